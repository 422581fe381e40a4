"""Klines of Binance: the public archive month by month and day by day, its REST host for the last days."""

import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from cpbkit.data import archive, request
from cpbkit.data.archive import ArchiveFile, BadFile, Piece, Record
from cpbkit.data.cache import PART_AGE, RANK, CacheError, Holding, Opinion, Store, forget, merge
from cpbkit.data.download import Answer, Client, Gone, Pool, Retries, Unavailable
from cpbkit.data.klines import (
    DAY_NS,
    EXTRAS,
    SECOND_NS,
    Disagreement,
    Incomplete,
    Klines,
    SourceFile,
    check_interval,
    grid_phase,
    join_bars,
    split_name,
    stamp,
    validate,
)
from cpbkit.data.layouts import MONEY
from cpbkit.data.request import Order
from cpbkit.data.venue import LISTINGS
from cpbkit.errors import CpbkitError, DataError, SourceError, UnknownName, check_name

THREADS = 12  # series at a time, and as many downloads
SETTLED = 3600 * SECOND_NS  # the REST host may be this much behind with the newest bars
_REST = {  # host, prefix of the paths, weight allowed a minute
    "spot": ("https://data-api.binance.vision", "/api/v3", 6000),
    "um": ("https://fapi.binance.com", "/fapi/v1", 2400),
}
FINER = {"3m": "1m", "5m": "1m", "15m": "5m", "30m": "15m", "1h": "15m", "2h": "1h", "4h": "1h", "6h": "1h", "8h": "1h"}
FINER |= {"12h": "1h", "1d": "1h", "3d": "1d", "1w": "1d"}  # what a second opinion adds up
ENDED = 2 * DAY_NS  # without a bar, before the venue is asked whether a symbol is still traded
LISTING_LIMIT = 64 << 20  # bytes; all symbols of a market with their rules have 20 MB
log = logging.getLogger(__name__)
Progress = Callable[[int, int, int, str], None]  # done files, total files, bytes, what came last
Job = tuple[str, Callable[[], Any]]  # what of a series it gets, in words; the function that a thread runs


@dataclass(frozen=True)
class Hosts:
    """Where the bars come from; a mirror of the same paths will do."""

    archive_url: str = "https://data.binance.vision"
    rest_url: str = ""  # "" takes the market's own host
    unsigned: bool = False  # whether a file that has no checksum is taken

    def __post_init__(self):
        for name in ("archive_url", "rest_url"):
            url = getattr(self, name)
            if (url or name == "archive_url") and not re.match(r"https?://[^/]", url):
                raise CpbkitError(f"{name} must be an address like https://data.binance.vision; got {url!r}")

    @classmethod
    def from_environment(cls) -> "Hosts":
        """Take the hosts that CPBKIT_ARCHIVE_URL and CPBKIT_REST_URL name, or the public ones.

        CPBKIT_ALLOW_UNSIGNED: take files that have no checksum.
        """
        named = os.environ.get("CPBKIT_ARCHIVE_URL") or cls.archive_url
        return cls(named, os.environ.get("CPBKIT_REST_URL", ""), bool(os.environ.get("CPBKIT_ALLOW_UNSIGNED")))

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
    progress: Progress = lambda *report: None,
    retries: Retries | None = None,
    refresh: bool = False,
    verify: bool = False,
) -> dict[str, Klines]:
    """Get bars, from the cache where it has them, and keep what is new there.

    start, end: UTC days, `2025-03-01`, both inclusive. hosts: default `Hosts.from_environment()`.
    progress is called from this thread; the total grows where days stand in for a month. A futures contract that
    is not named like its coin, or holds 1000 of them, is found by the spot symbol and rescaled to one coin.
    refresh: whatever the cache has of these dates is fetched anew. verify: one month a quarter is compared with a
    second source; the Passport says how much was.
    Returns Klines by series name, in the order asked for. Raises UnknownName and DataError before anything is
    downloaded when names or dates cannot be right, Incomplete at the end when a series is not available.
    """
    now = _now()
    check_name("market", market, _REST)
    first, last = request.days(start, end, now)
    intervals = [check_interval(name) for name in dict.fromkeys(intervals)]
    orders = [
        Order(symbol, interval, market, first, last, now, request.contract_of(symbol, market))
        for symbol in dict.fromkeys(symbols)
        for interval in intervals
    ]
    fetch = _Fetch(Client(THREADS, retries), hosts or Hosts.from_environment(), store or Store(), progress)
    with contextlib.closing(fetch):
        resolved, unknown = fetch.each(fetch.resolve, orders)
        if unknown:
            kind = UnknownName if any(isinstance(e, UnknownName) for e in unknown.values()) else DataError
            raise kind("\n".join(dict.fromkeys(map(str, unknown.values()))))
        get = functools.partial(fetch.get, refresh=refresh, verify=verify)
        klines, lost = fetch.each(get, resolved.values())
    if lost:
        raise Incomplete(_sentence(lost, len(orders)), klines, {name: str(e) for name, e in lost.items()})
    return klines


def find_symbols(patterns: Iterable[str], market: str = "spot", quote: str = "USDT") -> list[str]:
    """Return the symbols that trade now and are meant by names, `TOP20` (by turnover), `ALL` or `*USDT`.

    TOP20 and ALL are of one quote currency, without pairs of two kinds of money. Raises UnknownName for a pattern
    without a symbol, SourceError where the venue's REST host does not answer.
    """
    check_name("market", market, _REST)
    patterns = list(patterns)
    with contextlib.closing(Client(1)) as client:
        url = Hosts.from_environment().rest(market, "ticker/24hr")
        turnover = _turnover(client.get(url, limit=LISTING_LIMIT).body)
    coins = [name for name in turnover if name.endswith(quote) and name.removesuffix(quote) not in MONEY]
    found: list[str] = []
    for pattern in patterns:
        if top := re.fullmatch(r"TOP(\d+)", pattern):
            found += coins[: int(top[1])]
        elif pattern == "ALL":
            found += coins
        elif re.search(r"[*?]", pattern):
            fitting = sorted(fnmatch.filter(turnover, pattern))
            if not fitting:
                raise UnknownName(f"no symbol of the {market} market fits {pattern!r}; {len(turnover)} trade now")
            found += fitting
        else:
            found.append(pattern)
    if not found:
        raise UnknownName(f"nothing trades in {quote} on the {market} market now")
    return list(dict.fromkeys(found))


def _turnover(body: bytes) -> list[str]:
    """Return the symbols of a day's ticker that traded in it, that of the largest turnover first."""
    try:
        rows = [(float(row["quoteVolume"]), int(row["closeTime"]), str(row["symbol"])) for row in json.loads(body)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SourceError(f"the list of what trades cannot be read: {body[:80]!r}") from None
    newest = max((closed for _, closed, _ in rows), default=0)
    traded = [(money, name) for money, closed, name in rows if money > 0 and newest - closed < 86_400_000]
    return [name for money, name in sorted(traded, reverse=True) if re.fullmatch(r"\w{2,30}", name)]


def cached_klines(
    symbols: Iterable[str] = (), intervals: Iterable[str] = (), market: str = "spot"
) -> dict[str, Klines]:
    """Return what the cache holds, without asking anybody; all of it where nothing is named. Errors: DataError."""
    store, now = Store(), _now()
    symbols, intervals = set(symbols), {check_interval(one) for one in intervals}
    klines = {}
    for entry in store.list(market):
        symbol, interval = split_name(entry.series)
        if entry.problem or symbol not in (symbols or {symbol}) or interval not in (intervals or {interval}):
            continue
        held = store.read(market, entry.series)
        if not len(held.starts):
            continue
        order = Order(symbol, interval, market, int(held.starts[0]), 0, now, request.contract_of(symbol, market))
        order = replace(order, end=int(held.starts[-1]) + order.step, listing=request.listing_of(symbol, market))
        klines[entry.series] = _finish(request.usable(order), held, [], archive_failed=False)
    if not klines:
        there = ", ".join(entry.series for entry in store.list()[:10]) or "nothing"
        raise DataError(f"the cache in {store.folder} has no such bars of the {market} market; it has {there}")
    return klines


class _Fetch:
    """Gets series side by side: a thread for each, in which things are done in turn, and one pool of downloads."""

    def __init__(self, client: Client, hosts: Hosts, store: Store, progress: Progress):
        self.client, self.hosts, self.store, self.progress = client, hosts, store, progress
        self.series, self.downloads = Pool(THREADS), Pool(THREADS)
        self.events: queue.SimpleQueue[str | Future] = queue.SimpleQueue()  # what was got, and series that ended
        self.total = 0  # jobs so far
        self.lock = threading.Lock()

    def close(self) -> None:
        self.client.close()  # after an interrupt: whoever is still at work gives up at the next byte
        for pool in (self.series, self.downloads):
            pool.close()

    def each(
        self, step: Callable[[Order], Any], orders: Iterable[Order]
    ) -> tuple[dict[str, Any], dict[str, BaseException]]:
        """Take a step for all orders; return what it returned, and what it raised, by series."""
        futures = {order.series: self.series.submit(step, order) for order in orders}
        for future in futures.values():
            future.add_done_callback(self.events.put)
        running, finished = len(futures), 0
        while running:
            try:
                event = self.events.get(timeout=1)  # so that a Ctrl-C is heard on Windows too
            except queue.Empty:
                continue
            if isinstance(event, str):
                finished += 1
                self.progress(finished, self.total, self.client.bytes, event)
                continue
            running -= 1
            error = event.exception()
            if error and (isinstance(error, CacheError) or not isinstance(error, CpbkitError)):
                raise error  # a full disk, or a fault of ours: no series can go on
        failed = {name: error for name, future in futures.items() if (error := future.exception())}
        return {name: future.result() for name, future in futures.items() if name not in failed}, failed

    def resolve(self, order: Order) -> Order:
        """Find the listing; return the order cut to the bars that can exist and may be used."""
        listing = request.listing_of(order.symbol, order.market)
        if listing is None:
            held = self.store.read(order.market, order.series)
            listing = held.first_bar
            if listing is None and len(request.missing_bars(order, held)):
                listing = self._first_bar(order)
        return request.usable(replace(order, listing=listing))

    def get(self, order: Order, refresh: bool = False, verify: bool = False) -> Klines:
        """Get what the cache lacks of a series, and what may have changed since."""
        span = (order.first, min(order.end, order.now)) if refresh else None
        held = self.store.read(order.market, order.series)
        held = forget(held, *span) if span else held
        pieces: list[Piece] = []
        absent: dict[str, int] = {}  # files that are not there, and when that was asked
        same: dict[str, str] = {}  # files that are as they were, and what kept them from being compared
        troubles: list[Exception] = []
        archive_failed = False

        def files(lacking: list[ArchiveFile]) -> list[Job]:
            return [(file.date, functools.partial(self._get_file, order, file)) for file in lacking]

        steps: tuple[Callable[[], list[Job]], ...] = (
            lambda: files(request.lacking_months(order, held)),
            lambda: [
                (f"{file.date} (again)", functools.partial(self._look_again, order, file, held.records[file.name]))
                for file in request.doubtful_months(order, held)
            ],
            lambda: files(request.lacking_days(order, held, probe=True)),
            lambda: files(request.lacking_days(order, held, probe=False)),
            lambda: [
                (f"{stamp(span[0])[:10]} (REST)", functools.partial(self._get_rest, order, *span))
                for span in request.lacking_spans(order, held)
            ],
        )
        for step in steps:
            answers = self._run(order, step())
            fresh = [answer for answer in answers if isinstance(answer, Piece)]
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            absent |= {answer.name: order.now for answer in answers if isinstance(answer, ArchiveFile)}
            same |= dict(answer for answer in answers if isinstance(answer, tuple))
            held = merge(replace(held, absent={**held.absent, **absent}), fresh)
            pieces += fresh
            troubles += failed
            if any(isinstance(error, BadFile) for error in failed):
                break  # a file that cannot be trusted is a matter for a person, not for the next source
            archive_failed |= bool(failed) and step is not steps[-1]
        order, troubles = self._until_delisted(order, held, troubles)
        opinions = self._second_opinions(order, held) if verify else []
        compared = [name for name, trouble in same.items() if not trouble]
        if pieces or absent or compared or opinions:
            kept = self.store.update(
                order.market,
                order.series,
                pieces,
                absent,
                order.listing,
                compared=compared,
                now=stamp(order.now),
                opinions=opinions,
                forgotten=None if troubles else span,
            )
            held = replace(kept, damage=held.damage, fresh=held.fresh)
        elif not troubles:
            self.store.drop_parts(order.market, order.series)  # of a fetch that was killed after it had merged them
        notes = [f"{name} could not be compared again: {trouble}." for name, trouble in same.items() if trouble]
        return _finish(replace(order, notes=(*order.notes, *notes)), held, troubles, archive_failed)

    def _run(self, order: Order, jobs: list[Job]) -> list[Any]:
        """Run jobs in the pool of downloads; return for each what it returned, or the SourceError it raised."""

        def run(text: str, job: Callable[[], Any]) -> Any:
            try:
                return job()
            except (SourceError, UnknownName) as error:
                return error
            finally:
                self.events.put(f"{order.series} {text}")

        with self.lock:
            self.total += len(jobs)
        futures = [self.downloads.submit(run, *job) for job in jobs]
        return [future.result() for future in futures]

    def _look_again(self, order: Order, file: ArchiveFile, record: Record) -> Piece | tuple[str, str]:
        """Compare a file's checksum with what was read; fetch it anew where the venue has rewritten it.

        Else return its name, and what kept it from being compared, "" for nothing.
        """
        try:
            check = self.client.get(f"{self.hosts.file(file)}.CHECKSUM", limit=4096)
            if check.status != 200 or archive.parse_checksum(check.body, file.name) == record.sha256:
                return file.name, ""
            piece = self._get_file(order, file, keep=False)
        except SourceError as error:  # what was read before stays good
            return file.name, str(error).rstrip(".")
        if not isinstance(piece, Piece):
            return file.name, ""
        note = f"{file.name} was rewritten by the venue after {record.fetched_at[:10]}; it was fetched anew."
        return replace(piece, record=replace(piece.record, note=f"{piece.record.note} {note}".strip()))

    def _get_file(self, order: Order, file: ArchiveFile, keep: bool = True) -> Piece | ArchiveFile:
        """Get and check a file of the archive; return the file itself when there is none. keep: until `update`."""
        read = functools.partial(archive.read_file, file, now=order.now, coins=order.contract.coins)
        place = ("parts", order.market, order.series) if keep else ()
        return get_file(self.client, self.hosts, self.store, file, read, place, PART_AGE) or file

    def _get_rest(self, order: Order, start: int, end: int) -> Piece:
        """Get the bars that start in [start, end) from the REST host, page by page."""
        name = f"rest {order.contract.name}-{order.interval} {stamp(start)} {stamp(end)}"
        pages, at, now = [], start, order.now
        while at < end:
            page, clock = self._page(order, startTime=at // 10**6, endTime=end // 10**6 - 1, limit=archive.REST_BARS)
            now = min(now, clock)
            rows = archive.rows_of(page, name)
            if not rows:  # a short page alone may be a host that gives fewer bars than it was asked for
                break
            pages.append(page)
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
        asked = {"symbol": order.contract.name, "interval": order.interval, **params}
        answer = ask_rest(self.client, order.market, url, asked)
        if answer.status == 400 and b"-1121" in answer.body:
            raise self._unknown(order)
        if answer.status != 200:
            raise Unavailable(f"{url} answered HTTP {answer.status}: {answer.body[:80].decode(errors='replace')}")
        return answer.body, order.now if answer.time is None else int(answer.time) * SECOND_NS

    def _first_bar(self, order: Order) -> int | None:
        """Ask when a symbol was first traded (ns); None where the REST host is of no help."""
        try:
            body, _ = self._page(order, startTime=0, limit=1)
            rows = archive.rows_of(body, f"the first bar of {order.series}")
            return int(rows[0][0]) * 10**6 if rows else None
        except UnknownName:
            # The archive has coins that were delisted long ago; it shows where their bars begin.
            for month in request.spread(request.dates(np.arange(order.first, order.end, DAY_NS), "M")):
                with contextlib.suppress(SourceError):
                    if self.client.get(f"{self.hosts.file(order.file(month))}.CHECKSUM", limit=4096).status == 200:
                        return None
            raise
        except SourceError:
            return None

    def _until_delisted(self, order: Order, held: Holding, troubles: list[Exception]) -> tuple[Order, list[Exception]]:
        """End an order where its symbol's trading ended, if the venue says that it is not traded any more."""
        inside = held.starts[(held.starts >= order.first) & (held.starts < order.end)]
        if not len(inside) or min(order.end, order.now) - inside[-1] < ENDED:
            return order, troubles
        unknown = [error for error in troubles if isinstance(error, UnknownName)]
        if not unknown and (len(troubles) or self._is_traded(order)):
            return order, troubles
        last = int(inside[-1])
        note = f"{order.symbol} is not traded on {order.market} any more; its last bar is of {stamp(last)}."
        order = replace(order, end=last + order.step, notes=(*order.notes, note))
        return order, [error for error in troubles if error not in unknown]

    def _is_traded(self, order: Order) -> bool:
        """Ask whether a symbol is traded; where nobody says otherwise it is."""
        url = self.hosts.rest(order.market, "exchangeInfo")
        try:
            answer = self.client.get(url, {"symbol": order.contract.name}, limit=LISTING_LIMIT)
        except SourceError:
            return True
        if answer.status == 400:
            return b"-1121" not in answer.body
        status = rb'"symbol"\s*:\s*"%s"\s*,[^{}]*?"status"\s*:\s*"(\w+)"' % order.contract.name.encode()
        found = re.search(status, answer.body)
        return found is None or found[1] == b"TRADING"

    def _second_opinions(self, order: Order, held: Holding) -> list[Opinion]:
        """Compare one month in each quarter with a second source; what is not there is no opinion."""
        quarters: dict[str, list[str]] = {}
        for month in request.dates(held.starts[held.ranks == RANK["monthly"]], "M"):
            low, high = order.file(month).span
            if low >= order.first and high <= order.end:
                quarters.setdefault(f"{month[:4]} {(int(month[5:]) - 1) // 3}", []).append(month)
        jobs: list[Job] = []
        for months in quarters.values():
            month = months[len(months) // 2]
            jobs.append((f"{month} (second opinion)", functools.partial(self._opinion, order, month, held)))
        return [found for found in self._run(order, jobs) if isinstance(found, Opinion)]

    def _opinion(self, order: Order, month: str, held: Holding) -> Opinion | None:
        """Compare a month with the sum of the next finer interval, or else one of its days with the day's own file."""
        sources = [replace(order, interval=FINER[order.interval]).file(month)] if order.interval in FINER else []
        if order.interval not in archive.MONTHLY_ONLY:
            sources.append(order.file(f"{month}-15"))
        for file in sources:
            try:
                piece = self._get_file(replace(order, interval=file.interval), file, keep=False)
            except SourceError as error:
                log.warning("no second opinion from %s: %s", file.name, error)
                continue
            if isinstance(piece, Piece):
                return compare(order, held, piece, file.interval != order.interval)
        return None

    def _unknown(self, order: Order) -> UnknownName:
        """Say that there is no such symbol, with the nearest that there are."""
        try:
            answer = self.client.get(self.hosts.rest(order.market, "ticker/price"), limit=archive.REST_LIMIT)
            names = re.findall(r'"symbol"\s*:\s*"(\w+)"', answer.body.decode(errors="replace"))
        except SourceError:
            names = []
        try:
            check_name(f"symbol of the {order.market} market", order.symbol, names or LISTINGS)
        except UnknownName as error:
            return error
        return UnknownName(f"{order.symbol} has no bars on the {order.market} market")


def get_file(
    client: Client,
    hosts: Hosts,
    store: Store,
    file: ArchiveFile,
    read: Callable[..., Any],
    place: tuple[str, ...],
    age: float = math.inf,
) -> Any:
    """Get a file of the archive; return what `read` makes of its bytes (note: that no checksum is there).

    place: of the store, where one that was verified is kept, and looked for if it is not older than `age` seconds; ()
    for nowhere. None where there is none. What is wrong is downloaded twice. Errors: BadFile, Unavailable.
    """
    if place and (kept := store.kept(place, file.name, age)):
        return read(kept)
    url, name, wrong = hosts.file(file), file.name, None
    for _ in range(2):
        found = client.get(url, limit=archive.ZIP_LIMIT)
        if found.status == 404:
            return None
        if found.status != 200:
            raise Unavailable(f"{url} answered HTTP {found.status}: {found.body[:80]!r}")
        check = client.get(f"{url}.CHECKSUM", limit=4096)
        try:
            if check.status != 200:
                if hosts.unsigned:
                    return read(found.body, note=f"{name} has no checksum in the archive.")
                raise BadFile(
                    f"{name} has no checksum in the archive, so nothing says that it came whole; take it with "
                    "--allow-unsigned (CPBKIT_ALLOW_UNSIGNED=1)"
                )
            sha, promised = hashlib.sha256(found.body).hexdigest(), archive.parse_checksum(check.body, name)
            if sha != promised:
                both = f"sha256 {sha[:12]}..., the archive promises {promised[:12]}..."
                raise BadFile(f"{name} does not match its checksum ({both})")
            made = read(found.body)
            if place:
                store.keep(place, name, found.body)
            return made
        except BadFile as error:
            wrong = error
    raise BadFile(f"{wrong}; it was downloaded twice and is refused")


def compare(order: Order, held: Holding, piece: Piece, finer: bool) -> Opinion:
    """Compare the bars of a holding with a file of the same interval, or with the sums of a finer one.

    Of a finer file only bars are compared that it has all parts of.
    """
    starts, values = piece.starts, piece.values[:, :5]
    if finer:
        parts = order.step // int(np.diff(starts).min()) if len(starts) > 1 else 1
        starts, values, counts = join_bars(starts, values, order.step, grid_phase(order.interval, held.starts))
        starts, values = starts[counts == parts], values[counts == parts]
    _, mine, theirs = np.intersect1d(held.starts, starts, assume_unique=True, return_indices=True)
    differ = ~np.isclose(held.values[mine, :5], values[theirs], rtol=1e-7, atol=0).all(axis=1)
    first = stamp(held.starts[mine][differ][0]) if differ.any() else ""
    record = piece.record
    return Opinion(record.name, record.start, record.end, len(mine), int(differ.sum()), first)


def _finish(order: Order, held: Holding, troubles: list[Exception], archive_failed: bool) -> Klines:
    """Give out the bars that were asked for with what is known about them; raise if they are not available."""
    gone = [error for error in troubles if isinstance(error, Gone)]  # it says why the others failed
    reasons = list(dict.fromkeys(map(str, gone or troubles)))
    refused = [str(error) for error in troubles if isinstance(error, BadFile)]
    unknown = request.unasked_bars(order, held)
    inside = held.starts[(held.starts >= order.first) & (held.starts < order.end)]
    if refused or (len(unknown) and archive_failed) or (troubles and not len(inside)):
        lost = [f"{reason.rstrip('.')}." for reason in refused or reasons]
        if len(inside):
            lost.append(f"The cache has {len(inside)} bars in these dates, {stamp(inside[0])} .. {stamp(inside[-1])}.")
        raise (Gone if gone else SourceError)(" ".join(lost))
    if not len(inside):
        asked = f"from {stamp(order.first)} until {stamp(order.end)} UTC"
        raise DataError(f"neither archive nor REST host has a bar {asked}")
    notes = list(order.notes)
    if held.damage:
        notes.append(f"A damaged file of the cache was passed over: {held.damage}.")
    if len(unknown):
        why = " ".join(reasons) or "nobody was asked"
        notes.append(f"{len(unknown)} bars from {stamp(unknown[0])} on are not available: {why}.")
    elif reasons:
        notes.append(f"Another source stood in: {' '.join(reasons)}.")
    first = order.first
    if order.listing is None and inside[0] > first + request.WILD:
        first = int(inside[0]) + request.WILD
        notes.append(f"The first bar is of {stamp(inside[0])}; taken as the listing, its first day is left out.")
    records = [r for r in held.records.values() if r.start < order.end and r.end > first]
    records.sort(key=lambda r: (r.start, r.name))
    notes += [r.note for r in records if r.note]
    for place in sorted({r.place for r in records if r.place}):
        count = sum(r.place == place for r in records)
        notes.append(
            f"{count} of {len(records)} files were read by another cache ({place}); nothing proves their hashes."
        )
    for record in records:
        low, high = np.searchsorted(held.starts, (max(record.start, first), min(record.end, order.end)))
        stand_ins = int((held.ranks[low:high] < RANK["monthly"]).sum())
        if record.kind == "monthly" and stand_ins:
            notes.append(f"{record.name} lacks {stand_ins} bars; they come from daily files or REST.")
    opinions = [o for o in held.opinions if o.start < order.end and o.end > first]
    checked = sum(opinion.compared for opinion in opinions)
    if checked:
        wrong = sum(opinion.differ for opinion in opinions)
        notes.append(
            f"{checked:,} bars were compared with {len(opinions)} other files ({opinions[0].against} first): "
            + (f"{wrong} differ, the first at {min(o.first for o in opinions if o.first)}." if wrong else "all agree.")
        )
    disagreements = [d for d in held.disagreements if stamp(first) <= d.first < stamp(order.end)]
    disagreements += [
        Disagreement(f"cached and {o.against}", o.first, o.differ, o.compared, 0.0) for o in opinions if o.differ
    ]
    frame = pd.DataFrame(held.values, pd.DatetimeIndex(held.starts.view("M8[ns]")), archive.COLUMNS)
    for name in EXTRAS:
        if not frame[name].any() and frame["volume"].any():
            del frame[name]  # a source that has no such figures writes zeros
    return validate(
        frame,
        order.series,
        source="binance",
        market=order.market,
        files=[SourceFile(r.name, r.sha256) for r in records],
        start=first,
        end=order.end - 1,
        now=order.now,
        dropped={
            name: sum(getattr(r, name) for r in records)
            for name in ("duplicates", "off_grid", "unfinished", "conflicts")
        },
        disagreements=disagreements,
        checked=checked,
        notes=notes,
    )


def ask_rest(client: Client, market: str, url: str, params: dict[str, Any]) -> Answer:
    """Ask a REST host; where its allowance nears its end, nobody asks it again before the next minute."""
    answer = client.get(url, params, limit=archive.REST_LIMIT)
    if answer.weight > 0.8 * _REST[market][2]:
        client.pause(url, 60 - time.time() % 60)  # it is counted by the minute
    return answer


def _sentence(lost: Mapping[str, BaseException], asked: int) -> str:
    """Say what failed, each reason once, and how to go on."""
    by_reason: dict[str, list[str]] = {}
    for name, error in lost.items():
        by_reason.setdefault(str(error), []).append(name)
    lines = [f"{len(lost)} of {asked} series are not available."]
    for reason, names in by_reason.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{', '.join(names[:3])}{more}: {reason}")
    lines.append("Run the same again to go on: what came whole is kept. Or ask for dates that the cache has.")
    if any(isinstance(error, Gone) for error in lost.values()):
        lines.append(
            "Where the venue cannot be reached: --archive-url and --rest-url name a mirror, --source synthetic takes "
            "the seeded market, --files PATH your own bars."
        )
    return "\n".join(lines)


def _now() -> int:
    return time.time_ns()
