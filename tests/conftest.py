"""What every test gets: an own cache, loopback only, and a reason for each skip."""

import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import urllib.parse

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: small work, and a core a process
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    for item in items:
        if item.get_closest_marker("browser"):
            if not shutil.which("chromium") or not importlib.util.find_spec("playwright"):
                item.add_marker(pytest.mark.skip(reason="no chromium or no playwright here"))


@pytest.fixture(autouse=True)
def isolated(monkeypatch, tmp_path_factory):
    """Give each test an empty cache and hosts that do not exist; refuse connections that leave it."""
    monkeypatch.setenv("CPBKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("CPBKIT_ARCHIVE_URL", NOWHERE)
    monkeypatch.setenv("CPBKIT_REST_URL", NOWHERE)
    connect = socket.socket.connect

    def loopback_only(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
            "127.0.0.1",
            "localhost",
            "::1",
        ):
            raise AssertionError(f"a test must not leave the machine; it tried {address!r}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", loopback_only)


@pytest.fixture(scope="module")
def browser():
    """Start one Chromium for the tests of a module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Open pages as a person does; none may complain in the console or ask another host for anything."""
    wrong, opened = [], []

    def open_page(url, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        opened.append(page)
        page.set_default_timeout(30_000)
        home = urllib.parse.urlsplit(url).netloc
        page.on("console", lambda said: said.type in ("error", "warning") and wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda r: urllib.parse.urlsplit(r.url).netloc not in (home, "") and wrong.append(r.url))
        page.goto(url)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert wrong == []


@pytest.fixture(scope="module")
def recent_run(tmp_path_factory):
    """Train four tiny models on the seeded market of the last weeks, whose next bars can be forecast today."""
    import datetime as dt

    import cpbkit as cpb

    today = dt.datetime.now(dt.timezone.utc).date()
    days = {"start": str(today - dt.timedelta(days=24)), "end": str(today - dt.timedelta(days=2))}
    given = {"source": "synthetic", "symbols": ["BTCUSDT", "ETHUSDT"], "intervals": ["1h", "15m"], **days}
    small = {"context": 8, "horizon": 3, "width": 4, "epochs": 1, "steps": 5, "executor": "local", "quiet": True}
    return cpb.sweep("quick", folder=tmp_path_factory.mktemp("runs") / "recent", **given, **small)


def terminal(*words, cli=None):
    """Call a command as a terminal does, in this process; return what it showed and its exit code."""
    from click.testing import CliRunner

    from cpbkit.cli.main import cpbkit

    return CliRunner().invoke(cli or cpbkit, [str(word) for word in words])


@pytest.fixture
def market() -> pathlib.Path:
    """Return the folder of real bars that CPBKIT_MARKET names, or skip."""
    folder = os.environ.get("CPBKIT_MARKET")
    if not folder:
        pytest.skip("CPBKIT_MARKET is not set: no real bars here")
    return pathlib.Path(folder)


def walk(name: str, bars: int, seed: int = 0, phi: float = 0.0, gap_at: int = 0, horizon_targets: int = 1):
    """Make a Series of 15m log prices whose returns follow AR(1) with coefficient phi."""
    import numpy as np
    from scipy.signal import lfilter

    from cpbkit.config.experiment import OHLC, OHLC_RETURNS
    from cpbkit.windows.series import Series

    rng = np.random.default_rng([seed, *name.encode()])
    returns = lfilter([1], [1, -phi], rng.normal(0, 0.01, bars))
    noise = np.abs(rng.normal(0, 0.004, (bars, 2)))
    close = 4 + np.cumsum(returns)
    inputs = np.column_stack([returns * 0.1, returns + noise[:, 0], returns - noise[:, 1], returns])
    levels = np.column_stack([close - returns, close + noise[:, 0], close - noise[:, 1], close])
    steps = np.arange(bars) + np.where(np.arange(bars) >= gap_at, 5, 0) * (gap_at > 0)
    kept = [3] if horizon_targets == 1 else list(range(4))
    return Series(
        name=name,
        times=np.datetime64("2025-01-01", "ns") + steps * np.timedelta64(900, "s"),
        step_seconds=900,
        inputs=inputs,
        features=OHLC_RETURNS,
        levels=levels[:, kept],
        anchors=np.repeat(close[:, None], len(kept), 1),
        targets=tuple(OHLC[k] for k in kept),
        heads=("price",) * len(kept),
    )
