"""What a person asks for, in a notebook or a terminal, as one experiment and what gets its bars."""

import dataclasses
import datetime as dt
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from cpbkit.config.experiment import PARTS, Experiment, to_json, vary, with_quote
from cpbkit.config.own import is_own
from cpbkit.config.presets import LTSF, LTSF_SLOW, PRESETS, find_preset
from cpbkit.data.files import Found, from_frames
from cpbkit.data.klines import Klines, find_interval, split_name
from cpbkit.data.load import load_klines, open_files, with_days
from cpbkit.data.tables import arrange, find_moving, load
from cpbkit.data.traces import INTERVAL, Trace, find_traces
from cpbkit.errors import CpbkitError, check_name
from cpbkit.hardware.environment import in_notebook
from cpbkit.windows.series import Table, data_sha256, to_series

log = logging.getLogger(__name__)
PLACE = ("folder", "runs", "executor", "workers", "minutes", "quiet")  # what `cpb.sweep` takes that is no setting
LISTS = {f.name for cls in PARTS.values() for f in dataclasses.fields(cls) if f.type == tuple[str, ...]}
Bars: TypeAlias = Klines | Trace | pd.DataFrame | str | os.PathLike  # what data of one's own may be


@dataclass(frozen=True)
class Settled:
    """An experiment with all its series named, and where its bars come from."""

    experiment: Experiment
    given: Mapping[str, Klines | Trace | Table] = field(default_factory=dict)  # own data by series
    found: Found | None = None  # own files, which have been opened

    def bars(
        self, experiment: Experiment, tell: Callable[[str], None] = lambda stage: None
    ) -> Mapping[str, Klines | Trace | Table]:
        """Get the bars of the experiment, or of some of its series; `tell` hears what is going on."""
        return self.given or load_klines(experiment, tell, self.found)

    def name(self) -> str:
        """Name its run after the settings and the data that were given: `quick-3f2a91`; a change gives another name."""
        digest = hashlib.sha256(to_json(self.experiment).encode())
        for one in self.given.values():
            if isinstance(one, Table):
                digest.update(data_sha256(to_series(one, self.experiment.task)).encode())
            else:
                digest.update(pd.util.hash_pandas_object(one.frame).to_numpy().tobytes())
        return f"{self.experiment.preset}-{digest.hexdigest()[:6]}"


def inform(text: str) -> None:
    """Show a line as text in a notebook, which has what is logged on red as if it were an error; else log it."""
    if not in_notebook():
        log.warning(text)
        return
    from IPython.display import display  # a kernel has it

    display({"text/plain": text}, raw=True)


def settle(
    preset: str | os.PathLike | Experiment,
    given: Mapping[str, Any],
    data: Mapping[str, Bars] | None = None,
    *,
    say: Callable[[str], None] = inform,
    tell: Callable[[str], None] = lambda stage: None,
) -> Settled:
    """Return what is meant by a preset, settings by their flat name and own data by series.

    say: hears what was taken where nothing was given, such as the days. tell: hears what is going on.
    Errors: CpbkitError for settings that cannot be, DataError for data that cannot.
    """
    base = preset if isinstance(preset, Experiment) else find_preset(preset)
    settings = {name: _listed(name, value) for name, value in given.items() if name not in PLACE}
    if "search" in settings:
        settings["search"] = _grid(settings["search"])
    if "files" in settings:
        settings = {"source": "files", "symbols": (), "intervals": (), **settings, "files": str(settings["files"])}
    if data is not None and not (isinstance(data, Mapping) and data):
        got = f"{data!r:.40}" if isinstance(data, str | Mapping) else type(data).__name__
        raise CpbkitError(f'data takes bars or tables by their names, data={{"load": frame}}; got {got}')
    own: dict[str, Any] = {}
    read = {str(name): opened(one) for name, one in (data or {}).items()}
    if read and not any(map(is_bars, read.values())):
        named = settings.get("features", ()) and settings.get("targets", ())
        columns = (*settings["features"], *settings["targets"]) if named else ()
        own = {name: Table(name, as_table(table, name, columns)) for name, table in read.items()}
        frames = {name: table.frame for name, table in own.items()}
        base, settings = suit_rate(base, settings), suit_tables(frames, settings)
        for setting, tried in base.training.search if "search" not in settings else ():
            say(f"Validation chooses the {setting} of each table among {', '.join(f'{x:g}' for x in tried)}.")
    elif read:
        days: dict[str, Any] = {name: settings[name] for name in ("start", "end", "venue") if name in settings}
        own = {**from_frames(read, **days)}
        symbols, intervals = (tuple(dict.fromkeys(part)) for part in zip(*map(split_name, own), strict=True))
        settings |= {"source": "given", "symbols": symbols, "intervals": intervals, "series": tuple(own)}
    if "targets" in settings:
        settings.setdefault("target_weights", (1.0,) * len(settings["targets"]))
    experiment = with_days(vary(base, **settings), dt.datetime.now(dt.timezone.utc).date(), say)
    for one in own.values():  # what cannot be is said before a folder is begun
        if isinstance(one, Table):
            to_series(one, experiment.task)
    if experiment.data.market == "network":
        return Settled(_with_traces(experiment), own)
    if experiment.data.source == "files":
        found = open_files(experiment, tell)
        return Settled(found.settle(experiment), own, found)
    return Settled(experiment, own)


def _listed(name: str, value: Any) -> Any:
    """Return a setting, as a tuple where it is a list of names; one stands for itself, `BTC, ETH` for two coins."""
    if name in ("start", "end") and isinstance(value, dt.date):  # a datetime and pandas' Timestamp are such too
        return f"{value:%Y-%m-%d}"
    if name not in LISTS:
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, str) and name in ("symbols", "intervals", "tickers"):  # no column: those may hold blanks
        value = value.replace(",", " ").split()
    each = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if name == "intervals":
        each = tuple(find_interval(str(interval)) or interval for interval in each)  # 60m is 1h
    return tuple(with_quote(each)) if name == "symbols" else each


def _grid(search: Any) -> tuple:
    """Return a search as the settings hold it. Errors: CpbkitError for what is none."""
    try:
        return tuple((name, tuple(values)) for name, values in dict(search).items())
    except (TypeError, ValueError):
        wanted = 'search={"learning_rate": [1e-3, 3e-4]}'
        raise CpbkitError(f"a search names the values of each setting, as {wanted}; got {search!r}") from None


def opened(data: Any) -> Any:
    """Return own data, of a file its raw table, and a series as the table of it alone. Errors: DataError."""
    if isinstance(data, pd.Series):
        return data.to_frame("value" if data.name is None else data.name)
    return load(Path(data))[0] if isinstance(data, str | os.PathLike) else data


def as_table(table: pd.DataFrame, name: str, columns: Iterable[Any] = ()) -> pd.DataFrame:
    """Return a raw table as `arrange` does.

    columns: all that is used of it; where functions are among them, whatever holds numbers may be.
    """
    columns = tuple(columns)
    plain = all(isinstance(column, str) and not is_own(column) for column in columns)
    return arrange(table, name, columns=columns if plain else None)


def is_bars(data: object) -> bool:
    """Say whether own data are bars, which is everything but a frame without the four prices."""
    return not isinstance(data, pd.DataFrame) or {"open", "high", "low", "close"} <= {str(c).lower() for c in data}


def suit_tables(data: Mapping[str, pd.DataFrame], settings: Mapping) -> dict[str, Any]:
    """Return settings that suit tables, by series, and those given: every column that changes is forecast, from all.

    Errors: DataError for tables of different columns.
    """
    named = settings.keys() >= {"features", "targets"}
    columns = () if named else tuple(find_moving(data.values(), ", ".join(data)))
    return {
        **{"source": "table", "series": tuple(data), "symbols": tuple(data), "intervals": ("table",)},
        **{"features": columns, "targets": columns},
        **{"ranges": (), "weights": (), "repeats": ()},  # a preset's are of columns that a table need not have
        **settings,
    }


def suit_rate(base: Experiment, settings: Mapping) -> Experiment:
    """Return a preset for tables: which rate suits a linear map depends on whether they wander, so validation tells."""
    linear = [PRESETS[name] for name in ("nlinear", "dlinear")]
    if base not in linear or settings.keys() & {"learning_rate", "search"}:
        return base
    return vary(base, search=(("learning_rate", (LTSF_SLOW.learning_rate, LTSF.learning_rate)),))


def _with_traces(experiment: Experiment) -> Experiment:
    """Return the experiment over every trace of its file or folder, a model each."""
    data = experiment.data
    if data.source == "binance":
        raise CpbkitError(
            f"which trace? {experiment.preset} forecasts network traces: --files trace.csv, or a folder of them, with "
            f"the columns {', '.join(experiment.task.features)} and a row every 200 ms; or --source synthetic for a "
            'made-up one (in Python files="trace.csv", source="synthetic")'
        )
    if data.source == "files":
        return vary(experiment, symbols=data.symbols or tuple(find_traces(data.files)), intervals=(INTERVAL,))
    return experiment


def one_of(experiment: Experiment, series: str) -> Experiment:
    """Return the experiment with one of its series, which alone is fetched. Errors: UnknownName."""
    check_name("series", series, experiment.series)
    if experiment.data.market == "network":  # which draws made-up ones one after another
        return experiment
    if experiment.data.source == "table":
        return vary(experiment, series=(series,), symbols=(series,))
    symbol, interval = split_name(series)
    listed = (series,) if experiment.data.series else ()  # own bars name each series
    return vary(experiment, symbols=(symbol,), intervals=(interval,), series=listed)
