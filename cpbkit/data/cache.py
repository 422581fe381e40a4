"""The cache: one Parquet file a series and market, whole or absent, safe for several processes at once."""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import filelock
import numpy as np
import platformdirs
import pyarrow as pa
import pyarrow.parquet as pq

from cpbkit import __version__, atomic
from cpbkit.data.archive import COLUMNS, Piece, Record
from cpbkit.data.klines import Disagreement, find_last, stamp
from cpbkit.errors import DataError

log = logging.getLogger(__name__)
RANK = {"rest": 1, "daily": 2, "monthly": 3}  # who is believed where several were read: the settled source
_KINDS = {rank: kind for kind, rank in RANK.items()}
PART_AGE = 86400.0  # s; an older part may have been rewritten by the venue since
LOCK_WAIT = 60.0  # s; a merge takes well under one
Bars = tuple[np.ndarray, np.ndarray, np.ndarray]  # starts, values and ranks, as in Holding


class CacheError(DataError):
    """A cache that cannot be written."""


@dataclass(frozen=True)
class Opinion:
    """What a second source said of bars: another file, or the sum of a finer interval."""

    against: str  # BTCUSDT-15m-2025-02.zip
    start: int  # first instant it speaks for, ns
    end: int  # instant after the last, ns
    compared: int  # bars
    differ: int
    first: str = ""  # that differs: bar start, UTC


@dataclass(frozen=True, eq=False)
class Holding:
    """All that is kept of a series, the usual gaps and other assets included; nothing when it is new."""

    starts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # (N,) ns, strictly increasing
    values: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS))))  # (N, 8)
    ranks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))  # (N,) see RANK
    records: dict[str, Record] = field(default_factory=dict)  # by name
    absent: dict[str, int] = field(default_factory=dict)  # file the archive did not have: when it was asked, ns
    disagreements: tuple[Disagreement, ...] = ()
    first_bar: int | None = None  # of the symbol on the venue, ns, as its REST host says
    opinions: tuple[Opinion, ...] = ()  # what second sources said of some of the bars
    fresh: frozenset[str] = frozenset()  # names of the records that were read since the holding was; not kept
    damage: str = ""  # why the file in the cache could not be used


@dataclass(frozen=True)
class Entry:
    """One file of the cache, as `cpbkit cache` shows it."""

    path: str
    market: str
    series: str
    first: str = ""
    last: str = ""
    bars: int = 0
    files: int = 0  # read from
    bytes: int = 0
    fetched_at: str = ""  # the newest of its files
    problem: str = ""  # why it cannot be used


def merge(held: Holding, pieces: Iterable[Piece]) -> Holding:
    """Add pieces to a holding: of two bars the one of the higher rank stays, of equal rank the later one."""
    disagreements = {(d.between, d.first): d for d in held.disagreements}
    bars, records, fresh = (held.starts, held.values, held.ranks), held.records, set(held.fresh)
    for piece in pieces:
        if len(piece.starts):
            rank = RANK[piece.record.kind]
            # Only the stretch that the piece covers is looked at: a long series comes in many pieces.
            low, high = np.searchsorted(bars[0], (piece.starts[0], piece.starts[-1] + 1))
            stretch = bars[0][low:high], bars[1][low:high], bars[2][low:high]
            new = piece.starts, piece.values, np.full(len(piece.starts), rank, np.int8)
            if low < high:
                for found in _compare(*stretch, piece, rank):
                    disagreements[found.between, found.first] = found
                new = _best(stretch, new)
            starts, values, ranks = (
                np.concatenate((array[:low], part, array[high:])) for array, part in zip(bars, new, strict=True)
            )
            bars = starts, values, ranks
        record, earlier = piece.record, records.get(piece.record.name)
        if earlier and record.kind == "rest" and record.fetched_at != earlier.fetched_at:
            record = replace(record, asked=earlier.asked + 1)
        records = {**_not_replaced(records, record, bars[0], bars[2]), record.name: record}
        fresh |= {record.name}
    return replace(
        held,
        fresh=frozenset(fresh),
        starts=bars[0],
        values=bars[1],
        ranks=bars[2],
        records=records,
        disagreements=tuple(disagreements[key] for key in sorted(disagreements)),
    )


def forget(held: Holding, first: int, end: int) -> Holding:
    """Return a holding without what it knows of [first, end) ns, whole files of it."""
    gone = [record for record in held.records.values() if record.start < end and record.end > first]
    first, end = min([first, *(r.start for r in gone)]), max([end, *(r.end for r in gone)])
    kept = (held.starts < first) | (held.starts >= end)
    low, high = stamp(first), stamp(end)
    return replace(
        held,
        starts=held.starts[kept],
        values=held.values[kept],
        ranks=held.ranks[kept],
        records={name: r for name, r in held.records.items() if r.end <= first or r.start >= end},
        absent={},
        disagreements=tuple(d for d in held.disagreements if not low <= d.first < high),
        opinions=tuple(o for o in held.opinions if o.end <= first or o.start >= end),
    )


def cache_folder() -> Path:
    """Return where the cache is: CPBKIT_CACHE, or the folder that the platform has for caches."""
    if named := os.environ.get("CPBKIT_CACHE"):
        return Path(named).expanduser()
    return platformdirs.user_cache_path("cpbkit", appauthor=False, opinion=False)  # no folder of an author, none inside


def second_places() -> list[Path]:
    """Return folders laid out like the cache that are read and never written.

    Those of CPBKIT_CACHE_READ, and a `cpbkit` folder on a mounted Google Drive. The inputs of a Kaggle notebook are
    what strangers made: such a place is only told of.
    """
    named = [Path(p).expanduser() for p in os.environ.get("CPBKIT_CACHE_READ", "").split(os.pathsep) if p]
    kaggle = Path("/kaggle/input")
    # The two places of a dataset; a deeper search could walk through a million images.
    inputs = [found.parent for at in ("*", "datasets/*/*") for found in sorted(kaggle.glob(f"{at}/klines"))]
    for place in inputs:
        if place not in named:
            log.warning("%s has bars; to use them, if you trust who made them, set CPBKIT_CACHE_READ=%s", place, place)
    return [p for p in (*named, Path("/content/drive/MyDrive/cpbkit")) if (p / "klines").is_dir()]


class Store:
    """The cache of klines in a folder, with second places to read from."""

    def __init__(self, folder: str | Path | None = None, also: Iterable[str | Path] | None = None):
        self.folder = Path(folder) if folder is not None else cache_folder()
        places = second_places() if also is None else [Path(p) for p in also]
        self.also = [place for place in places if place != self.folder]

    def path(self, market: str, series: str) -> Path:
        """Return the file of a series."""
        return self._own("klines", market, series, suffix=".parquet")

    def _own(self, *names: str, suffix: str = "") -> Path:
        """Return a path in the cache; DataError for a name that is no plain word, CacheError where a link leads out."""
        check_path_name(*names)
        path = self.folder
        for part in (*names[:-1], names[-1] + suffix):
            path = path / part
            if path.is_symlink():
                raise CacheError(f"{path} is a link, and no link inside a cache is followed; remove it")
        return path

    def read(self, market: str, series: str) -> Holding:
        """Return what is kept of a series, here and in the second places.

        A damaged file counts as none; it is logged, and the holding says why.
        """
        check_path_name(market, series)
        held, damage = Holding(), []
        for folder in (*reversed(self.also), self.folder):
            path = folder / "klines" / market / f"{series}.parquet"
            try:
                found = _read(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except DataError as error:
                log.warning("%s", error)
                damage.append(str(error))
                continue
            if folder != self.folder:
                records = {name: replace(r, place=r.place or folder.name) for name, r in found.records.items()}
                found = replace(found, records=records)
            held = _overlay(held, found) if held.records else found
        return replace(held, damage="; ".join(damage))

    def update(
        self,
        market: str,
        series: str,
        pieces: Iterable[Piece],
        absent: dict[str, int] | None = None,
        first_bar: int | None = None,
        *,
        compared: Iterable[str] = (),
        now: str = "",
        opinions: Iterable[Opinion] = (),
        forgotten: tuple[int, int] | None = None,
    ) -> Holding:
        """Merge what was fetched into the file of a series, after whatever another process has put there.

        compared: files whose checksum was found unchanged at `now`. forgotten: the span (ns) whose old bars go first.
        """
        path = self.path(market, series)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(market, series):
                for orphan in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
                    orphan.unlink(missing_ok=True)
                held = self.read(market, series)
                held = merge(forget(held, *forgotten) if forgotten else held, pieces)
                same = {name: replace(held.records[name], compared_at=now) for name in compared if name in held.records}
                told = {opinion.against: opinion for opinion in (*held.opinions, *opinions)}
                known = {**held.absent, **(absent or {})}
                held = replace(
                    held,
                    records={**held.records, **same},
                    absent={name: at for name, at in known.items() if name not in held.records},
                    first_bar=held.first_bar if first_bar is None else first_bar,
                    opinions=tuple(told.values()),
                )
                atomic.write_bytes(path, _to_parquet(held, series))
        except OSError as error:
            raise _cannot_write(self.folder, error) from None
        self.drop_parts(market, series)
        return held

    def keep(self, place: tuple[str, ...], name: str, blob: bytes) -> None:
        """Keep a verified download in a folder of the cache; `update` drops those in ("parts", market, series)."""
        folder = self._own(*place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The name carries the sha256: the content proves itself, and half a file is no file.
            path = folder / f"{name}.{hashlib.sha256(blob).hexdigest()}"
            path.unlink(missing_ok=True)  # a link of that name would be written through
            path.write_bytes(blob)
        except FileNotFoundError:
            pass  # another process has just merged the same series
        except OSError as error:
            raise _cannot_write(self.folder, error) from None

    def kept(self, place: tuple[str, ...], name: str, age: float = math.inf) -> bytes | None:
        """Return a download that was kept, if it is whole and not older than `age` seconds."""
        folder = self._own(*place)
        # Any of this fails when another process merges the same series and drops its parts.
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if path.name.startswith(f"{name}.") and time.time() - path.stat().st_mtime < age:
                    blob = path.read_bytes()
                    if path.name == f"{name}.{hashlib.sha256(blob).hexdigest()}":
                        return blob
        return None

    def list(self, market: str | None = None, series: str | None = None) -> tuple[Entry, ...]:
        """List the files of the cache, without reading their bars."""
        return tuple(_entry(path, whole=False) for path in self._files(market, series))

    def verify(self, market: str | None = None, series: str | None = None) -> tuple[Entry, ...]:
        """List the files of the cache after reading each to the last bit; `problem` says what is wrong."""
        return tuple(_entry(path, whole=True) for path in self._files(market, series))

    def remove(self, market: str | None = None, series: str | None = None) -> tuple[Entry, ...]:
        """Remove files, all of them by default, from the first place; return what was removed."""
        removed = []
        for path in self._files(market, series):
            entry = _entry(path, whole=False)
            with self._lock(entry.market, entry.series):
                path.unlink(missing_ok=True)  # a link goes, not what it leads to
            removed.append(entry)
        for parts in (self.folder / "parts").glob(f"{market or '*'}/{series or '*'}"):
            self.drop_parts(parts.parent.name, parts.name)
        return tuple(removed)

    def _files(self, market: str | None, series: str | None) -> tuple[Path, ...]:
        check_path_name(*filter(None, (market, series)))
        return tuple(sorted((self.folder / "klines").glob(f"{market or '*'}/{series or '*'}.parquet")))

    def drop_parts(self, market: str, series: str) -> None:
        """Forget the downloads that wait for `update`."""
        shutil.rmtree(self._own("parts", market, series), ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self, market: str, series: str):
        folder = self._own("locks")
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self._own("locks", f"{market}_{series}", suffix=".lock"))
        try:
            with lock.acquire(timeout=LOCK_WAIT):
                yield
        except filelock.Timeout:
            raise CacheError(
                f"another process has held {lock.lock_file} for {LOCK_WAIT:.0f} s; end it, or remove that file"
            ) from None


def check_path_name(*names: str) -> None:
    """Raise DataError for a name that is no plain word: markets and series become names of files."""
    for name in names:
        if not re.fullmatch(r"\w{1,60}", name):
            raise DataError(f"a market or series is named in letters, digits and _, such as BTCUSDT_1h; got {name!r}")


def _compare(starts, values, ranks, piece: Piece, rank: int) -> list[Disagreement]:
    """Find the bars that a piece and a source of another rank both have and do not agree on."""
    _, mine, theirs = np.intersect1d(starts, piece.starts, assume_unique=True, return_indices=True)
    found = []
    for other in set(ranks[mine].tolist()) - {rank}:
        both = ranks[mine] == other
        at, a, b = starts[mine[both]], values[mine[both], :5], piece.values[theirs[both], :5]
        differ = np.flatnonzero((a != b).any(axis=1))
        if len(differ):
            largest = float((np.abs(a[:, :4] - b[:, :4]) / b[:, :4]).max())
            between = f"{_KINDS[max(other, rank)]} and {_KINDS[min(other, rank)]}"
            found.append(Disagreement(between, stamp(at[differ[0]]), len(differ), len(a), round(largest, 9)))
    return found


def _not_replaced(records: dict[str, Record], by: Record, starts: np.ndarray, ranks: np.ndarray) -> dict:
    """Drop the records that a later and higher one speaks for, if it left them no bar.

    Lower ones that come after a higher one stay: they are why its gaps need not be asked about again.
    """
    kept = {}
    for name, record in records.items():
        low, high = np.searchsorted(starts, (record.start, record.end))
        within = by.start <= record.start and record.end <= by.end and RANK[by.kind] > RANK[record.kind]
        if not within or (ranks[low:high] == RANK[record.kind]).any():
            kept[name] = record
    return kept


def _best(one: Bars, other: Bars) -> Bars:
    """Join starts, values and ranks; of two bars the higher rank stays, of equal rank the one of `other`."""
    starts, values, ranks = (np.concatenate(pair) for pair in zip(one, other, strict=True))
    order = np.lexsort((ranks, starts))
    starts, values, ranks = starts[order], values[order], ranks[order]
    last = find_last(starts)
    return starts[last], values[last], ranks[last]


def _overlay(below: Holding, above: Holding) -> Holding:
    """Lay one place's holding over another's."""
    return Holding(
        *_best((below.starts, below.values, below.ranks), (above.starts, above.values, above.ranks)),
        {**below.records, **above.records},
        {**below.absent, **above.absent},
        tuple(sorted({*below.disagreements, *above.disagreements}, key=lambda d: (d.between, d.first))),
        above.first_bar if above.first_bar is not None else below.first_bar,
        tuple({o.against: o for o in (*below.opinions, *above.opinions)}.values()),
    )


def _to_parquet(held: Holding, series: str) -> bytes:
    about = {
        "format": 1,
        "kit": __version__,
        "series": series,
        "records": [asdict(held.records[name]) for name in sorted(held.records)],
        "absent": dict(sorted(held.absent.items())),
        "disagreements": [asdict(d) for d in held.disagreements],
        "first_bar": held.first_bar,
        "opinions": [asdict(opinion) for opinion in held.opinions],
    }
    about["digest"] = _digest(held, about)
    columns = [pa.array(held.starts).cast(pa.timestamp("ns", tz="UTC"))]
    columns += [pa.array(np.ascontiguousarray(held.values[:, i])) for i in range(len(COLUMNS))]
    columns += [pa.array(held.ranks)]
    table = pa.table(columns, names=["open_time", *COLUMNS, "rank"])
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({"cpbkit": json.dumps(about)})
    pq.write_table(table, sink, compression="zstd", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def _digest(held: Holding, about: dict) -> str:
    """Return a sha256 over bars and metadata: Parquet itself notices few flipped bits."""
    sha = hashlib.sha256(json.dumps({k: v for k, v in about.items() if k != "digest"}, sort_keys=True).encode())
    for array in (held.starts, held.values, held.ranks):
        sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def _read(path: Path) -> Holding:
    """Read a file of the cache to the last bit; raise DataError when it is damaged, FileNotFoundError."""
    blob = path.read_bytes()
    try:
        table = pq.read_table(pa.BufferReader(blob), use_threads=False)
        about = json.loads(table.schema.metadata[b"cpbkit"])
        starts = table["open_time"].cast(pa.int64()).to_numpy()
        values = np.column_stack([table[name].to_numpy() for name in COLUMNS])
        held = Holding(
            starts,
            values,
            table["rank"].to_numpy(),
            {record["name"]: Record(**record) for record in about["records"]},
            about["absent"],
            tuple(Disagreement(**d) for d in about["disagreements"]),
            about["first_bar"],
            tuple(Opinion(**opinion) for opinion in about.get("opinions", ())),
        )
        right = about["digest"] == _digest(held, about)
    # A flipped bit can surface as any of these, from the Thrift footer to a JSON key.
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {str(error)[:120]})") from None
    if not right:
        raise DataError(f"{path} is damaged (its content does not match its digest)")
    return held


def _entry(path: Path, *, whole: bool) -> Entry:
    found = Entry(str(path), path.parent.name, path.stem)
    try:
        if whole:
            _read(path)
        with pq.ParquetFile(path) as file:
            records = json.loads(file.schema_arrow.metadata[b"cpbkit"])["records"]
            starts = file.read(["open_time"])["open_time"].cast(pa.int64()).to_numpy()
        return replace(
            found,
            first=stamp(starts[0]) if len(starts) else "",
            last=stamp(starts[-1]) if len(starts) else "",
            bars=len(starts),
            files=len(records),
            bytes=path.stat().st_size,
            fetched_at=max((record["fetched_at"] for record in records), default=""),
        )
    except (DataError, pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        return replace(found, problem=str(error)[:300] or type(error).__name__)


def _cannot_write(folder: Path, error: OSError) -> CacheError:
    return CacheError(
        f"the cache in {folder} cannot be written ({error.strerror or error}); what it held is untouched. "
        "Make room or give rights there, or set CPBKIT_CACHE to another folder"
    )
