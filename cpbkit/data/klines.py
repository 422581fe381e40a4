"""The kline table, the checks at its door, and the Passport that tells how complete and how sound it is."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from cpbkit.data.venue import HALTS
from cpbkit.errors import DataError, check_name

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
INTERVAL_SECONDS: dict[str, int] = {
    "1m": _MINUTE,
    "3m": 3 * _MINUTE,
    "5m": 5 * _MINUTE,
    "15m": 15 * _MINUTE,
    "30m": 30 * _MINUTE,
    "1h": _HOUR,
    "2h": 2 * _HOUR,
    "4h": 4 * _HOUR,
    "6h": 6 * _HOUR,
    "8h": 8 * _HOUR,
    "12h": 12 * _HOUR,
    "1d": _DAY,
    "3d": 3 * _DAY,
    "1w": 7 * _DAY,
}
OHLCV = ("open", "high", "low", "close", "volume")
EXTRAS = ("quote_volume", "trades", "taker_buy_volume")  # kept where the source has them
JUMP_LIMIT = 0.5  # |log return| of a bar beyond which it is listed as a jump (+65 %, -39 %)
SECOND = 1_000_000_000  # ns


@dataclass(frozen=True)
class SourceFile:
    """One file or answer that bars were read from."""

    name: str
    sha256: str = ""


@dataclass(frozen=True)
class Gap:
    """Bars that are missing in a row."""

    start: str  # first missing bar, UTC
    end: str  # last missing bar, UTC
    bars: int
    name: str = ""  # the known venue halt that explains it


@dataclass(frozen=True)
class Jump:
    """A bar that moved more than JUMP_LIMIT from the close before it."""

    time: str  # bar start, UTC
    log_return: float


@dataclass(frozen=True)
class Disagreement:
    """Two sources that were both read for the same bars and do not say the same."""

    between: str  # "monthly and daily file"
    first: str  # bar start, UTC
    bars: int  # that differ
    compared: int
    largest: float  # relative difference of a price


@dataclass(frozen=True)
class Passport:
    """How complete and how sound the bars of one series are. Times are UTC bar starts, `2025-03-01T00:00`."""

    series: str  # BTCUSDT_15m
    source: str = ""  # who gave the bars
    market: str = ""  # spot | um | "" where that has no meaning
    files: tuple[SourceFile, ...] = ()
    first: str = ""
    last: str = ""
    expected: int = 0  # bars of the grid in the range that was asked for and could exist
    got: int = 0
    gaps: tuple[Gap, ...] = ()
    zero_volume: int = 0  # bars without a trade
    flat: int = 0  # bars whose four prices are equal
    duplicates: int = 0  # rows dropped: an earlier row of the same bar
    unfinished: int = 0  # rows dropped: not closed when they were read
    off_grid: int = 0  # rows dropped: not a multiple of the interval
    jumps: tuple[Jump, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    notes: tuple[str, ...] = ()  # sentences for a person
    synthetic: bool = False

    @property
    def missing(self) -> int:
        """Bars that are expected and not there."""
        return self.expected - self.got

    @property
    def unexplained(self) -> int:
        """Missing bars that no known halt of the venue explains."""
        return sum(gap.bars for gap in self.gaps if not gap.name)

    @property
    def complete(self) -> bool:
        """Whether every bar that the venue ever made is there."""
        return self.unexplained == 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, numbers and strings, fit for JSON."""
        raw = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in raw.items()}

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Passport":
        """Read what `to_dict` wrote, also after a trip through JSON."""
        parts = {"files": SourceFile, "gaps": Gap, "jumps": Jump, "disagreements": Disagreement}
        values = {name: tuple(part(**item) for item in raw[name]) for name, part in parts.items()}
        return cls(**{**raw, **values, "notes": tuple(raw["notes"])})


@dataclass(frozen=True, eq=False)
class Klines:
    """Bars that passed the door.

    `frame` has a strictly increasing UTC index `open_time` (ns) on the grid of the interval, where missing bars
    are absent, and the float64 columns open high low close volume [quote_volume trades taker_buy_volume].
    """

    frame: pd.DataFrame
    passport: Passport


def series_name(symbol: str, interval: str) -> str:
    """Name the bars of one symbol at one interval: `BTCUSDT_15m`."""
    return f"{symbol}_{interval}"


def split_name(series: str) -> tuple[str, str]:
    """Return symbol and interval of a series name; raise DataError or UnknownName for anything else."""
    symbol, bar, interval = series.rpartition("_")
    if not bar or not symbol:
        raise DataError(f"a series is named like BTCUSDT_15m; got {series!r}")
    return symbol, check_name("interval", interval, INTERVAL_SECONDS)


def grid_phase(interval: str, starts: np.ndarray) -> int:
    """Return where the bars of an interval start, in ns after a multiple of its length since 1970.

    Weeks start on a Monday. The phase of three days is the venue's choice: the most common one of `starts`.
    """
    if interval == "1w":
        return 4 * _DAY * SECOND
    if interval == "3d" and len(starts):
        phases, counts = np.unique(starts % (3 * _DAY * SECOND), return_counts=True)
        return int(phases[counts.argmax()])
    return 0


def first_bar(instant: int, step: int, phase: int) -> int:
    """Return the start of the first bar at or after an instant; step, phase: of the grid, in the instant's unit."""
    return -((phase - instant) // step) * step + phase


def find_last(starts: np.ndarray) -> np.ndarray:
    """Return which of sorted starts (N,) are the last of their kind: (N,) bool."""
    return np.append(starts[1:] != starts[:-1], True)[: len(starts)]


def validate(
    frame: pd.DataFrame,
    series: str,
    *,
    source: str = "",
    market: str = "",
    files: Iterable[SourceFile] = (),
    start: Any = None,
    end: Any = None,
    now: Any = None,
    duplicates: int = 0,
    off_grid: int = 0,
    unfinished: int = 0,
    disagreements: Iterable[Disagreement] = (),
    notes: Iterable[str] = (),
    synthetic: bool = False,
) -> Klines:
    """Let bars in: sort, drop the double, the unfinished and the off-grid, refuse the impossible, count the rest.

    frame: DatetimeIndex of bar starts (without a zone: taken as UTC), in any order; of rows for one bar the last
    wins.
    start, end: first and last instant asked for, both inclusive (default: the first and the last bar).
    now: bars that close after it are unfinished (default: all are closed).
    duplicates, off_grid, unfinished, disagreements, notes: what the source already dropped or found.
    Raises DataError with the first bad bar.
    """
    _, interval = split_name(series)
    step = INTERVAL_SECONDS[interval] * SECOND
    starts, values, columns = _columns(frame, series)

    order = np.argsort(starts, kind="stable")
    starts, values = starts[order], values[order]
    phase = grid_phase(interval, starts)
    on_grid = starts % step == phase
    closed = np.ones(len(starts), bool) if now is None else starts + step <= _ns(now)
    keep = on_grid & closed
    off_grid += int((~on_grid).sum())
    unfinished += int((on_grid & ~closed).sum())
    starts, values = starts[keep], values[keep]
    last = find_last(starts)
    duplicates += int((~last).sum())
    starts, values = starts[last], values[last]

    low = first_bar(_ns(start), step, phase) if start is not None else None
    high = _ns(end) if end is not None else None
    if now is not None and high is not None:
        high = min(high, _ns(now) - step)
    inside = np.ones(len(starts), bool)
    if low is not None:
        inside &= starts >= low
    if high is not None:
        inside &= starts <= high
    starts, values = starts[inside], values[inside]
    if not len(starts):
        raise DataError(
            f"{series}: no bar left of {len(frame)} rows ({off_grid} off the {interval} grid, "
            f"{unfinished} not closed yet, {int((~inside).sum())} outside the dates asked for)"
        )
    check_bars(starts, values, series)

    grid_low = starts[0] if low is None else low
    grid_high = starts[-1] if high is None else (high - phase) // step * step + phase
    expected = max(int((grid_high - grid_low) // step) + 1, len(starts))
    o, h, lo, c, volume = values[:, :5].T
    move = np.log(c[1:] / c[:-1])
    jumped = np.flatnonzero(np.abs(move) > JUMP_LIMIT)
    passport = Passport(
        series=series,
        source=source,
        market=market,
        files=tuple(files),
        first=stamp(starts[0]),
        last=stamp(starts[-1]),
        expected=expected,
        got=len(starts),
        gaps=_gaps(starts, grid_low, grid_high, step, market),
        zero_volume=int((volume == 0).sum()),
        flat=int(((o == h) & (h == lo) & (lo == c)).sum()),
        duplicates=duplicates,
        unfinished=unfinished,
        off_grid=off_grid,
        jumps=tuple(Jump(stamp(starts[i + 1]), round(float(move[i]), 6)) for i in jumped),
        disagreements=tuple(disagreements),
        notes=tuple(notes),
        synthetic=synthetic,
    )
    index = pd.DatetimeIndex(starts.view("M8[ns]"), name="open_time").tz_localize("UTC")
    return Klines(pd.DataFrame(values, index=index, columns=columns), passport)


def passport_table(passports: Iterable[Passport]) -> pd.DataFrame:
    """Show Passports as a table, one row a series."""
    passports = list(passports)
    table = {name: [value(p) for p in passports] for name, value in _SHOWN.items()}
    return pd.DataFrame(table).set_index("series")


_SHOWN: dict[str, Callable[[Passport], Any]] = {
    "series": lambda p: p.series,
    "source": lambda p: f"synthetic: {p.source}" if p.synthetic else f"{p.source} {p.market}".strip(),
    "files": lambda p: len(p.files),
    "first": lambda p: p.first,
    "last": lambda p: p.last,
    "expected": lambda p: p.expected,
    "got": lambda p: p.got,
    "gaps": lambda p: len(p.gaps),
    "missing": lambda p: p.missing,
    "unexplained": lambda p: p.unexplained,
    "zero_volume": lambda p: p.zero_volume,
    "flat": lambda p: p.flat,
    "dropped": lambda p: p.duplicates + p.unfinished + p.off_grid,
    "jumps": lambda p: len(p.jumps),
    "disagreements": lambda p: sum(d.bars for d in p.disagreements),
    "notes": lambda p: " ".join(p.notes),
}


def check_bars(starts: np.ndarray, values: np.ndarray, name: str) -> None:
    """Raise DataError, with the first of them, if there are bars that cannot be.

    starts (N,): ns. values (N, >=5): open high low close volume first. name: of the series or the file.
    """
    o, h, lo, c, volume = values[:, :5].T
    with np.errstate(invalid="ignore"):
        slack = 1e-9 * np.abs(h)  # adjusted prices of other sources differ in their last digits
        rules = {
            "a price that is not a number": ~np.isfinite(values[:, :4]).all(axis=1),
            "a price that is not above zero": (values[:, :4] <= 0).any(axis=1),
            "a volume that is not a number of at least zero": ~(volume >= 0) | np.isinf(volume),
            "a high below another price": h + slack < np.maximum(np.maximum(o, c), lo),
            "a low above another price": lo - slack > np.minimum(o, c),
        }
    for rule, broken in rules.items():
        if broken.any():
            i = int(broken.argmax())
            shown = ", ".join(f"{column} {value!r}" for column, value in zip(OHLCV, values[i].tolist(), strict=False))
            raise DataError(f"{name}: {int(broken.sum())} bars with {rule}; the first at {stamp(starts[i])}: {shown}")


def stamp(ns: int) -> str:
    """Write an instant (ns since 1970, UTC) as `2025-03-01T00:00`."""
    return str(np.datetime64(int(ns), "ns").astype("M8[m]"))


def _ns(instant: Any) -> int:
    time = pd.Timestamp(instant)
    time = time.tz_localize("UTC") if time.tzinfo is None else time.tz_convert("UTC")
    return int(time.as_unit("ns").value)


def _columns(frame: pd.DataFrame, series: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    absent = [name for name in OHLCV if name not in frame.columns]
    if absent:
        got = ", ".join(map(str, frame.columns))
        raise DataError(f"{series}: bars need the columns {', '.join(OHLCV)}; got {got} ({', '.join(absent)} missing)")
    if not isinstance(frame.index, pd.DatetimeIndex):
        raise DataError(f"{series}: bars need an index of times; got {frame.index.dtype}")
    index = frame.index if frame.index.tz is None else frame.index.tz_convert("UTC").tz_localize(None)
    if index.hasnans:
        raise DataError(f"{series}: {int(index.isna().sum())} rows have no time that can be read")
    columns = [*OHLCV, *(name for name in EXTRAS if name in frame.columns)]
    try:
        values = frame[columns].to_numpy(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{series}: prices and volumes must be numbers; {error}") from None
    return index.as_unit("ns").to_numpy().view("i8"), values, columns


def _gaps(starts: np.ndarray, low: int, high: int, step: int, market: str) -> tuple[Gap, ...]:
    edges = np.concatenate(([low - step], starts, [high + step]))
    missing = np.diff(edges) // step - 1
    gaps = []
    for i in np.flatnonzero(missing > 0):
        first, last = int(edges[i]) + step, int(edges[i + 1]) - step
        gaps.append(Gap(stamp(first), stamp(last), int(missing[i]), _halt_name(first, last + step, market)))
    return tuple(gaps)


def _halt_name(start: int, end: int, market: str) -> str:
    if market == "spot":
        for halt in HALTS:
            if halt.covers(start, end):
                return halt.name
    return ""
