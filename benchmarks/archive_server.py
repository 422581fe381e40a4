"""A small public archive on loopback: a real HTTP server with seeded bars, and faults on demand.

Run as a script it is the parent of fetches that a test starts, kills, and starts again: a line of input that is a
JSON object forks a child that fetches with these settings, and is answered with its process id; a line that is a
process id waits for that child, and is answered with its exit status.
"""

import contextlib
import csv
import datetime as dt
import hashlib
import http.server
import io
import json
import os
import random
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
import zipfile
from dataclasses import dataclass

STEP_MS = {"15m": 900_000, "1h": 3_600_000, "4h": 14_400_000, "1d": 86_400_000, "1w": 604_800_000}
MICROSECONDS_FROM = 1_735_689_600_000  # 2025-01-01: spot files only
HEADER_FROM = "2025-02"  # futures files only
HEADER = (
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
)
FILE = re.compile(
    r"^/data/(?P<market>spot|futures/um)/(?P<span>monthly|daily)/klines/(?P<symbol>\w+)/(?P<interval>\w+)/"
    r"(?P=symbol)-(?P=interval)-(?P<date>[\d-]+)\.zip(?P<sum>\.CHECKSUM)?$"
)
RETRY_AFTER = "0"  # s
BOMB = 3 << 20  # bytes
FAULTS = (
    "404 401 403 418 451 429 500 503 204 206 short reset slow silent drip elsewhere circle wrong_sha garbage bomb"
    " escape html two_members encrypted"
).split()


def milliseconds(text: str) -> int:
    """Read `2025-03-01` or `2025-03-01T04:00` as UTC."""
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=dt.timezone.utc).timestamp() * 1000)


def make_rows(interval: str, start: str, end: str, seed: int = 0, price: float = 100.0) -> list[list[str]]:
    """Make the 12 fields of each bar that starts in [start, end); times in ms."""
    draw, step, rows = random.Random(f"{interval} {seed}"), STEP_MS[interval], []
    for opened in range(milliseconds(start), milliseconds(end), step):
        close = price * (1 + draw.uniform(-0.01, 0.01))
        high, low = max(price, close) * 1.002, min(price, close) * 0.998
        prices = [f"{value:.8f}" for value in (price, high, low, close)]
        volume = f"{draw.uniform(1, 9):.8f}"
        closed = opened + step - 1
        rows.append([str(opened), *prices, volume, str(closed), "700.5", "42", "3.25", "350.25", "0"])
        price = close
    return rows


@dataclass
class Fault:
    """What goes wrong, at which addresses, how often."""

    kind: str  # one of FAULTS
    where: str  # pattern searched in the path
    times: int = 10**9


class ArchiveServer(http.server.ThreadingHTTPServer):
    """Serves `rows[market, symbol, interval]`: monthly files but of `today`'s month, daily files up to yesterday."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, today: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.today = today
        self.rows: dict[tuple[str, str, str], list[list[str]]] = {}
        self.by_day: dict[tuple[str, ...], tuple] = {}
        self.built: dict[tuple[str, str], bytes | None] = {}
        self.edited: dict[str, list[list[str]]] = {}  # name of a zip: rows that it holds in place of the true ones
        self.hidden: set[str] = set()  # names of zips that are not there
        self.files: dict[str, bytes] = {}  # by path: what is served besides
        self.faults: list[Fault] = []
        self.asked: list[str] = []  # paths, with the query
        self.delay = 0.0  # s before each answer
        self.clock = ""  # Date header of REST answers
        self.most = 1000  # bars of a REST answer
        self.tickers: list[dict] = []  # of the last day
        self.traded: set[str] | None = None  # symbols that exchangeInfo calls so; None: all that have rows
        self.weight = ""  # header that says what a client has used of its allowance
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def rest_url(self) -> str:
        """Another name of the same server: to a client it is another host."""
        return f"http://localhost:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Say nothing: clients that hang up are what the tests are about."""

    def archive(self, market: str, symbol: str, interval: str, date: str) -> bytes | None:
        name = f"{symbol}-{interval}-{date}"
        if f"{name}.zip" in self.hidden or date >= self.today[: len(date)]:
            return None
        if f"{name}.zip" in self.edited:
            return packed(name, self.edited[f"{name}.zip"])
        days = self.days(market, symbol, interval)
        if (market, name) not in self.built:
            rows = [row for day in days if day.startswith(date) for row in days[day]]
            if market == "spot" and rows and int(rows[0][0]) >= MICROSECONDS_FROM:
                rows = [[r[0] + "000", *r[1:6], r[6] + "999", *r[7:]] for r in rows]
            header = HEADER + "\n" if market != "spot" and date >= HEADER_FROM else ""
            self.built[market, name] = packed(name, rows, header) if rows else None
        return self.built[market, name]

    def days(self, *key: str) -> dict[str, list[list[str]]]:
        rows = self.rows.get(key, [])
        if self.by_day.get(key, (None,))[0] is not rows:
            days: dict[str, list[list[str]]] = {}
            for row in rows:
                days.setdefault(day_of(row), []).append(row)
            self.by_day[key] = (rows, days)
            self.built.clear()
        return self.by_day[key][1]


def packed(name: str, rows: list[list[str]], header: str = "") -> bytes:
    text = io.StringIO(header)
    text.seek(0, io.SEEK_END)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return zipped({f"{name}.csv": text.getvalue()})


def day_of(row: list[str]) -> str:
    return dt.datetime.fromtimestamp(int(row[0]) / 1000, dt.timezone.utc).strftime("%Y-%m-%d")


def zipped(members: dict[str, str]) -> bytes:
    blob = io.BytesIO()
    with zipfile.ZipFile(blob, "w") as box:
        for name, text in members.items():
            box.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return blob.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the acknowledgement of its header
    server: ArchiveServer

    def do_GET(self):
        with self.server.lock:
            self.server.asked.append(self.path)
            fault = next((f for f in self.server.faults if f.times and re.search(f.where, self.path)), None)
            if fault:
                fault.times -= 1
        time.sleep(self.server.delay)
        url = urllib.parse.urlsplit(self.path)
        if fault and fault.kind == "silent":
            time.sleep(1)
            self.close_connection = True
            return
        if fault and fault.kind == "drip":  # a header that comes byte by byte, and never ends
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                for _ in range(200):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            self.close_connection = True
            return
        if fault and fault.kind in ("elsewhere", "circle"):
            host = "http://127.0.0.1:9" if fault.kind == "elsewhere" else ""
            return self.answer(302, b"", {"Location": f"{host}{self.path}"})
        if fault and fault.kind.isdigit():
            headers = {"Retry-After": RETRY_AFTER} if fault.kind in ("429", "418") else {}
            return self.answer(int(fault.kind), b"no", headers)
        body = self.server.files.get(url.path) or self.file(url.path, fault.kind if fault else "")
        if body is None and (beside := self.server.files.get(url.path.removesuffix(".CHECKSUM"))):
            body = f"{hashlib.sha256(beside).hexdigest()}  {url.path.rpartition('/')[2][:-9]}".encode()
        if body is None and url.path.endswith("/klines"):
            status, body = self.rest(dict(urllib.parse.parse_qsl(url.query)))
            if status != 200:
                return self.answer(status, body)
        if body is None and url.path.endswith("/exchangeInfo"):
            names = {symbol for _, symbol, _ in self.server.rows}
            on = names if self.server.traded is None else self.server.traded
            found = [{"symbol": n, "status": "TRADING" if n in on else "BREAK"} for n in sorted(names)]
            body = json.dumps({"timezone": "UTC", "symbols": found}).encode()
        if body is None and url.path.endswith("/ticker/24hr"):
            body = json.dumps(self.server.tickers).encode()
        if body is None and url.path.endswith("/ticker/price"):
            names = {symbol for _, symbol, _ in self.server.rows}
            body = json.dumps([{"symbol": name, "price": "1"} for name in sorted(names)]).encode()
        if body is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        self.misbehave(fault.kind if fault else "", body)

    def misbehave(self, kind: str, body: bytes):
        if kind == "short":
            self.answer(200, body[: len(body) // 2], {"Content-Length": str(len(body))})
            self.close_connection = True
        elif kind == "reset":
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:10])
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        elif kind == "slow":
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for i in range(len(body)):
                self.wfile.write(body[i : i + 1])
                time.sleep(0.05)
        elif kind == "html":
            self.answer(200, b"<html>Sign in to the network</html>")
        else:
            self.answer(200, body)

    def file(self, path: str, fault: str) -> bytes | None:
        match = FILE.match(path)
        if not match or (len(match["date"]) == 7) != (match["span"] == "monthly"):
            return None
        market = "spot" if match["market"] == "spot" else "um"
        blob = self.server.archive(market, match["symbol"], match["interval"], match["date"])
        if blob is None:
            return None
        name = f"{match['symbol']}-{match['interval']}-{match['date']}"
        blob = spoiled(blob, name, fault)
        if not match["sum"]:
            return blob
        # The checksum fits the spoiled file where the file itself is the fault.
        spoil = next((f.kind for f in self.server.faults if re.search(f.where, path[: -len(".CHECKSUM")])), "")
        sha = hashlib.sha256(spoiled(blob, name, spoil) if fault != "wrong_sha" else b"another").hexdigest()
        return f"{sha}  {name}.zip".encode()

    def rest(self, query: dict[str, str]) -> tuple[int, bytes]:
        market = "um" if self.path.startswith("/fapi") else "spot"
        symbol, interval = query.get("symbol", ""), query.get("interval", "")
        if not any(key[:2] == (market, symbol) for key in self.server.rows):
            return 400, b'{"code":-1121,"msg":"Invalid symbol."}'
        rows = self.server.rows.get((market, symbol, interval))
        if rows is None:
            return 400, b'{"code":-1120,"msg":"Invalid interval."}'
        low, high = int(query.get("startTime", 0)), int(query.get("endTime", 1 << 62))
        limit = min(int(query.get("limit", 500)), self.server.most)
        picked = [r for r in rows if low <= int(r[0]) <= high][:limit]
        return 200, json.dumps([[int(r[0]), *r[1:6], int(r[6]), r[7], int(r[8]), *r[9:]] for r in picked]).encode()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response_only(status)
        if self.server.clock:
            self.send_header("Date", self.server.clock)
        if self.server.weight:
            self.send_header("X-MBX-USED-WEIGHT-1M", self.server.weight)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


def spoiled(blob: bytes, name: str, fault: str) -> bytes:
    """Return what an archive sends that has gone wrong in this way."""
    if fault == "garbage":
        return blob[:40] + bytes(len(blob) - 40)
    if fault == "bomb":
        return zipped({f"{name}.csv": "0" * BOMB})
    if fault == "escape":
        return zipped({f"../../{name}.csv": "1,2,3"})
    if fault == "two_members":
        return zipped({f"{name}.csv": "1,2,3", "more.csv": "1"})
    if fault == "encrypted":  # the flag that says so, in both headers
        flagged = bytearray(blob)
        flagged[6] |= 1
        flagged[flagged.index(b"PK\x01\x02") + 8] |= 1
        return bytes(flagged)
    return blob


@contextlib.contextmanager
def serving(today: str):
    """Run a server in a thread of this process."""
    server = ArchiveServer(today)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _fetch(settings: dict) -> None:
    from cpbkit.data import binance

    binance._now = lambda: milliseconds(settings["now"]) * 10**6
    binance.THREADS = 4
    binance.fetch_klines(
        settings["symbols"],
        settings["intervals"],
        settings["start"],
        settings["end"],
        store=binance.Store(settings["cache"], also=[]),
        hosts=binance.Hosts(*settings["urls"]),
    )


def _parent() -> None:
    """Import once, then fork a child a line: its import would take longer than the fetch."""
    import cpbkit.data.binance  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            print(os.waitpid(order, 0)[1], flush=True)
            continue
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _fetch(order)
                status = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    _parent()
