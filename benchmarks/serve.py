"""`python -m benchmarks.serve`: kept forecasts, asked for over HTTP; beside them a bare answer of that size."""

import datetime as dt
import http.client
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import cpbkit as cpb
from cpbkit.bench.report import about
from cpbkit.hardware import provenance
from cpbkit.serve.server import make_server
from cpbkit.views.site import Site

SIDES = ("page", "bare")
CLIENTS = 8  # that ask at once, each over one connection
SECONDS, QUICK_SECONDS = 5.0, 1.0  # of a round
ROUNDS, QUICK_ROUNDS = 5, 2
GOAL = 200  # answers a second


def bench_serve(*, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> dict:
    """Ask both sides in turns, each a process of its own; return the document that `render` shows."""
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if quick else (ROUNDS, SECONDS)
    document = {"bench": "serve", **provenance.describe(), "clients": CLIENTS, "seconds": seconds}
    with tempfile.TemporaryDirectory() as folder:
        today = dt.datetime.now(dt.timezone.utc).date()
        days = {"start": str(today - dt.timedelta(days=24)), "end": str(today - dt.timedelta(days=2))}
        small = {"symbols": ["BTCUSDT"], "intervals": ["15m"], "source": "synthetic", "epochs": 1, "steps": 5}
        run = cpb.sweep("quick", folder=Path(folder) / "run", executor="local", quiet=True, **days, **small)
        with serving("page", run.folder, 0) as page:
            size = len(first(page))
            with serving("bare", run.folder, size) as bare:
                ports, spent = {"page": page, "bare": bare}, {side: [] for side in SIDES}
                for turn in range(rounds + 1):
                    for side in SIDES[:: 1 if turn % 2 else -1]:
                        say(f"round {turn} of {rounds}: {side}")
                        times = load(ports[side], seconds)
                        if turn:  # the first round warms up
                            spent[side].append(times)
    document["bytes"] = size
    document["sides"] = {side: summary(spent[side], seconds) for side in SIDES}
    return document


def summary(rounds: list[np.ndarray], seconds: float) -> dict[str, float]:
    """Return answers a second over rounds of so long, and the percentiles of what one took."""
    rates = [len(times) / seconds for times in rounds]
    p50, p99 = np.percentile(1e3 * np.concatenate(rounds), [50, 99]).tolist()
    return {"rate": float(np.median(rates)), "low": min(rates), "high": max(rates), "p50_ms": p50, "p99_ms": p99}


@contextmanager
def serving(side: str, folder: Path, size: int) -> Iterator[int]:
    """Serve one side in a process of its own; yield its port."""
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(side, folder, size, theirs), daemon=True)
    process.start()
    try:
        if not mine.poll(120):
            raise RuntimeError(f"the server of {side} did not start within 120 s")
        port = mine.recv()
        first(port)
        yield port
    finally:
        process.terminate()
        process.join()


def serve(side: str, folder: Path, size: int, told) -> None:
    """Run the server of one side on a free port, which is told first; never returns."""
    listening = socket.create_server(("127.0.0.1", 0))
    # As uvicorn's own socket has it; else every answer waits 40 ms for the client's acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if side == "page":
        run = cpb.open_run(folder)
        server, _ = make_server(Site(run.folder, [run[name] for name in run]))
    else:
        answer = Response(b"x" * size, media_type="application/json")
        app = Starlette(routes=[Route("/api/forecast", lambda request: answer)])
        server = uvicorn.Server(uvicorn.Config(app, http="h11", log_level="warning", access_log=False))
    told.send(listening.getsockname()[1])
    server.run(sockets=[listening])


def first(port: int) -> bytes:
    """Return the first answer, which is made; the others are kept."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        return ask(connection)[1]


def ask(connection: http.client.HTTPConnection) -> tuple[float, bytes]:
    """Return the seconds of one answer, and it."""
    begun = time.perf_counter()
    connection.request("GET", "/api/forecast?series=BTCUSDT_15m")
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"the server answered HTTP {answer.status}: {content[:200]!r}")
    return time.perf_counter() - begun, content


def load(port: int, seconds: float) -> np.ndarray:
    """Ask from all clients at once, for so long; return the seconds of each answer."""
    end, found = time.monotonic() + seconds, [[] for _ in range(CLIENTS)]

    def client(times: list[float]) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            while time.monotonic() < end:
                times.append(ask(connection)[0])

    threads = [threading.Thread(target=client, args=(times,)) for times in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate(found)


def render(document: dict) -> list[str]:
    """Show what was measured as lines of text."""
    page, bare = (document["sides"][side] for side in SIDES)
    lines = [f"{document['clients']} clients at once, an answer of {document['bytes']:,} bytes; goal {GOAL} a second"]
    for name, side in (("a kept forecast", page), ("a bare answer of that size", bare)):
        lines.append(
            f"{name}: {side['rate']:.0f} a second ({side['low']:.0f} to {side['high']:.0f}), "
            f"p50 {side['p50_ms']:.1f} ms, p99 {side['p99_ms']:.1f} ms"
        )
    return [*lines, f"so the page's own part leaves {page['rate'] / bare['rate']:.2f} of the library's rate"]


if __name__ == "__main__":
    measured = bench_serve(quick="--quick" in sys.argv[1:])
    print(*about(measured), "", *render(measured), sep="\n")
