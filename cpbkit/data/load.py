"""The bars of an experiment, from the source that it names, with context beside them."""

import time
from collections.abc import Callable

from cpbkit.config.experiment import Data, Experiment
from cpbkit.data import binance, files, synthetic, yahoo
from cpbkit.data.klines import Klines
from cpbkit.errors import DataError
from cpbkit.quantities import downloaded


def load_klines(experiment: Experiment, tell: Callable[[str], None] = lambda text: None) -> dict[str, Klines]:
    """Get the bars of an experiment from its source, and context beside them; `tell` hears what is going on."""
    data = experiment.data
    if data.source == "synthetic":
        tell("making the seeded market")
        bars = synthetic.make_market(data.symbols, data.intervals, data.start, data.end, data.seed)
    elif data.source == "files":
        tell("reading files")
        bars = files.read_folder(data.files, experiment.series)
    elif data.source == "given":
        raise DataError("the bars of this run were given as frames; give them again: sweep(..., data=frames)")
    else:
        begun = time.monotonic()

        def progress(done: int, total: int, size: int, text: str) -> None:
            tell(f"getting bars: {downloaded(done, total, size, time.monotonic() - begun)}")

        try:
            bars = binance.fetch_klines(
                data.symbols, data.intervals, data.start, data.end, market=data.market, progress=progress
            )
        except binance.Incomplete as error:
            error.klines = _with_context(error.klines, data, tell)
            raise
    return _with_context(bars, data, tell)


def _with_context(bars: dict[str, Klines], data: Data, tell: Callable[[str], None]) -> dict[str, Klines]:
    if not data.tickers:
        return bars
    tell(f"getting {', '.join(data.tickers)}")
    return yahoo.add_context(bars, data.tickers)
