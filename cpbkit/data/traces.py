"""Network traces, what a sender of video sees of its link every 200 ms: a person's own, or made up."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from cpbkit.config.experiment import Data
from cpbkit.config.presets import NETWORK
from cpbkit.data.klines import Passport, find_gaps, stamp
from cpbkit.data.synthetic import make_network_trace
from cpbkit.data.tables import read_table
from cpbkit.errors import DataError

STEP_NS = 200_000_000
INTERVAL = "200ms"
NEEDED = ("delay", "loss_ratio", "receiving_rate", "prev_bandwidth")  # the others follow from them
TARGET = "bandwidth"
KINDS = (".csv", ".csv.gz", ".parquet", ".feather", ".json")  # of files that are taken from a folder
MADE_UP_ROWS = 20_000  # of a trace that is drawn: about an hour
START = pd.Timestamp("2025-01-01").as_unit("ns").value  # of a trace without times


@dataclass(frozen=True, eq=False)
class Trace:
    """One trace: `frame` has the columns NETWORK and TARGET on a grid of 200 ms, where missing steps are absent."""

    frame: pd.DataFrame
    passport: Passport


def find_traces(path: str | Path) -> dict[str, Path]:
    """Return the traces of a file or folder, by the file's name up to its first dot. Errors: DataError for none."""
    path = Path(path)
    files = sorted(each for each in path.iterdir() if each.name.endswith(KINDS)) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} must hold traces, a file each ({', '.join(KINDS)}); it holds none")
    found = {re.sub(r"\W+", "_", each.name.partition(".")[0])[:40]: each for each in files}
    if len(found) < len(files):
        raise DataError(f"{path} must hold one file a trace; got {', '.join(each.name for each in files)}")
    return found


def read_trace(path: str | os.PathLike, name: str) -> Trace:
    """Read a trace from CSV, Parquet, feather or JSON: delay (ms), loss_ratio (0 to 1), rates and bandwidth in bit/s.

    delay_gradient, throughput and bandwidth are computed where they are absent; the bandwidth of a row is the
    prev_bandwidth of the next. Rows without a time are 200 ms apart. Errors: DataError.
    """
    path, notes = Path(path), []
    table = read_table(path)
    if absent := [column for column in NEEDED if column not in table]:
        raise DataError(
            f"{path.name}: a trace has the columns {', '.join(NETWORK)}, of which {', '.join(NEEDED)} must be there; "
            f"got {', '.join(table)} ({', '.join(absent)} missing)"
        )
    if "delay_gradient" not in table:
        table["delay_gradient"] = table["delay"].diff().fillna(0.0)
        notes.append("delay_gradient is the change of the delay from row to row.")
    if "throughput" not in table:
        table["throughput"] = table["receiving_rate"] * (1 - table["loss_ratio"])
        notes.append("throughput is receiving_rate * (1 - loss_ratio).")
    if TARGET not in table:
        table[TARGET] = table["prev_bandwidth"].shift(-1)
        notes.append("bandwidth is the prev_bandwidth of the next row; the last row has none.")
    frame = table[[*NETWORK, TARGET]].copy()
    frame.index = _on_grid(table.index, path)
    whole = np.isfinite(frame).all(axis=1)
    if lost := int((~whole).sum()):
        notes.append(f"{lost} rows without a value in every column were left out.")
    return _trace(frame[whole], name, notes, source="file")


def load_traces(data: Data, tell: Callable[[str], None] = lambda text: None) -> dict[str, Trace]:
    """Get the traces of an experiment, by series; a single file is the trace of the first symbol.

    Errors: DataError for a source that has no traces.
    """
    names = {symbol: f"{symbol}_{INTERVAL}" for symbol in data.symbols}
    if data.start or data.end:
        raise DataError(f"a trace is taken whole, without days; got {data.start} .. {data.end}")
    if data.source == "synthetic":
        tell("drawing network traces")
        drawn = {}
        for seed, name in enumerate(names.values(), data.seed):
            notes = [f"Synthetic: drawn from seed {seed}; no network was measured."]
            drawn[name] = _trace(make_network_trace(seed, MADE_UP_ROWS), name, notes, source="drawn", synthetic=True)
        return drawn
    if data.source != "files":
        raise DataError(
            "a network trace comes from a file of your own (source 'files', files 'trace.csv'; columns "
            f"{', '.join(NETWORK)}; a row every 200 ms) or is made up (source 'synthetic'); got source {data.source!r}"
        )
    tell("reading traces")
    found = find_traces(data.files)
    if len(data.symbols) == 1 and len(found) == 1:
        found = dict(zip(data.symbols, found.values(), strict=True))
    if absent := [symbol for symbol in names if symbol not in found]:
        raise DataError(f"{data.files} has no trace of {', '.join(absent)}; it has {', '.join(found)}")
    return {name: read_trace(found[symbol], name) for symbol, name in names.items()}


def _on_grid(index: pd.Index, path: Path) -> pd.DatetimeIndex:
    """Put times on the grid of 200 ms that begins with the first. Errors: DataError for another step."""
    if not isinstance(index, pd.DatetimeIndex):
        return pd.DatetimeIndex(START + STEP_NS * np.arange(len(index)), tz="UTC")
    times = index.as_unit("ns").asi8
    usual = np.median(np.diff(times)) if len(times) > 1 else STEP_NS
    if abs(usual - STEP_NS) > STEP_NS / 4:
        raise DataError(f"{path.name}: a trace has a row every 200 ms; got one every {usual / 1e6:g} ms. Resample it")
    places = np.rint((times - times[0]) / STEP_NS).astype(np.int64)
    if (twice := np.diff(places) == 0).any():
        raise DataError(
            f"{path.name}: one row every 200 ms; got {int(twice.sum())} more, the first at "
            f"{index[1:][twice][0]}. Resample it"
        )
    return pd.DatetimeIndex(times[0] + STEP_NS * places, tz="UTC")


def _trace(frame: pd.DataFrame, name: str, notes: list[str], source: str, synthetic: bool = False) -> Trace:
    if frame.empty:
        raise DataError(f"{name}: no row of the trace has a value in every column")
    starts = frame.index.as_unit("ns").asi8
    passport = Passport(
        series=name,
        source=source,
        market="network",
        first=stamp(starts[0]),
        last=stamp(starts[-1]),
        expected=int((starts[-1] - starts[0]) // STEP_NS) + 1,
        got=len(frame),
        gaps=find_gaps(starts, starts[0], starts[-1], STEP_NS, "network"),
        notes=tuple(notes),
        synthetic=synthetic,
    )
    return Trace(frame, passport)
