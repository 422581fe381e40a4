"""A person's own bars: files, folders and frames in any usual spelling, joined to one table a series."""

import glob
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from cpbkit.config.experiment import COINS, Experiment, vary
from cpbkit.data.klines import (
    DAY_NS,
    INTERVAL_SECONDS,
    OHLC,
    QUOTES,
    SECOND_NS,
    Klines,
    SourceFile,
    check_interval,
    find_interval,
    grid_phase,
    series_name,
    split_name,
    stamp,
    validate,
)
from cpbkit.data.layouts import BITFINEX, OTHER_NAMES, Sheet, read_sheets, read_symbol
from cpbkit.data.request import Order, listing_of, usable
from cpbkit.data.tables import KINDS, load, with_index
from cpbkit.data.venue import Contract
from cpbkit.errors import CpbkitError, DataError, check_name
from cpbkit.texts import one_line

VENUES = ("", "binance", "other")  # "" is guessed from the files' names
MANY = 10_000  # files of a folder
JUNK = 500  # files without bars, after which the others are not opened
LISTED = 30  # lines of what is not taken
NOTES = (".txt", ".dat")  # may hold anything; what is called .csv should be a table
NOT_BARS = re.compile(r"funding|premium|[-_]mark[-_.]|[-_]index[-_.]|aggtrades|[-_]trades[-_.]|bookdepth|metrics", re.I)
# As Binance's archive names files; that of HTX says 60min.
ARCHIVE_NAME = re.compile(r"[A-Z0-9]+-\d+(?:[smhdw]|mo)-\d{4}-\d{2}(-\d{2})?\.(csv|zip)")
WORDS = frozenset(  # of files' names that are no symbols
    """data ohlcv ohlc kline klines candle candles candlestick history historical hist spot futures um perp perpetual
    swap price prices bars binance bybit okx kraken coinbase bitfinex bitstamp gemini kucoin yahoo daily hourly minute
    of coin investing com coinmarketcap intraday from to""".split()
)


@dataclass(frozen=True)
class Found:
    """What a person's files hold."""

    klines: dict[str, Klines]  # by series
    refused: dict[str, str] = field(default_factory=dict)  # series or file: why its bars cannot be used
    left_out: dict[str, str] = field(default_factory=dict)  # file: why it is no file of bars

    def settle(self, experiment: Experiment) -> Experiment:
        """Return the experiment with the series that are there, and those that were asked for by name and are not."""
        data, names = experiment.data, list(self.klines)
        there = list(dict.fromkeys(split_name(name)[1] for name in names))
        for symbol in data.symbols:
            wanted = [series_name(symbol, interval) for interval in data.intervals or there]
            if data.intervals or not any(split_name(name)[0] == symbol for name in names):
                names += [name for name in wanted if name not in names]
        symbols, intervals = (tuple(dict.fromkeys(part)) for part in zip(*map(split_name, names), strict=True))
        return vary(experiment, symbols=symbols, intervals=intervals, series=tuple(names))

    def text(self) -> str:
        """List what is taken, and what is not and why."""
        lines = []
        for name, bars in self.klines.items():
            p = bars.passport
            files = p.files[0].name if len(p.files) == 1 else f"{len(p.files)} files, {p.files[0].name} first"
            lines.append(f"{name:16} {p.first} to {p.last}  {p.got:>9,} bars  {files}")
            lines += [f"{'':16} {note}" for note in p.notes]
        others = [f"not taken: {name}: {why}" for name, why in (self.refused | self.left_out).items()]
        lines += others[:LISTED]
        lines += [f"not taken: {len(others) - LISTED:,} more"] if len(others) > LISTED else []
        return "\n".join(map(one_line, lines))


def read_klines(path: str | os.PathLike, series: str = "") -> Klines:
    """Read bars of one series from CSV, Parquet, feather, JSON or Excel, whatever its columns and times are called.

    series: `BTCUSDT_15m`; without it symbol and interval are taken from the content and the file's name.
    Times are bar starts: seconds, ms, us or ns since 1970 (row by row), or text; without a zone they are UTC.
    Rows without any price are dropped, the last bar too while it is not closed. Raises DataError.
    """
    path = pathlib.Path(path)
    pieces = _read_file(path, series)
    if len(names := {piece.series for piece in pieces}) > 1:
        raise DataError(f"{path.name} holds {len(names)} series: {', '.join(sorted(names)[:8])}. Name one")
    return _join(pieces, "")


def read_files(
    where: str | pathlib.Path,
    symbols: Iterable[str] = (),
    intervals: Iterable[str] = (),
    *,
    start: str = "",
    end: str = "",
    venue: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Read every file of bars in a file, a folder or a pattern, and join the pieces of each series.

    symbols, intervals: those to take; without them all that is there. start, end: UTC days, both inclusive.
    venue: binance gives its halts, listings and the two assets of LUNA; other none; "" guesses by the names.
    tell hears how far it is.
    A file that cannot be used stops no other: it is in `refused`, one that is no file of bars in `left_out`.
    Raises DataError where there is no file, or none of bars; of very many, when the first of them are none.
    """
    check_name("venue", venue, VENUES)
    symbols, intervals = list(symbols), [check_interval(one) for one in intervals]
    paths = find_files(where)
    asked = symbols[0] if len(symbols) == 1 and len(paths) == 1 else ""  # of a file that does not say
    pieces: dict[str, list[_Piece]] = {}
    refused: dict[str, str] = {}
    left_out: dict[str, str] = {}
    others: set[str] = set()  # series that were not asked for
    for i, path in enumerate(paths):
        name = one_line(path.name)
        if i and not i % 100:
            tell(f"reading files: {i:,} of {len(paths):,}")
        if reason := _is_no_file_of_bars(path):
            left_out[name] = reason
            continue
        if len(refused) >= JUNK and not pieces and not others:
            first, why = next(iter(refused.items()))
            raise DataError(
                f"{where}: the first {JUNK} files hold no bars; name a folder nearer to them. {first}: {why}"
            )
        try:
            by_folder = _folder_symbol(path)
            for piece in _read_file(path, asked=asked or by_folder):
                symbol, interval = split_name(piece.series)
                if symbol in (symbols or [symbol]) and interval in (intervals or [interval]):
                    pieces.setdefault(piece.series, []).append(piece)
                else:
                    others.add(piece.series)
        except CpbkitError as error:
            # What lies beside bars and names no symbol describes them, and so do notes.
            symbol, interval = read_name(path.name)
            notes = path.suffix.lower() in NOTES and not interval and not symbol.endswith((*QUOTES, *COINS))
            beside = (path.suffix.lower() == ".json" and not symbol) or (notes and not _has_table(path))
            (left_out if beside else refused)[name] = str(error).removeprefix(f"{name}: ")
    klines = {}
    for name in sorted(pieces, key=lambda name: (split_name(name)[0], INTERVAL_SECONDS[split_name(name)[1]])):
        try:
            klines[name] = _join(pieces[name], venue, start, end)
        except DataError as error:
            refused[name] = str(error).removeprefix(f"{name}: ")
    if not klines:
        reasons = "; ".join(f"{name}: {why}" for name, why in [*refused.items(), *left_out.items()][:5])
        there = f"It has {', '.join(sorted(others)[:20])}{' ...' if len(others) > 20 else ''}. " if others else ""
        raise DataError(f"{where} holds no bars that were asked for. {there}{reasons}".rstrip(" ."))
    return Found(klines, refused, left_out)


def from_frames(
    frames: Mapping[str, pd.DataFrame | Klines], *, start: str = "", end: str = "", venue: str = "other"
) -> dict[str, Klines]:
    """Take frames of bars as files are taken: {"BTCUSDT_1h": df}, or {"BTCUSDT": df} with the interval of its times.

    A frame has its times as index or as a column, in any of the spellings that files may have. Raises DataError.
    """
    check_name("venue", venue, VENUES)
    klines = {}
    for name, frame in frames.items():
        if isinstance(frame, Klines):
            klines[name] = frame
            continue
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"{name}: bars come as a pandas DataFrame; got {type(frame).__name__}")
        table = frame if isinstance(frame.index, pd.RangeIndex) else frame.rename_axis(frame.index.name or "time")
        series = name if "_" in name and find_interval(name.rpartition("_")[2]) else ""
        sheets = read_sheets(with_index(table, name), name)
        pieces = [_piece(sheet, name, SourceFile(name), series, asked=name) for sheet in sheets]
        if len({piece.series for piece in pieces}) > 1:
            raise DataError(f"{name}: a frame holds one series; got {', '.join(piece.series for piece in pieces[:8])}")
        bars = _join(pieces, venue, start, end)
        klines[bars.passport.series] = replace(bars, passport=replace(bars.passport, source="frame"))
    return klines


def find_files(where: str | os.PathLike) -> list[pathlib.Path]:
    """List the files that a path, a folder or a pattern means, those of folders inside too; DataError for none."""
    path = pathlib.Path(where).expanduser()
    if path.is_file():
        return [path]
    found: Iterable[pathlib.Path] = ()
    if path.is_dir():
        found = path.rglob("*")
    elif glob.has_magic(str(path)):
        found = map(pathlib.Path, glob.glob(str(path), recursive=True))
    else:
        load(path)  # says what is there instead
    files, runs = [], set()
    try:
        found = list(itertools.islice(found, 100 * MANY))
    except RecursionError:
        raise DataError(f"{where} holds folders inside folders without end; name a folder nearer to the bars") from None
    for one in found:
        if one.name == "experiment.json":
            runs.add(one.parent)
        elif one.is_file() and not any(part.startswith(".") for part in one.parts[len(path.parts) :]):
            files.append(one)
        if len(files) > MANY:
            raise DataError(f"{where} holds more than {MANY:,} files; name a folder nearer to the bars")
    files = [one for one in files if not runs.intersection(one.parents)]  # what a sweep has left among them
    if not files:
        raise DataError(f"{where} holds no file")
    return sorted(files)


def _folder_symbol(path: pathlib.Path) -> str:
    """Return the symbol that a folder is named after, as in BTCUSDT/1h/2025-01-01.csv or symbol=BTCUSDT/0.parquet."""
    names = [part.rpartition("=")[2] for part in reversed(path.parent.parts[-3:])]
    symbols = [read_name(name)[0] for name in names if name.isupper()]
    return next((symbol for symbol in symbols if symbol.endswith(QUOTES)), "")


def _is_no_file_of_bars(path: pathlib.Path) -> str:
    kind = path.name.lower().rpartition(".")[2]
    if kind not in KINDS:
        return f"a file of bars is .csv, .parquet, .feather, .json or .xlsx; this is .{kind}"
    if found := NOT_BARS.search(path.name):
        return f"its name says {found[0].strip('-_.')}, which is no trade price"
    return ""


def _has_table(path: pathlib.Path) -> bool:
    """Say whether most lines of a text have five cells, as bars have."""
    with path.open("rb") as file:
        lines = file.read(1 << 16).splitlines()
    return sum(len(re.findall(rb"[,;\t|]", line)) >= 4 for line in lines) > len(lines) / 2


@dataclass(frozen=True)
class _Piece:
    """What one file holds of a series."""

    series: str
    frame: pd.DataFrame
    file: SourceFile
    notes: tuple[str, ...]


def _read_file(path: pathlib.Path, series: str = "", asked: str = "") -> list[_Piece]:
    """Read the pieces of a file. series: what it must be; asked: the symbol, if the file does not say."""
    table, digest = load(path)
    try:
        table, by_folder, notes = _from_lean(path, table)
        sheets = [replace(one, notes=(*notes, *one.notes)) for one in read_sheets(table, path.name)]
    except (OverflowError, ValueError) as error:  # a number of four hundred digits, the year 148108, bytes as a price
        raise DataError(f"{path.name}: it cannot be read: {str(error)[:300]}") from None
    if series and len(sheets) > 1:
        sheets = [sheet for sheet in sheets if series_name(sheet.symbol, sheet.interval) == series] or sheets
    file = SourceFile(one_line(path.name), digest)
    return [_piece(sheet, path.name, file, series, by_folder or asked, len(sheets) == 1) for sheet in sheets]


# equity/usa/minute/aapl/20240122_trade.zip, crypto/coinbase/hour/btcusd_trade.zip
LEAN = re.compile(
    r"/(equity|crypto|cryptofuture)/\w+/(minute|hour|daily)/(?:(\w+)/(\d{8})_)?(\w+?)(?:_(trade|quote))?\.(?:zip|csv)$"
)


def _from_lean(path: pathlib.Path, table: pd.DataFrame) -> tuple[pd.DataFrame, str, tuple[str, ...]]:
    """Read a table of QuantConnect's Lean, whose folders say what it does not: its table, symbol and notes."""
    found = LEAN.search(path.absolute().as_posix())
    if not found or not pd.api.types.is_integer_dtype(table.columns.dtype):
        return table, "", ()
    kind, length, folder, day, stem, what = found.groups()
    if "quote" in (what, stem):
        raise DataError(f"{path.name}: it holds bids and asks; take Lean's file of trades")
    if day:
        opened = pd.to_datetime(day, format="%Y%m%d") + pd.to_timedelta(table[0], unit="ms")
    else:
        opened = pd.to_datetime(table[0], format="%Y%m%d %H:%M")
    prices, notes = table[[1, 2, 3, 4]], []
    if kind == "equity":
        prices, notes = prices / 10_000, ["Lean's prices of shares were read as ten-thousandths of a dollar."]
    if kind == "equity" and length != "daily":
        opened = opened.dt.tz_localize("America/New_York").dt.tz_convert("UTC")
        notes.append("Lean's times of shares were read as New York's.")
    return pd.concat([opened, prices, table[table.columns[5:]]], axis=1), (folder or stem).upper(), tuple(notes)


def _piece(sheet: Sheet, name: str, file: SourceFile, series: str, asked: str, alone: bool = True) -> _Piece:
    """Name the series of a sheet, which may be alone in its file; DataError where name and content disagree."""
    notes = list(sheet.notes)
    symbol, interval = read_name(name)
    if series:
        named = sheet.symbol or symbol
        symbol, interval = split_name(series)
        if named and not (symbol.startswith(named) or named.startswith(symbol)):
            raise DataError(f"{name}: {series} was asked for, but these are bars of {named}")
        if sheet.interval not in ("", interval):
            raise DataError(f"{name}: {series} was asked for, but the bars start {sheet.interval} apart")
    elif sheet.symbol and not alone:
        symbol = sheet.symbol
    elif sheet.symbol and symbol and not (symbol.startswith(sheet.symbol) or sheet.symbol.startswith(symbol)):
        raise DataError(f"{name}: its name says {symbol}, its content {sheet.symbol}. Rename the file")
    elif interval and sheet.interval not in ("", interval):
        raise DataError(f"{name}: its name says {interval}, but the bars start {sheet.interval} apart. Rename the file")
    interval = sheet.interval or interval
    if not interval:
        raise DataError(f"{name}: the interval is read from two bars or more, or from the name; got one bar")
    symbol = symbol if series else max(sheet.symbol, symbol, key=len) or asked
    if symbol in COINS:
        notes.append(f"{symbol} was taken as {symbol}USDT.")
        symbol += "USDT"
    if not symbol:
        raise DataError(
            f"{name}: no symbol in the file's name or in a column; name the series, such as BTCUSDT_{interval}, by "
            "renaming the file, or in a sweep of this one file by --symbols"
        )
    return _Piece(series_name(symbol, interval), sheet.frame, file, tuple(map(one_line, notes)))


def read_name(name: str) -> tuple[str, str]:
    """Return the symbol and the interval that a file's name says, "" for what it does not."""
    stem = re.sub(rf"(\.({'|'.join(KINDS)}))+$", "", name, flags=re.I)
    stem = re.sub(r"^DAT_(?:ASCII|MT|NT|XLSX|MS)_", "", stem)
    interval, rest = "", stem
    # 1h, 15m, 1-min, 60min, M15 and H1 of MetaTrader, hourly; a bare d stands alone in CryptoDataDownload's names.
    for match in re.finditer(r"(?<![A-Za-z0-9])(\d{1,3}[-_ ]?[A-Za-z]+|[MHDW]\d{1,3}|[a-z]+)(?![A-Za-z0-9])", stem):
        text = match[1]
        if re.fullmatch(r"[MHDW]\d+", text):
            text = text[1:] + text[0].lower()
        word = text.lower() if not text[-1:] == "M" or len(text) > 2 else text
        if (found := find_interval(word)) and not (word.isalpha() and word not in ("d", "daily", "hourly", "minute")):
            interval = interval or found
            rest = f"{rest[: match.start()]}{' ' * len(match[1])}{rest[match.end() :]}"
    rest = re.sub(BITFINEX, r"\1\2", rest)
    # Without the words that are no symbols, as in BTC_price_usd_ohlc, unless nothing is left: PERP and DATA are coins.
    bare = re.sub(r"[A-Za-z]+[-_ .,()]*", lambda m: "" if m[0].strip("-_ .,()").lower() in WORDS else m[0], rest)
    for upper, quote in itertools.product((bare.upper(), rest.upper()), QUOTES):
        pair = re.search(rf"(?<![A-Z])(?:BINANCE|BYBIT|OKX)?[-_ ]*([A-Z0-9]{{2,15}}?)[-_/]?{quote}(?![A-Z])", upper)
        if pair:
            return read_symbol(pair[1] + quote), interval
    tokens = [token for token in re.split(r"[-_ .,()]+", rest) if re.search(r"[A-Za-z]", token)]
    tokens = [token for token in tokens if token.lower() not in WORDS]
    whole = tokens[0] if len(tokens) == 1 else ""
    known = whole.isupper() or whole.upper() in (*COINS, *OTHER_NAMES)
    return read_symbol(whole) if known else "", interval


def _join(pieces: list[_Piece], venue: str, start: str = "", end: str = "") -> Klines:
    """Join the pieces of one series and let them in; DataError where they do not agree."""
    name = pieces[0].series
    symbol, interval = split_name(name)
    notes = list(dict.fromkeys(note for piece in pieces for note in piece.notes))
    columns = [column for column in pieces[0].frame if all(column in piece.frame for piece in pieces)]
    if lost := sorted({column for piece in pieces for column in piece.frame} - set(columns)):
        notes.append(f"Not every file has {', '.join(lost)}, so it was left out.")
    frame = pd.concat([piece.frame[columns] for piece in pieces])
    origin = np.repeat(np.arange(len(pieces)), [len(piece.frame) for piece in pieces])
    frame, grown = _settle_doubles(frame, origin, pieces)
    if grown:
        notes.append(f"{grown} bars that were saved before they closed gave way to the whole ones.")
    frame, phase = _on_one_grid(frame, name, interval, notes)
    now = pd.Timestamp.now("UTC")
    if start or end:
        inside = frame.index >= pd.Timestamp(start or 0, tz="UTC")
        if end:
            inside &= frame.index < pd.Timestamp(end, tz="UTC") + pd.Timedelta(days=1)
        if not inside.any():
            there = f"{frame.index.min():%Y-%m-%d} .. {frame.index.max():%Y-%m-%d}"
            raise DataError(f"{name}: no bar in {start or 'its start'} .. {end or 'its end'}; the files have {there}")
        frame = frame[inside]
    files = list({piece.file.name: piece.file for piece in pieces}.values())
    market = ""
    named = any("binance" in file.name.lower() or ARCHIVE_NAME.fullmatch(file.name) for file in files)
    if venue == "binance" or (not venue and named):
        market = "um" if re.search(r"[-_](um|futures|perp|swap)", files[0].name, re.I) else "spot"
        starts, step = frame.index.asi8, INTERVAL_SECONDS[interval] * SECOND_NS
        first, after = int(starts.min()), int(starts.max()) + step
        order = Order(symbol, interval, market, first, after, now.value, Contract(symbol, 1))
        order = usable(replace(order, listing=listing_of(symbol, market)))
        frame = frame[starts >= order.first]
        guess = "" if venue else " (as the name says; venue other if they are not)"
        notes += [f"Bars of Binance, {market}{guess}.", *order.notes]
    return validate(frame, name, source="file", market=market, files=files, now=now, phase=phase, notes=notes)


def _settle_doubles(frame: pd.DataFrame, origin: np.ndarray, pieces: list[_Piece]) -> tuple[pd.DataFrame, int]:
    """Keep one row a bar: of equal rows any, of one that grew until it closed the last state; DataError else.

    Returns the frame, oldest first, and how many bars had been saved before they closed.
    """
    starts, values = frame.index.asi8, frame.to_numpy(float)
    if (np.diff(starts) > 0).all():  # as most files are
        return frame, 0
    o, h, lo = values[:, :3].T
    volume = frame["volume"].to_numpy(float) if "volume" in frame else np.zeros(len(frame))
    order = np.lexsort((origin, h - lo, volume, starts))  # the widest state of a bar comes last
    a, b = order[:-1], order[1:]
    same_bar = starts[a] == starts[b]
    equal = np.isclose(values[a, :4], values[b, :4], rtol=1e-9, atol=0).all(1) & np.isclose(volume[a], volume[b])
    grew = np.isclose(o[a], o[b], rtol=1e-9) & (h[a] <= h[b]) & (lo[a] >= lo[b]) & (volume[a] <= volume[b])
    ends = np.array([piece.frame.index.asi8.max() for piece in pieces])
    snapshot = starts[a] == ends[origin[a]]  # the last row of a file: it may have been saved at any moment
    conflict = same_bar & ~equal & ~grew & ~(snapshot & (origin[a] != origin[b]))
    if conflict.any():
        i = int(np.flatnonzero(conflict)[np.argmin(starts[a][conflict])])
        said = [f"{pieces[origin[k]].file.name} says {' '.join(f'{x:g}' for x in values[k, :4])}" for k in (a[i], b[i])]
        raise DataError(
            f"{int(conflict.sum())} bars have two rows that disagree; the first at {stamp(starts[a[i]])}: "
            f"{said[0]}, {said[1]} ({', '.join(OHLC)}). Are these two markets, two coins without a symbol column, "
            "or times of a clock that was put back?"
        )
    kept = order[np.append(~same_bar, True)]
    return frame.iloc[kept], int((same_bar & ~equal).sum())


def _on_one_grid(frame: pd.DataFrame, name: str, interval: str, notes: list[str]) -> tuple[pd.DataFrame, int | None]:
    """Return the frame and where its bars start on the grid, None for the usual place (ns).

    Venues start days at other hours (16:00 UTC in Hong Kong), exchanges hours at other minutes (New York's 09:30).
    """
    step = INTERVAL_SECONDS[interval] * SECOND_NS
    starts = frame.index.asi8
    phases, counts = np.unique(starts % step, return_counts=True)
    most = phases[counts.argmax()]
    if interval == "1d" and len(phases) == 2 and phases[1] - phases[0] == 3600 * SECOND_NS:  # summer time
        notes.append("Days start at midnight of a place with summer time; each was written to its date in UTC.")
        return frame.set_axis(pd.DatetimeIndex((starts + DAY_NS // 2) // DAY_NS * DAY_NS, tz="UTC")), None
    off = int(len(starts) - counts.max())
    if off > max(2, len(starts) // 100):
        where = stamp(starts[starts % step != most][0])
        raise DataError(f"{name}: {off} of {len(starts)} rows stand off the {interval} grid; the first at {where}")
    if most == grid_phase(interval, starts):
        return frame, None
    notes.append(f"Bars start {pd.Timedelta(int(most))!s} after the usual {interval} grid (UTC), and stay there.")
    return frame, int(most)
