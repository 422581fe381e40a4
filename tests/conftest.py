"""What every test gets: an own cache, loopback only, and a reason for each skip."""

import os
import pathlib
import shutil
import socket

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: small work, and a core a process
NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing answers


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    for item in items:
        if item.get_closest_marker("browser") and not shutil.which("chromium"):
            item.add_marker(pytest.mark.skip(reason="no chromium here"))


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


@pytest.fixture
def market() -> pathlib.Path:
    """Return the folder of real bars that CPBKIT_MARKET names, or skip."""
    folder = os.environ.get("CPBKIT_MARKET")
    if not folder:
        pytest.skip("CPBKIT_MARKET is not set: no real bars here")
    return pathlib.Path(folder)
