"""The same bars as public exports write them: each is read right, or refused with a sentence; none is read wrong."""

# ruff: noqa: E501 - a layout a line

import gzip
import json
import zipfile

import numpy as np
import pandas as pd
import pytest

from cpbkit.data.files import read_files
from cpbkit.data.layouts import read_symbol
from cpbkit.errors import DataError

PRICES = ["open", "high", "low", "close"]


def bars(rows, freq, start="2024-01-20", seed=3, price=42_000.0):
    """Bars whose every price, volume and time can be told apart."""
    rng = np.random.default_rng(seed)
    close = np.round(price + np.cumsum(rng.normal(0, price / 300, rows)), 2)
    open_ = np.append(price, close[:-1])
    high = np.round(np.maximum(open_, close) + rng.uniform(1, 90, rows), 2)
    low = np.round(np.minimum(open_, close) - rng.uniform(1, 90, rows), 2)
    frame = pd.DataFrame({"open": open_, "high": high, "low": low, "close": close})
    frame["volume"] = np.round(rng.uniform(1, 90, rows), 3)
    return frame.set_axis(pd.date_range(start, periods=rows, freq=freq, tz="UTC", unit="ns"))


HOURS, DAYS, QUARTERS = bars(40, "1h"), bars(40, "1D"), bars(40, "15min")
STOCK_HOURS = bars(40, "1h", "2024-01-22 14:30")
ETH = bars(40, "1h", seed=8, price=2_500.0)
HONGKONG = bars(40, "1D", "2024-01-19 16:00")


def s(frame):
    return frame.index.asi8 // 10**9


def ms(frame):
    return frame.index.asi8 // 10**6


def at(frame, form):
    return frame.index.strftime(form)


def money(frame):
    return np.round(frame["volume"] * (frame["high"] + frame["low"]) / 2, 2)


def csv(frame, header, *columns, sep=",", newest_first=False, banner="", footer=""):
    """Write a table as text: column names of the frame, or the values themselves."""
    values = [frame[one].tolist() if isinstance(one, str) else list(one) for one in columns]
    lines = [sep.join(map(str, row)) for row in zip(*values, strict=True)]
    lines = lines[::-1] if newest_first else lines
    return banner + "\n".join(([header] if header else []) + lines) + "\n" + footer


def same(frame, *given):
    return [[value] * len(frame) for value in given]


def rows(frame, *columns, newest_first=False):
    """The rows of an API's answer."""
    values = [frame[one].tolist() if isinstance(one, str) else list(one) for one in columns]
    found = [[v.item() if hasattr(v, "item") else v for v in row] for row in zip(*values, strict=True)]
    return found[::-1] if newest_first else found


def texts(found):
    return [[str(value) for value in row] for row in found]


def records(names, found):
    return [dict(zip(names.split(), row, strict=True)) for row in found]


OHLCV = ("open", "high", "low", "close", "volume")
H, D, Q = HOURS, DAYS, QUARTERS
ISO, DAY = "%Y-%m-%d %H:%M:%S", "%Y-%m-%d"
CLOSES = ms(H) + 3_599_999
US = [f"{x:,.1f}" for x in np.round(D["close"], 1)]
ROUND = D.round(1)  # Investing.com writes few digits
UNIX_QUOTED = [f'"{t}"' for t in s(H)]


def quoted(values):
    return [f'"{value}"' for value in values]


def investing(frame, names, dates, number, volume):
    columns = [quoted(dates), *(quoted(map(number, frame[c])) for c in ("close", "open", "high", "low"))]
    return csv(frame, names, *columns, quoted(volume), quoted(["-1.2%"] * len(frame)), newest_first=True)


def english(value):
    return f"{value:,.1f}"


def german(value):
    return english(value).translate(str.maketrans(",.", ".,"))


K = [f"{v:.3f}K" for v in D["volume"]]  # 12.345K: the volume times a thousand
AV = {at(D, DAY)[i]: {f"{k + 1}. {c}": str(D[c].iloc[i]) for k, c in enumerate(OHLCV)} for i in range(len(D))}
AV_HOURS = {at(H, ISO)[i]: {f"{k + 1}. {c}": str(H[c].iloc[i]) for k, c in enumerate(OHLCV)} for i in range(len(H))}
PANEL = pd.concat({"BTC-USD": D.rename(columns=str.title), "ETH-USD": (D / 20).rename(columns=str.title)}, axis=1)
YF = "Price,Close,High,Low,Open,Volume\nTicker,BTC-USD,BTC-USD,BTC-USD,BTC-USD,BTC-USD\nDate,,,,,\n"
MT5 = "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>"
BINANCE = [ms(H), *OHLCV, CLOSES, money(H), *same(H, 7), H["volume"] / 2, money(H) / 2, *same(H, 0)]
BINANCE_NAMES = (
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
)
US_TIMES = [ms(H) * 1000, *OHLCV, CLOSES * 1000 + 999, *BINANCE[7:]]
CDD = "https://www.CryptoDataDownload.com\n"
POLYGON = records("v vw o c h l t n", rows(H, "volume", "close", "open", "close", "high", "low", ms(H), *same(H, 5)))
DERIBIT = {"ticks": ms(H).tolist(), **{c: H[c].tolist() for c in OHLCV}, "cost": money(H).tolist(), "status": "ok"}
UDF = {"s": "ok", "t": s(H).tolist(), **{c[0]: H[c].tolist() for c in OHLCV}}
HTX = records(
    "id open close low high amount vol count",
    rows(H, s(H), "open", "close", "low", "high", "volume", money(H), *same(H, 4), newest_first=True),
)
CANDLES = rows(H, ms(H), *OHLCV)
MINUTES = bars(40, "1min")
SHARES = STOCK_HOURS.assign(**{c: np.rint(STOCK_HOURS[c] * 10_000).astype(int) for c in PRICES})

# file name, content, what it holds (series: bars)
LAYOUTS = {
    "Binance archive, spot ms": ("BTCUSDT-1h-2024-01.csv", csv(H, "", *BINANCE), {"BTCUSDT_1h": H}),
    "Binance archive, spot us": ("BTCUSDT-1h-2024-01.csv", csv(H, "", *US_TIMES), {"BTCUSDT_1h": H}),
    "Binance archive, futures header": ("BTCUSDT-1h-2024-01.csv", csv(H, BINANCE_NAMES, *BINANCE), {"BTCUSDT_1h": H}),
    "Binance REST": ("BTCUSDT_1h.json", json.dumps([[r[0], *map(str, r[1:6]), r[6], *map(str, r[7:])] for r in rows(H, *BINANCE)]), {"BTCUSDT_1h": H}),
    "python-binance frame": ("btc.csv", csv(H, "Open time,Open,High,Low,Close,Volume,Close time,Quote asset volume,Number of trades,Taker buy base asset volume,Taker buy quote asset volume,Ignore", at(H, ISO), *BINANCE[1:6], at(H, "%Y-%m-%d %H:59:59.999"), *BINANCE[7:]), {"BTCUSDT_1h": H}),
    "to_csv of a frame, index not named": ("BTCUSDT_1h.csv", csv(H, ",open,high,low,close,volume", at(H, "%Y-%m-%d %H:%M:%S+00:00"), *OHLCV), {"BTCUSDT_1h": H}),
    "to_csv with a count of rows": ("BTCUSDT_1h.csv", csv(H, ",timestamp,open,high,low,close,volume", range(40), ms(H), *OHLCV), {"BTCUSDT_1h": H}),
    "to_json by columns": ("BTCUSDT_1h.json", json.dumps({c: dict(zip(map(str, ms(H).tolist()), H[c].tolist(), strict=True)) for c in OHLCV}), {"BTCUSDT_1h": H}),
    "to_json by rows": ("BTCUSDT_1h.json", json.dumps(records("time open high low close volume", rows(H, ms(H), *OHLCV))), {"BTCUSDT_1h": H}),
    "to_json by index": ("BTCUSDT_1h.json", json.dumps({str(t): dict(zip(OHLCV, v, strict=True)) for t, *v in CANDLES}), {"BTCUSDT_1h": H}),
    "to_json, split": ("BTCUSDT_1h.json", json.dumps({"columns": list(OHLCV), "index": ms(H).tolist(), "data": H.to_numpy().tolist()}), {"BTCUSDT_1h": H}),
    "JSON lines": ("BTCUSDT_1h.jsonl", "\n".join(map(json.dumps, records("time open high low close volume", CANDLES))), {"BTCUSDT_1h": H}),
    "JSON lines under .json": ("BTCUSDT_1h.json", "\n".join(map(json.dumps, records("time open high low close volume", CANDLES))), {"BTCUSDT_1h": H}),
    "freqtrade JSON": ("BTC_USDT-1h.json", json.dumps(CANDLES), {"BTCUSDT_1h": H}),
    "ccxt fetch_ohlcv to_csv": ("BTC_USDT-1h.csv", csv(H, ",0,1,2,3,4,5".replace(",0,1,2,3,4,5", "timestamp,open,high,low,close,volume"), ms(H), *OHLCV), {"BTCUSDT_1h": H}),
    "ccxt without names": ("BTC_USDT-1h.csv", csv(H, "", ms(H), *OHLCV), {"BTCUSDT_1h": H}),
    "yfinance download, three header rows": ("BTC-USD.csv", csv(D, YF.rstrip("\n"), at(D, DAY), "close", "high", "low", "open", "volume"), {"BTCUSD_1d": D}),
    "yfinance download, hours": ("BTC-USD.csv", csv(H, YF.rstrip("\n").replace("Date", "Datetime"), at(H, "%Y-%m-%d %H:%M:%S+00:00"), "close", "high", "low", "open", "volume"), {"BTCUSD_1h": H}),
    "yfinance download of two tickers": ("crypto.csv", csv(D, "Price,Close,Close,High,High,Low,Low,Open,Open,Volume,Volume\nTicker," + ",".join(["BTC-USD,ETH-USD"] * 5) + "\nDate" + "," * 10, at(D, DAY), *(v for c in ("close", "high", "low", "open", "volume") for v in (D[c], ETH[c]))), {"BTCUSD_1d": D, "ETHUSD_1d": ETH.set_axis(D.index)}),
    "yfinance grouped by ticker": ("crypto.csv", csv(D, "Ticker," + ",".join(["BTC-USD"] * 5) + "\nPrice,Open,High,Low,Close,Volume\nDate,,,,,", at(D, DAY), *OHLCV), {"BTCUSD_1d": D}),
    "yfinance Ticker.history": ("BTC-USD.csv", csv(D, "Date,Open,High,Low,Close,Volume,Dividends,Stock Splits", at(D, "%Y-%m-%d 00:00:00+00:00"), *OHLCV, *same(D, 0.0, 0.0)), {"BTCUSD_1d": D}),
    "Yahoo, adjusted close beside": ("BTC-USD.csv", csv(D, "Date,Open,High,Low,Close,Adj Close,Volume", at(D, DAY), *PRICES, D["close"] * 0.9, "volume"), {"BTCUSD_1d": D}),
    "Yahoo, null rows": ("BTC-USD.csv", csv(D, "Date,Open,High,Low,Close,Adj Close,Volume", at(D, DAY), *PRICES, "close", "volume") + "2024-02-29,null,null,null,null,null,null\n", {"BTCUSD_1d": D}),
    "New York hours at :30": ("SPY_1h.csv", csv(STOCK_HOURS, "Datetime,Open,High,Low,Close,Volume", at(STOCK_HOURS, "%Y-%m-%d %H:%M:%S+00:00"), *OHLCV), {"SPY_1h": STOCK_HOURS}),
    "CryptoDataDownload, hours": ("Binance_BTCUSDT_1h.csv", csv(H, "Unix,Date,Symbol,Open,High,Low,Close,Volume BTC,Volume USDT,tradecount", ms(H), at(H, ISO), *same(H, "BTCUSDT"), *OHLCV, money(H), *same(H, 9), newest_first=True, banner=CDD), {"BTCUSDT_1h": H}),
    "CryptoDataDownload, older, 12 hours": ("Bitstamp_BTCUSD_1h.csv", csv(H, "Date,Symbol,Open,High,Low,Close,Volume BTC,Volume USD", at(H, "%Y-%m-%d %I-%p"), *same(H, "BTCUSD"), *OHLCV, money(H), newest_first=True, banner=CDD), {"BTCUSD_1h": H}),
    "CryptoDataDownload, days": ("Gemini_BTCUSD_d.csv", csv(D, "unix,date,symbol,open,high,low,close,Volume BTC,Volume USD", s(D), at(D, ISO), *same(D, "BTC/USD"), *OHLCV, money(D), newest_first=True, banner=CDD), {"BTCUSD_1d": D}),
    "Kaggle coin_Bitcoin": ("coin_Bitcoin.csv", csv(D, "SNo,Name,Symbol,Date,High,Low,Open,Close,Volume,Marketcap", range(40), *same(D, "Bitcoin", "BTC"), at(D, "%Y-%m-%d 23:59:59"), "high", "low", "open", "close", "volume", *same(D, 8e11)), {"BTCUSDT_1d": D}),
    "Kaggle BTC minutes by Bitstamp": ("btcusd_1-min_data.csv", csv(bars(40, "1min"), "Timestamp,Open,High,Low,Close,Volume", [f"{t}.0" for t in s(bars(40, "1min"))], *OHLCV), {"BTCUSD_1m": bars(40, "1min")}),
    "Kaggle S&P, Name at the end": ("all_stocks_5yr.csv", csv(D, "date,open,high,low,close,volume,Name", at(D, DAY), *OHLCV, *same(D, "AAL")), {"AAL_1d": D}),
    "Kaggle, several symbols": ("all.csv", csv(H, "symbol,timestamp,open,high,low,close,volume", *same(H, "BTCUSDT"), ms(H), *OHLCV) + csv(ETH, "", *same(ETH, "ETHUSDT"), ms(ETH), *OHLCV), {"BTCUSDT_1h": H, "ETHUSDT_1h": ETH}),
    "Kaggle, asset ids and no symbol": ("train.csv", csv(H, "timestamp,Asset_ID,Count,Open,High,Low,Close,Volume,VWAP,Target", s(H), *same(H, 1, 5), *OHLCV, "close", *same(H, 0.1)) + csv(ETH, "", s(ETH), *same(ETH, 6, 5), *OHLCV, "close", *same(ETH, 0.1)), "no symbol|disagree"),
    "two coins under one name": ("BTCUSDT_1h.csv", csv(H, "time,open,high,low,close,volume", ms(H), *OHLCV) + csv(ETH, "", ms(ETH), *OHLCV), "40 bars have two rows that disagree; the first at 2024-01-20T00:00"),
    "Investing.com, US": ("BTC_USD Bitfinex Historical Data.csv", investing(ROUND, '"Date","Price","Open","High","Low","Vol.","Change %"', at(D, "%m/%d/%Y"), english, K), {"BTCUSD_1d": ROUND.assign(volume=D["volume"] * 1000)}),
    "Investing.com, words for months": ("BTC_USD Bitfinex Historical Data.csv", investing(ROUND, '"Date","Price","Open","High","Low","Vol.","Change %"', at(D, "%b %d, %Y"), english, K), {"BTCUSD_1d": ROUND.assign(volume=D["volume"] * 1000)}),
    "Investing.com, Germany": ("BTC_USD Bitfinex Historische Daten.csv", investing(ROUND, '"Datum","Zuletzt","Eröffn.","Hoch","Tief","Vol.","+/- %"', at(D, "%d.%m.%Y"), german, [k.replace(".", ",") for k in K]), {"BTCUSD_1d": ROUND.assign(volume=D["volume"] * 1000)}),
    "Investing.com, Taiwan": ("BTC_USD Bitfinex.csv", investing(ROUND, '"日期","收市","開市","高","低","成交量","更改%"', at(D, "%Y年%m月%d日"), english, K), {"BTCUSD_1d": ROUND.assign(volume=D["volume"] * 1000)}),
    "Investing.com, China": ("BTC_USD Bitfinex.csv", investing(ROUND, '"日期","收盘","开盘","高","低","交易量","涨跌幅"', at(D, "%Y-%m-%d"), english, K), {"BTCUSD_1d": ROUND.assign(volume=D["volume"] * 1000)}),
    "Investing.com, index without volume": ("SPX_1d.csv", investing(ROUND, '"Date","Price","Open","High","Low","Vol.","Change %"', at(D, "%m/%d/%Y"), english, [""] * 40), {"SPX_1d": ROUND[PRICES]}),
    "CoinMarketCap": ("Bitcoin_historical_data_coinmarketcap.csv", csv(D, "timeOpen;timeClose;timeHigh;timeLow;name;open;high;low;close;volume;marketCap;timestamp", quoted(at(D, "%Y-%m-%dT00:00:00.000Z")), quoted(at(D, "%Y-%m-%dT23:59:59.999Z")), quoted(at(D, "%Y-%m-%dT11:00:00.000Z")), quoted(at(D, "%Y-%m-%dT12:00:00.000Z")), *same(D, "2781"), *OHLCV, *same(D, 8e11), quoted(at(D, "%Y-%m-%dT23:59:59.999Z")), sep=";", newest_first=True), {"BTCUSDT_1d": D}),
    "CoinMarketCap, table copied": ("BTC.csv", csv(D, "Date\tOpen*\tHigh\tLow\tClose**\tVolume\tMarket Cap", at(D, "%b %d, %Y"), *([f"${x:,.2f}" for x in D[c]] for c in OHLCV[:4]), [f"${x:,.3f}" for x in D["volume"]], *same(D, "$8,000,000"), sep="\t"), {"BTCUSDT_1d": D}),
    "CoinGecko OHLC, close times": ("BTCUSDT_4h.csv", csv(bars(40, "4h"), "close_time,open,high,low,close", ms(bars(40, "4h")) + 4 * 3_600_000, *PRICES), {"BTCUSDT_4h": bars(40, "4h")[PRICES]}),
    "CoinGecko prices": ("btc-usd-max.csv", csv(D, "snapped_at,price,market_cap,total_volume", at(D, "%Y-%m-%d 00:00:00 UTC"), "close", *same(D, 1e11), "volume"), "nothing read as .*open, high, low"),
    "CoinAPI": ("BTCUSDT_1h.csv", csv(H, "time_period_start,time_period_end,time_open,time_close,price_open,price_high,price_low,price_close,volume_traded,trades_count", at(H, "%Y-%m-%dT%H:%M:%S.0000000Z"), [f"{t:%Y-%m-%dT%H:%M:%S}.0000000Z" for t in H.index + pd.Timedelta("1h")], at(H, "%Y-%m-%dT%H:00:04Z"), at(H, "%Y-%m-%dT%H:59:58Z"), *OHLCV, *same(H, 3)), {"BTCUSDT_1h": H}),
    "CryptoCompare": ("btc.json", json.dumps({"Response": "Success", "Message": "", "Data": {"Aggregated": False, "TimeFrom": 1, "TimeTo": 2, "Data": records("time high low open volumefrom volumeto close conversionType", rows(H, s(H), "high", "low", "open", "volume", money(H), "close", *same(H, "direct")))}}), {"BTCUSDT_1h": H}),
    "Bybit v5": ("kline.json", json.dumps({"retCode": 0, "retMsg": "OK", "result": {"symbol": "BTCUSDT", "category": "spot", "list": texts(rows(H, ms(H), *OHLCV, money(H), newest_first=True))}, "retExtInfo": {}, "time": 17}), {"BTCUSDT_1h": H}),
    "Bybit archive": ("BTCUSDT_60_2024-01.csv", csv(H, "start_at,symbol,period,open,high,low,close,volume".replace("start_at", "timestamp"), s(H), *same(H, "BTCUSDT", "60"), *OHLCV), {"BTCUSDT_1h": H}),
    "OKX v5": ("BTC-USDT_1h.json", json.dumps({"code": "0", "msg": "", "data": texts(rows(H, ms(H), *OHLCV, money(H), money(H), *same(H, 1), newest_first=True))}), {"BTCUSDT_1h": H}),
    "OKX v5, last bar not closed": ("BTC-USDT_1h.json", json.dumps({"code": "0", "msg": "", "data": texts(rows(H, ms(H), *OHLCV, money(H), money(H), [1] * 39 + [0], newest_first=True))}), {"BTCUSDT_1h": H[:-1]}),
    "OKX days at UTC+8": ("BTC-USDT_1d.csv", csv(HONGKONG, "ts,open,high,low,close,vol,volCcy,volCcyQuote,confirm", ms(HONGKONG), *OHLCV, money(HONGKONG), money(HONGKONG), *same(HONGKONG, 1)), {"BTCUSDT_1d": HONGKONG}),
    "Bitget": ("BTCUSDT_1h.json", json.dumps({"code": "00000", "data": texts(rows(H, ms(H), *OHLCV, money(H), money(H)))}), {"BTCUSDT_1h": H}),
    "MEXC": ("BTCUSDT_1h.json", json.dumps([[r[0], *map(str, r[1:6]), r[6], str(r[7])] for r in rows(H, ms(H), *OHLCV, CLOSES + 1, money(H))]), {"BTCUSDT_1h": H}),
    "Kraken REST": ("ohlc.json", json.dumps({"error": [], "result": {"XXBTZUSD": [[r[0], *map(str, r[1:7]), r[7]] for r in rows(H, s(H), *PRICES, (H["high"] + H["low"]) / 2, "volume", *same(H, 12))], "last": 17}}), {"BTCUSD_1h": H}),
    "Kraken download": ("XBTUSD_60.csv", csv(H, "", s(H), *OHLCV, np.arange(3, 43)), {"BTCUSD_1h": H}),
    "Coinbase REST": ("BTC-USD_1h.json", json.dumps(rows(H, s(H), "low", "high", "open", "close", "volume", newest_first=True)), {"BTCUSD_1h": H}),
    "Coinbase Advanced": ("BTC-USD.json", json.dumps({"candles": records("start low high open close volume", texts(rows(H, s(H), "low", "high", "open", "close", "volume", newest_first=True)))}), {"BTCUSD_1h": H}),
    "Bitfinex REST": ("tBTCUSD_1h.json", json.dumps(rows(H, ms(H), "open", "close", "high", "low", "volume", newest_first=True)), {"BTCUSD_1h": H}),
    "KuCoin": ("BTC-USDT_1h.json", json.dumps({"code": "200000", "data": texts(rows(H, s(H), "open", "close", "high", "low", "volume", money(H), newest_first=True))}), {"BTCUSDT_1h": H}),
    "Gate.io": ("BTC_USDT_1h.json", json.dumps(texts(rows(H, s(H), money(H), "close", "high", "low", "open", "volume", *same(H, "true")))), {"BTCUSDT_1h": H}),
    "HTX": ("btcusdt_1h.json", json.dumps({"ch": "market.btcusdt.kline.60min", "status": "ok", "ts": 17, "data": HTX}), {"BTCUSDT_1h": H}),
    "HTX archive": ("BTCUSDT-60min-2024-01-20.zip", csv(H, "", s(H), "open", "close", "high", "low", money(H), "volume").encode(), {"BTCUSDT_1h": H}),
    "HTX archive, with names": ("BTCUSDT-60min-2024-01.csv", csv(H, "id,open,high,low,close,vol,amount", s(H), *PRICES, money(H), "volume"), {"BTCUSDT_1h": H}),
    "HTX archive, days at UTC+8": ("BTCUSDT-1day-2024-01.csv", csv(HONGKONG, "", s(HONGKONG), "open", "close", "high", "low", money(HONGKONG), "volume"), {"BTCUSDT_1d": HONGKONG}),
    "QuantConnect Lean, hours of a coin": ("crypto/coinbase/hour/btcusd_trade.zip", csv(H, "", at(H, "%Y%m%d %H:%M"), *OHLCV).encode(), {"BTCUSD_1h": H}),
    "QuantConnect Lean, minutes of a coin": ("crypto/binance/minute/btcusdt/20240120_trade.zip", csv(MINUTES, "", ms(MINUTES) - ms(MINUTES)[0], *OHLCV).encode(), {"BTCUSDT_1m": MINUTES}),
    "QuantConnect Lean, hours of a share": ("equity/usa/hour/aapl.zip", csv(SHARES, "", [f"{t:%Y%m%d %H:%M}" for t in STOCK_HOURS.index - pd.Timedelta("5h")], *OHLCV).encode(), {"AAPL_1h": STOCK_HOURS}),
    "QuantConnect Lean, days of a share": ("equity/usa/daily/aapl.zip", csv(D.assign(**{c: np.rint(D[c] * 10_000).astype(int) for c in PRICES}), "", at(D, "%Y%m%d 00:00"), *OHLCV).encode(), {"AAPL_1d": D}),
    "QuantConnect Lean, quotes": ("crypto/binance/minute/btcusdt/20240120_quote.zip", csv(MINUTES, "", ms(MINUTES) - ms(MINUTES)[0], *OHLCV, *OHLCV).encode(), "it holds bids and asks"),
    "Deribit": ("BTC-PERPETUAL_1h.json", json.dumps({"jsonrpc": "2.0", "result": DERIBIT, "usIn": 1, "testnet": False}), {"BTCUSDT_1h": H}),
    "Bitstamp": ("bitstamp.json", json.dumps({"data": {"pair": "BTC/USD", "ohlc": records("timestamp open high low close volume", texts(rows(H, s(H), *OHLCV)))}}), {"BTCUSD_1h": H}),
    "Upbit": ("krw.json", json.dumps(records("market candle_date_time_utc opening_price high_price low_price trade_price timestamp candle_acc_trade_volume", rows(H, *same(H, "KRW-BTC"), at(H, "%Y-%m-%dT%H:%M:%S"), "open", "high", "low", "close", ms(H) + 3_500_000, "volume"))), "nothing read as"),
    "TradingView export": ("BINANCE_BTCUSDT, 60.csv", csv(H, "time,open,high,low,close,Volume,Volume MA", s(H), *OHLCV, *same(H, 50)), {"BTCUSDT_1h": H}),
    "TradingView export, ISO of another zone": ("BINANCE_BTCUSDT, 60_ab1c2.csv", csv(H, "time,open,high,low,close,Volume", [t.isoformat() for t in H.index.tz_convert("Asia/Taipei")], *OHLCV), {"BTCUSDT_1h": H}),
    "TradingView UDF, Finnhub": ("BTCUSDT_1h.json", json.dumps(UDF), {"BTCUSDT_1h": H}),
    "Polygon": ("polygon.json", json.dumps({"ticker": "X:BTCUSD", "queryCount": 40, "results": POLYGON, "status": "OK"}), {"BTCUSD_1h": H}),
    "Polygon flat files": ("2024-01.csv.gz", gzip.compress(csv(H, "ticker,volume,open,close,high,low,window_start,transactions", *same(H, "X:BTC-USD"), "volume", "open", "close", "high", "low", ms(H) * 10**6, *same(H, 7)).encode()), {"BTCUSD_1h": H}),
    "Alpha Vantage": ("BTCUSD.json", json.dumps({"Meta Data": {"1. Information": "Daily", "2. Symbol": "BTC"}, "Time Series (Daily)": AV}), {"BTCUSD_1d": D}),
    "Alpha Vantage, hours of a coin": ("av.json", json.dumps({"Meta Data": {"1. Information": "Crypto Intraday (60min) Time Series", "2. Digital Currency Code": "BTC", "3. Digital Currency Name": "Bitcoin", "4. Market Code": "USD", "7. Interval": "60min", "9. Time Zone": "UTC"}, "Time Series Crypto (60min)": AV_HOURS}), {"BTCUSD_1h": H}),
    "Alpha Vantage, hours of a currency": ("fx.json", json.dumps({"Meta Data": {"1. Information": "FX Intraday (60min) Time Series", "2. From Symbol": "EUR", "3. To Symbol": "USD", "5. Interval": "60min", "7. Time Zone": "UTC"}, "Time Series FX (60min)": AV_HOURS}), {"EURUSD_1h": H}),
    "Alpha Vantage CSV": ("BTCUSD_daily.csv", csv(D, "timestamp,open,high,low,close,volume", at(D, DAY), *OHLCV, newest_first=True), {"BTCUSD_1d": D}),
    "Twelve Data": ("td.json", json.dumps({"meta": {"symbol": "BTC/USD", "interval": "1h"}, "values": records("datetime open high low close volume", texts(rows(H, at(H, ISO), *OHLCV, newest_first=True))), "status": "ok"}), {"BTCUSD_1h": H}),
    "Tiingo": ("BTCUSD.csv", csv(H, "date,open,high,low,close,tradesDone,volume,volumeNotional", at(H, "%Y-%m-%dT%H:%M:%S+00:00"), *PRICES, *same(H, 5.0), "volume", money(H)), {"BTCUSD_1h": H}),
    "Alpaca": ("alpaca.csv", csv(H, "symbol,timestamp,open,high,low,close,volume,trade_count,vwap", *same(H, "BTC/USD"), at(H, "%Y-%m-%d %H:%M:%S+00:00"), *OHLCV, *same(H, 5), "close"), {"BTCUSD_1h": H}),
    "MetaTrader 5 export": ("BTCUSD_H1.csv", csv(H, MT5, at(H, "%Y.%m.%d"), at(H, "%H:%M:%S"), *OHLCV, *same(H, 0, 3), sep="\t"), {"BTCUSD_1h": H}),
    "MetaTrader 5 export, days": ("BTCUSD_D1.csv", csv(D, MT5.replace("<TIME>\t", ""), at(D, "%Y.%m.%d"), *OHLCV, *same(D, 0, 3), sep="\t"), {"BTCUSD_1d": D}),
    "MetaTrader 5 in UTF-16": ("BTCUSD_H1.csv", csv(H, MT5, at(H, "%Y.%m.%d"), at(H, "%H:%M:%S"), *OHLCV, *same(H, 0, 3), sep="\t").encode("utf-16"), {"BTCUSD_1h": H}),
    "MetaTrader 4 history": ("EURUSD60.csv".replace("60", "_H1"), csv(H, "", at(H, "%Y.%m.%d"), at(H, "%H:%M"), *OHLCV), {"EURUSD_1h": H}),
    "MetaTrader5 for Python": ("BTCUSD_1h.csv", csv(H, "time,open,high,low,close,tick_volume,spread,real_volume", s(H), *OHLCV, *same(H, 3, 0)), {"BTCUSD_1h": H}),
    "HistData ASCII": ("DAT_ASCII_EURUSD_M1_2024.csv", csv(bars(40, "1min"), "", [f"{t:%Y%m%d %H%M%S}" for t in bars(40, "1min").index - pd.Timedelta("5h")], *OHLCV, sep=";"), {"EURUSD_1m": bars(40, "1min")}),
    "Dukascopy, GMT": ("EURUSD_Candlestick_1_Hour_BID.csv".replace("_Candlestick_1_Hour_BID", "_1h"), csv(H, "Gmt time,Open,High,Low,Close,Volume", at(H, "%d.%m.%Y %H:%M:%S.000"), *OHLCV), {"EURUSD_1h": H}),
    "Dukascopy, local time": ("EURUSD_1h.csv", csv(H, "Local time,Open,High,Low,Close,Volume", [f"{t:%d.%m.%Y %H:%M:%S}.000 GMT+0100" for t in H.index + pd.Timedelta("1h")], *OHLCV), {"EURUSD_1h": H}),
    "Stooq, days": ("btcusd_d.csv", csv(D, "Date,Open,High,Low,Close,Volume", at(D, DAY), *OHLCV), {"BTCUSD_1d": D}),
    "Stooq, bulk": ("btcusd.txt", csv(H, "<TICKER>,<PER>,<DATE>,<TIME>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<VOL>,<OPENINT>", *same(H, "BTCUSD", "60"), at(H, "%Y%m%d"), at(H, "%H%M%S"), *OHLCV, *same(H, 0)), {"BTCUSD_1h": H}),
    "NinjaTrader": ("BTCUSD_15m.txt", csv(Q, "", at(Q, "%Y%m%d %H%M%S"), *OHLCV, sep=";"), {"BTCUSD_15m": Q}),
    "NinjaTrader, its own name": ("BTCUSD.Last.txt", csv(Q, "", at(Q.set_axis(Q.index + pd.Timedelta("15min")), "%Y%m%d %H%M%S"), *OHLCV, sep=";"), {"BTCUSD_15m": Q}),
    "BitMEX, closes": ("XBTUSD_1h.csv", csv(H, "timestamp,symbol,open,high,low,close,trades,volume", at(H.set_axis(H.index + pd.Timedelta("1h")), "%Y-%m-%dT%H:%M:%S.000Z"), *same(H, "XBTUSD"), *PRICES, *same(H, 12), "volume"), {"BTCUSD_1h": H}),
    "TradeStation": ("BTCUSD_15m.txt", csv(Q, '"Date","Time","Open","High","Low","Close","Vol","OI"', at(Q, "%m/%d/%Y"), at(Q, "%H:%M"), *OHLCV, *same(Q, 0)), {"BTCUSD_15m": Q}),
    "German, day and clock apart": ("BTCUSD_15m.csv", csv(Q, "Datum;Uhrzeit;Eröffnung;Hoch;Tief;Schluss;Volumen", at(Q, "%d.%m.%Y"), at(Q, "%H:%M"), *OHLCV, sep=";"), {"BTCUSD_15m": Q}),
    "Nasdaq.com": ("AAPL.csv", csv(D, "Date,Close/Last,Volume,Open,High,Low", at(D, "%m/%d/%Y"), [f"${x}" for x in D["close"]], "volume", *([f"${x}" for x in D[c]] for c in ("open", "high", "low")), newest_first=True), {"AAPL_1d": D}),
    "WSJ": ("AAPL.csv", csv(D, "Date, Open, High, Low, Close, Volume", at(D, "%m/%d/%y"), *OHLCV, newest_first=True), {"AAPL_1d": D}),
    "Excel, semicolons and decimal commas": ("BTCUSDT_1h.csv", csv(H, "Zeit;Open;High;Low;Close;Volume", at(H, "%d.%m.%Y %H:%M"), *OHLCV, sep=";").replace(".", ",").replace(",01,2024", ".01.2024").replace("20,01.", "20.01.").replace("21,01.", "21.01."), {"BTCUSDT_1h": H}),
    "times that end in UTC": ("BTCUSDT_1h.csv", csv(H, "date,open,high,low,close,volume", at(H, "%Y-%m-%d %H:%M:%S UTC"), *OHLCV), {"BTCUSDT_1h": H}),
    "times of Go": ("BTCUSDT_1h.csv", csv(H, "time,open,high,low,close,volume", at(H, "%Y-%m-%d %H:%M:%S +0000 UTC"), *OHLCV), {"BTCUSDT_1h": H}),
    "newest first, quoted": ("BTCUSDT_1h.csv", csv(H, '"Timestamp","Open","High","Low","Close","Volume"', UNIX_QUOTED, *(quoted(H[c]) for c in OHLCV), newest_first=True), {"BTCUSDT_1h": H}),
    "days first, day above twelve": ("BTCUSDT_1h.csv", csv(H, "Date;Open;High;Low;Close;Volume", at(H, "%d/%m/%Y %H:%M"), *OHLCV, sep=";"), {"BTCUSDT_1h": H}),
    "day and month not to be told apart": ("BTCUSDT.csv", csv(D[:9], "date,open,high,low,close,volume", [f"0{i}/02/2024" for i in range(1, 10)], *OHLCV), "can be read as .*and as"),
    "close_time says 15m under 1h starts": ("BTCUSDT.csv", csv(H, BINANCE_NAMES, *BINANCE[:6], ms(H) + 899_999, *BINANCE[7:]), "bars start 1h apart but last 15m by close_time"),
    "15m rows in a file of 1h": ("BTCUSDT-1h-2024-01.csv", csv(Q, "", ms(Q), *OHLCV), "its name says 1h, but the bars start 15m apart"),
    "another coin inside than outside": ("ETHUSDT_1h.csv", csv(H, "symbol,time,open,high,low,close,volume", *same(H, "BTCUSDT"), ms(H), *OHLCV), "its name says ETHUSDT, its content BTCUSDT"),
    "columns in another order under their names": ("BTCUSDT_1h.csv", csv(H, "volume,close,low,high,open,time", "volume", "close", "low", "high", "open", ms(H)), {"BTCUSDT_1h": H}),
    "volume and money under each other's name": ("BTCUSDT_1h.csv", csv(H, "time,open,high,low,close,volume,quote_volume", ms(H), *PRICES, money(H), "volume"), {"BTCUSDT_1h": H}),
    "Parquet of polars": ("BTCUSDT_1h.parquet", H.reset_index(names="timestamp"), {"BTCUSDT_1h": H}),
    "Parquet with an index": ("BTCUSDT_1h.parquet", H.rename_axis("open_time"), {"BTCUSDT_1h": H}),
    "freqtrade feather": ("BTC_USDT-1h.feather", H.reset_index(names="date"), {"BTCUSDT_1h": H}),
    "freqtrade funding rates": ("BTC_USDT_USDT-8h-funding_rate.feather", H.reset_index(names="date"), "funding, which is no trade price"),
    "Excel": ("BTCUSDT_1d.xlsx", D.tz_localize(None).reset_index(names="Date"), {"BTCUSDT_1d": D}),
    "zip of one CSV": ("BTCUSDT-1h-2024-01.zip", csv(H, "", *BINANCE).encode(), {"BTCUSDT_1h": H}),
    "bars without volume": ("DXY_1d.csv", csv(D, "Date,Open,High,Low,Close", at(D, DAY), *PRICES), {"DXY_1d": D[PRICES]}),
    "months": ("BTCUSD_monthly.csv", csv(D, "Date,Open,High,Low,Close,Volume", pd.date_range("2020-01-01", periods=40, freq="MS").strftime(DAY), *OHLCV), "Bars of a month have no even step"),
    "renko bricks, no even step": ("BTCUSD.csv", csv(D, "Date,Open,High,Low,Close,Volume", at(D[:1], DAY)[0:1].append(pd.Index([f"2024-03-{i:02d} {i % 24:02d}:{i:02d}:07" for i in (1, 2, 4, 7, 11, 16, 22, 29)])), *(D[c][:9] for c in OHLCV)), "usual interval apart"),
    "ticks": ("BTCUSDT-trades.csv".replace("-trades", "_ticks"), csv(H, "time,price,qty,side", ms(H), "close", "volume", *same(H, "buy")), "nothing read as open"),
    "QuantConnect Lean, deci-cents of a day": ("BTCUSDT_1h.csv", csv(H, "", (ms(H) - ms(H)[0]), *OHLCV), "would be 1970"),
    "Backtrader, openinterest": ("BTCUSDT_1h.csv", csv(H, "datetime,open,high,low,close,volume,openinterest", at(H, ISO), *OHLCV, *same(H, -1)), {"BTCUSDT_1h": H}),
    "Glassnode": ("BTC_price_usd_ohlc_1h.json", json.dumps([{"t": r[0], "o": dict(zip("ohlc", r[1:], strict=True))} for r in rows(H, s(H), *PRICES)]), {"BTCUSD_1h": H[PRICES]}),
    "Sierra Chart": ("BTCUSD_60min.txt", csv(H, "Date, Time, Open, High, Low, Last, Volume, NumberOfTrades, BidVolume, AskVolume", [f"{t.year}/{t.month}/{t.day}" for t in H.index], at(H, "%H:%M:%S.%f"), *OHLCV, *same(H, 9, 1, 2), sep=", "), {"BTCUSD_1h": H}),
    "Databento, fixed point": ("BTCUSDT_ohlcv-1h.csv", csv(H, "ts_event,rtype,publisher_id,instrument_id,open,high,low,close,volume", ms(H) * 10**6, *same(H, 35, 1, 1234), *(np.rint(H[c] * 1e9).astype(int) for c in PRICES), "volume"), {"BTCUSDT_1h": H}),
    "Databento, decimals": ("BTCUSDT_ohlcv-1h.csv", csv(H, "ts_event,rtype,publisher_id,instrument_id,open,high,low,close,volume", at(H, "%Y-%m-%dT%H:%M:%S.000000000Z"), *same(H, 35, 1, 1234), *OHLCV), {"BTCUSDT_1h": H}),
    "Excel, days as numbers": ("BTCUSDT_1h.xlsx", H.tz_localize(None).reset_index(names="Date").assign(Date=lambda t: (t["Date"] - pd.Timestamp("1899-12-30")) / pd.Timedelta("1D")), {"BTCUSDT_1h": H}),
    "vectorbt, two levels of columns": ("crypto.parquet", PANEL, {"BTCUSD_1d": D, "ETHUSD_1d": D / 20}),
    "an API's error in place of bars": ("BTCUSDT_1h.json", json.dumps({"code": -1121, "msg": "Invalid symbol."}), "no rows of bars in it"),
    "a page of HTML in place of bars": ("BTCUSDT_1h.csv", "<html><body>Sign in to the network</body></html>\n", "holds no rows"),
}  # fmt: skip


def write(path, content):
    """Put a layout into a file as its kind wants it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, pd.DataFrame):
        kind = {".parquet": "to_parquet", ".feather": "to_feather", ".xlsx": "to_excel"}[path.suffix]
        getattr(content, kind)(path, **({"index": False} if kind == "to_excel" else {}))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as box:
            box.writestr(path.stem + ".csv", content)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_there_are_a_hundred_layouts():
    assert len(LAYOUTS) >= 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_right_or_refused(tmp_path, layout):
    name, content, expected = LAYOUTS[layout]
    if name.endswith(".xlsx"):
        pytest.importorskip("openpyxl", reason="Excel is read by openpyxl: pip install cpbkit[excel]")
    write(tmp_path / name, content)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read_files(tmp_path, venue="other")
        return
    found = read_files(tmp_path, venue="other")
    assert not found.refused and found.klines.keys() == expected.keys()
    for series, frame in expected.items():
        got = found.klines[series].frame
        columns = list(frame.columns)
        assert np.array_equal(got.index.asi8, frame.index.as_unit("ns").asi8)
        assert np.allclose(got[columns].to_numpy(), frame.to_numpy(), rtol=1e-12, atol=0)
        assert ("volume" in got) == ("volume" in columns)


@pytest.mark.parametrize(
    "text, symbol",
    [
        ("BTC/USDT", "BTCUSDT"),
        ("BTC/USDT:USDT", "BTCUSDT"),
        ("btc-usd", "BTCUSD"),
        ("XBT/USD", "BTCUSD"),
        ("XXBTZUSD", "BTCUSD"),
        ("XETHZEUR", "XETHZEUR"),
        ("BINANCE:BTCUSDT.P", "BTCUSDT"),
        ("X:BTCUSD", "BTCUSD"),
        ("KRW-BTC", "BTCKRW"),
        ("tBTCUSD", "BTCUSD"),
        ("tDOGE:USD", "DOGEUSD"),
        ("tBTC-USD", "TBTCUSD"),
        ("PERP_USDT", "PERPUSDT"),
        ("EUR-USD", "EURUSD"),
        ("BTC-USDT-SWAP", "BTCUSDT"),
        ("BTC_USDT_USDT", "BTCUSDT"),
        ("BTC-USDT-240329", "BTCUSDT240329"),
        ("^GSPC", "GSPC"),
        ("2781", ""),
    ],
)
def test_symbols_are_read_as_venues_spell_them(text, symbol):
    assert read_symbol(text) == symbol


def test_close_times_without_a_zone_are_said_to_be_taken_as_utc(tmp_path):
    closes = HOURS.set_axis(HOURS.index + pd.Timedelta("1h"))
    (tmp_path / "BTCUSDT_1h.csv").write_text(
        csv(closes, "close_time,open,high,low,close,volume", at(closes, "%Y-%m-%d %H:%M"), *OHLCV)
    )
    (klines,) = read_files(tmp_path, venue="other").klines.values()
    assert "Times say no zone; they were taken as UTC." in klines.passport.notes


def test_what_is_no_bar_is_sent_where_it_is_taken(tmp_path):
    (tmp_path / "BTCUSDT_1d.csv").write_text(
        csv(DAYS, "snapped_at,price,total_volume", at(DAYS, "%Y-%m-%d"), "close", "volume")
    )
    with pytest.raises(DataError, match="`cpbkit series` takes tables without these"):
        read_files(tmp_path, venue="other")
