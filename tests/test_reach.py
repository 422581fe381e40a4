"""Hosts are asked as they are set, and what they answer is told with its time."""

import http.server
import threading

import click
import pytest
from click.testing import CliRunner

from cpbkit.cli.command import Command
from cpbkit.data.reach import find_hosts, try_hosts


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    def do_GET(self):
        if self.path == "/hang":
            self.server.over.wait(10)
            return
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.over = threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.over.set()
        server.shutdown()


def test_each_host_is_told_with_its_time_or_its_trouble(server):
    paths = {"fine": "/200", "listing forbidden": "/404", "elsewhere": "/451", "broken": "/503", "hangs": "/hang"}
    found = {one.name: one for one in try_hosts({name: server + path for name, path in paths.items()}, seconds=0.5)}
    assert "answers in 0." in str(found["fine"]) and str(found["fine"]).startswith("  ok ")
    assert not found["listing forbidden"].problem, "a host that answers is there"
    assert "refuses this place (451)" in str(found["elsewhere"]) and "error (503)" in str(found["broken"])
    assert found["hangs"].seconds is None and "no answer in time (ReadTimeout)" in str(found["hangs"])


def test_the_hosts_are_those_that_are_set_and_no_password_is_shown(monkeypatch):
    monkeypatch.setenv("CPBKIT_ARCHIVE_URL", "http://me:secret@127.0.0.1:9")
    monkeypatch.delenv("CPBKIT_REST_URL", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    hosts = find_hosts()
    assert hosts["REST"].startswith("https://data-api.binance.vision") and hosts["Hub"] == "http://127.0.0.1:9"
    (told,) = try_hosts({"archive": hosts["archive"]})
    assert "secret" not in repr(told) and "cannot be reached" in str(told)


def test_a_missing_module_gets_its_line():
    @click.command(cls=Command, examples=("x",))
    def command():
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    shown = CliRunner().invoke(command)
    assert shown.exit_code == 1
    assert 'the module ray is not installed: pip install "cpbkit[ray]"; in a notebook, then restart' in shown.output
