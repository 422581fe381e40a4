"""One series to get from Binance: which bars can exist, which of them a holding lacks, where to ask for them."""

import itertools
import re
from dataclasses import dataclass, replace

import numpy as np

from cpbkit.data.archive import MONTHLY_ONLY, ArchiveFile
from cpbkit.data.cache import RANK, Holding
from cpbkit.data.klines import DAY_NS, INTERVAL_SECONDS, SECOND_NS, first_bar, grid_phase, instant, series_name, stamp
from cpbkit.data.venue import CONTRACTS, LISTINGS, PREDECESSORS, Contract, halts_of
from cpbkit.errors import DataError, UnknownName, check_day

WILD = DAY_NS  # after a listing, left out: the first hours trade far from every later price
ROLLED_UP = 100 * DAY_NS  # a month this old has its monthly file, or never gets one
ASK_AGAIN = 6 * 3600 * SECOND_NS  # a file that the archive lacked: it may have come since
ASK_OLD_AGAIN = 7 * DAY_NS  # the same for one older than ROLLED_UP
BELIEVED = 2  # answers that say the same of a hole before it is taken for the venue's: one may have been cut short
REWRITTEN = 45 * DAY_NS  # the venue corrects files that are younger more often than older ones


@dataclass(frozen=True)
class Order:
    """The bars of one series that start in [first, end)."""

    symbol: str
    interval: str
    market: str  # spot | um
    first: int  # ns
    end: int  # ns
    now: int  # ns
    contract: Contract  # what the venue calls it, and how many coins one unit is
    listing: int | None = None  # ns, where it is known
    notes: tuple[str, ...] = ()

    @property
    def series(self) -> str:
        return series_name(self.symbol, self.interval)

    @property
    def step(self) -> int:
        return INTERVAL_SECONDS[self.interval] * SECOND_NS

    def file(self, date: str) -> ArchiveFile:
        """Return the file of a month (2025-03) or a day (2025-03-24)."""
        return ArchiveFile(self.market, self.contract.name, self.interval, date)

    def is_rolled_up(self, file: ArchiveFile) -> bool:
        """Say whether a file is so old that what the archive lacks of it will hardly come."""
        return file.span[1] < self.now - ROLLED_UP


def days(start: str, end: str, now: int) -> tuple[int, int]:
    """Return the first instant of the first day and the one after the last day (ns), if they can be asked for."""
    first, last = (instant(str(check_day(name, day, DataError))) for name, day in (("start", start), ("end", end)))
    if first > last:
        raise DataError(f"start must not be after end; got {start} .. {end}")
    if last > now:
        late = f"start lies in the future: {start}" if first > now else f"end lies in the future: {end}"
        raise DataError(f"{late}; bars are available up to today, {stamp(now)[:10]} (UTC)")
    return first, last + DAY_NS


def contract_of(symbol: str, market: str) -> Contract:
    """Return what the venue calls a symbol on a market."""
    if not re.fullmatch(r"\w{2,30}", symbol) or symbol != symbol.upper():
        plain = re.sub(r"\W|_", "", symbol).upper()
        raise UnknownName(f"symbol must be written like BTCUSDT; got {symbol!r} (did you mean {plain}?)")
    return CONTRACTS.get(symbol, Contract(symbol, 1)) if market == "um" else Contract(symbol, 1)


def usable(order: Order) -> Order:
    """Cut an order to the bars that may be used: a day after the listing, none of another asset. Say so."""
    notes = list(order.notes)
    name, coins = order.contract
    if coins != 1:
        notes.append(f"From the contract {name}, rescaled: prices / {coins}, volumes * {coins}.")
    elif name != order.symbol:
        notes.append(f"From the contract {name}.")
    if order.listing is None or order.first >= order.listing + WILD:
        return replace(order, notes=tuple(notes))
    said = f"{order.symbol} was first traded on {stamp(order.listing)} UTC"
    if order.market == "spot" and order.symbol in PREDECESSORS:
        last, what = PREDECESSORS[order.symbol]
        said = f"{said}; bars up to {last} under this name are of another asset, {what}, and are left out"
    first = order.listing + WILD
    if first >= min(order.end, order.now):
        raise DataError(
            f"{order.series}: no bars in {stamp(order.first)[:10]} .. {stamp(order.end - 1)[:10]}. {said}; "
            f"bars are available from {stamp(first)} to today"
        )
    notes.append(f"{said}. The first day after it is left out too: bars from {stamp(first)} on.")
    return replace(order, first=first, notes=tuple(notes))


def missing_bars(order: Order, held: Holding) -> np.ndarray:
    """Return the starts (ns) of closed bars that a holding lacks and no halt of the venue explains."""
    step, phase = order.step, grid_phase(order.interval, held.starts)
    grid = np.arange(first_bar(order.first, step, phase), min(order.end, order.now - step + 1), step, dtype=np.int64)
    at = np.searchsorted(held.starts, grid)
    absent = grid[np.append(held.starts, -1)[at] != grid]
    return absent[halts_of(absent, absent + step, order.market) < 0]


def unasked_bars(order: Order, held: Holding) -> np.ndarray:
    """Return the missing bars that no answer of the REST host speaks for; an old answer must be one of several."""
    absent = missing_bars(order, held)
    said = np.zeros(len(absent), np.int64)
    for name, record in held.records.items():
        if record.kind == "rest":
            age = order.now - instant(record.fetched_at)
            weight = BELIEVED if name in held.fresh else record.asked if age < ASK_OLD_AGAIN else 0
            said += weight * ((absent >= record.start) & (absent < record.end))
    return absent[said < BELIEVED]


def doubtful_months(order: Order, held: Holding) -> list[ArchiveFile]:
    """List the monthly files that were read and may be other ones now: recent ones, and those with holes."""
    holes, found = unasked_bars(order, held), []
    last = order.file(stamp(order.end - 1)[:7]).span[1]
    for record in held.records.values():
        if record.kind != "monthly" or record.name in held.fresh or not order.first < record.end <= last:
            continue
        lately = order.now - instant(record.compared_at or record.fetched_at) < ASK_AGAIN
        recent = record.end > order.now - REWRITTEN and not lately
        if recent or ((holes >= record.start) & (holes < record.end)).any():
            found.append(order.file(stamp(record.start)[:7]))
    return found


def lacking_months(order: Order, held: Holding) -> list[ArchiveFile]:
    """List the monthly files to ask for."""
    return _unasked_files(order, held, dates(_unsettled_bars(order, held), "M"))


def lacking_days(order: Order, held: Holding, probe: bool) -> list[ArchiveFile]:
    """List the daily files to ask for.

    An old month without a file was most likely never traded. Three of its days are asked for with `probe`, and the
    others without it once one of the three was there.
    """
    if order.interval in MONTHLY_ONLY:
        return []
    days = dates(_unsettled_bars(order, held), "D")
    chosen: list[str] = []
    for month, of_month in itertools.groupby(days, key=lambda day: day[:7]):
        whole, listed = order.file(month), list(of_month)
        low, high = whole.span
        traded = any(r.kind == "daily" and low <= r.start < high for r in held.records.values())
        if whole.name in held.absent and order.is_rolled_up(whole) and not traded:
            listed = spread(listed) if probe else []
        chosen += listed
    return _unasked_files(order, held, chosen)


def lacking_spans(order: Order, held: Holding) -> list[tuple[int, int]]:
    """List the spans [first, last + step) (ns) to ask the REST host for: days in a row, none across a month."""
    absent = unasked_bars(order, held)
    if not len(absent):
        return []
    days, months = (absent.view("M8[ns]").astype(f"M8[{unit}]").astype(np.int64) for unit in "DM")
    ends = np.flatnonzero((np.diff(days) > max(1, order.step // DAY_NS)) | (np.diff(months) > 0))
    return [(int(piece[0]), int(piece[-1]) + order.step) for piece in np.split(absent, ends + 1)]


def _unsettled_bars(order: Order, held: Holding) -> np.ndarray:
    """Return the starts of bars that the archive may still give: missing ones, and those only REST has given."""
    ours = (held.starts >= order.first) & (held.starts < order.end) & (held.ranks == RANK["rest"])
    return np.concatenate((missing_bars(order, held), held.starts[ours]))


def _unasked_files(order: Order, held: Holding, dates: list[str]) -> list[ArchiveFile]:
    """Drop the files that are read, that cannot be there yet, or that lately were not there."""
    files = []
    for file in map(order.file, dates):
        waited = order.now - held.absent.get(file.name, -ASK_OLD_AGAIN)
        lately = 0 <= waited < (ASK_OLD_AGAIN if order.is_rolled_up(file) else ASK_AGAIN)
        if file.span[1] <= order.now and file.name not in held.records and not lately:
            files.append(file)
    return files


def dates(starts: np.ndarray, unit: str) -> list[str]:
    """List the months (unit M) or days (unit D) that hold bar starts (ns), oldest first."""
    return [str(date) for date in np.unique(starts.view("M8[ns]").astype(f"M8[{unit}]"))]


def spread(items: list[str]) -> list[str]:
    """Return the first, the middle and the last of a list, each once."""
    return list(dict.fromkeys((items[0], items[len(items) // 2], items[-1])))


def listing_of(symbol: str, market: str) -> int | None:
    """Return when a symbol was first traded (ns), where it is known without asking."""
    if market == "spot" and symbol in LISTINGS:
        return instant(LISTINGS[symbol])
    return None
