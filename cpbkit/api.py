"""The front door: start a run or open one, look at what it found, use its models."""

import contextlib
import html
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.own import require_consent
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance
from cpbkit.data.files import from_frames
from cpbkit.data.klines import Klines
from cpbkit.data.load import load_klines
from cpbkit.data.traces import Trace
from cpbkit.errors import NO_ROOM, CpbkitError, DataError, RunError, check_name, stoppable
from cpbkit.evaluation.conformal import say_quantiles
from cpbkit.evaluation.forecastable import HORIZONS, forecastable, headlines, text
from cpbkit.evaluation.pooled import Pooled, gather, pool, say_all
from cpbkit.evaluation.results import MADE_UP, ResultLine, is_synthetic
from cpbkit.evaluation.training_checks import check_results, tell_unsound
from cpbkit.evaluation.verdicts import (
    Verdict,
    headline,
    judgements,
    meanings,
    say_p,
    seed_spread,
    skill_by_horizon,
    table_text,
    tell_too_few,
    tell_unaudited,
    tell_unbelievable,
    verdict_table,
)
from cpbkit.quantities import counted
from cpbkit.runs.compare import compare as compare_runs
from cpbkit.runs.folder import RunFolder, tell_stopped
from cpbkit.runs.settle import Bars, Settled, as_table, one_of, opened, settle
from cpbkit.runs.workspace import Workspace
from cpbkit.windows.series import Series, Table, data_sha256, to_series
from cpbkit.windows.splits import folds, split

if TYPE_CHECKING:  # torch takes seconds to load, and a run can be looked at without it
    from cpbkit.evaluation.backtest import Forecaster
    from cpbkit.evaluation.poison import Findings
    from cpbkit.runs.trained import Forecast, TrainedModel

log = logging.getLogger(__name__)


class Run:
    """A run folder, finished or not: its settings, results, verdicts and trained models by name."""

    def __init__(self, folder: str | os.PathLike, trust_code: bool = False):
        self._folder, self._trust_code = RunFolder(folder), trust_code

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self._folder.folder

    @property
    def experiment(self) -> Experiment:
        """Its settings. Errors: RunError where there is no run."""
        return self._folder.experiment

    @property
    def results(self) -> list[ResultLine]:
        """The lines of its ledger, one for each finished series."""
        return self._folder.results()

    def frame(self) -> pd.DataFrame:
        """Return a row per finished series: how its training ended. The verdicts have a table of their own."""
        told = ("series", "status", "reason", "parameters", "epochs", "best_epoch", "seconds", "mode", "synthetic")
        return pd.DataFrame([{name: getattr(line, name) for name in told} for line in self.results], columns=told)

    @property
    def series(self) -> tuple[str, ...]:
        """The names of all its series, `BTCUSDT_1h`, finished or not."""
        return self.experiment.series

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}): {self.experiment.preset}, {len(self.results)} of {len(self.series)} done"

    def __iter__(self) -> Iterator[str]:
        return iter(line.series for line in self.results if line.status == "done")

    def __getitem__(self, series: str) -> "TrainedModel":
        """Return the trained model of a series. Errors: UnknownName, RunError where it has none."""
        (model,) = self.models([series])
        return model

    def models(self, series: Iterable[str] | None = None) -> "list[TrainedModel]":
        """Return the trained models of some series, or of all that are finished. Errors: as for one, `run[series]`."""
        from cpbkit.runs.trained import TrainedModel

        results, known, found = self.results, self.series, []  # each read once: a property reads its file
        said = meanings(results)
        for name in [line.series for line in results if line.status == "done"] if series is None else series:
            check_name("series", name, known)
            content = self._folder.model(name)
            if content is None:
                raise RunError(f"{self.folder} has no model of {name} yet; {self!r}")
            try:
                found.append(TrainedModel.read(content, said.get(name, ""), self._trust_code))
            except RunError as error:
                raise RunError(f"the model of {name} in {self.folder} cannot be used: {error}") from None
        return found

    def stop(self, *series: str, after_epoch: bool = False) -> None:
        """Ask the sweep that works on this run, wherever it is, to end after a checkpoint; the same call goes on.

        series: only their models end, with the running epoch, and are judged as they are. after_epoch: all do.
        Errors: RunError where nobody works on it, and for single models on a Ray cluster; UnknownName.
        """
        self._folder.stop(self.series if after_epoch else series)

    def verdicts(self) -> "Verdicts":
        """Say of each model whether it beats the best naive forecast. Errors: RunError before the first result."""
        results = self.results
        if not results:
            raise RunError(f"{self.folder} has no finished series yet, of {len(self.series)}")
        by_head = judgements(results)
        losses, missing = gather([line.series for line in results if line.test], self._folder.losses)
        together = {head: pool(parts) for head, parts in losses.items()}
        said = say_all(results, by_head, losses, together) | say_quantiles(results)
        trouble = [f"{line.series} {line.status}: {line.reason}" for line in results if line.status != "done"]
        told = [
            tell_stopped(results),
            tell_unsound(results),
            tell_unbelievable(results, by_head),
            tell_too_few(by_head),
            tell_unaudited(self._folder.unaudited_features(), by_head),
        ]
        trouble += filter(None, told)
        if failed := self._folder.failed_checks():
            of = counted(len(failed), "failed check")
            trouble.append(f"an audit failed, do not believe these: {failed[0]}, of {of}")
        if missing:
            trouble.append(f"no verdict over all series holds {', '.join(missing)}: their losses cannot be read")
        return Verdicts(verdict_table(by_head), said, results, together, tuple(trouble))

    def plot(self):
        """Return the picture of the run as HTML: a panel for each series, memory and load below."""
        from cpbkit.views.panels import sweep_html

        return sweep_html(self.results, self._folder.monitor(), self.series)

    def report(self, out: str | os.PathLike | None = None, series: Sequence[str] | None = None) -> "Link":
        """Write the report, one HTML file, and return a link to it.

        series: those that get a part of their own; by default all, or the best and the worst of very many.
        """
        from cpbkit.views.report import write_report

        return Link(write_report(self.folder, out, series=series))

    def retrain(self, series: str = "", *, data: Mapping[str, Bars] | None = None, **given) -> "Retraining":
        """Return a series of this run, by default the one of the best verdict, to be trained again under suspicion.

        data: the bars or the table again, of a run whose data were given. given: settings that differ, such as
        epochs=3. Errors: UnknownName; RunError where it has no verdict, or for another table; CpbkitError for own parts
        and a foundation model without consent.
        """
        require_consent(self.experiment.own_parts, self._trust_code, str(self.folder), self.experiment.pretrained)
        name = series or self.verdicts().best
        one = vary(one_of(self.experiment, name), **given)
        if one.data.source == "table":
            if data is None or name not in data:
                again = f"data={{{name!r}: frame}}, in the terminal --table FILE"
                raise DataError(f"the table of {name} was given as a frame; give it again: {again}")
            table = as_table(opened(data[name]), name, (*one.task.features, *one.task.targets))
            return Retraining(name, one, self._same_table(Table(name, table)))
        bars = load_klines(one) if data is None else from_frames({each: opened(data[each]) for each in data})
        return Retraining(name, one, bars[check_name("series", name, bars)])

    def _same_table(self, table: Table) -> Table:
        """Return a table that is the one which the run was trained on. Errors: RunError for another."""
        known = {line.series: line.data_sha256 for line in self.results}.get(table.name, "")
        if known != data_sha256(to_series(table, self.experiment.task)):
            even = Table(table.name, table.frame.reset_index(drop=True))  # as a column of times was once left unread
            with contextlib.suppress(CpbkitError):  # own features may need the times
                if known == data_sha256(to_series(even, self.experiment.task)):
                    return even
            why = "it has other rows or values" if known else f"that run has {', '.join(self.series)}"
            raise RunError(f"{table.name} must be the table that {self.folder} was trained on, row by row; {why}")
        return table

    def page(
        self, out: str | os.PathLike | None = None, bars: Mapping[str, Bars] | None = None, public: bool = False
    ) -> "Link":
        """Write a page to look at, a folder of static files, and return a link to it; by default `page` in the run's.

        bars: to forecast from, by series; None fetches the newest. public: without any bar, fit to be shown around.
        Errors: RunError without a finished model; CpbkitError without the extra `page`.
        """
        from cpbkit.views.site import write_page

        return Link(write_page(self.folder, self.models(), out, bars, public))

    def publish(
        self,
        repo: str,
        public: bool = False,
        dry_run: str | os.PathLike | None = None,
        page: bool = False,
        bars: Mapping[str, Bars] | None = None,
        collection: str = "",
    ):
        """Publish the models with what may be said of them as a repository of the Hub, private unless `public`.

        page: publish the page instead, as a static Space of that name, which never holds bars. bars: as of `page`.
        collection: the title of one for the repositories of several presets, made where it is not there.
        dry_run: a new folder that gets what would be published; nothing leaves the machine, and no token is needed.
        Returns where it is. Errors: HubError for synthetic data, own code, a missing token, another run's repository.
        """
        from cpbkit.hub.client import connect  # the Hub's client takes a moment to load
        from cpbkit.hub.publish import publish, publishable, write_repository, write_space

        with tempfile.TemporaryDirectory() as folder:
            out = Path(dry_run or Path(folder) / "repository")
            publishable(self._folder, out)  # tells what is missing before the work, and of a token where one would help
            connect(repo, write=dry_run is None)
            if page:
                write_space(self.folder, self.models(), repo, out, bars)
            else:
                write_repository(self.folder, repo, out)
            if dry_run is not None:
                return Link(out / ("index.html" if page else "README.md"))
            return publish(self.folder, repo, out, public, "space" if page else "model", collection)

    def refit(
        self,
        until: str,
        *,
        from_zero: bool = False,
        folder: str | os.PathLike | None = None,
        data: Mapping[str, Bars] | None = None,
        quiet: bool = False,
        **place,
    ) -> "Run":
        """Train the same experiment on bars up to a later day, begun from the weights that are there; return that run.

        Its verdicts stand for new and old weights, side by side, on the same new test days; neither has seen them.
        from_zero: begin from drawn weights. folder: by default beside this run, named after the day; stopped at any
        moment, the same call goes on. data: the bars again, longer, of a run whose bars were given. place: as `sweep`
        takes it. Errors: as `sweep`; RunError where this run has bars up to that day, or no model.
        """
        from cpbkit.runs.sweep import name_refit, plan_refit

        experiment = plan_refit(self._folder, until, from_zero, self._trust_code)
        task, days = experiment.task, experiment.data
        given = {"features": task.features, "targets": task.targets, "target_weights": task.target_weights}
        given |= {name: getattr(days, name) for name in ("start", "end", "venue")} if data is not None else {}
        folder = Path(folder or name_refit(self.folder, until, from_zero))
        return _train(settle(experiment, given, data), folder, quiet, parent=self._folder, **place)

    def record(self, repo: str, name: str = "", bars: Mapping[str, Bars] | None = None, public: bool = False):
        """Commit the forecasts of the bars to come to a record, a dataset repository of the Hub, before they happen.

        name: under which they are kept there; by default one made of the settings. bars: as in `forecast`.
        Returns what was done. Errors: HubError, DataError.
        """
        from cpbkit.hub.record import record  # the Hub's client takes a moment to load

        return record(self.models(), repo, name or Settled(self.experiment).name(), bars, public)

    def coverage(self):
        """Return the picture of what the prediction intervals held, through the test split."""
        from cpbkit.views.verdict import coverage_figure

        return coverage_figure(self.results)

    def calibration(self):
        """Return the picture of how many truths lay below each quantile of models that forecast quantiles."""
        from cpbkit.views.verdict import calibration_figure

        return calibration_figure(self.results)

    def health(self):
        """Return the picture of the health of the trainings: a row per series, a column per check."""
        from cpbkit.views.verdict import health_figure

        return health_figure(check_results(self.results), is_synthetic(self.results))

    def browse(self, series: str = ""):
        """Return a menu of the losses of all models, which begins with `series`, or the first."""
        from cpbkit.views.live import browse

        place = {name: i for i, name in enumerate(self.series)}
        return browse(sorted(self.results, key=lambda line: place[line.series]), series)

    def forecast(
        self, bars: Mapping[str, Bars] | None = None, now: pd.Timestamp | None = None
    ) -> "dict[str, Forecast]":
        """Forecast the next bars of every finished series, as one stack.

        bars: by series; None fetches the newest closed ones. A series whose bars do not fit is left out, with a
        warning. Errors: DataError where no series can be forecast.
        """
        from cpbkit.runs.trained import forecast_able

        models = self.models(None if bars is None else [name for name in self if name in bars])
        found, trouble = forecast_able(models, bars, now)
        for why in trouble.values():
            log.warning("not forecast: %s", why)
        return found


@dataclass(frozen=True, repr=False)
class Verdicts:
    """The verdict of each model, the best first; shown as a styled table in a notebook."""

    table: pd.DataFrame
    said: dict[str, str]  # in a line each: of each head, and of all series at once
    results: list[ResultLine] = field(default_factory=list)  # the ledger that they were read from
    pooled: dict[str, Pooled] = field(default_factory=dict)  # by head, of all series at once
    trouble: tuple[str, ...] = ()  # which series have no verdict, or no place among all, and why

    @property
    def synthetic(self) -> bool:
        """Whether any of the data were made up."""
        return is_synthetic(self.results)

    @property
    def headlines(self) -> tuple[str, ...]:
        """What is said, and that the data are synthetic where they are."""
        return (*self.said.values(), *[MADE_UP] * self.synthetic)

    @property
    def best(self) -> str:
        """The series of the highest skill among those that are BEATS, or of all where none is; of the first head."""
        sure = self.table[self.table["verdict"] == "BEATS"]  # few bars give a high skill by chance, which TIES
        return (self.table if sure.empty else sure)["series"].iloc[0]

    def plot(self):
        """Return the picture of all skills with their intervals."""
        from cpbkit.views.verdict import verdict_figure

        return verdict_figure(self.results)

    def by_horizon(self) -> pd.DataFrame:
        """Return the skill against the best naive forecast in percent: a row per series and head, a column per bar."""
        return skill_by_horizon(judgements(self.results))

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers: a row per series and head."""
        return self.table

    def to_dict(self) -> dict:
        """Return plain JSON types."""
        return {
            "models": len(self.results),
            "synthetic": self.synthetic,
            "headlines": self.said,
            "pooled": {head: asdict(pooled) for head, pooled in self.pooled.items()},
            "trouble": list(self.trouble),
            "verdicts": json.loads(self.table.to_json(orient="records")),
        }

    def __str__(self) -> str:
        columns = shutil.get_terminal_size().columns
        return "\n".join(filter(None, [table_text(self.table, columns), *self.trouble, *self.headlines]))

    __repr__ = __str__  # what a notebook without HTML shows

    def _repr_html_(self) -> str:
        from cpbkit.views.tables import verdict_html

        return verdict_html(self.table, (*self.trouble, *self.headlines))


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs side by side, each table the best first; words are corrected for all that a table asks."""

    runs: pd.DataFrame  # a row a run and head: skill against the best naive forecast over all series
    pairs: pd.DataFrame  # a row a pair of runs and head: skill of the first against the other
    best: pd.DataFrame  # a row a series and head: the run that validation chooses, and its verdict in test
    seeds: pd.DataFrame  # of runs that differ in their seed alone: a row a series and head
    notes: tuple[str, ...] = ()

    def plot(self):
        """Return the picture of the runs' skills with their intervals, and of the pairs that differ."""
        from cpbkit.views.verdict import comparison_figure

        return comparison_figure(self.runs, self.pairs)

    def to_frame(self) -> pd.DataFrame:
        """Return the runs, a row each and head."""
        return self.runs

    def to_dict(self) -> dict:
        """Return plain JSON types."""
        tables = {name: getattr(self, name) for name in ("runs", "pairs", "best", "seeds")}
        found = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        return found | {"notes": list(self.notes)}

    def __str__(self) -> str:
        shown = {
            "Of runs that differ in their seed alone:": self.seeds,
            "Each run against the best naive forecast, over all series at once:": self.runs,
            "Each pair of runs, the skill of the first against the other:": self.pairs,
            "For each series the run of the least validation loss:": self.best.reindex(columns=BEST),
        }
        form = {"float_format": "{:.3f}".format, "formatters": {"p": say_p}, "na_rep": ""}
        tables = [f"{title}\n{table.to_string(index=False, **form)}" for title, table in shown.items() if len(table)]
        heads = [] if self.best.empty else [f"By validation: {line}" for line in self._headlines()]
        return "\n\n".join([*tables, *heads, *self.notes])

    __repr__ = __str__

    def _headlines(self) -> list[str]:
        words = {head: group.set_index("series")["verdict"] for head, group in self.best.groupby("head")}
        return [headline({name: Verdict(word, 1.0, "") for name, word in each.items()}, h) for h, each in words.items()]


BEST = ["series", "head", "run", "validation", "verdict", "skill %", "low %", "high %", "p"]


def compare(*runs: Run | str | os.PathLike) -> Comparison:
    """Hold runs of the same series side by side: presets, seeds, settings; each named by its folder.

    For each series validation chooses the run, never test. Errors: CpbkitError for runs that do not compare.
    """
    if odd := next((run for run in runs if not isinstance(run, Run | str | os.PathLike)), None):
        raise CpbkitError(f"to compare takes runs or their folders, cpb.compare(a, b); got {type(odd).__name__}")
    folders = [run.folder if isinstance(run, Run) else Path(run) for run in runs]
    short = len({folder.name for folder in folders}) == len(folders)
    named = {folder.name if short else str(folder): RunFolder(folder) for folder in folders}
    if len(named) < len(folders):
        raise RunError(f"each run to compare is named once; got {', '.join(str(each) for each in folders)}")
    return Comparison(*compare_runs(named))


@dataclass(frozen=True)
class Retraining:
    """One series of a run, trained again under suspicion; each question trains anew, alone and on the CPU."""

    series: str
    experiment: Experiment
    data: Klines | Trace | Table

    @stoppable()
    def audit(self, placebos: int = 20, tell: Callable[[str], None] | None = None) -> "Findings":
        """Look for leaks: a row per check, with its verdict and the evidence.

        placebos: how many are judged. tell: hears which training is at work and the time left, each second; by default
        a notebook or a terminal shows it.
        """
        from cpbkit.evaluation import leakage
        from cpbkit.evaluation.poison import Findings
        from cpbkit.views.live import Countdown

        one = self.experiment
        with Countdown(f"auditing {self.series}: training", placebos + 7, tell) as begin:
            forecaster = self._refit(one, begin)
            found = leakage.audit(self.data, one.task, forecaster, model=one.model.name, placebos=placebos)
            begin("one batch")
            return Findings([*found, leakage.check_overfit(one, self._columns())])

    @stoppable()
    def plot(self, ahead: int = 1, windows: int = 160):
        """Return the picture of its forecasts `ahead` bars beside the truth, over the last windows of the test."""
        from cpbkit.views.live import Countdown
        from cpbkit.views.verdict import forecast_figure

        columns, task = self._columns(), self.experiment.task
        splits = split(columns, task)
        with Countdown(f"{self.series}: training", 1) as begin:
            forecasts = self._refit(self.experiment, begin)(columns, task, splits)
        return forecast_figure(columns, splits.test, forecasts, ahead, windows)

    @stoppable()
    def seeds(self, count: int = 3, refits: int = 3) -> pd.DataFrame:
        """Say what luck does to its skill: other seeds, each over `refits` test periods with a refit before each."""
        from cpbkit.evaluation.backtest import judge_folds
        from cpbkit.views.live import Countdown

        columns, parts = self._columns(), folds(vary(self.experiment, folds=refits).task, refits)
        found = []
        with Countdown(f"{self.series}: training", count * len(parts)) as begin:
            for seed in range(count):
                one = vary(self.experiment, seed=seed)
                judged = judge_folds(columns, parts, self._refit(one, begin), one.model.name)
                found.append({head: {self.series: judgement} for head, judgement in judged.items()})
        return seed_spread(found)

    def _refit(self, experiment: Experiment, begin: Callable[[], None]) -> "Forecaster":
        """Return what trains anew on each piece it is handed, and says of each training that it begins."""
        from cpbkit.evaluation.backtest import refit

        forecaster = refit(experiment)

        def told(*given):
            begin()
            return forecaster(*given)

        return told

    def _columns(self) -> Series:
        return to_series(self.data, self.experiment.task)


@dataclass(frozen=True, repr=False)
class Map:
    """What can be forecast at all: a row per series, target and horizon, and one for all series at once."""

    table: pd.DataFrame
    synthetic: bool = False

    @classmethod
    def of(cls, bars: Mapping, horizons: Sequence[int]) -> "Map":
        """Judge bars by series. Errors: CpbkitError for horizons, DataError for bars that are too few."""
        return cls(forecastable(bars, horizons), any(one.passport.synthetic for one in bars.values()))

    def plot(self):
        """Return the map as a picture."""
        from cpbkit.views.forecastable import map_figure

        return map_figure(self.table, self.synthetic)

    def __str__(self) -> str:
        return text(self.table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(f"<p>{html.escape(line)}</p>" for line in headlines(self.table))


@dataclass(frozen=True, repr=False)
class Link:
    """A file that was written, shown in a notebook as a link to it."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        near = os.path.relpath(self.path)
        return f'<a href="{html.escape(near)}" target="_blank">{html.escape(near)}</a>'


def sweep(
    preset: str | os.PathLike | Experiment = "quick",
    *,
    folder: str | os.PathLike | None = None,
    data: Mapping[str, Bars] | None = None,
    quiet: bool = False,
    runs: str | os.PathLike | Workspace = "runs",
    **given,
) -> Run:
    """Train and judge a model for every series, and return the run; stopped at any moment, the same call goes on.

    preset: a name of `presets()`, the file of an own one (JSON, as the `experiment.json` of a run, or TOML), or an
    Experiment.
    folder: of the run; by default one in `runs`, named after the settings, so that a change begins a new run and a
    repeat finds the old one; a `workspace()` also keeps it elsewhere, and finds it there.
    data: own bars by series name, `{"BTCUSDT_1h": frame}`, instead of fetched ones, or any tables, `{"load": frame}`,
    whose columns of numbers are all forecast unless `targets` names some; they count as settings. `files="bars/"`
    takes bars of files in any usual layout. given: settings by their flat name (symbols, intervals, start, end,
    epochs, ...; without days the last twelve months, said first; as name, loss or feature also a class or function of
    your own), and what says where it runs: executor ("processes", "local" or a `Ray` cluster), workers, minutes.
    `search={"learning_rate": [1e-3, 3e-4]}` trains all values side by side, and validation chooses for each series.
    Errors: CpbkitError for settings that cannot be, DataError, RunError for a folder of other settings.
    """
    place: dict[str, Any] = {name: given.pop(name) for name in ("executor", "workers", "minutes") if name in given}
    settled = settle(preset, given, data)
    folder = Path(folder or _place(runs, settled.name()))
    try:
        return _train(settled, folder, quiet, **place)
    finally:
        if isinstance(runs, Workspace):
            runs.keep()


def _train(settled: Settled, folder: Path, quiet: bool, **place) -> Run:
    """Sweep with what a person sees of it, unless `quiet`, and the buttons that stop it; return the run."""
    from cpbkit.runs.sweep import sweep

    run = Run(folder, trust_code=True)  # its own parts were just named, or consented to
    again = "the same call goes on from what is done"
    if not quiet:
        from cpbkit.views.live import live

        place["on_progress"] = live(settled.experiment, folder.name, run.stop)
    try:
        with stoppable(again):
            sweep(settled.experiment, folder, klines=settled.bars, **place)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        room = f"Make room there: delete folders of old runs, or `cpbkit cache remove`; {again}"
        raise RunError(f"{error.strerror}: {error.filename or folder}. {room}") from error
    return run


def find_run(
    preset: str | os.PathLike | Experiment = "quick",
    *,
    data: Mapping[str, Bars] | None = None,
    runs: str | os.PathLike | Workspace = "runs",
    **given,
) -> Run | None:
    """Open the run that `sweep` keeps for these settings, finished or not, and train nothing; None where there is none.

    Takes what `sweep` takes. Errors: as those of its settings.
    """
    folder = _place(runs, settle(preset, given, data).name())
    return open_run(folder, trust_code=True) if (folder / "experiment.json").exists() else None


def window(
    preset: str | os.PathLike | Experiment = "quick",
    *,
    series: str = "",
    data: Mapping[str, Bars] | None = None,
    **given,
):
    """Return the picture of one train window as a model of these settings sees it, before any training.

    series: whose, by default the first, which alone is fetched. Takes what `sweep` takes. Errors: as those of its
    settings; DataError for bars that are too few, SourceError.
    """
    from cpbkit.views.window import window_figure

    settled = settle(preset, given, data)
    name = series or settled.experiment.series[0]
    one = one_of(settled.experiment, name)
    return window_figure(to_series(settled.bars(one)[name], one.task), one.task)


def audit(
    preset: str | os.PathLike | Experiment = "quick",
    *,
    series: str = "",
    placebos: int = 20,
    data: Mapping[str, Bars] | None = None,
    **given,
) -> "Findings":
    """Look for leaks in one series before a sweep: a row per check, with its verdict and the evidence.

    series: by default the first. placebos: how many are judged; the model is trained so often, and six times more.
    Takes what `sweep` takes; of a run that is there, `run.retrain(...).audit()`. Errors: as those of its settings.
    """
    settled = settle(preset, given, data)
    name = series or settled.experiment.series[0]
    one = one_of(settled.experiment, name)
    return Retraining(name, one, settled.bars(one)[name]).audit(placebos)


@stoppable()
def map(*, data: Mapping[str, Bars] | None = None, horizons: Sequence[int] = HORIZONS, **given) -> Map:
    """Say what can be forecast at all, before a GPU hour is spent: targets x horizons of every series, in closed form.

    data, given: bars as `sweep` takes them (symbols, intervals, start, end, files, source). horizons: bars.
    Errors: CpbkitError for settings that cannot be, DataError for bars that are too few, SourceError.
    """
    settled = settle("quick", given, data)
    return Map.of(settled.bars(settled.experiment), horizons)


def _place(runs: str | os.PathLike | Workspace, name: str) -> Path:
    return runs.find(name) if isinstance(runs, Workspace) else Path(runs) / name


def open_run(folder: str | os.PathLike, trust_code: bool = False) -> Run:
    """Open a run folder, finished or not.

    trust_code: whether its models may run the own parts they name (network, features), from the current folder, and
    load the foundation model they name. Errors: RunError where there is none.
    """
    run = Run(folder, trust_code)
    run.experiment  # noqa: B018  # says at once where there is no run
    return run


def fetch(symbols, intervals, start: str, end: str, market: str = "spot") -> dict[str, Klines]:
    """Fetch bars of the venue, checked and cached: Klines by series name; `.frame` is the table.

    start, end: UTC days, both inclusive. Errors: as `cpbkit.data.binance.fetch_klines`.
    """
    return binance.fetch_klines(symbols, intervals, start, end, market=market)


def presets() -> pd.DataFrame:
    """Return the presets by name: network, width, context and horizon in bars, targets."""
    rows = {
        name: {
            "network": e.model.name,
            "width": e.model.width,
            "context": e.task.context,
            "horizon": e.task.horizon,
            "targets": ", ".join(e.task.targets),
        }
        for name, e in PRESETS.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")
