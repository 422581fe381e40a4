"""`python -m benchmarks.data`: archive files read and cached a second, mirror on loopback; memory of windows."""

import hashlib
import io
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import requests
import torch

from benchmarks.mirror import serve
from cpbkit.bench.market import make_bars, make_series
from cpbkit.bench.report import about, ratio, size, table
from cpbkit.config.experiment import SYMBOLS
from cpbkit.config.presets import PRESETS
from cpbkit.data.archive import ArchiveFile
from cpbkit.data.binance import Hosts, fetch_klines
from cpbkit.data.cache import Store
from cpbkit.data.klines import INTERVAL_SECONDS, Klines
from cpbkit.data.synthetic import make_market
from cpbkit.hardware import provenance
from cpbkit.quantities import figure
from cpbkit.windows.windows import Windows

INTERVALS = ("15m", "1h")
END, QUICK_END = "2025-03-31", "2025-01-31"  # last day of what the mirror has, from the year's first day
START = "2025-01-01"
ROUNDS = 3
OURS, THEIRS = "fetch_klines", "one request after another, read_csv, to_csv"


def bench_data(*, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> dict:
    """Fetch all files of the mirror with this kit and as the loop in circulation does; return the document."""
    end = QUICK_END if quick else END
    say("building the mirror's files from the seeded market")
    market = make_market(SYMBOLS, INTERVALS, START, end)
    files = pack_market(market)
    zips = [path for path in files if path.endswith(".zip")]
    seconds: dict[str, list[float]] = {OURS: [], THEIRS: [], "from the cache": []}
    with serve(files) as url:
        for turn in range(ROUNDS):
            say(f"round {turn + 1} of {ROUNDS}: {len(zips)} files")
            with tempfile.TemporaryDirectory() as folder:
                store = Store(Path(folder) / "cache", also=[])
                got = None
                for side in (OURS, "from the cache"):
                    begun = time.perf_counter()
                    got = fetch_klines(SYMBOLS, INTERVALS, START, end, store=store, hosts=Hosts(url, url))
                    seconds[side].append(time.perf_counter() - begun)
                if {name: len(k.frame) for name, k in got.items()} != {n: len(k.frame) for n, k in market.items()}:
                    raise RuntimeError("the mirror's bars did not come back whole; this benchmark would mean nothing")
                begun = time.perf_counter()
                fetch_plainly(url, zips, Path(folder))
                seconds[THEIRS].append(time.perf_counter() - begun)
    ratios = [theirs / ours for ours, theirs in zip(seconds[OURS], seconds[THEIRS], strict=True)]
    return {
        "bench": "data",
        **provenance.describe(),
        "files": len(zips),
        "bytes": sum(len(files[path]) for path in zips),
        "bars": sum(len(klines.frame) for klines in market.values()),
        "seconds": {side: statistics.median(values) for side, values in seconds.items()},
        "ratio": {
            "ours": len(zips) / statistics.median(seconds[OURS]),
            "theirs": len(zips) / statistics.median(seconds[THEIRS]),
            "sides": [OURS, THEIRS],
            "unit": "files a second",
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        },
        "memory": measure_memory(),
    }


def pack_market(market: dict[str, Klines]) -> dict[str, bytes]:
    """Write the market as the archive's monthly zips and their checksums: path -> content."""
    files = {}
    for klines in market.values():
        symbol, _, interval = klines.passport.series.partition("_")
        frame = klines.frame
        for month, part in frame.groupby(frame.index.strftime("%Y-%m")):
            file = ArchiveFile("spot", symbol, interval, str(month))
            blob = io.BytesIO()
            with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED) as box:
                box.writestr(file.name.replace(".zip", ".csv"), to_rows(part, interval))
            files[file.path] = blob.getvalue()
            files[file.path + ".CHECKSUM"] = f"{hashlib.sha256(blob.getvalue()).hexdigest()}  {file.name}\n".encode()
    return files


def to_rows(frame: pd.DataFrame, interval: str) -> str:
    """Write bars as the twelve columns of the archive, times in microseconds."""
    opened = frame.index.tz_localize(None).to_numpy("datetime64[us]").astype(np.int64)
    columns = {"opened": opened, **{c: frame[c] for c in ("open", "high", "low", "close", "volume")}}
    columns |= {"closed": opened + INTERVAL_SECONDS[interval] * 1_000_000 - 1}
    columns |= {"quote": frame.get("quote_volume", 0.0), "trades": frame.get("trades", 0.0)}
    columns |= {"taker": frame.get("taker_buy_volume", 0.0), "taker_quote": 0.0, "ignore": 0}
    table = pd.DataFrame(columns, frame.index)
    table["trades"] = table["trades"].astype(np.int64)
    return table.to_csv(header=False, index=False)


def fetch_plainly(url: str, paths: list[str], folder: Path) -> None:
    """Get the files as cpbv2's scripts do: one request after another, no checksum, a CSV a series."""
    series: dict[str, list[pd.DataFrame]] = {}
    for path in paths:
        answer = requests.get(url + path, timeout=30)
        with zipfile.ZipFile(io.BytesIO(answer.content)) as box, box.open(box.namelist()[0]) as member:
            series.setdefault(path.rpartition("/")[0].replace("/", "-"), []).append(pd.read_csv(member, header=None))
    for name, parts in series.items():
        pd.concat(parts).iloc[:, 1:6].to_csv(folder / f"{name}.csv", index=False)


def measure_memory() -> dict:
    """Compare the bytes of bars, of this kit's windows over them, and of windows built one by one."""
    task = PRESETS["quick"].task
    bars = next(iter(make_bars(1).values())).frame
    windows = Windows(make_series(task, 1), task, torch.device("cpu"), torch.float32)
    held = [
        windows.inputs,
        windows.levels,
        windows.anchors,
        *(pool for part in windows.origins.values() for pool in part),
    ]
    count = sum(len(pool) for part in windows.origins.values() for pool in part)
    built = 4 * count * (task.context * len(task.features) + (1 + task.horizon) * len(task.targets))
    ours = sum(tensor.nbytes for tensor in held)
    return {
        "bars": int(bars.memory_usage().sum()),
        "ours": ours,
        "theirs": built,
        "unit": "bytes",
        "ratio": ours / int(bars.memory_usage().sum()),
        "preset": "quick",
    }


def render(document: dict) -> list[str]:
    """Show what was measured as lines of text."""
    against, memory, seconds = document["ratio"], document["memory"], document["seconds"]
    ours, theirs = against["sides"]
    return [
        f"{document['files']} archive files ({size(document['bytes'])}, {document['bars']:,} bars), mirror on loopback",
        "",
        *table(
            ["", "seconds", "files/s"],
            [[side, figure(s, 3), figure(document["files"] / s, 3)] for side, s in seconds.items()],
        ),
        "",
        f"{ours}: {ratio(against)} the pace of {theirs}",
        f"Memory of one series ({memory['preset']}): bars {size(memory['bars'])}, windows gathered by index "
        f"{size(memory['ours'])} ({memory['ratio']:.2f}x the bars), windows built one by one {size(memory['theirs'])}",
    ]


if __name__ == "__main__":
    measured = bench_data(quick="--quick" in sys.argv[1:])
    print(*about(measured), "", *render(measured), sep="\n")
