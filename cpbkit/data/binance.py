"""Klines of Binance: the public archive month by month and day by day, its REST host for the last days."""

import hashlib
import os
import queue
import re
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from cpbkit.data import archive
from cpbkit.data.archive import DAY, ArchiveFile, BadFile, Piece
from cpbkit.data.download import Client, Patience, Unavailable
from cpbkit.data.klines import EXTRAS, INTERVAL_SECONDS, SECOND, Klines, SourceFile, stamp, validate
from cpbkit.data.order import (
    WILD,
    Order,
    contract_of,
    dates,
    days,
    listing_of,
    missing_bars,
    segments,
    unasked_bars,
    unsettled_bars,
    usable,
)
from cpbkit.data.store import RANK, Holding, Store, merge
from cpbkit.data.venue import LISTINGS
from cpbkit.errors import CpbkitError, DataError, SourceError, UnknownName, check_name

ROLLED_UP = 100 * DAY  # a month this old has its monthly file, or never gets one
ASK_AGAIN = 6 * 3600 * SECOND  # a file that the archive lacked: it may have come since
ASK_OLD_AGAIN = 7 * DAY  # the same for one older than ROLLED_UP
SETTLED = 3600 * SECOND  # the REST host may be this much behind with the newest bars
_REST = {  # host, prefix of the paths, weight allowed a minute
    "spot": ("https://data-api.binance.vision", "/api/v3", 6000),
    "um": ("https://fapi.binance.com", "/fapi/v1", 2400),
}

Job = tuple[str, Callable[[], Any]]  # what it gets, in words; the function that a thread runs
Steps = Generator[list[Job], list[Any], Any]  # yields jobs, is sent what they returned or died of


class Incomplete(SourceError):
    """Some series could not be had; `klines` holds those that could, `reasons` a sentence for each other one."""

    def __init__(self, message: str, klines: dict[str, Klines], reasons: dict[str, str]):
        super().__init__(message)
        self.klines = klines
        self.reasons = reasons


class _Lost(SourceError):
    def __init__(self, reason: str, cached: str):
        super().__init__(f"{reason} {cached}".strip())
        self.reason, self.cached = reason, cached


@dataclass(frozen=True)
class Hosts:
    """Where the bars come from; a mirror of the same paths will do."""

    archive_url: str = "https://data.binance.vision"
    rest_url: str = ""  # "" takes the market's own host

    def __post_init__(self):
        for name in ("archive_url", "rest_url"):
            url = getattr(self, name)
            if (url or name == "archive_url") and not re.match(r"https?://[^/]", url):
                raise CpbkitError(f"{name} must be an address like https://data.binance.vision; got {url!r}")

    @classmethod
    def from_environment(cls) -> "Hosts":
        """Take the hosts that CPBKIT_ARCHIVE_URL and CPBKIT_REST_URL name, or the public ones."""
        named = os.environ.get("CPBKIT_ARCHIVE_URL") or cls.archive_url
        return cls(named, os.environ.get("CPBKIT_REST_URL", ""))

    def file(self, file: ArchiveFile) -> str:
        return self.archive_url.rstrip("/") + quote(file.path)

    def rest(self, market: str, call: str) -> str:
        host, prefix, _ = _REST[market]
        return (self.rest_url or host).rstrip("/") + f"{prefix}/{call}"


def fetch_klines(
    symbols: Iterable[str],
    intervals: Iterable[str],
    start: str,
    end: str,
    *,
    market: str = "spot",
    store: Store | None = None,
    hosts: Hosts | None = None,
    progress: Callable[[int, int, int, str], None] | None = None,
    threads: int = 12,
    patience: Patience | None = None,
) -> dict[str, Klines]:
    """Get bars, from the cache where it has them, and keep what is new there.

    start, end: UTC days, `2025-03-01`, both inclusive. hosts: default `Hosts.from_environment()`.
    progress(done_files, total_files, bytes, text) is called from this thread; the total grows where days stand in
    for a month. A futures contract that is not named like its coin, or holds 1000 of them, is found by the spot
    symbol and rescaled to one coin.
    Returns Klines by series name, in the order asked for. Raises UnknownName and DataError before anything is
    downloaded when names or dates cannot be right, Incomplete at the end when a series could not be had.
    """
    now = _now()
    check_name("market", market, _REST)
    first, last = days(start, end, now)
    intervals = [check_name("interval", name, INTERVAL_SECONDS) for name in dict.fromkeys(intervals)]
    orders = [
        Order(symbol, interval, market, first, last, now, contract_of(symbol, market))
        for symbol in dict.fromkeys(symbols)
        for interval in intervals
    ]
    with Client(threads, patience) as client:
        fetch = _Fetch(client, hosts or Hosts.from_environment(), store or Store())
        resolved, unknown = _run({o.series: fetch.resolve(o) for o in orders}, client, threads, None)
        if unknown:
            kind = UnknownName if any(isinstance(e, UnknownName) for e in unknown.values()) else DataError
            raise kind("\n".join(dict.fromkeys(map(str, unknown.values()))))
        got, lost = _run({name: fetch.get(order) for name, order in resolved.items()}, client, threads, progress)
    klines = {order.series: got[order.series] for order in orders if order.series in got}
    if lost:
        raise Incomplete(_sentence(lost, len(orders)), klines, {name: str(e) for name, e in lost.items()})
    return klines


@dataclass(frozen=True)
class _Fetch:
    """How one series is got: steps that yield jobs for the threads and are sent what those found."""

    client: Client
    hosts: Hosts
    store: Store
    _names: dict[str, list[str]] = field(default_factory=dict)

    def resolve(self, order: Order) -> Steps:
        """Find the listing; return the order cut to the bars that can exist and may be used."""
        listing = listing_of(order.symbol, order.market)
        if listing is None:
            held = self.store.read(order.market, order.series)
            listing = held.first_bar
            if listing is None and len(missing_bars(order, held)):
                (listing,) = yield [(f"{order.series}: first bar", lambda: self._first_bar(order))]
            if isinstance(listing, UnknownName):
                months = dates(np.arange(order.first, order.end, DAY), "M")
                picked = dict.fromkeys((months[0], months[len(months) // 2], months[-1]))
                found = yield [(month, lambda m=month: self._exists(order.file(m))) for month in picked]
                if True not in found:  # neither does the archive have it, as it does for coins delisted long ago
                    raise listing
            if not isinstance(listing, int):
                listing = None  # the REST host is of no help: the archive shows where the bars begin
        return usable(replace(order, listing=listing))

    def get(self, order: Order) -> Steps:
        """Get what the cache lacks of a series; return its Klines."""
        held = self.store.read(order.market, order.series)
        pieces, absent, trouble = [], {}, []
        for choose in (self._monthly, self._some_days, self._all_days, self._rest):
            jobs = choose(order, held)
            fresh = []
            for answer in (yield jobs) if jobs else []:
                if isinstance(answer, Piece):
                    fresh.append(answer)
                elif isinstance(answer, str):
                    absent[answer] = order.now
                else:
                    trouble.append((choose == self._rest, answer))
            held = merge(replace(held, absent={**held.absent, **absent}), fresh)
            pieces += fresh
            if any(isinstance(error, BadFile) for _, error in trouble):
                break  # a file that cannot be trusted is a matter for a person, not for the next source
        if pieces or absent:
            damage = held.damage
            held = self.store.update(order.market, order.series, pieces, absent, order.listing)
            held = replace(held, damage=damage)
        elif not trouble:
            self.store.drop_parts(order.market, order.series)  # of a fetch that was killed after it had merged them
        return _finish(order, held, trouble)

    def _monthly(self, order: Order, held: Holding) -> list[Job]:
        files = [order.file(month) for month in dates(unsettled_bars(order, held), "M")]
        return self._file_jobs(order, held, files)

    def _some_days(self, order: Order, held: Holding) -> list[Job]:
        return self._daily(order, held, probe=True)

    def _all_days(self, order: Order, held: Holding) -> list[Job]:
        return self._daily(order, held, probe=False)

    def _daily(self, order: Order, held: Holding, probe: bool) -> list[Job]:
        if order.interval in archive.MONTHLY_ONLY:
            return []
        by_month: dict[str, list[str]] = {}
        for day in dates(unsettled_bars(order, held), "D"):
            by_month.setdefault(day[:7], []).append(day)
        files = []
        for month, listed in by_month.items():
            whole = order.file(month)
            read = any(r.kind == "daily" and whole.span[0] <= r.start < whole.span[1] for r in held.records.values())
            if whole.name in held.absent and whole.span[1] < order.now - ROLLED_UP and not read:
                # An old month without a file was most likely never traded: three days tell.
                listed = dict.fromkeys((listed[0], listed[len(listed) // 2], listed[-1])) if probe else ()
            files += [order.file(day) for day in listed]
        return self._file_jobs(order, held, files)

    def _rest(self, order: Order, held: Holding) -> list[Job]:
        jobs = []
        for start, end in segments(unasked_bars(order, held), order.step):
            text = f"{order.series} {stamp(start)[:10]} (REST)"
            jobs.append((text, lambda s=start, e=end: self._get_rest(order, s, e)))
        return jobs

    def _file_jobs(self, order: Order, held: Holding, files: list[ArchiveFile]) -> list[Job]:
        jobs = []
        for file in files:
            asked = held.absent.get(file.name)
            again = ASK_OLD_AGAIN if file.span[1] < order.now - ROLLED_UP else ASK_AGAIN
            if (
                file.span[1] <= order.now
                and file.name not in held.records
                and not (asked is not None and order.now - again < asked <= order.now)
            ):
                jobs.append((f"{order.series} {file.date}", lambda f=file: self._get_file(order, f)))
        return jobs

    def _get_file(self, order: Order, file: ArchiveFile) -> Piece | str:
        """Get and check a file of the archive; return its name when there is none."""
        kept = self.store.part(order.market, order.series, file.name)
        if kept is not None:
            return archive.read_file(file, kept, now=order.now, coins=order.contract.coins)
        url, wrong = self.hosts.file(file), None
        for _ in range(2):
            found = self.client.get(url, limit=archive.ZIP_LIMIT)
            if found.status == 404:
                return file.name
            if found.status != 200:
                raise Unavailable(f"{url} answered HTTP {found.status}: {found.body[:80]!r}")
            check = self.client.get(f"{url}.CHECKSUM", limit=4096)
            note = "" if check.status == 200 else f"{file.name} has no checksum in the archive."
            try:
                if check.status == 200:
                    promised = archive.parse_checksum(check.body, file.name)
                    sha = hashlib.sha256(found.body).hexdigest()
                    if sha != promised:
                        raise BadFile(
                            f"{file.name} does not match its checksum (sha256 {sha[:12]}..., "
                            f"the archive promises {promised[:12]}...)"
                        )
                piece = archive.read_file(file, found.body, now=order.now, coins=order.contract.coins, note=note)
            except BadFile as error:
                wrong = error
                continue
            if not note:
                self.store.keep_part(order.market, order.series, file.name, found.body)
            return piece
        raise BadFile(f"{wrong}; it was downloaded twice and is refused")

    def _get_rest(self, order: Order, start: int, end: int) -> Piece:
        """Get the bars that start in [start, end) from the REST host, page by page."""
        name = f"rest {order.contract.name}-{order.interval} {stamp(start)} {stamp(end)}"
        pages, at, now = [], start, order.now
        while at < end:
            page, clock = self._page(order, startTime=at // 10**6, endTime=end // 10**6 - 1, limit=archive.REST_BARS)
            now = min(now, clock)
            rows = archive.rows_of(page, name)
            pages.append(page)
            if len(rows) < archive.REST_BARS:
                break
            following = int(rows[-1][0]) * 10**6 + order.step
            if following <= at:
                raise BadFile(f"{name}: the answers do not go forward in time")
            at = following
        piece = archive.read_answer(pages, order.interval, start, end, name=name, now=now, coins=order.contract.coins)
        # What the host has not got yet must be asked again, so the record ends before it.
        known = int(piece.starts[-1]) + order.step if len(piece.starts) else start
        settled = now - SETTLED - order.step + 1
        return replace(piece, record=replace(piece.record, end=min(end, max(known, settled))))

    def _page(self, order: Order, **params: int) -> tuple[bytes, int]:
        url = self.hosts.rest(order.market, "klines")
        answer = self.client.get(
            url, {"symbol": order.contract.name, "interval": order.interval, **params}, limit=archive.REST_LIMIT
        )
        if answer.weight > 0.8 * _REST[order.market][2]:
            self.client.pause(url, 60 - time.time() % 60)  # the allowance is counted by the minute
        if answer.status == 400 and b"-1121" in answer.body:
            raise self._unknown(order)
        if answer.status != 200:
            raise Unavailable(f"{url} answered HTTP {answer.status}: {answer.body[:80].decode(errors='replace')}")
        return answer.body, order.now if answer.time is None else int(answer.time) * SECOND

    def _first_bar(self, order: Order) -> int | None:
        body, _ = self._page(order, startTime=0, limit=1)
        rows = archive.rows_of(body, f"the first bar of {order.series}")
        return int(rows[0][0]) * 10**6 if rows else None

    def _exists(self, file: ArchiveFile) -> bool:
        return self.client.get(f"{self.hosts.file(file)}.CHECKSUM", limit=4096).status == 200

    def _unknown(self, order: Order) -> UnknownName:
        """Say that there is no such symbol, with the nearest that there are."""
        if order.market not in self._names:
            try:
                url = self.hosts.rest(order.market, "ticker/price")
                answer = self.client.get(url, limit=archive.REST_LIMIT)
                names = re.findall(r'"symbol"\s*:\s*"(\w+)"', answer.body.decode(errors="replace"))
            except SourceError:
                names = []
            self._names[order.market] = names or list(LISTINGS)
        try:
            check_name(f"symbol of the {order.market} market", order.symbol, self._names[order.market])
        except UnknownName as error:
            return error
        return UnknownName(f"{order.symbol} has no bars on the {order.market} market")


def _finish(order: Order, held: Holding, trouble: list[tuple[bool, Exception]]) -> Klines:
    """Give out the bars that were asked for with what is known about them; raise if they are not to be had."""
    reasons = list(dict.fromkeys(str(error) for _, error in trouble))
    refused = [str(error) for _, error in trouble if isinstance(error, BadFile)]
    unknown = unasked_bars(order, held)
    archive_failed = any(not at_rest for at_rest, _ in trouble)
    inside = (held.starts >= order.first) & (held.starts < order.end)
    if refused or (len(unknown) and archive_failed) or (trouble and not inside.any()):
        raise _Lost(" ".join(f"{r.rstrip('.')}." for r in refused or reasons), _cached(order, held))
    notes = list(order.notes)
    if held.damage:
        notes.append(f"A damaged file of the cache was passed over: {held.damage}.")
    if len(unknown):
        notes.append(f"{len(unknown)} bars from {stamp(unknown[0])} on could not be had: {' '.join(reasons)}.")
    elif reasons:
        notes.append(f"Another source stood in: {' '.join(reasons)}.")
    first = order.first
    if order.listing is None and inside.any() and held.starts[inside][0] > first + WILD:
        found = int(held.starts[inside][0])
        first = found + WILD
        notes.append(f"The first bar is of {stamp(found)}; taken as the listing, its first day is left out.")
    records = [r for r in held.records.values() if r.start < order.end and r.end > first]
    records.sort(key=lambda r: (r.start, r.name))
    notes += [r.note for r in records if r.note]
    for record in records:
        low, high = np.searchsorted(held.starts, (max(record.start, first), min(record.end, order.end)))
        stand_ins = int((held.ranks[low:high] < RANK["monthly"]).sum())
        if record.kind == "monthly" and stand_ins:
            notes.append(f"{record.name} lacks {stand_ins} bars; they come from daily files or REST.")
    if not inside.any():
        raise DataError(f"{order.series}: neither archive nor REST host has a bar in the dates asked for")
    frame = pd.DataFrame(held.values, columns=list(archive.COLUMNS))
    frame.index = pd.DatetimeIndex(held.starts.view("M8[ns]"))
    for name in EXTRAS:
        if not frame[name].any() and frame["volume"].any():
            del frame[name]  # a source that has no such figures writes zeros
    between = (stamp(first), stamp(order.end))
    return validate(
        frame,
        order.series,
        source="binance",
        market=order.market,
        files=[SourceFile(r.name, r.sha256) for r in records],
        start=pd.Timestamp(first, tz="UTC"),
        end=pd.Timestamp(order.end - 1, tz="UTC"),
        now=pd.Timestamp(order.now, tz="UTC"),
        duplicates=sum(r.duplicates for r in records),
        off_grid=sum(r.off_grid for r in records),
        unfinished=sum(r.unfinished for r in records),
        disagreements=[d for d in held.disagreements if between[0] <= d.first < between[1]],
        notes=notes,
    )


def _cached(order: Order, held: Holding) -> str:
    inside = held.starts[(held.starts >= order.first) & (held.starts < order.end)]
    if not len(inside):
        return f"The cache has nothing of {order.series} in these dates."
    return (
        f"The cache has {len(inside)} bars of {order.series} in these dates, {stamp(inside[0])} .. {stamp(inside[-1])}."
    )


def _sentence(lost: dict[str, Exception], asked: int) -> str:
    """Say what failed, each reason once, what the cache has, and how to go on."""
    by_reason: dict[str, list[str]] = {}
    for name, error in lost.items():
        by_reason.setdefault(getattr(error, "reason", str(error)), []).append(name)
    lines = [f"{len(lost)} of {asked} series could not be had."]
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{', '.join(names[:3])}{more}: {reason}")
    cached = [e.cached for e in lost.values() if isinstance(e, _Lost)]
    lines += cached[:3]
    lines.append("Run the same again to go on: what came whole is kept. Or ask for dates that the cache has.")
    return "\n".join(lines)


def _run(
    plans: dict[str, Steps], client: Client, threads: int, progress: Callable[[int, int, int, str], None] | None
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Drive all plans at once with one pool of threads; return what they returned, and what they raised."""
    done: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    answers: dict[str, list[Any]] = {}
    left: dict[str, int] = {}
    waiting: dict[Future, tuple[str, int, str]] = {}
    ready: queue.SimpleQueue[Future] = queue.SimpleQueue()  # wait() would look at every future each time
    finished = total = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="klines")

    def advance(name: str, value: list[Any] | None) -> None:
        nonlocal total
        try:
            jobs = plans[name].send(value)
        except StopIteration as stop:
            done[name] = stop.value
        except CpbkitError as error:
            failed[name] = error
        else:
            answers[name] = [None] * len(jobs)
            left[name] = len(jobs)
            total += len(jobs)
            for slot, (text, job) in enumerate(jobs):
                future = pool.submit(job)
                waiting[future] = (name, slot, text)
                future.add_done_callback(ready.put)

    try:
        for name in plans:
            advance(name, None)
        while waiting:
            try:
                future = ready.get(timeout=1)  # so that a Ctrl-C is heard on Windows too
            except queue.Empty:
                continue
            name, slot, text = waiting.pop(future)
            error = future.exception()
            if error is not None and not isinstance(error, SourceError | UnknownName):
                raise error  # a full disk, or a fault of ours: no series can go on
            answers[name][slot] = future.result() if error is None else error
            finished += 1
            left[name] -= 1
            if progress:
                progress(finished, total, client.bytes, text)
            if not left[name]:
                advance(name, answers.pop(name))
    finally:
        if waiting:
            client.stop()
        pool.shutdown(wait=False, cancel_futures=True)
    return done, failed


def _now() -> int:
    return time.time_ns()
