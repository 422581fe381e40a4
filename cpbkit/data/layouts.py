"""What the columns of a person's bars mean, whoever exported them; what had to be guessed is said."""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cpbkit.data import times
from cpbkit.data.klines import INTERVAL_SECONDS, OHLC, OHLCV, QUOTES, SECOND_NS, find_interval, stamp
from cpbkit.data.tables import SYMBOL, has_decimal_commas, read_numbers, read_written
from cpbkit.errors import DataError

# Column spellings seen in the wild, in letters and digits only.
SPELLINGS = {
    "open": "open o openprice priceopen bidopen openbid firstprice eröffn eröffnung apertura ouv 开盘 開盤 開市 开盘价",
    "high": "high h highprice pricehigh bidhigh highbid max hoch máximo maximo plushaut 高 最高 最高价",
    "low": "low l lowprice pricelow bidlow lowbid min tief mínimo minimo plusbas 低 最低 最低价",
    "close": "close c closeprice priceclose closelast bidclose closebid last lastprice zuletzt schluss último ultimo"
    " dernier 收盘 收盤 收市 收盘价",
    "volume": "volume vol v basevolume baseassetvolume volumetraded volumefrom volbase volumebase totalvolume qty"
    " quantity volumen 成交量 交易量",
    "quote_volume": "quotevolume quoteassetvolume turnover volumecurrency volumequote volumeto volquote volccyquote"
    " volccy volumeusd amount cost value 成交额 成交額",
    "trades": "trades count tradecount tradescount numberoftrades numtrades n transactions trade",
    "taker_buy_volume": "takerbuyvolume takerbuybasevolume takerbuybaseassetvolume takerbuybase",
}
# Nothing was traded at them, which the Passport notes.
BIDS = "bidopen openbid bidhigh highbid bidlow lowbid bidclose closebid".split()
TICKS = ("tickvol", "tickvolume", "ticks")
SYMBOLS = (
    "symbol ticker tic pair instid instrument instrumentname productid currencypair asset coin name s market".split()
)
SERIES = 5_000  # of a file
PERIODS = ("interval", "timeframe", "tf", "resolution", "granularity")
CLOSED = ("confirm", "isclosed", "closed", "isfinal", "iscomplete", "complete", "windowclose")
# How rows without names are ordered after the time, as public APIs send them; what comes later has to show itself.
ORDERS = ("open high low close", "low high open close", "open close high low", "quote_volume close high low open")
ARCHIVE = (*OHLCV, "close_time", "quote_volume", "trades", "taker_buy_volume", "taker_buy_quote", "ignore")
MONEY = "USDT USDC FDUSD TUSD USDP BUSD DAI USD1 USDE EURI AEUR USD EUR GBP JPY KRW TWD TRY BRL AUD".split()
OTHER_NAMES = {"XBT": "BTC", "XXBT": "BTC", "XDG": "DOGE", "BITCOIN": "BTC", "ETHEREUM": "ETH"}
BITFINEX = re.compile(r"(?<![A-Za-z0-9])t(?=[A-Z0-9:]{6})([A-Z0-9]{3,}):?([A-Z0-9]{3,})(?![A-Za-z0-9])")  # tBTCUSD


@dataclass(frozen=True)
class Sheet:
    """The rows of one series in one file, in the order of the file."""

    symbol: str  # as the content says, "" where it does not
    interval: str  # as the times say, "" where there is one row
    frame: pd.DataFrame  # index: bar starts, UTC; columns as of Klines, volume where there is one
    notes: tuple[str, ...] = ()


def read_sheets(table: pd.DataFrame, where: str) -> list[Sheet]:
    """Read the series of a table, one a symbol and interval that its columns name. where: for messages.

    Raises DataError for tables that are no bars, for cells that are no numbers, and for what contradicts itself.
    """
    table, notes = _named(table, where)
    return [_sheet(part, symbol, where, notes) for symbol, part in _split(table, where)]


def read_symbol(text: str) -> str:
    """Return the symbol that a spelling means, "" for none: BTC/USDT, XBTUSD, BINANCE:BTCUSDT, KRW-BTC, BTC-USD."""
    text = re.sub(BITFINEX, r"\1\2", text.strip()).upper()
    before, colon, after = text.partition(":")
    if colon:
        text = before if "/" in before else after  # BTC/USDT:USDT of ccxt, or a venue's name in front
    text = re.sub(r"[-_](PERP|PERPETUAL|SWAP|SPOT)$|[-_./]P$", "", text)
    parts = re.split(r"[-_/. ]", text)
    if len(parts) == 2 and parts[0] in MONEY and parts[1] not in MONEY:
        text = parts[1] + parts[0]  # Upbit and Bittrex name the money first
    plain = re.sub(r"[\W_]", "", re.sub(r"_(USDT|USDC|USD)_\1$", r"_\1", text))  # BTC_USDT_USDT: a future of freqtrade
    for quote in QUOTES:
        base = re.sub(r"^X([A-Z]{3})Z?$", r"\1", plain.removesuffix(quote))  # XXBTZUSD of Kraken
        if plain.endswith(quote) and base in OTHER_NAMES:
            return OTHER_NAMES[base] + quote
    return OTHER_NAMES.get(plain, plain) if not plain.isdigit() and len(plain) <= 30 else ""


def _split(table: pd.DataFrame, where: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Take a table apart by its columns of symbols and of intervals, where it has some."""
    plain = times.plain_names(table)
    symbols = next((plain[name] for name in SYMBOLS if name in plain and _holds_symbols(table[plain[name]])), None)
    named = [plain[name] for name in PERIODS if name in plain]
    periods = next((one for one in named if all(find_interval(str(each)) for each in table[one].unique()[:100])), None)
    by = [column for column in (symbols, periods) if column is not None]
    if not by:
        yield "", table.reset_index(drop=True)
        return
    if (series := len(table[by].drop_duplicates())) > SERIES:
        raise DataError(f"{where}: a file may hold {SERIES:,} series; got {series:,} by {', '.join(map(str, by))}")
    for key, part in table.groupby(by, sort=False, dropna=False):
        yield read_symbol(str(key[0])) if symbols is not None else "", part.reset_index(drop=True)


def _holds_symbols(column: pd.Series) -> bool:
    if pd.api.types.is_numeric_dtype(column):
        return False
    found = [read_symbol(str(one)) for one in column.unique()[:100]]
    named = times.plain(column.name) != "market"  # else it may say spot
    return all(found) and (named or all(one.endswith(QUOTES) for one in found))


def _named(table: pd.DataFrame, where: str) -> tuple[pd.DataFrame, list[str]]:
    """Name the columns of a table without header; return what was guessed."""
    if not pd.api.types.is_integer_dtype(table.columns.dtype):
        return table, []
    if SYMBOL in table.columns:
        named, notes = _named(table.drop(columns=SYMBOL), where)
        return named.assign(symbol=table[SYMBOL]), notes
    width = len(table.columns)
    if width >= 7 and times.is_clock(table[1]):
        return table.set_axis([*("date", "time", *OHLCV), *range(7, width)][:width], axis=1), []
    if width < 5:
        raise DataError(f"{where}: bars need a time and four prices; got {width} columns without names")
    rows = table.iloc[:, 1:].apply(pd.to_numeric, errors="coerce").to_numpy(float)
    order = _best_order(rows)
    names = dict(enumerate(order.split()))
    if order == ORDERS[3]:
        names[5] = "volume"
    elif width >= 11:
        names = dict(enumerate(ARCHIVE))
    else:
        names |= _name_rest(table, rows, names)
    said = [names.get(i, "-") for i in range(width - 1)]
    notes = []
    if order != ORDERS[0] or width not in (6, 12):
        notes.append(f"No header; the columns were read as time, {', '.join(said)}.")
    if width == 5:
        notes.append(
            "CoinGecko stamps such rows by their close: if these are its, name the columns, the first close_time."
        )
    return table.set_axis(["time", *(names.get(i, f"column {i + 2}") for i in range(width - 1))], axis=1), notes


def _best_order(rows: np.ndarray) -> str:
    """Return the order of ORDERS in which high and low are the extremes, and each open is near the close before."""
    misfit = {}
    for order in ORDERS:
        places = {name: i for i, name in enumerate(order.split())}
        if max(places.values()) >= rows.shape[1]:
            continue
        o, h, lo, c = (rows[:, places[name]] for name in OHLC)
        wrong = (h < np.maximum(np.maximum(o, c), lo)) | (lo > np.minimum(o, c))
        with np.errstate(divide="ignore", invalid="ignore"):
            ascending = np.abs(np.log(o[1:] / c[:-1])), np.abs(np.log(o[:-1] / c[1:]))  # newest first: the other way
        steps = min((float(np.nanmean(step)) for step in ascending if np.isfinite(step).any()), default=0.0)
        misfit[order] = float(wrong.mean()), steps
    best = min(misfit, key=misfit.__getitem__)
    return ORDERS[0] if misfit[ORDERS[0]] <= misfit[best] else best


def _name_rest(table: pd.DataFrame, rows: np.ndarray, names: dict[int, str]) -> dict[int, str]:
    """Name what follows four prices, by what it looks like: a mean price, volume, a close time, money, a count."""
    places = {name: i for i, name in names.items()}
    low, high = rows[:, places["low"]], rows[:, places["high"]]
    found: dict[int, str] = {}
    for i in range(4, rows.shape[1]):
        column = rows[:, i]
        if ((column >= low) & (column <= high)).all() and not (low == high).all() and "volume" not in found.values():
            found[i] = "mean price"
        elif "volume" not in found.values():
            found[i] = "volume"
        elif (column > 1e9).all() and (column >= pd.to_numeric(table[0], errors="coerce").to_numpy(float)).all():
            found[i] = "close_time"
        elif i == rows.shape[1] - 1 and np.isin(column, (0, 1)).all() and (column == 0).sum() <= 1:
            found[i] = "confirm"
        elif "quote_volume" not in found.values() and _is_money(column, rows, found, low, high):
            found[i] = "quote_volume"
        elif "trades" not in found.values() and (column == np.floor(column)).all():
            found[i] = "trades"
    return found


def _is_money(column: np.ndarray, rows: np.ndarray, found: dict[int, str], low: np.ndarray, high: np.ndarray) -> bool:
    volume = rows[:, next(i for i, name in found.items() if name == "volume")]
    # Whichever of the two comes first: `_order_volumes` exchanges them.
    return max(_share_between(column, volume, low, high), _share_between(volume, column, low, high)) > 0.9


def _share_between(money: np.ndarray, volume: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """Return the share of traded bars whose money over volume is a price of the bar, with room for rounding."""
    traded = (volume > 0) & (money > 0)
    if not traded.any():
        return 0.0
    mean = money[traded] / volume[traded]
    return float(((mean >= 0.99 * low[traded]) & (mean <= 1.01 * high[traded])).mean())


def _sheet(table: pd.DataFrame, symbol: str, where: str, notes: list[str]) -> Sheet:
    plain, notes = times.plain_names(table), list(notes)
    plain = {**{re.sub(r"^\d[ab]?(?=[a-z])", "", name): column for name, column in plain.items()}, **plain}
    bare = {re.sub(r"\W*\(\w+\)$", "", str(column).strip()).lower(): column for column in table}  # Open (USDT)
    plain = {**{name: bare[name] for name in OHLC if name in bare}, **plain}
    found: dict[str, str] = {}
    for name, spellings in SPELLINGS.items():
        if spelling := next((one for one in spellings.split() if one in plain), None):
            found[name] = plain[spelling]
            if spelling in BIDS:
                notes.append(f"{name} is the bid's price (column {plain[spelling]}).")
    if "close" not in found and "price" in plain and "open" in found:
        found["close"] = plain["price"]
        notes.append(f"close was read from the column {plain['price']}.")
    _find_volumes(table, plain, found, notes, where)
    start = _find_time(table, plain)
    end = next((plain[name] for name in times.ENDS if name in plain), None)
    closes = None if end is None else table[end]
    if closes is None and _is_stamped_by_close(table, plain, where):
        start, closes = None, start
    absent = ["time"] if start is None and closes is None else []
    absent += [name for name in OHLC if name not in found]
    if absent:
        got = ", ".join(map(str, table.columns[:30]))
        then = "Rename the columns" + ("; `cpbkit series` takes tables without these" if len(absent) > 2 else "")
        raise DataError(
            f"{where}: bars need a column of start times and {', '.join(OHLC)}; got {got} "
            f"(nothing read as {', '.join(absent)}). {then}"
        )
    prices = [table[found[name]] for name in OHLC]
    commas = any(has_decimal_commas(p.astype(str)) for p in prices if not pd.api.types.is_numeric_dtype(p))
    read = functools.partial(read_written, commas=commas)
    columns = {name: read_numbers(table[found[name]], name, where, read) for name in SPELLINGS if name in found}
    frame = pd.DataFrame(columns)
    if {"tsevent", "rtype"} <= set(plain) and all(map(pd.api.types.is_integer_dtype, prices)):
        frame[list(OHLC)] /= 1e9
        notes.append("Prices were read as billionths, as Databento writes them.")
    _order_volumes(frame, notes)
    if "volume" in frame and frame["volume"].isna().all():  # of an index: a column of blanks
        del frame["volume"]
    unpriced = frame[list(OHLC)].isna().all(axis=1)
    kept = ~unpriced
    if flag := next((plain[name] for name in CLOSED if name in plain), None):
        open_ = table[flag].astype(str).str.lower().isin(("0", "0.0", "false"))
        if 0 < int(open_.sum()) <= 2:
            notes.append(f"{int(open_.sum())} rows that say they are not closed ({flag}) were dropped.")
            kept &= ~open_
    if unpriced.any():
        notes.append(f"{int(unpriced.sum())} rows without a price were dropped.")
    opened, interval = _read_starts(start, closes, where, notes)
    frame = frame.set_axis(opened)[kept.to_numpy()]
    return Sheet(symbol, interval, frame, tuple(notes))


def _find_time(table: pd.DataFrame, plain: dict[str, str]) -> pd.Series | None:
    if dated := times.date_and_clock(table):
        return dated[2]
    named = next((plain[name] for name in times.STARTS if name in plain and _may_be_times(table[plain[name]])), None)
    if named is None and "id" in plain and "amount" in plain:  # HTX calls the second a bar starts at its id
        named = plain["id"]
    return None if named is None else table[named]


def _is_stamped_by_close(table: pd.DataFrame, plain: dict, where: str) -> bool:
    """Say whether the one time of a bar is that of its close, as NinjaTrader and BitMEX write it."""
    if where.endswith(".Last.txt"):
        return True
    if not {"timestamp", "symbol", "trades"} <= set(plain):
        return False
    return "homenotional" in plain or bool(table[plain["symbol"]].astype(str).str.startswith("XBT").all())


def _may_be_times(column: pd.Series) -> bool:
    """Say whether a column is no mere count of rows, as pandas writes one."""
    return not (
        times.plain(column.name) in ("unnamed0", "index", "level0")
        and pd.api.types.is_numeric_dtype(column)
        and column.max() < 1e8
    )


def _find_volumes(table: pd.DataFrame, plain: dict, found: dict, notes: list[str], where: str) -> None:
    """Find the volumes that need a look: money and coins under like names, ticks in place of a volume that is zero."""
    for spelling in reversed(plain):  # "Volume BTC" and "Volume USDT", "Volume_(Currency)"
        if spelling.startswith("volume") and spelling not in ("volume", "volumetraded", "volumema"):
            quoted = spelling.endswith(("usdt", "usd", "usdc", "busd", "eur", "currency", "quote", "to"))
            found.setdefault("quote_volume" if quoted else "volume", plain[spelling])
    if {"id", "amount", "vol"} <= set(plain):  # HTX: amount counts coins, vol money
        found["volume"], found["quote_volume"] = plain["amount"], plain["vol"]
    ticks = next((plain[name] for name in TICKS if name in plain), None)
    if ticks is not None and (
        "volume" not in found
        or not np.nan_to_num(read_numbers(table[found["volume"]], "volume", where, read_written)).any()
    ):
        found["volume"] = ticks
        notes.append(f"volume counts price changes (column {ticks}), not what was traded.")


def _order_volumes(frame: pd.DataFrame, notes: list[str]) -> None:
    """Exchange volume and quote_volume where only the other way round a mean price comes out."""
    if not {"volume", "quote_volume"} <= set(frame):
        return
    volume, money, low, high = (frame[name].to_numpy() for name in ("volume", "quote_volume", "low", "high"))
    if _share_between(money, volume, low, high) < 0.5 < 0.9 < _share_between(volume, money, low, high):
        frame["volume"], frame["quote_volume"] = money, volume
        notes.append("volume and quote volume stand under each other's name; they were exchanged.")


def _read_starts(
    start: pd.Series | None, end: pd.Series | None, where: str, notes: list[str]
) -> tuple[pd.DatetimeIndex, str]:
    """Return bar starts and interval, as starts and close times agree on them; at least one of the two is there."""
    if start is None and end is not None:
        closes = times.read_times(end, where)
        step = _step(closes, where)
        if not step:
            raise DataError(f"{where}: one row with a close time alone; it does not say when the bar started")
        ns = -(-closes.asi8 // SECOND_NS) * SECOND_NS - step * SECOND_NS  # 09:59:59.999 is 10:00
        interval = find_interval(f"{step}s")
        notes.append(f"Only close times stand there ({end.name}); each bar starts {interval} earlier.")
        notes += _say_zone(end, closes)
        return pd.DatetimeIndex(ns, tz="UTC"), interval
    opened = times.read_times(start, where)
    if times.are_serials(start):
        notes.append("Times were read as days since 1900, as Excel counts them.")
    if not times.has_zone(start):
        if re.match(r"DAT_(ASCII|MT|NT|XLSX|MS)_", where):
            opened += pd.Timedelta(hours=5)
            notes.append("Times were taken as New York's without summer time (UTC-5), as HistData writes them.")
        else:
            notes += _say_zone(start, opened)
    step = _step(opened, where)
    interval = find_interval(f"{step}s")
    if step and (opened.asi8 % (step * SECOND_NS) >= (step - 1) * SECOND_NS).all():  # 23:59:59 of a day
        notes.append(f"Times are those of the close ({stamp(opened.asi8[0])}); each bar starts {interval} earlier.")
        opened = pd.DatetimeIndex((opened.asi8 // (step * SECOND_NS)) * step * SECOND_NS, tz="UTC")
    if end is not None and end.notna().all():
        lengths = (times.read_times(end, where).asi8 - opened.asi8 + SECOND_NS // 2) // SECOND_NS
        length, rows = Counter(lengths.tolist()).most_common(1)[0]
        lasts = find_interval(f"{length}s") or find_interval(f"{length + 1}s")
        if interval and lasts and lasts != interval and rows > len(lengths) / 2:
            raise DataError(
                f"{where}: bars start {interval} apart but last {lasts} by {end.name}; the first starts at "
                f"{stamp(opened.asi8[0])}. Ask whoever wrote them"
            )
        interval = interval or lasts
    return opened, interval


def _say_zone(written: pd.Series, read: pd.DatetimeIndex) -> list[str]:
    """Say that times of a day were taken as UTC where they tell no zone; days alone need none."""
    of_days = read.normalize().nunique() == len(read)
    return [] if times.has_zone(written) or of_days else ["Times say no zone; they were taken as UTC."]


def _step(starts: pd.DatetimeIndex, where: str) -> int:
    """Return the seconds from bar to bar, 0 where there is one bar alone."""
    steps = np.diff(np.sort(starts.asi8)) // SECOND_NS
    steps = steps[steps > 0]
    if not len(steps):
        return 0
    step = Counter(steps.tolist()).most_common(1)[0][0]  # np.unique takes seconds on a million times
    if not find_interval(f"{step}s"):
        why = " Bars of a month have no even step" if step >= 28 * 86400 else ""
        if str(step).strip("0") == "1" and step >= 1000:
            why = " Were digits of the times cut, as in 1.75431E+12?"
        raise DataError(
            f"{where}: bars must stand a usual interval apart ({', '.join(INTERVAL_SECONDS)}); "
            f"these are most often {step} s apart.{why}"
        )
    return step
