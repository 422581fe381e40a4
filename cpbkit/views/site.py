"""A page to look at: static files that show forecasts, candles, past forecasts and verdicts of a run, in a browser.

No bar of a venue is in a page that is to be published: its forecasts stand relative to the last close, and what
happened after past ones is told as errors of a day, from which no bar can be told.
"""

import importlib.resources
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup

from cpbkit import __version__, atomic
from cpbkit.config.experiment import Experiment
from cpbkit.data.klines import INTERVAL_SECONDS, Klines, validate
from cpbkit.errors import CpbkitError, DataError, RunError
from cpbkit.evaluation import past, verdicts
from cpbkit.evaluation.results import is_synthetic
from cpbkit.quantities import signed, without_nan
from cpbkit.runs import trained
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.settle import Bars
from cpbkit.runs.trained import Forecast, TrainedModel
from cpbkit.texts import printable
from cpbkit.views.report import SKILL, sentences, skill_mark, templates
from cpbkit.views.style import label
from cpbkit.views.verdict import skill_frame
from cpbkit.windows.series import TARGETS

CANDLES = 180  # of the newest bars
LIBRARY = "bokeh.min.js", "bokeh-api.min.js"  # of the installed package
BRAND = "cpbkit.page.json"  # tells a page that was written before from somebody's folder
log = logging.getLogger(__name__)


class Site:
    """What the page of a run shows, made anew from the newest bars whenever it is asked for."""

    def __init__(self, folder: str | os.PathLike, models: Iterable[TrainedModel], public: bool = False):
        self.run, self.public = RunFolder(folder), public
        self.results = self.run.results()
        self.models = {model.series: model for model in models}
        if not self.models:
            raise RunError(f"a page needs at least one finished model; {self.run.folder} has none")
        known = [line for line in self.results if line.series in self.models]
        self._judged = verdicts.judgements(known)
        self._said = sentences(self.run, known, self._judged)
        self._meanings = {head: verdicts.say_meanings(group) for head, group in self._judged.items()}

    def documents(self, names: Collection[str], bars: Mapping[str, Bars] | None = None) -> dict[str, dict]:
        """Return what the page shows of some series, with the forecast of their next bars or why there is none.

        bars: by series; None fetches the newest closed ones. In plain JSON types; `forecast.schema.json` says what
        each is.
        """
        models, now = [self.models[name] for name in names], pd.Timestamp.now("UTC")
        why: dict[str, str] = {}
        found: Mapping[str, Forecast] = {}
        try:
            given, why = trained.reachable_bars(models, now) if bars is None else (bars, {})
            found, more = trained.forecast_able(models, given, now)
            why = more | why
        except trained.NoForecast as error:
            why = {**error.reasons, **why}
        except DataError as error:
            why = {model.series: str(error) for model in models}
        return {
            name: self._document(name, found.get(name), given[name] if name in found else None, why.get(name, ""))
            for name in names
        }

    def _document(self, name: str, forecast: Forecast | None, bars: Bars | None, why: str) -> dict:
        told = None if forecast is None else without_nan(forecast.to_dict())
        if told and self.public:
            told = _relative(told, self.models[name].experiment)
        candles = None
        if isinstance(bars, pd.DataFrame) and {"open", "high", "low", "close"} <= set(bars):
            bars = validate(bars, name, source="given")
        if isinstance(bars, Klines) and not self.public:
            frame = bars.frame.iloc[-CANDLES:]
            candles = {side: _rounded(frame[side]) for side in ("open", "high", "low", "close")}
            candles["time"] = [stamp.value // 10**6 for stamp in frame.index]
        kept = self.run.losses(name)
        by_head = past.from_bytes(kept, name) if kept else {}
        step = next((one.step_seconds for by_target in by_head.values() for one in by_target.values()), 0)
        show = _errors if self.public else _beside_truth
        return {
            "series": name,
            "label": label(name),
            "meanings": {head: said[name] for head, said in self._meanings.items() if name in said},
            "note": f"No forecast of the next bars: {printable(why)}" if told is None else "",
            "synthetic": self.models[name].synthetic,
            "step_ms": round(1000 * (INTERVAL_SECONDS.get(name.rpartition("_")[2]) or step)),
            "forecast": told,
            "intervals": {
                head: {"nominal": known["nominal"], "coverage": known["coverage"]}
                for head, known in self.models[name].prediction_intervals.items()
            },
            "candles": candles,
            "past": {head: [show(one) for one in by_target.values()] for head, by_target in by_head.items()},
        }

    def _choices(self) -> list[dict]:
        """List what can be looked at, the first at the top: each target under its head, and the one of old weights."""
        model = next(iter(self.models.values()))
        targets = model.experiment.task.targets
        own = model.experiment.data.source == "table" or model.experiment.data.market == "network"
        by_head: dict[str, list[str]] = {}
        for target in sorted(targets, key=lambda target: target != "close"):
            by_head.setdefault(target if own else TARGETS[target][2], []).append(target)
        heads = dict.fromkeys([*self._judged, *by_head])
        return [
            {
                "head": head,
                "target": target,
                "text": (target if base == target else f"{base}: {target}") + head[len(base) :],
                "old": base != head,
                "on_candles": base in ("price", "bands") and not own,
            }
            for head in heads
            for base in [head.removesuffix(verdicts.OLD)]
            for target in by_head.get(base, ())
        ]

    def _glance(self, head: str) -> dict:
        """Return all series sorted by their skill on one head."""
        group = self._judged.get(head, {})
        found, frame = verdicts.verdicts(group), skill_frame(group)
        rows = []
        for name in sorted(self.models, key=lambda name: -group[name].skill if name in group else math.inf):
            row = {"series": name, "label": label(name), "word": "", "kind": "ties", "mark": "", "skill": ""}
            if name in group:
                word, skill = found[name].word, f"{signed(100 * group[name].skill, '+.2f')} %"
                row |= {"word": word, "kind": word.lower().replace(" ", "-"), "skill": skill}
                row |= {"mark": Markup(skill_mark(group[name], *frame))}
            rows.append(row)
        said, *more = self._said.get(head, ["No model is judged yet"])
        return {"head": head, "headline": said, "more": "\n".join(more), "rows": rows}

    def index(self, live: bool = False) -> bytes:
        """Return the first file of the page: what is the same for every series, and all of them at a glance."""
        glances = [self._glance(head) for head in self._judged or ("",)]
        pairs = [name.rpartition("_") for name in self.models]
        experiment = self.run.experiment
        template = templates().get_template("site.html")
        page = template.render(
            title=f"{experiment.preset} · {len(self.models)} series",
            synthetic=is_synthetic(self.results),
            live=live,
            glances=glances,
            skill=SKILL,
            choices=self._choices(),
            quantiles=experiment.task.quantiles,
            coins=list(dict.fromkeys(symbol for symbol, _, _ in pairs)),
            intervals=list(dict.fromkeys(interval for _, _, interval in pairs)),
            labels={symbol: symbol.removesuffix("USDT") or symbol for symbol, _, _ in pairs},
            library=LIBRARY,
            version=__version__,
        )
        return page.encode()

    def files(self) -> dict[str, bytes]:
        """Return the files that no series changes, by name: the script, and the library that draws.

        Errors: CpbkitError without that library.
        """
        script = (importlib.resources.files("cpbkit.views") / "templates" / "site.js").read_bytes()
        try:
            scripts = importlib.resources.files("bokeh") / "server" / "static" / "js"
        except ModuleNotFoundError:
            raise CpbkitError('a page is drawn by bokeh, which is not installed: pip install "cpbkit[page]"') from None
        return {"site.js": script} | {name: (scripts / name).read_bytes() for name in LIBRARY}


def write_page(
    folder: str | os.PathLike,
    models: Iterable[TrainedModel],
    out: str | os.PathLike | None = None,
    bars: Mapping[str, Bars] | None = None,
    public: bool = False,
) -> Path:
    """Write the page of a run as a folder of static files, and return its `index.html`.

    out: a new folder, or one that holds an earlier page; by default `page` in the run's. bars: by series; None fetches
    the newest closed ones. Of a series without such bars the page says why, and shows what the test split did.
    public: without the bars. Errors: RunError for a run without a model or a folder that holds something else;
    CpbkitError without the extra `page`.
    """
    site, out = Site(folder, models, public), Path(out) if out else Path(folder) / "page"
    if out.exists() and any(out.iterdir()) and not (out / BRAND).exists():
        raise RunError(f"{out} must be a new or an empty folder, or hold a page that was written before")
    files = site.files()
    documents = site.documents(site.models, bars)
    if notes := [document["note"] for document in documents.values() if document["note"]]:
        log.warning("%d of %d series: %s. The page says why of each", len(notes), len(documents), notes[0])
    files |= {f"series/{name}.js": f"cpbkit({to_json(one)});\n".encode() for name, one in documents.items()}
    told = {name: document["forecast"] for name, document in documents.items()}
    files |= {"index.html": site.index(), BRAND: to_json({"cpbkit": __version__, "forecasts": told}).encode()}
    (out / "series").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        atomic.write_bytes(out / name, content)
    return out / "index.html"


def to_json(document: Mapping) -> str:
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(f"{value:.8g}") for value in np.asarray(values, float).tolist()]


def _relative(told: dict, experiment: Experiment) -> dict:
    """Return a forecast relative to the last level: in basis points, or in the unit of an own table."""
    last, bars, own_unit = told["last"], [], experiment.data.source == "table"
    ends = ("", "_low", "_high", *(f"_q{level:g}" for level in experiment.task.quantiles))
    for bar in told["bars"]:
        at = {"time": bar["time"]}
        for target, level in last.items():
            for name in (f"{target}{end}" for end in ends):
                if bar.get(name) is not None:
                    at[name] = bar[name] - level if own_unit else round(1e4 * (bar[name] / level - 1), 4)
        bars.append(at)
    return {**told, "last": None, "bars": bars, "unit": "" if own_unit else "bp"}


def _beside_truth(one: past.Past) -> dict:
    """Return past forecasts beside what happened, as levels; a list for each number of bars ahead."""
    low, high = one.edges()
    columns = {"forecast": one.levels(one.forecast), "low": low, "high": high, "truth": one.levels(one.truth)}
    return {
        "target": one.target,
        "ahead": one.ahead.tolist(),
        "time": one.bars().T.tolist(),
        **{name: [_rounded(column) for column in values.T] for name, values in columns.items()},
    }


def _errors(one: past.Past) -> dict:
    """Return the errors of past forecasts by day, beside those of the last close; from these nobody can tell a bar."""
    table, scale = one.by_day(), verdicts.UNITS.get(one.unit, 1.0)
    parts = [table[table["ahead"] == step] for step in one.ahead]
    return {
        "target": one.target,
        "ahead": one.ahead.tolist(),
        "unit": one.unit,
        "time": [[int(pd.Timestamp(day).value // 10**6) for day in part["day"]] for part in parts],
        "rmse": [_rounded(scale * part["rmse"]) for part in parts],
        "persistence": [_rounded(scale * part["persistence"]) for part in parts],
        "inside": [_rounded(part["inside"]) for part in parts],
    }
