"""What the futures say beside the bars: funding, mark price, premium, open interest, as it was known at the time."""

import contextlib
import functools
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from cpbkit.data import archive, binance
from cpbkit.data.archive import ArchiveFile, BadFile
from cpbkit.data.binance import THREADS, Hosts
from cpbkit.data.cache import Store
from cpbkit.data.download import Client, Pool, Unavailable
from cpbkit.data.klines import DAY_NS, INTERVAL_SECONDS, SECOND_NS, Klines, SourceFile, split_name, stamp
from cpbkit.data.request import contract_of, dates
from cpbkit.data.unpack import NotUnpacked, unzip
from cpbkit.data.venue import Contract
from cpbkit.errors import SourceError

COLUMNS = {  # feature: folder of the archive of USD-M futures
    "funding_rate": "fundingRate",  # of the last payment: a share of the position, paid by whoever is long
    "mark_price": "markPriceKlines",  # at the bar's close, per coin
    "premium": "premiumIndexKlines",  # at the bar's close: a share of the index price
    "open_interest": "metrics",  # coins; one file per day, so that years of it take a while
}
SAMPLED = 300 * SECOND_NS  # open interest is sampled every five minutes, and taken as known with the next sample
RECENT = 30 * DAY_NS  # of open interest, which is all that the REST host has
FUNDING = ["calc_time", "funding_interval_hours", "last_funding_rate"]


def add_columns(bars: Mapping[str, Klines], names: Iterable[str]) -> dict[str, Klines]:
    """Return the bars with columns of COLUMNS beside them: the archive's files, checksums held, then the REST host.

    The value at a bar is the last one known when it closes; before the first and after the last it is NaN, and the
    Passport tells why. Raises SourceError where neither has anything of a contract, or the archive does not answer.
    """
    names, store, hosts = list(names), Store(), Hosts.from_environment()
    with contextlib.closing(Client(THREADS)) as client, contextlib.closing(Pool(THREADS)) as pool:

        def get(name: str, file: ArchiveFile, contract: Contract) -> _Month | None:
            read = functools.partial(_parse, name, file, contract)
            return binance.get_file(client, hosts, store, file, read, ("context", file.folder))

        ask = functools.partial(_ask, client, hosts)
        jobs = {(series, name): _files(each, name) for series, each in bars.items() for name in names}
        waiting = {key: [pool.submit(get, key[1], *job) for job in files] for key, files in jobs.items()}
        found = {key: [month for future in futures if (month := future.result())] for key, futures in waiting.items()}
        tails = {(series, name): pool.submit(ask, name, bars[series], found[series, name]) for series, name in found}
        asked = {key: future.result() for key, future in tails.items()}
    return {
        series: _joined(each, {name: (found[series, name], *asked[series, name]) for name in names})
        for series, each in bars.items()
    }


@dataclass(frozen=True)
class _Month:
    """What one file or answer says, and until when it speaks."""

    known: np.ndarray  # (N,) ns, increasing
    values: np.ndarray  # (N,)
    end: int  # ns
    source: SourceFile


def _joined(bars: Klines, found: dict[str, tuple[list[_Month], _Month | None, str]]) -> Klines:
    frame, passport = bars.frame, bars.passport
    files, notes = list(passport.files), list(passport.notes)
    for name, (months, tail, why) in found.items():
        there = [*months, tail] if tail else months
        if not there:
            raise SourceError(f"{passport.series}: the archive has no {COLUMNS[name]} for these dates, and {why}")
        known, values = (np.concatenate([getattr(month, part) for month in there]) for part in ("known", "values"))
        end = max(month.end for month in there)
        column = np.where(bars.closes <= end, bars.last_known(known, values), np.nan)
        frame = frame.assign(**{name: column})
        files += [month.source for month in there]
        if absent := int(np.isnan(column).sum()):
            last = max((month.end for month in months), default=None)
            ends = "no file is there" if last is None else f"the archive's files end at {stamp(last)}"
            notes.append(f"{absent} bars have no {name}: {ends}{', and ' + why if why else ''}.")
    return Klines(frame, replace(passport, files=tuple(files), notes=tuple(notes)))


def _ask(client: Client, hosts: Hosts, name: str, bars: Klines, months: list[_Month]) -> tuple[_Month | None, str]:
    """Ask the REST host for what the archive does not have yet of a column; return it, and what it has not, and why."""
    symbol, interval = split_name(bars.passport.series)
    contract, length = contract_of(symbol, "um"), INTERVAL_SECONDS[interval] * SECOND_NS
    starts = bars.frame.index.asi8
    since = max((month.end for month in months), default=int(starts[0]) - DAY_NS)
    first, end, why = since, int(starts[-1]) + length, ""
    if since >= end:
        return None, ""
    call, later, params = COLUMNS[name], length, {"interval": interval, "limit": 1000}
    if name == "funding_rate":
        later, params = 0, {"limit": 1000}
    elif name == "open_interest":
        call, later, params = "openInterestHist", SAMPLED, {"period": "5m", "limit": 500}
        first = max(since, binance._now() - RECENT)
        why = "the REST host has it of the last 30 days alone" if first > since else ""
    url = hosts.rest("um", call)
    if name == "open_interest":
        url = url.replace("/fapi/v1/", "/futures/data/")
    points: list[tuple[int, float]] = []
    sha, at = hashlib.sha256(), first
    try:
        while at < end:
            span = {"startTime": at // 10**6, "endTime": (end - 1) // 10**6}
            answer = binance.ask_rest(client, "um", url, {"symbol": contract.name, **params, **span})
            if answer.status != 200:
                raise Unavailable(f"{url} answered HTTP {answer.status}: {answer.body[:80].decode(errors='replace')}")
            page = [(time, value) for time, value in _points(answer.body, name, url) if at <= time < end]
            if not page:
                break
            points += page
            sha.update(answer.body)
            at = page[-1][0] + 10**6
    except SourceError as error:
        why = f"the REST host did not help: {str(error).rstrip('.')}"
    if not points:
        return None, why or f"the REST host has none of it from {stamp(since)} on"
    known, values = (np.array(each) for each in zip(*points, strict=True))
    known = known + later
    values = values * (contract.coins if name == "open_interest" else 1 / contract.coins if name == "mark_price" else 1)
    if first > since:  # nothing is known between the last file and the first answer
        known, values = np.append(since + 1, known), np.append(np.nan, values)
    source = SourceFile(f"rest {call} {contract.name} {stamp(first)} {stamp(end)}", sha.hexdigest())
    return _Month(known, values, end if name == "funding_rate" and not why else int(known[-1]), source), why


def _points(body: bytes, name: str, url: str) -> list[tuple[int, float]]:
    """Return times (ns) and values of one answer, in order; BadFile where it has none."""
    time, value = {
        "funding_rate": ("fundingTime", "fundingRate"),
        "open_interest": ("timestamp", "sumOpenInterest"),
    }.get(name, (0, 4))  # of bars: the start and the close
    try:
        return sorted((int(row[time]) * 10**6, float(row[value])) for row in json.loads(body))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError):
        raise BadFile(f"{url} answered what is no {name}: {body[:80]!r}") from None


def _files(bars: Klines, name: str) -> list[tuple[ArchiveFile, Contract]]:
    """List the months or days of a column, from the day before the first bar: what was said last is still known."""
    symbol, interval = split_name(bars.passport.series)
    contract, starts = contract_of(symbol, "um"), bars.frame.index.asi8
    periods = dates(np.append(starts[0] - DAY_NS, starts), "D" if name == "open_interest" else "M")
    folder = COLUMNS[name]
    middle = interval if folder.endswith("Klines") else folder  # of the file's name
    return [(ArchiveFile("um", contract.name, middle, period, folder), contract) for period in periods]


def _parse(name: str, file: ArchiveFile, contract: Contract, blob: bytes, note: str = "") -> _Month:
    try:
        text = unzip(io.BytesIO(blob), archive.CSV_LIMIT)[1]
        if name == "funding_rate":
            table = pd.read_csv(io.BytesIO(text), names=FUNDING, header=0 if text[:1].isalpha() else None)
            times, values = table["calc_time"].to_numpy(np.int64) * 10**6, table["last_funding_rate"].to_numpy(float)
        elif name == "open_interest":
            table = pd.read_csv(io.BytesIO(text), usecols=["create_time", "sum_open_interest"])
            sampled = pd.DatetimeIndex(pd.to_datetime(table["create_time"], utc=True)).as_unit("ns").asi8
            times, values = sampled + SAMPLED, contract.coins * table["sum_open_interest"].to_numpy(float)
        else:
            starts, closes, bars = archive.parse_csv(text, file.name)
            archive.check_lengths(starts, closes, file.interval, file.name)
            times = starts + INTERVAL_SECONDS[file.interval] * SECOND_NS
            values = bars[:, 3] / (contract.coins if name == "mark_price" else 1)
    except (NotUnpacked, ValueError, KeyError) as error:
        raise BadFile(f"{file.name} does not hold {file.folder}: {error}") from None
    order = np.argsort(times, kind="stable")
    source = SourceFile(f"{file.folder} {file.name}{note and ' (no checksum)'}", hashlib.sha256(blob).hexdigest())
    return _Month(times[order], values[order], file.span[1], source)
