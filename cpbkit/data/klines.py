"""The kline table, the checks at its door, and the Passport that tells how complete and how sound it is."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd

from cpbkit import foreign
from cpbkit.config.experiment import COINS, OHLC
from cpbkit.data.sessions import closed_bars
from cpbkit.data.venue import HALTS, halts_of
from cpbkit.errors import DataError, SourceError, check_name
from cpbkit.texts import redact

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_UNIT_WORDS = {
    "s": ("s", "sec", "second", "seconds"),
    "m": ("", "m", "t", "min", "mins", "minute", "minutes"),  # a bare number counts minutes, as charts write it
    "h": ("h", "hr", "hour", "hours", "hourly"),
    "d": ("d", "day", "days", "daily"),
    "w": ("w", "wk", "week", "weeks", "weekly"),
}
INTERVAL_SECONDS: dict[str, int] = {
    name: int(name[:-1]) * _UNITS[name[-1]] for name in "1m 3m 5m 15m 30m 1h 2h 4h 6h 8h 12h 1d 3d 1w".split()
}
OHLCV = (*OHLC, "volume")
QUOTES = tuple("USDT FDUSD USDC BUSD TUSD DAI USD EUR GBP JPY KRW TWD TRY BRL AUD BTC ETH BNB".split())  # longest first
DOLLARS = QUOTES[:6]  # coins that stand for one: what is priced in them trades around the clock
EXTRAS = ("quote_volume", "trades", "taker_buy_volume")  # kept where the source has them
JUMP_LIMIT = 0.5  # |log return| of a bar beyond which it is listed as a jump (+65 %, -39 %)
TENFOLD = 8.0  # a slipped decimal point; real markets open where they closed, and their wicks are shorter
LOWEST, HIGHEST = 1e-18, 1e18  # of a price, in any currency
MOST = 1e30  # of a volume
COARSER_ROWS = 12  # in a row, equally far apart, that are no chance
ENOUGH = 30  # bars that follow each other, to tell open from close by
SWAPPED = 10  # times nearer to the open before it than the next open is to a close
ANOTHER_ASSET = 3.0  # |log return| across a gap beyond which the name seems to have changed hands
SECOND_NS = 1_000_000_000
DAY_SECONDS = 86_400
DAY_NS = DAY_SECONDS * SECOND_NS


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
    conflicts: int = 0  # of the duplicates: rows that said other prices than the row that was kept
    jumps: tuple[Jump, ...] = ()
    tenfold: tuple[str, ...] = ()  # bar starts, UTC, whose prices stand a factor of ten off their neighbours
    disagreements: tuple[Disagreement, ...] = ()
    checked: int = 0  # bars that were compared with a second source
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
    def doubts(self) -> int:
        """Bars that two sources or two rows tell differently, or that stand a factor of ten off their neighbours."""
        return sum(each.bars for each in self.disagreements) + self.conflicts + len(self.tenfold)

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
        try:
            foreign.check(raw, FORM)
            ends = [raw.get(name) for name in ("first", "last")]
            ends += [gap[name] for gap in raw.get("gaps", ()) for name in ("start", "end")]
            foreign.check([time for time in ends if time], [datetime])
        except foreign.Damaged as error:
            raise DataError(f"a Passport that cannot be read: {error}") from None

        def read(kind, values):
            return kind(**{f.name: values[f.name] for f in dataclasses.fields(kind) if f.name in values})

        parts = {"files": SourceFile, "gaps": Gap, "jumps": Jump, "disagreements": Disagreement}
        found = {name: tuple(read(part, item) for item in raw.get(name, ())) for name, part in parts.items()}
        return read(cls, {**raw, **found, **{name: tuple(raw.get(name, ())) for name in ("tenfold", "notes")}})


FORM = foreign.form_of(Passport)


@dataclass(frozen=True, eq=False)
class Klines:
    """Bars that passed the door.

    `frame` has a strictly increasing UTC index `open_time` (ns) on the grid of the interval, where missing bars
    are absent, and the float64 columns open high low close [volume quote_volume trades taker_buy_volume].
    """

    frame: pd.DataFrame
    passport: Passport

    @property
    def closes(self) -> np.ndarray:
        """When each bar closes: (N,) ns."""
        return self.frame.index.asi8 + INTERVAL_SECONDS[split_name(self.passport.series)[1]] * SECOND_NS

    def last_known(self, times: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the last value that is known when each bar closes, NaN before the first; times (ns): since when."""
        at = np.searchsorted(times, self.closes, side="right") - 1
        return np.where(at >= 0, values[at], np.nan)


class Incomplete(SourceError):
    """Some series are not there; `klines` holds those that are, `reasons` a sentence for each other one."""

    def __init__(self, message: str, klines: dict[str, Klines], reasons: dict[str, str]):
        super().__init__(message)
        self.klines = klines
        self.reasons = reasons


def find_interval(text: str) -> str:
    """Return the interval that a spelling means, "" for none: 60m, 1H, 1-min, 3600s, hour, 240 (minutes), D."""
    text = text.strip()
    match = re.fullmatch(r"(\d{0,7})[-_ ]?([a-z]*)", text.lower())
    if not match or not any(match.groups()) or (text.endswith("M") and match[1] in ("", "1")):  # M is a month
        return ""
    unit = next((unit for unit, words in _UNIT_WORDS.items() if match[2] in words), "")
    seconds = int(match[1] or 1) * _UNITS.get(unit, 0)
    return next((name for name, length in INTERVAL_SECONDS.items() if length == seconds), "")


def check_interval(text: str) -> str:
    """Return the interval that is meant, 1h for 60m; raise UnknownName for none."""
    return find_interval(text) or check_name("interval", text, INTERVAL_SECONDS)


def series_name(symbol: str, interval: str) -> str:
    """Name the bars of one symbol at one interval: `BTCUSDT_15m`."""
    return f"{symbol}_{interval}"


def split_name(series: str) -> tuple[str, str]:
    """Return symbol and interval of a series name; raise DataError or UnknownName for anything else."""
    symbol, bar, interval = series.rpartition("_")
    if not bar or not symbol:
        raise DataError(f"a series is named like BTCUSDT_15m; got {series!r}")
    return symbol, check_interval(interval)


def grid_phase(interval: str, starts: np.ndarray) -> int:
    """Return where the bars of an interval start, in ns after a multiple of its length since 1970.

    Weeks start on a Monday. The phase of three days is the venue's choice: the most common one of `starts`.
    """
    if interval == "1w":
        return 4 * DAY_NS
    if interval == "3d" and len(starts):
        phases, counts = np.unique(starts % (3 * DAY_NS), return_counts=True)
        return int(phases[counts.argmax()])
    return 0


def first_bar(moment: int, step: int, phase: int) -> int:
    """Return the start of the first bar at or after an instant; step, phase: of the grid, in the instant's unit."""
    return -((phase - moment) // step) * step + phase


def find_last(starts: np.ndarray) -> np.ndarray:
    """Return which of sorted starts (N,) are the last of their kind: (N,) bool."""
    return np.append(starts[1:] != starts[:-1], True)[: len(starts)]


def join_bars(
    starts: np.ndarray, values: np.ndarray, step: int, phase: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Put bars together to longer ones, on the grid of step and phase: their starts, values, and parts that were there.

    starts (N,): in order, in the unit of step and phase; values (N, 5): open high low close volume.
    """
    whole = (starts - phase) // step * step + phase
    whole, begins, counts = np.unique(whole, return_index=True, return_counts=True)
    high, low = np.maximum.reduceat(values[:, 1], begins), np.minimum.reduceat(values[:, 2], begins)
    volume = np.add.reduceat(values[:, 4], begins)
    closes = values[begins + counts - 1, 3]
    return whole, np.column_stack([values[begins, 0], high, low, closes, volume]), counts


def sift(
    starts: np.ndarray, values: np.ndarray, interval: str, now: int | None = None, phase: int | None = None
) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """Keep the bars on the grid that are closed, in order, of rows for one bar the last; count what was dropped.

    starts (N,): ns; values (N, C). now (ns): bars that close later are unfinished (default: all are closed).
    phase: as `grid_phase` returns it (default: what that returns).
    """
    step = INTERVAL_SECONDS[interval] * SECOND_NS
    on_grid = starts % step == (grid_phase(interval, starts) if phase is None else phase)
    closed = on_grid if now is None else on_grid & (starts <= now - step)
    order = np.argsort(starts, kind="stable")
    order = order[closed[order]]
    last = find_last(starts[order])
    kept, earlier = order[last], order[~last]
    winners = kept[np.searchsorted(starts[kept], starts[earlier])]  # of the same bars
    dropped = {
        "duplicates": len(earlier),
        "conflicts": int((values[earlier, :5] != values[winners, :5]).any(axis=1).sum()),
        "unfinished": int((on_grid & ~closed).sum()),
        "off_grid": int((~on_grid).sum()),
    }
    return starts[kept], values[kept], dropped


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
    phase: int | None = None,
    dropped: Mapping[str, int] | None = None,
    disagreements: Iterable[Disagreement] = (),
    checked: int = 0,
    notes: Iterable[str] = (),
    synthetic: bool = False,
) -> Klines:
    """Let bars in: sort, drop the double, the unfinished and the off-grid, refuse the impossible, count the rest.

    frame: DatetimeIndex of bar starts (without a zone: taken as UTC), in any order.
    start, end: first and last instant asked for, both inclusive (default: the first and the last bar).
    now: bars that close after it are unfinished (default: all are closed). Instants: ns, or as pd.Timestamp reads.
    phase: where bars start on the grid, where that is not as `grid_phase` says (ns).
    dropped, disagreements, checked, notes: what the source already dropped (as `sift` counts it) or found.
    Raises DataError with the first bad bar.
    """
    symbol, interval = split_name(series)
    step = INTERVAL_SECONDS[interval] * SECOND_NS
    starts, values, columns = _columns(frame, series)
    phase = grid_phase(interval, starts) if phase is None else phase
    starts, values, counts = sift(starts, values, interval, None if now is None else _ns(now), phase)

    low = -(1 << 62) if start is None else first_bar(_ns(start), step, phase)
    high = min((_ns(end) if end is not None else 1 << 62), (_ns(now) - step if now is not None else 1 << 62))
    inside = (starts >= low) & (starts <= high)
    if not inside.any():
        raise DataError(
            f"{series}: no bar left of {len(frame)} rows ({counts['off_grid']} off the {interval} grid, "
            f"{counts['unfinished']} not closed yet, {int((~inside).sum())} outside the dates asked for)"
        )
    starts, values = starts[inside], values[inside]
    has_volume = "volume" in columns
    check_bars(starts, values, series, has_volume)
    _check_order(starts, values, series, step)

    grid_low = starts[0] if start is None else low
    grid_high = starts[-1] if end is None else (high - phase) // step * step + phase
    coarser = _find_coarser(starts, step)
    # Pairs of coins, and of a coin and money, are traded around the clock.
    pair = symbol.endswith(DOLLARS) or any(symbol == coin + quote for coin in COINS for quote in QUOTES)
    known = market or synthetic or pair
    closed = starts[:0] if known or coarser else closed_bars(starts, grid_low, grid_high, step)
    o, h, lo, c = values[:, :4].T
    move = np.log(c[1:] / c[:-1])
    beyond_gap = (np.diff(starts) > step) & (np.abs(move) > ANOTHER_ASSET)
    notes = [*notes] if has_volume else [*notes, "There is no volume; features that need it cannot be used."]
    notes += [coarser] if coarser else []
    if len(closed):
        notes.append(f"It trades in sessions: {len(closed):,} bars of nights, weekends and holidays are not missing.")
    notes += [
        f"Across the gap from {stamp(starts[i])} to {stamp(starts[i + 1])} the price changes by a factor of "
        f"{np.exp(abs(move[i])):,.0f}, as if another asset had taken the name: use the bars of one side."
        for i in np.flatnonzero(beyond_gap)
    ]
    passport = Passport(
        series=series,
        source=source,
        market=market,
        files=tuple(files),
        first=stamp(starts[0]),
        last=stamp(starts[-1]),
        expected=max(int((grid_high - grid_low) // step) + 1 - len(closed), len(starts)),
        got=len(starts),
        gaps=find_gaps(np.sort(np.append(starts, closed)), grid_low, grid_high, step, market),
        zero_volume=int((values[:, 4] == 0).sum()) if has_volume else 0,
        flat=int(((o == h) & (h == lo) & (lo == c)).sum()),
        **{name: count + (dropped or {}).get(name, 0) for name, count in counts.items()},
        jumps=tuple(
            Jump(stamp(starts[i + 1]), round(float(move[i]), 6)) for i in np.flatnonzero(np.abs(move) > JUMP_LIMIT)
        ),
        tenfold=_find_tenfold(starts, values, step),
        disagreements=tuple(disagreements),
        checked=checked,
        notes=tuple(map(redact, notes)),
        synthetic=synthetic,
    )
    index = pd.DatetimeIndex(starts.view("M8[ns]"), name="open_time").tz_localize("UTC")
    # Each column in one piece: indicators read columns, and one that is spread over the rows costs them a copy.
    return Klines(pd.DataFrame(np.asfortranarray(values), index=index, columns=columns), passport)


_SHOWN = (
    "series source files first last expected got gaps missing unexplained zero_volume flat dropped conflicts jumps"
    " tenfold disagreements checked notes"
).split()


def passport_table(passports: Iterable[Passport]) -> pd.DataFrame:
    """Show Passports as a table, one row a series; of files, gaps and jumps their number."""
    rows = []
    for p in passports:
        row = vars(p) | {name: len(getattr(p, name)) for name in ("files", "gaps", "jumps", "tenfold")}
        row["source"] = f"synthetic: {p.source}" if p.synthetic else f"{p.source} {p.market}".strip()
        row |= {"missing": p.missing, "unexplained": p.unexplained}
        row["dropped"] = p.duplicates + p.unfinished + p.off_grid
        row["disagreements"] = sum(each.bars for each in p.disagreements)
        row["notes"] = " ".join(p.notes)
        rows.append(row)
    return pd.DataFrame(rows, columns=_SHOWN).set_index("series")


def say_doubts(passports: Iterable[Passport]) -> str:
    """Say in a line how many bars of real data are missing without a reason or in doubt; empty where none is."""
    known = [passport for passport in passports if not passport.synthetic]
    if not (odd := [p for p in known if p.unexplained or p.doubts]):
        return ""
    worst = max(odd, key=lambda p: p.unexplained + p.doubts)
    missing, doubts = sum(p.unexplained for p in odd), sum(p.doubts for p in odd)
    parts = [f"{missing:,} missing without a reason"] if missing else []
    parts += [f"{doubts:,} in doubt"] if doubts else []
    said = f"Bars that are not sound, in {len(odd)} of {len(known)} series: {', '.join(parts)}"
    return f"{said}; most of {worst.series}. The report has the passport of each"


def check_bars(starts: np.ndarray, values: np.ndarray, name: str, has_volume: bool = True) -> None:
    """Raise DataError, with the first of them, if there are bars that cannot be.

    starts (N,): ns. values (N, >=4): open high low close first, then volume where it has one. name: of the series
    or the file.
    """
    o, h, lo, c = values[:, :4].T
    volume = values[:, 4] if has_volume else np.zeros(len(values))
    with np.errstate(invalid="ignore"):
        slack = 1e-9 * np.abs(h)  # adjusted prices of other sources differ in their last digits
        rules = {
            "a price that is not a number": ~np.isfinite(values[:, :4]).all(axis=1),
            "a price that is not above zero": (values[:, :4] <= 0).any(axis=1),
            f"a price that no market has ({LOWEST:g} to {HIGHEST:g})": (
                (values[:, :4] < LOWEST) | (values[:, :4] > HIGHEST)
            ).any(axis=1),
            f"a volume that is not a number of at least zero, or above {MOST:g}": ~(volume >= 0) | (volume > MOST),
            "a high below another price": h + slack < np.maximum(np.maximum(o, c), lo),
            "a low above another price": lo - slack > np.minimum(o, c),
        }
    for rule, broken in rules.items():
        if broken.any():
            i = int(broken.argmax())
            shown = ", ".join(
                f"{column} {value!r}"
                for column, value in zip(OHLCV[: 4 + has_volume], values[i].tolist(), strict=False)
            )
            raise DataError(f"{name}: {int(broken.sum())} bars with {rule}; the first at {stamp(starts[i])}: {shown}")


def _check_order(starts: np.ndarray, values: np.ndarray, series: str, step: int) -> None:
    """Raise DataError for bars that close where the bar before opened: columns, or time, are the wrong way round."""
    follows = np.flatnonzero(np.diff(starts[:2000]) == step)
    if len(follows) < ENOUGH:
        return
    o, c = values[:2000, 0], values[:2000, 3]
    to_next = np.median(np.abs(np.log(o[follows + 1] / c[follows])))
    if to_next > SWAPPED * np.median(np.abs(np.log(c[follows + 1] / o[follows]))):
        raise DataError(
            f"{series}: each bar must open near where the one before it closed; these close where the one before it "
            f"opened (from {stamp(starts[0])} on). Are open and close swapped, or do times run backwards?"
        )


def _find_coarser(starts: np.ndarray, step: int) -> str:
    """Say where bars of a longer interval begin among these, "" where none do. Sessions leave no such regular holes."""
    apart = np.diff(starts) // step
    begins = np.flatnonzero(np.append(True, np.diff(apart) != 0)[: len(apart)])
    counts = np.diff(np.append(begins, len(apart)))
    found = np.flatnonzero((counts >= COARSER_ROWS) & (apart[begins] > 1))
    if not len(found):
        return ""
    i, rows = begins[found[0]], counts[found[0]]
    last = starts[i + rows]
    return (
        f"From {stamp(starts[i])} to {stamp(last)} rows stand {apart[i]} bars apart, as those of a longer interval do: "
        "keep the bars of one interval in a file."
    )


def _find_tenfold(starts: np.ndarray, values: np.ndarray, step: int) -> tuple[str, ...]:
    """List bars that open far from where the bar before them closed, or whose wick is longer than any."""
    o, h, lo, c = values[:, :4].T
    move = np.append(1.0, np.where(np.diff(starts) == step, o[1:] / c[:-1], 1.0))
    off = (move > TENFOLD) | (move < 1 / TENFOLD) | (h > TENFOLD * np.maximum(o, c)) | (np.minimum(o, c) > TENFOLD * lo)
    return tuple(stamp(start) for start in starts[off])


def stamp(ns: int) -> str:
    """Write an instant (ns since 1970, UTC) as `2025-03-01T00:00`."""
    return str(np.datetime64(int(ns), "ns").astype("M8[m]"))


def instant(written: str) -> int:
    """Read what `stamp` wrote, or the first instant of a day or month (ns since 1970, UTC)."""
    return int(np.datetime64(written, "m").astype(np.int64)) * 60 * SECOND_NS


def _ns(moment: Any) -> int:
    time = pd.Timestamp(moment)
    time = time.tz_localize("UTC") if time.tzinfo is None else time.tz_convert("UTC")
    return int(time.as_unit("ns").value)


def _columns(frame: pd.DataFrame, series: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    absent = [name for name in OHLC if name not in frame.columns]
    if absent:
        got = ", ".join(map(str, frame.columns))
        raise DataError(f"{series}: bars need the columns {', '.join(OHLC)}; got {got} ({', '.join(absent)} missing)")
    if not isinstance(frame.index, pd.DatetimeIndex):
        raise DataError(f"{series}: bars need an index of times; got {frame.index.dtype}")
    if frame.index.hasnans:
        raise DataError(f"{series}: {int(frame.index.isna().sum())} rows have no time that can be read")
    columns = [*OHLC, *(name for name in ("volume", *EXTRAS) if name in frame.columns)]
    try:
        values = frame[columns].to_numpy(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{series}: prices and volumes must be numbers; {error}") from None
    return frame.index.as_unit("ns").asi8, values, columns


def find_gaps(starts: np.ndarray, low: int, high: int, step: int, market: str) -> tuple[Gap, ...]:
    """List the steps from low to high (ns) that lie between starts (N,), with the halt of the market behind each."""
    edges = np.concatenate(([low - step], starts, [high + step]))
    at = np.flatnonzero(np.diff(edges) > step)
    first, after = edges[at] + step, edges[at + 1]
    names = [HALTS[i].name if i >= 0 else "" for i in halts_of(first, after, market)]
    return tuple(
        Gap(stamp(begin), stamp(end - step), int((end - begin) // step), name)
        for begin, end, name in zip(first, after, names, strict=True)
    )
