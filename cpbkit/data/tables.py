"""A person's own files as tables: every usual container, without a guess at what the columns mean."""

import csv
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import warnings
import zipfile
import zlib
import zoneinfo
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO
from xml.etree.ElementTree import ParseError

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
from pandas.io.parsers import TextParser
from pyarrow import ipc

from cpbkit.data import times
from cpbkit.data.unpack import PACKED, PIECE, NotUnpacked, check_methods, unpack, unzip
from cpbkit.errors import DataError, check_name

log = logging.getLogger(__name__)

TEXT = ("csv", "txt", "tsv", "dat")
JSON = ("json", "jsonl", "ndjson")
KINDS = (*TEXT, *JSON, "parquet", "pq", "feather", "arrow", "ft", "xlsx", *PACKED, "zip")
UNPACKED = 32 << 20  # bytes that any packed file may hold
TIMES_PACKED = 50  # more, if the file is large: bars of many digits shrink to a tenth, flat ones to a fiftieth
ROWS = 2_000_000  # that any Parquet or feather file may hold; more, if it is large: a row takes more than a byte
SIZE = 2 << 30  # bytes of any file: eight years of minutes as CSV have half of one
ENDS = {"parquet": b"PAR1", "pq": b"PAR1", "feather": b"ARROW1", "arrow": b"ARROW1", "ft": b"ARROW1"}  # first and last
JSON_DEPTH = 6
JSON_SIZE = 128 << 20  # bytes; parsed it takes ten times as much
COLUMNS = 10_000  # of any table: 1,500 tickers side by side have fewer
FOOTER = 16 << 20  # bytes of what a Parquet file tells of itself: columns, row groups, what pandas noted
NOTED = 4 << 20  # bytes of what pandas noted; parsed it takes thirty times as much
SHEETS, SHEET_COLUMNS, SHEET_BLANKS = 100, 100, 1000  # of Excel: sheets, their columns, rows that may be empty
SYMBOL = -1  # the column of symbols where columns are numbered
NOTHING = ("", "-", "—", "null", "NULL", "None", "nan")  # cells that mean none
THOUSANDS = r"[1-9]\d{0,2}(\.\d{3})+"  # ended by points, where these do not stand before three decimals
WITH_COMMAS = rf"-?({THOUSANDS}|\d+)(,\d+)?(e[-+]?\d+)?"  # numbers with a comma before the decimals
WITH_POINTS = r"-?([1-9]\d{0,2}(,\d{3})+|\d*)(\.\d*)?(e[-+]?\d+)?"
GROUPED = r"(-?[1-9]\d{0,2})((?:[\s\u00a0\u202f'’]\d{3})+)(?!\d)"  # thousands ended by blanks or apostrophes
SIZES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}  # factors that stand after a number
MIXED = 0.02  # least share of whole numbers; of three decimals one number in a thousand is whole by chance
_TANGLED = (KeyError, TypeError, RecursionError, OverflowError)  # of nested or huge JSON, of what pandas noted
_IS_BRACKET = np.isin(np.arange(256), list(b"[]{}"))
SYMBOL_KEYS = (  # of JSON, beside the rows: one name, or two that make one
    *(("symbol",), ("ticker",), ("pair",)),
    *(("digital currency code", "market code"), ("from symbol", "to symbol")),
)
MARGIN = ("schema", "index", "columns", "data")  # of pandas' own JSON


def read_table(path: str | pathlib.Path, time: str | None = None, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read any time series table (CSV, Parquet, feather, JSON) as float64 columns, oldest row first.

    time: column of times; without it the first column that holds times, or else a plain count of rows. Without
    a zone times are UTC. columns: those to keep, in this order; without them every column of numbers.
    Raises UnknownName for a column that is not there, DataError for text, infinities or the same time twice.
    """
    path = pathlib.Path(path)
    return arrange(load(path)[0], path.name, time, columns)


def arrange(
    table: pd.DataFrame, name: str, time: str | None = None, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Do with a table what `read_table` does with that of a file; an index of times holds its times.

    name: what errors call it.
    """
    index = _find_index(table.index, name)
    if isinstance(table.index, pd.MultiIndex):
        table = table.reset_index(allow_duplicates=True)
    table = table.set_axis([str(column) for column in table.columns], axis=1)
    if table.columns.has_duplicates:
        twice = ", ".join(table.columns[table.columns.duplicated()].unique())
        raise DataError(f"{name}: each column needs a name of its own; got twice {twice}")
    if index is not None:
        time = None
    elif time is None and (dated := times.date_and_clock(table)):
        time, clock, both = dated
        table = table.assign(**{time: both}).drop(columns=clock)
    elif time is not None:
        check_name("time column", time, table.columns)
    else:
        time = next((column for column in table.columns if times.holds_times(table[column], name)), None)
    chosen = [check_name("column", column, table.columns) for column in dict.fromkeys(columns or ())]
    if not chosen:
        chosen = _find_numbers(table.drop(columns=[time] if time else []), name)
    if not chosen:
        raise DataError(f"{name}: a table needs at least one column of numbers; got {', '.join(table.columns)}")
    if odd := next((column for column in chosen if ":" in column), None):
        raise DataError(f"{name}: a column's name may have no ':', by which own parts are named; rename {odd!r}")
    values = pd.DataFrame({column: read_numbers(table[column], column, name, _as_written) for column in chosen})
    _tell_how_read(table[chosen], values, name)
    if time is not None:
        index = times.read_times(table[time], name).rename(time)
    elif index is not None:
        index = times.read_times(index.to_series(), name).rename(index.name)
    if index is None:
        return values
    values = values.set_index(index)
    if not values.index.has_duplicates:
        return values.sort_index(kind="stable")
    again = values.reset_index(names="").duplicated().to_numpy()
    doubled = values.index[~again].duplicated()
    if doubled.any():
        first = values.index[~again][doubled].min()
        why = _tell_apart(table, values.index) or (
            "Keep one series in a file or frame; local times, of which an hour comes twice in autumn, need their zone, "
            'in Python tz_localize("Europe/Berlin", ambiguous="infer")'
        )
        raise DataError(f"{name}: one row a time; got {int(doubled.sum())} more, the first at {first}. {why}")
    log.warning("%s: rows left out that repeat another: %d", name, again.sum())
    return values[~again].sort_index(kind="stable")


def _tell_apart(table: pd.DataFrame, index: pd.Index) -> str:
    """Name the column that tells apart the series of a long table, and how to take them; empty without one."""
    for column in table:
        key = table[column].astype(str).to_numpy()
        count = len(pd.unique(key))
        many = 1 < count < index.nunique() and len(key) >= 0.8 * count * index.nunique()  # each at nearly all times
        if many and not pd.MultiIndex.from_arrays([index, key]).has_duplicates:
            each = f"rows.drop(columns={column!r}) for key, rows in frame.groupby({column!r})"
            return f"{column} tells {count} series apart, a file each; in Python data={{key: {each}}}"
    return ""


def _find_index(index: pd.Index, name: str) -> pd.Index | None:
    """Return an index that holds times, of which there are many kinds; None for any other."""
    if isinstance(index, pd.PeriodIndex):
        return index.to_timestamp()
    if isinstance(index, pd.DatetimeIndex):
        return index
    if isinstance(index, pd.MultiIndex) or pd.api.types.is_numeric_dtype(index):
        return None
    return index if len(index) and times.holds_times(index.to_series(), name) else None


def _find_numbers(table: pd.DataFrame, name: str) -> list[str]:
    """Return the columns of numbers, and say which others are left out; DataError for one that is mostly numbers."""
    numbers = [column for column in table if _are_numbers(table[column])]
    counts = [column for column in numbers if column.startswith("Unnamed: ") and _counts_rows(table[column])]
    left = [column for column in table if column not in numbers]
    for column in left:
        no_number = pd.to_numeric(table[column], errors="coerce").isna() & table[column].notna()
        if 0 < no_number.mean() < 0.5 and not times.holds_times(table[column], name):
            raise DataError(
                f"{name}: {column} must hold numbers; {no_number.sum():,} of {len(table):,} cells are none, row "
                f"{no_number.argmax() + 1} has {str(table[column][no_number].iloc[0])[:60]!r}. Mend them, or leave the "
                "column out (--columns, in Python frame.drop)"
            )
    if left:
        log.warning("%s: columns that are not numbers were left out: %s", name, _with_cells(table[left]))
    if counts:
        log.warning("%s: a column that counts the rows was left out: %s", name, ", ".join(counts))
    return [column for column in numbers if column not in counts]


def find_moving(tables: Iterable[pd.DataFrame], name: str) -> list[str]:
    """Return the columns of the first table without those that never change in any, and say which these are.

    Errors: DataError for a table that lacks one.
    """
    first, *others = tables
    for other in others:
        if lacking := [column for column in first if column not in other]:
            raise DataError(
                f"tables of one sweep share their columns; one of {name} has {', '.join(other)}, and not "
                f"{', '.join(lacking)}. Sweep them apart, or name columns that all have: features=, targets="
            )
    moving = [c for c in first if any(table[c].min() != table[c].max() for table in (first, *others))]
    if moving and (still := [column for column in first if column not in moving]):
        log.warning("%s: columns that never change were left out: %s", name, ", ".join(still))
    return moving or list(first)


def _are_numbers(column: pd.Series) -> bool:
    if pd.api.types.is_numeric_dtype(column):
        return True
    if not (pd.api.types.is_object_dtype(column) or pd.api.types.is_string_dtype(column)) or column.isna().all():
        return False
    if (pd.to_numeric(column, errors="coerce").isna() == column.isna()).all():
        return True
    some = column.dropna().iloc[:50].astype(str)  # of words few are numbers
    return bool(_as_written(some).notna().any()) and _are_read(_as_written(column), column)


def _as_written(column: pd.Series) -> pd.Series:
    """Read numbers by how their own column is written, all of it alike; NaN for what is none."""
    values = read_written(column, sizes=False)  # 5B may name a house
    if _are_read(values, column) or not column.astype(str).str.contains(",", regex=False).any():
        return values
    by_commas = read_written(column, commas=True, sizes=False)
    return by_commas if _are_read(by_commas, column) else values


def _tell_how_read(table: pd.DataFrame, values: pd.DataFrame, name: str) -> None:
    """Say how columns were read that people wrote, and which may have been read amiss."""
    told = []
    for column, cells in table.items():
        if not pd.api.types.is_numeric_dtype(cells):
            odd = np.flatnonzero(pd.to_numeric(cells, errors="coerce").isna() & ~_is_nothing(cells))
            if len(odd):
                told.append(f"{column} ({str(cells.iloc[odd[0]])[:20]!r} as {values[column].iloc[odd[0]]:,})")
        if (pair := _find_mixed(values[column].to_numpy())) is not None:
            log.warning(
                "%s: %s has whole numbers such as %d, and %.3f: if that point ends thousands, write %d",
                *(name, column, *pair, round(1000 * pair[1])),
            )
    if told:
        log.warning("%s: numbers were read as they are written: %s", name, ", ".join(told))


def _find_mixed(values: np.ndarray) -> tuple[float, float] | None:
    """Return a whole number below 1000 and one with three decimals of a column that has nothing else: 822, 1.017."""
    size = np.abs(values[np.isfinite(values)])
    parts, whole = size[size % 1 != 0], size[size % 1 == 0]
    if not len(parts) or len(whole) < MIXED * len(size) or not 100 <= whole.max() < 1000:
        return None
    if parts.min() < 1 or parts.max() >= 100:
        return None
    if (np.abs(1000 * parts - np.rint(1000 * parts)) > 1e-6).any():
        return None
    fine = parts[np.abs(100 * parts - np.rint(100 * parts)) > 1e-6]  # of two decimals there are none
    return (whole.max(), fine[0]) if 2 * len(fine) > len(parts) else None


def _counts_rows(column: pd.Series) -> bool:
    return bool((column.diff().iloc[1:] == 1).all())


def _with_cells(columns: pd.DataFrame) -> str:
    """Name columns, each with its first cell that is no number."""
    odd = {name: cells[pd.to_numeric(cells, errors="coerce").isna() & cells.notna()] for name, cells in columns.items()}
    return ", ".join(
        f"{name} ({str(cells.iloc[0])[:20]!r})" if len(cells) else str(name) for name, cells in odd.items()
    )


def load(path: pathlib.Path) -> tuple[pd.DataFrame, str]:
    """Return the raw table of a file, its index as a column, and the sha256 of the file; DataError else."""
    if not path.is_file():
        near = sorted(p.name for p in path.parent.iterdir() if p.is_file())[:8] if path.parent.is_dir() else []
        raise DataError(f"no file {path}" + (f"; that folder has {', '.join(near)}" if near else ""))
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _check_early(file, path.name, size)
            limit = max(UNPACKED, TIMES_PACKED * size)
            name = path.name
            kind = name.lower().rpartition(".")[2]
            if kind in PACKED:
                name, blob = unpack(file, name, limit, _check_piece)
            elif kind == "zip":
                name, blob = unzip(file, limit, _check_piece)
            else:
                blob = file.read()
            file.seek(0)
            digest = hashlib.sha256()
            while piece := file.read(PIECE):
                digest.update(piece)
        table = _from_bytes(blob, name, limit)
    # Arrow's errors are ValueErrors, those of a sheet's XML are not.
    except (ValueError, OSError, EOFError, ParseError, pa.ArrowException, *_TANGLED) as error:
        why = " ".join(str(error).split())[:300]
        raise DataError(f"{path.name}: it cannot be read as what its name says: {why}") from None
    return with_index(table, path.name), digest.hexdigest()


def _check_early(file: BinaryIO, name: str, size: int) -> None:
    """Raise ValueError for a file that would take too much memory, before it is read."""
    if size > SIZE:
        raise ValueError(f"a file may have {SIZE >> 30} GiB; got {size >> 30}. Split it by symbol or by year")
    kind = name.lower().rpartition(".")[2]
    if kind in TEXT:
        while piece := file.read(PIECE):
            _check_piece(name, piece, 0)
    elif kind in JSON:
        _check_json(size)
    elif kind in ENDS:
        head = file.read(8)
        file.seek(max(0, size - 8))
        _check_ends(kind, head, file.read(8))
    elif kind == "xlsx" and not zipfile.is_zipfile(file):
        raise ValueError("it is no Excel file (File is not a zip file)")
    file.seek(0)


def _check_piece(name: str, piece: bytes, before: int) -> None:
    kind = name.lower().rpartition(".")[2]
    if kind in TEXT and len(piece) == PIECE and not re.search(rb"[\r\n]", piece):
        raise NotUnpacked(f"it has a line of more than {PIECE:,} bytes")
    if kind in JSON:
        _check_json(before + len(piece))


def _check_json(size: int) -> None:
    if size > JSON_SIZE:
        raise NotUnpacked(f"JSON may have {JSON_SIZE >> 20} MiB. Write Parquet, feather or CSV")


def _check_ends(kind: str, head: bytes, tail: bytes) -> None:
    mark = ENDS[kind]
    if not (head.startswith(mark) and tail.endswith(mark)):
        raise ValueError(f"it must begin and end with {mark.decode()}, as each .{kind} does")
    if kind in ("parquet", "pq") and (size := int.from_bytes(tail[:4], "little")) > FOOTER:
        raise ValueError(f"what a Parquet file tells of itself may have {FOOTER:,} bytes; got {size:,}")


def with_index(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return a table whose index, where it says something, is a column; DataError for one without rows."""
    if table.columns.nlevels == 2:
        table = one_row_each(table)
    if not isinstance(table.index, pd.RangeIndex):
        table = table.reset_index()
    if not len(table):
        raise DataError(f"{name}: it holds no rows")
    if len(table.columns) > COLUMNS:
        raise DataError(f"{name}: a table may have {COLUMNS:,} columns; got {len(table.columns):,}")
    return table.reset_index(drop=True)


def one_row_each(table: pd.DataFrame) -> pd.DataFrame:
    """Turn columns of two levels, ticker and price in either order, into a row per ticker with the column `symbol`."""
    levels = [{str(name).lower() for name in table.columns.get_level_values(i)} for i in (0, 1)]
    prices = 0 if "close" in levels[0] else 1
    if "close" not in levels[prices]:
        raise ValueError(f"columns of two levels need one of prices; got {sorted(levels[0])[:6]}")
    tickers = table.columns.get_level_values(1 - prices)
    parts = []
    for ticker in dict.fromkeys(tickers):
        part = table.loc[:, tickers == ticker]
        part = part.set_axis(part.columns.get_level_values(prices), axis=1).dropna(how="all")
        parts.append(part.assign(symbol=str(ticker)))
    return pd.concat(parts)


def _from_bytes(blob: bytes, name: str, limit: int) -> pd.DataFrame:
    kind = name.lower().rpartition(".")[2]
    if kind in ("parquet", "pq"):
        return from_parquet(blob, limit)
    if kind in ("feather", "arrow", "ft"):
        rows = pyarrow.dataset.IpcFileFormat().make_fragment(pa.py_buffer(blob)).count_rows()
        schema = ipc.open_file(pa.py_buffer(blob)).schema
        _check_noted(schema.metadata)
        _check_rows(rows, len(schema), blob)
        return pd.read_feather(io.BytesIO(blob))
    if kind in JSON:
        return _from_json(blob)
    if kind == "xlsx":
        return _from_excel(blob, limit)
    if kind in TEXT:
        return _from_text(blob)
    raise DataError(
        f"{name}: a file is read as .csv, .parquet, .feather, .json or .xlsx (also .gz, .bz2, .xz, .zip); got .{kind}. "
        "Pickles are never read: they can run code"
    )


def _check_noted(metadata: dict[bytes, bytes] | None) -> None:
    if (size := len((metadata or {}).get(b"pandas", b""))) > NOTED:
        raise ValueError(f"what pandas noted of it may have {NOTED:,} bytes; got {size:,}")


def from_parquet(blob: bytes, limit: int) -> pd.DataFrame:
    """Read a Parquet file whose columns unpack to at most `limit` bytes; ValueError or ArrowException else."""
    _check_ends("parquet", blob[:8], blob[-8:])
    told = pq.ParquetFile(pa.BufferReader(blob))
    _check_noted(told.schema_arrow.metadata)
    _check_rows(told.metadata.num_rows, told.metadata.num_columns, blob)
    flat = [field.name for field in told.schema_arrow if not pa.types.is_nested(field.type)]
    leaves = [told.schema.column(i) for i in range(told.metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path in flat]
    # Not of each group's columns: to ask for a damaged one ends the process (pyarrow 26).
    size = sum(told.metadata.row_group(i).total_byte_size for i in range(told.metadata.num_row_groups))
    if size <= limit:
        # One long text may stand in every row: such a column is first read as a list of its different texts.
        table = pq.ParquetFile(pa.BufferReader(blob), read_dictionary=texts).read(columns=flat)
        for chunk in (chunk for name in texts for chunk in table[name].chunks):
            if pa.types.is_dictionary(chunk.type) and len(chunk.dictionary):
                size += pc.max(pc.binary_length(chunk.dictionary)).as_py() * len(chunk)
    if size > limit:
        raise ValueError(f"it unpacks to more than {limit:,} bytes")
    for name in texts:
        at, field = table.schema.get_field_index(name), told.schema_arrow.field(name)
        table = table.set_column(at, field, table[name].cast(field.type))
    return table.to_pandas()


def _check_columns(columns: int) -> None:
    if columns > COLUMNS:
        raise ValueError(f"a table may have {COLUMNS:,} columns; got {columns:,}")


def _check_rows(rows: int, columns: int, blob: bytes) -> None:
    _check_columns(columns)
    if rows > max(ROWS, len(blob)) or rows * columns > max(8 * ROWS, 16 * len(blob)):
        what = f"{rows:,} rows of {columns:,} columns"
        raise ValueError(f"it promises {what} in {len(blob):,} bytes, which no bars fit into")


def _from_excel(blob: bytes, limit: int) -> pd.DataFrame:
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as box:
            check_methods(box.infolist())
            if (size := sum(member.file_size for member in box.infolist())) > limit:  # zipfile reads no more than this
                raise ValueError(f"it unpacks to {size:,} bytes")
            for part in map(box.read, box.infolist()):
                if b"<!DOCTYPE" in part:  # the format has none, and its entities may grow without end
                    raise ValueError("its XML declares a document type")
                if part.count(b"<") > 1000 + len(part) // 6:  # a cell of a sheet takes seven bytes a mark
                    raise ValueError("it has more marks than cells could fill")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"it is no Excel file ({error})") from None
    try:
        import openpyxl
    except ImportError:
        raise DataError('.xlsx is read by openpyxl, which is not here: pip install "cpbkit[excel]"') from None
    book = openpyxl.load_workbook(io.BytesIO(blob), read_only=True, data_only=True, keep_links=False)
    tables = {sheet.title: _from_sheet(sheet) for sheet in book.worksheets[:SHEETS]}
    tables = {title: table for title, table in tables.items() if len(table.columns) >= 5}
    if not tables:
        raise ValueError("no sheet has five columns: a time and four prices")
    if len(tables) == 1:
        return next(iter(tables.values()))
    if odd := [title for title in tables if not re.fullmatch(r"[A-Z0-9]{2,15}([-_/ ]?[A-Z]{3,5})?", title)]:
        raise ValueError(f"it has {len(tables)} sheets; name each after its symbol, as {odd[0][:40]!r} is not")
    return pd.concat([_with_symbol(table, title) for title, table in tables.items()], ignore_index=True)


def _from_sheet(sheet) -> pd.DataFrame:
    """Read the rows of a sheet. What it leaves out is filled in, so a cell far off would bring a million rows."""
    rows, blank = [], 0
    for row in sheet.iter_rows(max_row=1 << 20, max_col=SHEET_COLUMNS, values_only=True):
        blank = 0 if any(cell is not None for cell in row) else blank + 1
        if blank > SHEET_BLANKS:
            break
        if not blank:
            rows.append(row)
    width = max((i + 1 for row in rows[:50] for i, cell in enumerate(row) if cell is not None), default=0)
    return TextParser([list(row[:width]) for row in rows], header=0).read() if len(rows) > 1 else pd.DataFrame()


def _from_json(blob: bytes) -> pd.DataFrame:
    # A list takes two bytes here and sixty in memory; one of a bar's four prices and time has more than ten. A number
    # takes two and eight; one of a bar has seven or more, but for volumes of zero.
    if blob.count(b"[") + blob.count(b"{") > 1000 + len(blob) // 10:
        raise ValueError("it has more lists than bars could fill")
    if blob.count(b",") > 1000 + len(blob) // 4:
        raise ValueError("it has more values than bars could fill")
    largest, *_, fifth = _largest_lists(blob)
    if largest > PIECE and fifth < largest // 50:
        raise ValueError(
            f"one of its lists or objects has {largest:,} bytes; bars are rows, or five lists of one length"
        )
    text = _decode(blob)[0]
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        if "Extra data" not in str(error):
            raise
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    found = list(_find_rows(data, "", 0))
    if not found:
        raise ValueError("no rows of bars in it")
    largest = max(len(table) for _, table in found)
    found = [(symbol, table) for symbol, table in found if len(table) > largest / 10]  # not a list of warnings
    tables = [_with_symbol(table, symbol) for symbol, table in found]
    return pd.concat(tables, ignore_index=all(isinstance(table.index, pd.RangeIndex) for table in tables))


def _largest_lists(blob: bytes) -> list[int]:
    """Return the bytes of the five longest stretches without a bracket, longest first."""
    found, last = [0] * 5, -1
    marks = np.frombuffer(blob, np.uint8)
    for begin in range(0, len(marks), PIECE):
        at = begin + np.flatnonzero(_IS_BRACKET[marks[begin : begin + PIECE]])
        lengths = np.diff(at, prepend=last)
        found = sorted([*found, *lengths[lengths > PIECE // 50].tolist()])[-5:]
        last = int(at[-1]) if len(at) else last
    return sorted([*found, len(marks) - last])[:0:-1]


def _with_symbol(table: pd.DataFrame, symbol: str) -> pd.DataFrame:
    if not symbol or any(str(column).lower() in ("symbol", "ticker", "market") for column in table.columns):
        return table
    table = table.copy()
    table[SYMBOL if pd.api.types.is_integer_dtype(table.columns.dtype) else "symbol"] = symbol
    return table


def _find_rows(data: object, symbol: str, depth: int, zone: str = "") -> Iterator[tuple[str, pd.DataFrame]]:
    """Find the tables in JSON: rows or records, columns as lists or by time; each with its symbol."""
    if depth > JSON_DEPTH:
        raise ValueError(f"it is nested more than {JSON_DEPTH} deep")
    if isinstance(data, list):
        if data and all(isinstance(row, list | dict) for row in data):
            cells = [isinstance(value, list | dict) for value in data[0].values()] if isinstance(data[0], dict) else []
            if len(data) == 1 and isinstance(data[0], dict) and cells.count(False) < 5:  # no record of a bar
                yield from _find_rows(data[0], symbol, depth + 1)
            elif not isinstance(data[0], list) or len(data[0]) >= 5:
                yield symbol, _as_table(data)
        return
    if not isinstance(data, dict):
        return
    beside = [data, *(value for value in data.values() if isinstance(value, dict))]  # "meta": {"symbol": ...}
    told = [_unnumbered(part) for part in beside if len(part) <= 100]
    names = ["".join(part.get(key, "") for key in keys) for part in told for keys in SYMBOL_KEYS]
    symbol = next((name for name in names if 0 < len(name) <= 30), symbol)
    zone = next((part["time zone"] for part in told if "time zone" in part), zone)
    if set(data) >= {"columns", "data"} and isinstance(data["columns"], list):
        _check_columns(len(data["columns"]))
        if isinstance(data["data"], list) and all(isinstance(row, list) for row in data["data"]):
            _check_common(data["data"])
        yield symbol, pd.DataFrame(data["data"], index=data.get("index"), columns=data["columns"])
        return
    lists = {key: value for key, value in data.items() if isinstance(value, list)}
    plain = {key for key, value in lists.items() if value and not isinstance(value[0], list | dict)}
    longest = max((len(lists[key]) for key in plain), default=0)
    if len(columns := {key: lists[key] for key in plain if len(lists[key]) == longest}) >= 4:
        _check_columns(len(columns))
        yield symbol, pd.DataFrame({key: columns[key] for key in data if key in columns})
        return
    inner = {key: value for key, value in data.items() if isinstance(value, dict)}
    if len(inner) >= 4 and all(not isinstance(v, list | dict) for value in inner.values() for v in value.values()):
        by_column = {"open", "close"} <= {key.lower() for key in inner}
        _check_common(list(inner.values()))
        table = pd.DataFrame(inner) if by_column else _as_table(list(inner.values())).set_axis(list(inner))
        yield symbol, table.set_axis(_in_zone(table.index, zone)).rename_axis("time")
        return
    several = sum(isinstance(value, list | dict) for value in data.values()) > 1
    for key, value in data.items():
        least = 3 if several else 5  # Kraken's {"XXBTZUSD": [...]}, and {"BTC": [...], "ETH": [...]}
        as_symbol = key.lower() not in MARGIN and re.fullmatch(rf"[A-Z0-9/_.:-]{{{least},30}}", key)
        yield from _find_rows(value, key if as_symbol else symbol, depth + 1, zone)


def _unnumbered(part: dict) -> dict[str, str]:
    """Return the texts of an object; Alpha Vantage numbers their names: "2. Symbol"."""
    texts = {key: value for key, value in part.items() if isinstance(value, str)}
    return {re.sub(r"^\d+[.:)] *", "", key).lower(): value for key, value in texts.items()}


def _as_table(rows: list) -> pd.DataFrame:
    """Make a table of rows, which are lists or objects. Errors: as `_check_common`."""
    rows = [_flat(row) if isinstance(row, dict) else row for row in rows]
    _check_columns(_check_common(rows))
    return pd.DataFrame(rows)


def _check_common(rows: list) -> int:
    """Return how many cells differ; ValueError for rows of which a table would be mostly empty, and of any size."""
    same = all(isinstance(row, dict) for row in rows)
    width = len(set().union(*rows)) if same else max(map(len, rows), default=0)
    if width * len(rows) > 100_000 + 8 * sum(map(len, rows)):
        raise ValueError(f"its rows have too little in common: {len(rows):,} rows, {width:,} different cells")
    return width


def _flat(row: dict, depth: int = 2) -> dict:
    """Lift what lies in objects inside a row: {"timeOpen": ..., "quote": {"USD": {"open": ...}}} of CoinMarketCap."""
    if not depth or not any(isinstance(value, dict) for value in row.values()):
        return row
    inner = [_flat(value, depth - 1) for value in row.values() if isinstance(value, dict)]
    flat = {key: value for key, value in row.items() if not isinstance(value, dict)}
    return {key: value for part in (*inner, flat) for key, value in part.items()}


def _in_zone(index: pd.Index, zone: object) -> pd.Index:
    """Read times of day in the zone that stands beside them, "6. Time Zone": "US/Eastern" of Alpha Vantage."""
    if not isinstance(zone, str) or zone not in zoneinfo.available_timezones() or len(index[0]) <= 10:
        return index  # a day alone belongs to no zone
    return pd.DatetimeIndex(index).tz_localize(zone).tz_convert("UTC")


def _decode(blob: bytes) -> tuple[str, str]:
    for encoding in ("utf-16",) if blob[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig", "cp1252"):
        try:
            return blob.decode(encoding), encoding
        except UnicodeDecodeError:
            continue
    raise ValueError("its text is neither UTF-8 nor UTF-16")


def _from_text(blob: bytes) -> pd.DataFrame:
    text, encoding = _decode(blob)
    # A banner before the table, and a separator, are seen on its first lines.
    head = text[:65536].splitlines()[:50]
    if not any(map(str.strip, head)):
        raise ValueError("No columns to parse: it is empty")
    del text
    separator = max(";\t|,", key=lambda mark: sum(mark in line for line in head[:-1] or head))
    cells = list(csv.reader(head, delimiter=separator))
    width = Counter(map(len, cells)).most_common(1)[0][0] if cells else 0
    skip = next((i for i, row in enumerate(cells) if len(row) == width), 0)  # a banner has another width
    rows = [[cell.strip() for cell in row] for row in cells[skip:]]
    header: int | list[int] | None = None if rows and all(map(is_value, rows[0])) else 0
    levels = next((i for i, row in enumerate(rows[:4]) if i >= 2 and row and row[0].isalpha() and not any(row[1:])), 0)
    arguments = dict(sep=separator, skiprows=skip, encoding=encoding, low_memory=False, skipinitialspace=True)
    buffer = io.BytesIO(blob)  # text would take four bytes a letter there
    if levels:  # yfinance: prices, tickers, and a line with the index's name alone
        return pd.read_csv(buffer, header=[0, 1], index_col=0, **arguments).rename_axis(rows[levels][0])
    # A time of day such as 093100 must keep its zeros, and so must the day beside it.
    clocks: dict[int, type] = {}
    if header is None and width >= 7 and times.is_clock(pd.Series([rows[0][1]])):
        clocks = {0: str, 1: str}
    elif header == 0:
        named = [times.plain(cell) for cell in rows[0]]
        clocks = {named.index(name): str for name in ("date", "time")} if {"date", "time"} <= set(named) else {}
    cells_below = pd.Series([cell for row in rows[1:] for cell in row], dtype=str)
    columns = zip(*(row for row in rows[1:] if len(row) == width), strict=True)
    commas = has_decimal_commas(cells_below) or any(map(_have_all_commas, columns))
    pointed = cells_below.str.fullmatch(r"-?[\d,]*\.\d+")  # then a comma ends thousands
    both = cells_below.str.fullmatch(rf"-?{THOUSANDS},\d+").any()  # 1.234,5: then so does a point
    if both:
        pointed &= ~cells_below.str.fullmatch(f"-?{THOUSANDS}")
    decimal = "," if separator == ";" and commas and not pointed.any() else "."
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            table = pd.read_csv(
                buffer, header=header, index_col=False, decimal=decimal, dtype=clocks or None, **arguments
            )
        except pd.errors.ParserWarning:  # pandas would drop the cells that are too many
            raise ValueError(f"its rows have more cells than the {width} names of its columns") from None
    for place in range(table.shape[1]) if both and decimal == "," else ():
        cells = table.iloc[:, place]
        if not pd.api.types.is_numeric_dtype(cells):
            values = read_written(cells, commas=True)
            if values.notna().any() and _are_read(values, cells):
                table.isetitem(place, values)
    return table


def has_decimal_commas(text: pd.Series) -> bool:
    """Say whether one of many cells has a comma where thousands cannot end."""
    text = text.str.strip()[text.str.contains(",", regex=False)]
    return bool(len(text)) and not text.str.fullmatch(r"\D*[1-9]\d{0,2}(,\d{3})+(\.\d+)?\D*").all()


def _have_all_commas(cells: Sequence[str]) -> bool:
    """Say whether each number of a column has one comma: of thousands, what is below would have none."""
    numbers = [cell for cell in cells if re.fullmatch(r"-?\d+(,\d+)?", cell)]
    return len(numbers) > 1 and all("," in number for number in numbers)


def read_written(column: pd.Series, commas: bool = False, sizes: bool = True) -> pd.Series:
    """Read numbers as people and sites write them: 1,234.5, 1.234,5 (commas: before the decimals), $1.20, 7 %.

    sizes: also 89.12K. NaN for what is none: a point or comma that stands elsewhere would shift what it is read as.
    """
    text = column.astype(str).str.strip().str.replace(r"^[$€£¥]\s*|\s*[%€]$", "", regex=True)
    size: Any = 1.0
    if sizes:
        size = text.str[-1:].str.upper().map(SIZES).fillna(1.0)
        text = text.where(size == 1.0, text.str[:-1].str.strip())
    text = text.str.replace(GROUPED, lambda found: re.sub(r"[^\d-]", "", found[0]), regex=True)
    whole = text.str.fullmatch(WITH_COMMAS if commas else WITH_POINTS, flags=re.IGNORECASE)
    if commas:
        text = text.str.replace(".", "", regex=False)
    return pd.to_numeric(text.str.replace(",", "." if commas else "", regex=False).where(whole), errors="coerce") * size


def _are_read(values: pd.Series, column: pd.Series) -> bool:
    """Say whether each cell of a column became a number, or means none."""
    return bool((values.notna() | _is_nothing(column)).all())


def _is_nothing(column: pd.Series) -> pd.Series:
    return column.isna() | column.astype(str).str.strip().isin(NOTHING)


def is_value(cell: str) -> bool:
    """Say whether a cell holds a number or a time, and is no name of a column."""
    cell = cell.strip()
    try:
        float(cell or "nan")
        return True
    except ValueError:
        return bool(re.fullmatch(r"\d[\d:/.,+\-TZ ]*", cell))


def read_numbers(
    column: pd.Series, name: str, where: str, written: Callable[[pd.Series], pd.Series] | None = None
) -> np.ndarray:
    """Read a column of numbers, blanks as NaN; DataError with the first cell that is neither.

    written: reads those that are written otherwise, where some are; NaN for what is no number.
    """
    values = pd.to_numeric(column, errors="coerce")
    lost = values.isna() & column.notna()
    if lost.any() and written:
        values = written(column)
        lost = values.isna() & ~_is_nothing(column)
    if not lost.any():
        values = values.to_numpy(float, na_value=np.nan)
        lost = pd.Series(np.isinf(values))
    if lost.any():
        row = int(np.flatnonzero(lost)[0])
        blank = "; leave such cells blank" if np.isinf(pd.to_numeric(column.iloc[row], errors="coerce")) else ""
        raise DataError(f"{where}: {name} must hold numbers; row {row + 1} has {str(column.iloc[row])[:60]!r}{blank}")
    return values
