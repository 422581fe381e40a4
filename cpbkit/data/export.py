"""Bars written for other programs: Parquet, CSV, and the feather files of freqtrade."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from cpbkit import atomic
from cpbkit.data.klines import OHLCV, QUOTES, Klines, split_name
from cpbkit.errors import DataError, check_name


def write_klines(klines: Mapping[str, Klines], folder: str | Path, kind: str = "parquet") -> Iterator[Path]:
    """Write a file per series into a folder, whole or not at all; yield its path. Gaps stay gaps.

    kind: parquet (BTCUSDT_1h.parquet, index open_time), csv (the same as text), freqtrade (BTC_USDT-1h.feather).
    Errors: DataError for a symbol whose quote currency is not known, where the kind needs it; OSError.
    """
    check_name("kind", kind, ("parquet", "csv", "freqtrade"))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in klines.items():
        content = io.BytesIO()
        if kind == "freqtrade":
            symbol, interval = split_name(name)
            quote = next((quote for quote in QUOTES if symbol.endswith(quote) and symbol != quote), "")
            if not quote:
                raise DataError(f"freqtrade names base and quote; {symbol} ends in none of {', '.join(QUOTES)}")
            path = folder / f"{symbol.removesuffix(quote)}_{quote}-{interval}.feather"
            table = each.frame[[column for column in OHLCV if column in each.frame]]
            table.rename_axis("date").reset_index().to_feather(content, compression="lz4")
        else:
            path = folder / f"{name}.{kind}"
            each.frame.to_parquet(content) if kind == "parquet" else each.frame.to_csv(content)
        atomic.write_bytes(path, content.getvalue())
        yield path
