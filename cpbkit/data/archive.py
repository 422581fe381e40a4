"""The files of the public archive and the answers of the REST host: their names, and the bars inside, checked."""

import hashlib
import io
import json
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from cpbkit.data.klines import EXTRAS, INTERVAL_SECONDS, OHLCV, SECOND_NS, check_bars, instant, sift, stamp
from cpbkit.data.unpack import NotUnpacked, unzip
from cpbkit.errors import DataError, SourceError

MONTHLY_ONLY = ("3d", "1w")  # intervals without daily files
COLUMNS = (*OHLCV, *EXTRAS)
_FIELDS = (1, 2, 3, 4, 5, 7, 8, 9)  # where COLUMNS stand among the 12 fields of a row; field 0 is the open time
_HEADER = (  # of the files that have one
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
).split(",")
_VALUES = [_HEADER[i] for i in _FIELDS]
_TYPES = {**dict.fromkeys(("open_time", "close_time"), pa.int64()), **dict.fromkeys(_VALUES, pa.float64())}
_CSV = pa.csv.ConvertOptions(column_types=_TYPES, include_columns=list(_TYPES))
ZIP_LIMIT = 16 << 20  # bytes; a month of minutes has 3 MB
CSV_LIMIT = 64 << 20  # bytes; a month of minutes has 6 MB
REST_LIMIT = 4 << 20  # bytes; 1000 bars have 200 kB
REST_BARS = 1000  # at most, an answer
_MICROSECONDS = 10**14  # an open time above it is in microseconds: as milliseconds it would be the year 5138
_LAST_MS = 9 * 10**12  # 2255; what comes later does not fit into nanoseconds


class BadFile(SourceError):
    """A file or an answer that arrived whole and cannot be trusted."""


@dataclass(frozen=True)
class ArchiveFile:
    """A monthly or daily file of the archive."""

    market: str  # spot | um
    symbol: str  # as the archive names it: 1000PEPEUSDT
    interval: str
    date: str  # 2025-03 or 2025-03-24
    folder: str = "klines"

    @property
    def kind(self) -> str:
        return "monthly" if len(self.date) == 7 else "daily"

    @property
    def name(self) -> str:
        return f"{self.symbol}-{self.interval}-{self.date}.zip"

    @property
    def path(self) -> str:
        market = {"spot": "spot", "um": "futures/um"}[self.market]
        inner = f"{self.symbol}/{self.interval}" if self.folder.lower().endswith("klines") else self.symbol
        return f"/data/{market}/{self.kind}/{self.folder}/{inner}/{self.name}"

    @property
    def span(self) -> tuple[int, int]:
        """First instant, and the instant after the last (ns)."""
        following = np.datetime64(self.date) + 1  # counts months or days, as the date is written
        return instant(self.date), instant(str(following))


@dataclass(frozen=True)
class Record:
    """What was read, and what was left out of it; the cache keeps it with the bars."""

    name: str
    kind: str  # monthly | daily | rest
    start: int  # first instant it speaks for, ns
    end: int  # instant after the last, ns
    sha256: str
    fetched_at: str  # UTC
    duplicates: int = 0
    off_grid: int = 0
    unfinished: int = 0
    conflicts: int = 0  # of the duplicates: rows that said other prices than the one that was kept
    note: str = ""
    asked: int = 1  # how often an answer said the same
    compared_at: str = ""  # UTC; when its checksum was last compared with the archive's
    place: str = ""  # the second place it came from, where another cache had read it


@dataclass(frozen=True, eq=False)
class Piece:
    """The sound bars of one file or answer: strictly increasing starts (N,) ns and values (N, 8) as in COLUMNS."""

    record: Record
    starts: np.ndarray
    values: np.ndarray


def parse_checksum(body: bytes, name: str) -> str:
    """Return the sha256 that a .CHECKSUM file gives for `name`; BadFile if it gives none."""
    match = re.match(rb"\s*([0-9a-fA-F]{64})(?:\s+\*?(\S+))?\s*$", body)
    if not match or (match[2] and match[2] != name.encode()):
        raise BadFile(f"{name}.CHECKSUM does not hold a sha256 of {name}; got {body[:80]!r}")
    return match[1].decode().lower()


def read_file(file: ArchiveFile, blob: bytes, *, now: int, coins: int = 1, note: str = "") -> Piece:
    """Read a zip of the archive. `now` (ns): bars that close later are dropped; coins: a contract's units.

    Raises BadFile for anything but one sound CSV of the name that the file promises.
    """
    low, high = file.span
    wanted = file.name.removesuffix(".zip") + ".csv"
    try:
        found, text = unzip(io.BytesIO(blob), CSV_LIMIT)
        if found != wanted:
            raise NotUnpacked(f"it holds {found!r}")
        starts, closes, values = parse_csv(text, file.name)
    except NotUnpacked as error:
        raise BadFile(f"{file.name} must hold {wanted} alone: {error}") from None
    except pa.ArrowException as error:
        raise BadFile(f"{file.name} does not hold 12 columns of numbers ({str(error)[:120]})") from None
    early = INTERVAL_SECONDS[file.interval] * SECOND_NS if file.interval in MONTHLY_ONLY else 0
    inside = (starts >= low - early) & (starts < high)  # a week may begin in the month before
    if len(starts) and not inside.any():
        raise BadFile(f"{file.name} holds no bar of {file.date}; its first is of {stamp(starts[0])}")
    check_lengths(starts, closes, file.interval, file.name)
    about = Record(file.name, file.kind, low, high, hashlib.sha256(blob).hexdigest(), stamp(now), note=note)
    return _piece(about, starts, values, inside, file.interval, coins, now)


def read_answer(
    pages: list[bytes], interval: str, start: int, end: int, *, name: str, now: int, coins: int = 1
) -> Piece:
    """Read what the REST host said about the bars that start in [start, end) (ns); BadFile where that is no bars."""
    rows = [row for page in pages for row in rows_of(page, name)]
    try:
        starts, closes = (_to_ns(np.array([row[i] for row in rows], np.int64)) for i in (0, 6))
        values = np.array([[float(row[i]) for i in _FIELDS] for row in rows]).reshape(-1, len(_FIELDS))
    except (ValueError, TypeError, OverflowError) as error:
        raise BadFile(f"{name}: an answer that does not hold bars ({error})") from None
    check_lengths(starts, closes, interval, name)
    about = Record(name, "rest", start, end, hashlib.sha256(b"".join(pages)).hexdigest(), stamp(now))
    return _piece(about, starts, values, (starts >= start) & (starts < end), interval, coins, now)


def rows_of(page: bytes, name: str) -> list:
    """Return the rows of one REST answer; BadFile if it is not a list of lists."""
    try:
        rows = json.loads(page)
    except (ValueError, RecursionError):
        raise BadFile(f"{name}: an answer that is not JSON: {page[:80]!r}") from None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) >= 11 and isinstance(row[0], int) and 0 < row[0] < _LAST_MS for row in rows
    ):
        raise BadFile(f"{name}: an answer that is not a list of bars: {page[:80]!r}")
    return rows


def check_lengths(starts: np.ndarray, closes: np.ndarray, interval: str, name: str) -> None:
    """Raise BadFile for bars of another interval, as their close times tell. starts, closes (N,): ns.

    A bar that a halt cut short may close early; the archive has a few of them.
    """
    lengths = np.rint((closes - starts) / SECOND_NS).astype(np.int64)
    other = (lengths != INTERVAL_SECONDS[interval]) & np.isin(lengths, list(INTERVAL_SECONDS.values()))
    if other.sum() > max(2, len(starts) // 10) or (len(starts) and other.all()):
        first = int(other.argmax())
        raise BadFile(
            f"{name}: {int(other.sum())} of {len(starts)} bars last {lengths[first]} s by their close time, not "
            f"{interval}; the first starts at {stamp(starts[first])}"
        )


def parse_csv(text: bytes, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts (N,) and close times (N,) in ns and the values (N, 8) of a CSV of the archive; BadFile else."""
    names = _HEADER
    if not text[:1].isdigit():  # futures files got a header at some time, spot files have none
        header, _, text = text.partition(b"\n")
        names = header.decode(errors="replace").strip().lower().split(",")
        if sorted(names) != sorted(_HEADER):  # any order will do
            raise BadFile(f"{name} must name its columns {', '.join(_HEADER)}; got {header[:200]!r}")
    if not text.strip():
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, len(COLUMNS)))
    options = pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=len(text) + 1)
    table = pa.csv.read_csv(pa.BufferReader(text), options, convert_options=_CSV)
    opened, closed = table["open_time"], table["close_time"]
    if absent := opened.null_count + closed.null_count:
        raise pa.ArrowInvalid(f"{absent} rows without a time")
    values = np.column_stack([table[title].to_numpy() for title in _VALUES])
    return _to_ns(opened.to_numpy()), _to_ns(closed.to_numpy()), values


def _to_ns(times: np.ndarray) -> np.ndarray:
    """Turn open times in ms or us, by their size and row by row, into ns."""
    micro = np.clip(times, 0, _LAST_MS * 1_000) * 1_000
    milli = np.clip(times, 0, _LAST_MS) * 1_000_000
    return np.where(times > _MICROSECONDS, micro, milli)


def _piece(about: Record, starts, values, inside, interval: str, coins: int, now: int) -> Piece:
    """Keep the sound bars inside the span, count the others, scale to coins."""
    kept, values, dropped = sift(starts[inside], values[inside], interval, now)
    try:
        check_bars(kept, values, about.name)
    except DataError as error:
        raise BadFile(f"impossible bars: {error}") from None
    if coins != 1:
        values[:, :4] /= coins
        values[:, [4, 7]] *= coins  # volume and taker_buy_volume count coins; quote_volume counts money
    counts: dict[str, Any] = {**dropped, "off_grid": dropped["off_grid"] + int((~inside).sum())}
    return Piece(replace(about, **counts), kept, values)
