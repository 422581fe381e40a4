"""A person's own files: bars in any usual spelling, and any other time series table."""

import collections
import csv
import gzip
import hashlib
import io
import json
import logging
import pathlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from cpbkit.data.klines import INTERVAL_SECONDS, OHLCV, Klines, SourceFile, split_name, validate
from cpbkit.errors import DataError, check_name

log = logging.getLogger(__name__)

# Column spellings seen in the wild, in letters and digits only. Of several times the first in this order counts.
TIMES = tuple(
    "opentimems opentime openat candlebegintime timeperiodstart starttime unixtimestamp unix unixtime timestamp ts"
    " datetime gmttime time date start begin index t".split()
)
SPELLINGS = {
    "open": ("open", "o", "openprice", "priceopen"),
    "high": ("high", "h", "highprice", "pricehigh", "max"),
    "low": ("low", "l", "lowprice", "pricelow", "min"),
    "close": ("close", "c", "closeprice", "priceclose"),
    "volume": ("volume", "vol", "v", "basevolume", "baseassetvolume", "volumetraded", "tickvol", "tickvolume"),
    "quote_volume": ("quotevolume", "quoteassetvolume", "turnover", "amount", "volumecurrency", "volumequote"),
    "trades": ("trades", "count", "tradecount", "tradescount", "numberoftrades", "numtrades"),
    "taker_buy_volume": ("takerbuyvolume", "takerbuybasevolume", "takerbuybaseassetvolume"),
}
ARCHIVE = ("open_time", *OHLCV, "close_time", "quote_volume", "trades", "taker_buy_volume", "taker_buy_quote", "ignore")
QUOTES = "USDT FDUSD USDC BUSD TUSD USD EUR TRY BTC ETH BNB".split()  # longest spelling of a currency first
# Times that are not ISO 8601. Day first and month first are both tried: one of them must fail.
FORMATS = tuple(
    f"{date}{clock}"
    for date in ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y-%m-%d")
    for clock in ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", " %I-%p")
)


def read_klines(path: str | pathlib.Path, series: str = "") -> Klines:
    """Read bars from CSV, Parquet, feather or JSON, whatever its columns and times are called.

    series: `BTCUSDT_15m`; without it the symbol is taken from the file's name and the interval from the times.
    Times are bar starts: seconds, ms, us or ns since 1970 (row by row), or text; without a zone they are UTC.
    Rows without any price are dropped, the last bar too while it is not closed. Raises DataError.
    """
    path = pathlib.Path(path)
    table, digest = _read(path)
    table = _name_columns(table, path)
    times = _times(table.pop("time"), path)
    frame = pd.DataFrame({name: _numbers(table[name], name, path) for name in table}, index=times)
    empty = frame[list(OHLCV[:4])].isna().all(axis=1)
    notes = [f"{int(empty.sum())} rows without a price were dropped."] if empty.any() else []
    spacing = _interval(times, path)
    if not series:
        series = f"{_symbol(path)}_{spacing}"
    elif split_name(series)[1] != spacing:
        raise DataError(f"{path.name}: {series} was asked for, but the bars start {spacing} apart")
    files = [SourceFile(path.name, digest)]
    return validate(frame[~empty], series, source="file", files=files, now=pd.Timestamp.now("UTC"), notes=notes)


def read_folder(folder: str | pathlib.Path, names: Iterable[str]) -> dict[str, Klines]:
    """Read one file of bars a series, `BTCUSDT_15m.csv` or any other type that `read_klines` knows.

    Errors: DataError for a series without a file, or with several.
    """
    if not pathlib.Path(folder).is_dir():
        raise DataError(f"no folder {folder}; it must hold one file a series, such as BTCUSDT_15m.csv")
    paths = [path for path in sorted(pathlib.Path(folder).iterdir()) if path.is_file()]
    found = {name: [path for path in paths if path.name.split(".")[0] == name] for name in names}
    if wrong := [f"{name}: {len(some)}" for name, some in found.items() if len(some) != 1]:
        there = ", ".join(path.name for path in paths[:20]) or "nothing"
        raise DataError(f"{folder} must hold one file a series; got {', '.join(wrong)}. There is {there}")
    return {name: read_klines(path, name) for name, (path,) in found.items()}


def read_table(path: str | pathlib.Path, time: str | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read any time series table (CSV, Parquet, feather, JSON) as float64 columns, oldest row first.

    time: column of times; without it the first column that holds times, or else a plain count of rows. Without
    a zone times are UTC. columns: those to keep, in this order; without them every column of numbers.
    Raises UnknownName for a column that is not there, DataError for text, infinities or the same time twice.
    """
    path = pathlib.Path(path)
    table, _ = _read(path)
    table.columns = [str(column) for column in table.columns]
    if time is None and (both := _date_and_clock(table)):
        time, clock = both
        table = table.assign(**{time: _joined(table, time, clock)}).drop(columns=clock)
    elif time is not None:
        check_name("time column", time, table.columns)
    else:
        time = next((column for column in table.columns if _holds_times(table[column], path)), None)
    chosen = [check_name("column", column, table.columns) for column in dict.fromkeys(columns or ())]
    if not chosen:
        rest = [column for column in table.columns if column != time]
        chosen = [column for column in rest if pd.api.types.is_numeric_dtype(table[column])]
        if left := [column for column in rest if column not in chosen]:
            log.warning("%s: columns that are not numbers were left out: %s", path.name, ", ".join(left))
    if not chosen:
        raise DataError(f"{path.name}: a table needs at least one column of numbers; got {', '.join(table.columns)}")
    values = pd.DataFrame({column: _numbers(table[column], column, path) for column in chosen})
    if time is None:
        return values
    values = values.set_index(_times(table[time], path).rename(time)).sort_index(kind="stable")
    twice = values.index.duplicated()
    if twice.any():
        raise DataError(
            f"{path.name}: one row a time; got {int(twice.sum())} more, the first at {values.index[twice][0]}. "
            "Keep one series in a file"
        )
    return values


def _read(path: pathlib.Path) -> tuple[pd.DataFrame, str]:
    """Return the raw table and the sha256 of the file."""
    if not path.is_file():
        near = sorted(p.name for p in path.parent.iterdir() if p.is_file())[:8] if path.parent.is_dir() else []
        raise DataError(f"no file {path}" + (f"; that folder has {', '.join(near)}" if near else ""))
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    name = path.name.lower()
    try:
        if name.endswith(".gz"):
            raw, name = gzip.decompress(raw), name[:-3]
        elif name.endswith(".zip"):
            raw, name = _only_member(raw, path)
        kind = name.rpartition(".")[2]
        if kind in ("parquet", "pq"):
            table = pd.read_parquet(io.BytesIO(raw))
        elif kind in ("feather", "arrow", "ft"):
            table = pd.read_feather(io.BytesIO(raw))
        elif kind == "json":
            table = _from_json(json.loads(raw))
        elif kind in ("csv", "txt", "tsv", "dat"):
            table = _from_text(raw)
        else:
            raise DataError(
                f"{path.name}: a file is read as .csv, .parquet, .feather or .json (also .gz, .zip); got .{kind}. "
                "Pickles are never read: they can run code"
            )
    except (ValueError, OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path.name} cannot be read as what its name says: {error}") from error
    if not isinstance(table.index, pd.RangeIndex):
        table = table.reset_index()
    if not len(table):
        raise DataError(f"{path.name} holds no rows")
    return table, digest


def _only_member(raw: bytes, path: pathlib.Path) -> tuple[bytes, str]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        if len(members) != 1:
            raise DataError(f"{path.name}: a zip must hold one file; got {len(members)}. Unpack it first")
        return archive.read(members[0]), members[0].filename.lower()


def _from_json(data: object) -> pd.DataFrame:
    if isinstance(data, dict) and not all(isinstance(column, list) for column in data.values()):
        data = next((rows for rows in data.values() if isinstance(rows, list)), [])  # {"symbol": ..., "data": [...]}
    return pd.DataFrame(data)


def _from_text(raw: bytes) -> pd.DataFrame:
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    head = raw[:65536].decode(encoding, errors="replace").splitlines()[:50]
    separator = max(";\t|,", key=lambda mark: sum(mark in line for line in head[:-1] or head))
    cells = list(csv.reader(head, delimiter=separator))
    width = collections.Counter(map(len, cells)).most_common(1)[0][0] if cells else 0
    skip = next((i for i, row in enumerate(cells) if len(row) == width), 0)  # a banner has another width
    header = None if cells and all(map(_is_value, cells[skip])) else 0
    decimal = "," if separator == ";" and any("," in cell for row in cells[skip + 1 :] for cell in row) else "."
    return pd.read_csv(
        io.BytesIO(raw),
        sep=separator,
        skiprows=skip,
        header=header,
        index_col=False,
        decimal=decimal,
        encoding=encoding,
    )


def _is_value(cell: str) -> bool:
    cell = cell.strip()
    try:
        float(cell or "nan")
        return True
    except ValueError:
        return bool(re.fullmatch(r"\d[\d:/.,+\-TZ ]*", cell))


def _name_columns(table: pd.DataFrame, path: pathlib.Path) -> pd.DataFrame:
    """Return the columns time, open .. volume and what else bars may have, under these names."""
    if pd.api.types.is_integer_dtype(table.columns.dtype):  # no header
        names = ARCHIVE if len(table.columns) >= 11 else ARCHIVE[:6]
        if len(table.columns) >= 7 and _is_clock(table[1]):
            names = ("date", "time", *OHLCV)
        table = table.set_axis([*names, *range(len(names), len(table.columns))][: len(table.columns)], axis=1)
    plain, found = _plain_names(table), {}
    if both := _date_and_clock(table):
        found["time"] = _joined(table, *both)
    elif time := next((plain[name] for name in TIMES if name in plain), None):
        found["time"] = table[time]
    for name, spellings in SPELLINGS.items():
        if column := next((plain[spelling] for spelling in spellings if spelling in plain), None):
            found[name] = table[column]
    for spelling in reversed(plain):  # "Volume BTC" and "Volume USDT", "Volume_(Currency)"
        if spelling.startswith("volume") and spelling not in ("volume", "volumetraded"):
            quoted = spelling.endswith(("usdt", "usd", "usdc", "busd", "eur", "currency", "quote"))
            found.setdefault("quote_volume" if quoted else "volume", table[plain[spelling]])
    absent = [name for name in ("time", *OHLCV) if name not in found]
    if absent:
        got = ", ".join(map(str, table.columns))
        raise DataError(
            f"{path.name}: bars need a column of start times and {', '.join(OHLCV)}; got {got} "
            f"(nothing read as {', '.join(absent)}). Rename the columns"
        )
    return pd.DataFrame(found)


def _plain_names(table: pd.DataFrame) -> dict[str, str]:
    """Return the columns by their names in small letters and digits; of equal names the first."""
    return {re.sub("[^a-z0-9]", "", str(column).lower()): column for column in reversed(list(table.columns))}


def _date_and_clock(table: pd.DataFrame) -> tuple[str, str] | None:
    """Return the two columns that hold the day and the time of day, where times are written so."""
    plain = _plain_names(table)
    two = {"date", "time"} <= set(plain) and _is_clock(table[plain["time"]])
    return (plain["date"], plain["time"]) if two else None


def _joined(table: pd.DataFrame, date: str, clock: str) -> pd.Series:
    return table[date].astype(str).str.cat(table[clock].astype(str), sep=" ")


def _is_clock(column: pd.Series) -> bool:
    first = column.iloc[0] if len(column) else ""
    return isinstance(first, str) and bool(re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", first.strip()))


def _times(column: pd.Series, path: pathlib.Path) -> pd.DatetimeIndex:
    """Read times as UTC: dates, text, or numbers since 1970 whose unit is told by their size, row by row."""
    if not pd.api.types.is_datetime64_any_dtype(column):
        if not pd.api.types.is_numeric_dtype(column) and pd.to_numeric(column[:1], errors="coerce").notna().all():
            column = pd.to_numeric(column, errors="coerce")  # numbers in quotes
        column = _since_1970(column, path) if pd.api.types.is_numeric_dtype(column) else _from_words(column, path)
    times = pd.DatetimeIndex(pd.to_datetime(column, utc=True))
    if times.hasnans:
        row = int(np.flatnonzero(times.isna())[0])
        raise DataError(f"{path.name}: every row needs a time; row {row + 1} has none that can be read")
    return times.as_unit("ns")


def _since_1970(numbers: pd.Series, path: pathlib.Path) -> pd.Series:
    x = numbers.to_numpy(float, na_value=np.nan)
    digits = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}.get(len(str(int(np.nanmax(x)))) if len(x) else 0)
    if digits:
        written = pd.to_datetime(numbers.astype("Int64").astype(str), format=digits, errors="coerce", utc=True)
        if written.notna().all():
            return written
    unit = np.select([x < 1e11, x < 1e14, x < 1e17], [1_000_000_000, 1_000_000, 1_000], 1)  # s, ms, us, else ns
    if numbers.dtype.kind in "iu":
        ns = numbers.to_numpy(np.int64) * unit
    else:
        whole = np.where(np.isnan(x), 0, x)
        ns = np.floor(whole).astype(np.int64) * unit + np.rint((whole % 1) * unit).astype(np.int64)
    times = pd.Series(pd.DatetimeIndex(ns, tz="UTC")).where(~np.isnan(x))
    if times.min().year < 1980 or times.max().year > 2100:
        raise DataError(
            f"{path.name}: times are read as seconds, ms, us or ns since 1970; {numbers.iloc[0]} would be "
            f"{times.iloc[0]}. Write times as 2025-01-31 00:00"
        )
    return times


def _from_words(column: pd.Series, path: pathlib.Path) -> pd.Series:
    text = column.astype(str).str.strip()
    try:
        return pd.to_datetime(text, format="ISO8601", utc=True)
    except ValueError:
        pass
    readings = {}
    for form in FORMATS:
        if pd.notna(pd.to_datetime(text.iloc[0], format=form, errors="coerce")):
            times = pd.to_datetime(text, format=form, errors="coerce", utc=True)
            if times.notna().all():
                readings[form] = times
    if len(readings) == 1:
        return next(iter(readings.values()))
    why = f"can be read as {' and as '.join(readings)}" if readings else "cannot be read"
    raise DataError(f"{path.name}: times such as {text.iloc[0]!r} {why}. Write them as 2025-01-31 00:00")


def _holds_times(column: pd.Series, path: pathlib.Path) -> bool:
    named = re.sub("[^a-z0-9]", "", str(column.name).lower()) in TIMES
    if pd.api.types.is_numeric_dtype(column) and not named:
        return False
    try:
        _times(column.iloc[:100], path)
    except DataError:
        return False
    return True


def _numbers(column: pd.Series, name: str, path: pathlib.Path) -> np.ndarray:
    values = pd.to_numeric(column, errors="coerce")
    lost = values.isna() & column.notna()
    if not lost.any():
        values = values.to_numpy(float, na_value=np.nan)
        lost = pd.Series(np.isinf(values))
    if lost.any():
        row = int(np.flatnonzero(lost)[0])
        raise DataError(f"{path.name}: {name} must hold numbers; row {row + 1} has {str(column.iloc[row])!r}")
    return values


def _interval(times: pd.DatetimeIndex, path: pathlib.Path) -> str:
    steps = np.diff(np.sort(times.asi8)) // 1_000_000_000
    steps = steps[steps > 0]
    if not len(steps):
        raise DataError(f"{path.name}: the interval is read from two bars or more; got {len(times)}")
    step = collections.Counter(steps.tolist()).most_common(1)[0][0]  # np.unique takes seconds on a million times
    for interval, seconds in INTERVAL_SECONDS.items():
        if seconds == step:
            return interval
    raise DataError(
        f"{path.name}: bars must stand a usual interval apart ({', '.join(INTERVAL_SECONDS)}); "
        f"these are most often {step} s apart"
    )


def _symbol(path: pathlib.Path) -> str:
    stem = path.name.upper()
    for quote in QUOTES:
        if match := re.search(rf"([A-Z0-9]{{2,15}}?)[-_]?{quote}(?![A-Z])", stem):
            return match[1] + quote
    raise DataError(f"{path.name}: no symbol in the file's name; name the series, such as BTCUSDT_15m")
