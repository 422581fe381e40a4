"""Times as people's files write them, read as UTC instants."""

import re

import numpy as np
import pandas as pd

from cpbkit.errors import DataError

# Column spellings seen in the wild, in letters and digits only. Of several the first in this order counts.
STARTS = tuple(
    "opentimems opentime openat candlebegintime timeperiodstart timeopen starttime windowstart unixtimestamp unix"
    " unixtime timestamp ts tsevent datetimeutc datetime gmttime localtime timeutc time dateutc date tradedate start"
    " begin index t zeit datum fecha data 日期 时间 時間 ticks unnamed0 level0".split()
)
ENDS = tuple("closetimems closetime timeperiodend timeclose endtime closeat".split())
# Of the two columns in which a day and its time of day stand apart.
DATES = tuple("date datum fecha data 日期".split())
CLOCKS = tuple("time uhrzeit zeit hora ora heure 时间 時間".split())
# Times that are not ISO 8601. Day first and month first are both tried: one of them must fail.
_DAYS = [
    *("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%m/%d/%y"),
    *("%d/%m/%y", "%b %d, %Y", "%d %b %Y", "%d-%b-%Y", "%B %d, %Y", "%Y%m%d", "%Y年%m月%d日", "%a %b %d %Y"),
]
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", " %I-%p", " %H%M%S", " %H%M")
FORMATS = tuple(f"{day}{clock}" for day in _DAYS for clock in _CLOCKS)
_SERIALS = 29_221, 73_051  # 1980 and 2100 in days since 1899-12-30; as seconds all of them fall on 1970-01-01
# After a time of day an offset, the name of UTC, or both; after a day its name alone.
_ZONE = re.compile(
    r"(?P<kept>:\d{2}(?:\.\d+)?|\d(?=\s+(?:UTC|GMT)$))\s*"
    r"(?:(?:UTC|GMT)?\s*(?P<hours>[+-]\d{1,2}):?(?P<minutes>\d{2})?(?:\s*(?:UTC|GMT))?|UTC|GMT|Z)$"
)


def plain(name: object) -> str:
    """Return a name in small letters and digits alone."""
    return re.sub(r"[\W_]", "", str(name).lower())


def plain_names(table: pd.DataFrame) -> dict[str, str]:
    """Return the columns by their plain names; of equal names the first."""
    return {plain(column): column for column in reversed(list(table.columns))}


def date_and_clock(table: pd.DataFrame) -> tuple[str, str, pd.Series] | None:
    """Return the two columns that hold the day and the time of day, where times are written so, and both as one."""
    plain = plain_names(table)
    date, clock = (next((plain[name] for name in names if name in plain), None) for names in (DATES, CLOCKS))
    if date is None or clock is None or not is_clock(table[clock]):
        return None
    return date, clock, table[date].astype(str).str.cat(table[clock].astype(str), sep=" ")


def is_clock(column: pd.Series) -> bool:
    """Say whether a column holds times of day: 09:31, 09:31:00, 09:31:00.000000, 0931 or 093100."""
    first = column.iloc[0] if len(column) else ""
    return isinstance(first, str) and bool(re.fullmatch(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?|\d{4}|\d{6}", first.strip()))


def read_times(column: pd.Series, where: str) -> pd.DatetimeIndex:
    """Read times as UTC: dates, text, or numbers since 1970 whose unit is told by their size, row by row."""
    if not pd.api.types.is_datetime64_any_dtype(column):
        if not pd.api.types.is_numeric_dtype(column) and pd.to_numeric(column[:1], errors="coerce").notna().all():
            column = pd.to_numeric(column, errors="coerce")  # numbers in quotes
        column = _since_1970(column, where) if pd.api.types.is_numeric_dtype(column) else _from_words(column, where)
    times = pd.DatetimeIndex(pd.to_datetime(column, utc=True))
    if times.hasnans:
        row = int(np.flatnonzero(times.isna())[0])
        raise DataError(f"{where}: every row needs a time; row {row + 1} has none that can be read")
    return times.as_unit("ns")


def has_zone(column: pd.Series) -> bool:
    """Say whether times tell their zone, as numbers since 1970 do."""
    if pd.api.types.is_numeric_dtype(column) or isinstance(column.dtype, pd.DatetimeTZDtype):
        return True
    first = str(column.iloc[0]).strip()
    return bool(re.fullmatch(r"\d{9,19}(\.\d+)?", first) or _ZONE.search(first))


class Ambiguous(DataError):
    """Times that can be read in more than one way, of which later rows may rule out some."""


def holds_times(column: pd.Series, where: str) -> bool:
    """Say whether a column can be read as times, if perhaps in two ways; numbers only where its name says so."""
    first = column.iloc[:100].astype(str)
    numeric = pd.api.types.is_numeric_dtype(column) or pd.to_numeric(first, errors="coerce").notna().all()
    if numeric and plain(column.name) not in STARTS:
        return False
    try:
        read_times(column.iloc[:100], where)
    except Ambiguous:
        return True
    except DataError:
        return False
    return True


def are_serials(column: pd.Series) -> bool:
    """Say whether a column holds days since 1900, as Excel counts them: 45292.5 is the noon of 2024-01-01."""
    return pd.api.types.is_numeric_dtype(column) and bool(column.between(*_SERIALS).all())


def _since_1970(numbers: pd.Series, where: str) -> pd.Series:
    x = numbers.to_numpy(float, na_value=np.nan)
    if not np.isfinite(x).any():
        raise DataError(f"{where}: times are read as numbers since 1970; none of them is a number")
    digits = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}.get(len(str(int(np.nanmax(x)))))
    if digits:
        written = pd.to_datetime(numbers.astype("Int64").astype(str), format=digits, errors="coerce", utc=True)
        if written.notna().all():
            return written
    if are_serials(numbers):
        return pd.Timestamp("1899-12-30", tz="UTC") + pd.to_timedelta(np.rint(numbers * 86_400), unit="s")
    unit = np.select([x < 1e11, x < 1e14, x < 1e17], [1_000_000_000, 1_000_000, 1_000], 1)  # s, ms, us, else ns
    if numbers.dtype.kind in "iu":
        ns = numbers.to_numpy(np.int64) * unit
    else:
        whole = np.where(np.isfinite(x), x, 0)
        ns = np.floor(whole).astype(np.int64) * unit + np.rint((whole % 1) * unit).astype(np.int64)
    times = pd.Series(pd.DatetimeIndex(ns, tz="UTC")).where(np.isfinite(x))
    if (strange := (times.dt.year < 1980) | (times.dt.year > 2100)).any():
        row = int(strange.argmax())
        raise DataError(
            f"{where}: times are read as seconds, ms, us or ns since 1970; {_row(numbers, row)}, which would be "
            f"{times.iloc[row]}. Write times as 2025-01-31 00:00"
        )
    return times


def _row(column: pd.Series, row: int) -> str:
    last = ", the last row: was the file cut there?" if 0 < row == len(column) - 1 else ""
    return f"row {row + 1} has {str(column.iloc[row])[:60]!r}{last}"


def _from_words(column: pd.Series, where: str) -> pd.Series:
    text = column.astype(str).str.strip()
    written = pd.to_datetime(text, format="ISO8601", utc=True, errors="coerce")
    if written.notna().all():
        return written
    zone = text.str.extract(_ZONE)
    if zone["kept"].notna().all():
        hours, minutes = (pd.to_numeric(zone[part]).fillna(0) for part in ("hours", "minutes"))
        offset = hours + np.where(zone["hours"].str.startswith("-", na=False), -1, 1) * minutes / 60
        bare = text.str.replace(_ZONE, lambda match: match["kept"], regex=True)
        return _from_words(bare, where) - pd.to_timedelta(offset, unit="h")
    readings: dict[bytes, tuple[str, pd.Series]] = {}  # by what they say
    most = written  # of all ways to read them, that which reads most
    for form in FORMATS:
        if pd.notna(pd.to_datetime(text.iloc[0], format=form, errors="coerce")):
            times = pd.to_datetime(text, format=form, errors="coerce", utc=True)
            if times.notna().all():
                readings.setdefault(pd.DatetimeIndex(times).asi8.tobytes(), (form, times))
            most = max(most, times, key=pd.Series.count)
    if len(readings) == 1:
        return next(iter(readings.values()))[1]
    if not readings and most.notna().iloc[0]:
        row = int(most.isna().argmax())
        raise DataError(f"{where}: {_row(text, row)}; it is no time like {text.iloc[0]!r}. Mend or drop it")
    why = f"can be read as {' and as '.join(form for form, _ in readings.values())}" if readings else "cannot be read"
    kind = Ambiguous if readings else DataError
    raise kind(f"{where}: times such as {text.iloc[0]!r} {why}. Write them as 2025-01-31 00:00")
