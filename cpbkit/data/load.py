"""The bars of an experiment, from the source that it names, with context beside them."""

import datetime as dt
import logging
import time
from collections.abc import Callable, Mapping

from cpbkit.config.experiment import Experiment, vary
from cpbkit.data import binance, derivatives, files, synthetic, yahoo
from cpbkit.data.klines import Incomplete, Klines
from cpbkit.data.traces import Trace, load_traces
from cpbkit.errors import CpbkitError, DataError
from cpbkit.quantities import downloaded

log = logging.getLogger(__name__)


def with_days(experiment: Experiment, today: dt.date, tell: Callable[[str], None]) -> Experiment:
    """Return the experiment with first and last day: where none are given, the last twelve months that are there.

    today: in UTC. tell: hears which days were taken. Errors: CpbkitError for a last day without a first one.
    """
    data = experiment.data
    if data.source not in ("binance", "yahoo", "synthetic") or data.market == "network" or (data.start and data.end):
        return experiment
    if data.end:
        raise CpbkitError(f"start must be a day too, such as 2025-03-01; got end {data.end} alone")
    if data.start:
        return vary(experiment, end=str(today))
    start, end = last_months(today)
    meant = "the last twelve whole months"
    if data.source == "yahoo":
        end, meant = str(today), "what Yahoo serves, at most twelve months"
        start = str(today - dt.timedelta(days=min(365, yahoo.reach(data.intervals) - 1)))
    tell(f"No days were given: {meant}, {start} to {end}.")
    return vary(experiment, start=start, end=end)


def last_months(day: dt.date) -> tuple[str, str]:
    """Return the first and the last day of the twelve months before that of a day; the archive has them whole."""
    first = day.replace(day=1)
    return first.replace(year=first.year - 1).isoformat(), (first - dt.timedelta(days=1)).isoformat()


def open_files(experiment: Experiment, tell: Callable[[str], None] = lambda text: None) -> files.Found:
    """Read the own bars that an experiment asks for; what is refused is logged. Errors: as `files.read_files`."""
    data = experiment.data
    found = files.read_files(
        data.files, data.symbols, data.intervals, start=data.start, end=data.end, venue=data.venue, tell=tell
    )
    for name, why in found.refused.items():
        log.warning("not taken: %s: %s", name, why)
    return found


def load_klines(
    experiment: Experiment, tell: Callable[[str], None] = lambda text: None, found: files.Found | None = None
) -> Mapping[str, Klines | Trace]:
    """Get the bars of an experiment from its source, and context beside them; `tell` hears what is going on.

    found: its own files, where they have been opened already.
    """
    data = experiment.data
    if data.market == "network":
        return load_traces(data, tell)
    try:
        bars = _load(experiment, tell, found)
    except Incomplete as error:
        error.klines = _with_context(error.klines, experiment, tell)
        raise
    return _with_context(bars, experiment, tell)


def _load(experiment: Experiment, tell: Callable[[str], None], found: files.Found | None) -> dict[str, Klines]:
    data = experiment.data
    if data.source == "synthetic":
        tell("making the seeded market")
        return synthetic.make_market(data.symbols, data.intervals, data.start, data.end, data.seed)
    if data.source == "files":
        tell("reading files")
        return _chosen(experiment, found or open_files(experiment, tell))
    if data.source == "yahoo":
        tell("getting bars of Yahoo")
        return yahoo.fetch_klines(data.symbols, data.intervals, data.start, data.end)
    if data.source in ("given", "table"):
        raise DataError("the bars of this run were given as frames; give them again: data=frames")
    begun = time.monotonic()

    def progress(done: int, total: int, size: int, text: str) -> None:
        tell(f"getting bars: {downloaded(done, total, size, time.monotonic() - begun)}")

    return binance.fetch_klines(
        data.symbols, data.intervals, data.start, data.end, market=data.market, progress=progress
    )


def _chosen(experiment: Experiment, found: files.Found) -> dict[str, Klines]:
    """Return the own bars of the experiment's series; Incomplete where some are not there."""
    bars = {name: found.klines[name] for name in experiment.series if name in found.klines}
    lacking = [name for name in experiment.series if name not in bars]
    if not lacking:
        return bars
    reasons = {name: found.refused.get(name, f"no file of {experiment.data.files} has it") for name in lacking}
    lines = [f"{len(lacking)} of {len(experiment.series)} series are not there."]
    lines += [f"{name}: {why}" for name, why in (reasons | found.refused).items()]
    raise Incomplete("\n".join(lines), bars, reasons)


def _with_context(bars: dict[str, Klines], experiment: Experiment, tell: Callable[[str], None]) -> dict[str, Klines]:
    data = experiment.data
    if not bars:
        return bars
    if data.tickers:
        tell(f"getting {', '.join(data.tickers)}")
        bars = yahoo.add_context(bars, data.tickers)
    beside = [name for name in experiment.task.features if name in derivatives.COLUMNS]
    if beside and data.source != "synthetic":
        tell(f"getting {', '.join(beside)}")
        bars = derivatives.add_columns(bars, beside)
    return bars
