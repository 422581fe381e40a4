"""The server of a page: what it answers, and that no request takes it down or reads what is not its own."""

import contextlib
import http.client
import importlib.resources
import json
import socket
import threading
import time

import jsonschema
import pytest
from conftest import terminal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import serve as bench
from cpbkit.errors import SourceError
from cpbkit.runs import trained
from cpbkit.serve import server as serving
from cpbkit.views.site import Site

SCHEMA = json.loads((importlib.resources.files("cpbkit.serve") / "forecast.schema.json").read_text())


@pytest.fixture(scope="module")
def site(recent_run):
    return Site(recent_run.folder, [recent_run[name] for name in recent_run])


@contextlib.contextmanager
def serve(site, **settings):
    """Run the real server on a free port of this machine; yield its port and its address with the token."""
    server, address = serving.make_server(site, port=0, **settings)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield port, address
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def port(site):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "PATIENCE", 1.0)
        patch.setattr(serving, "CHECK", 0.1)
        with serve(site) as (port, _):
            yield port


def ask(port, path, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, answer.headers


def test_a_forecast_is_that_of_the_model_and_keeps_to_the_schema(port, recent_run):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(ask(port, "/api/schema.json")[1]) == SCHEMA
    status, content, headers = ask(port, "/api/forecast?series=ETHUSDT_1h")
    told = json.loads(content)
    jsonschema.validate(told, SCHEMA)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert told["forecast"] == recent_run["ETHUSDT_1h"].forecast().to_dict() and len(told["candles"]["close"]) == 180
    for name in recent_run:
        public = Site(recent_run.folder, [recent_run[name]], public=True)
        jsonschema.validate(public.documents([name])[name], SCHEMA)


def test_a_forecast_is_kept_until_the_next_bar_and_made_once_for_all_who_ask(site, monkeypatch):
    made, fetch = [], trained.newest_bars
    monkeypatch.setattr(trained, "newest_bars", lambda *given: made.append(1) or time.sleep(0.2) or fetch(*given))
    with serve(site) as (port, _):
        found = []
        path = "/api/forecast?series=BTCUSDT_15m"
        threads = [threading.Thread(target=lambda: found.append(ask(port, path)[1])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8 and len(set(found)) == 1 and len(made) == 1


def test_bars_that_cannot_be_had_are_told_and_the_rest_is_there(site, monkeypatch):
    def fail(*_):
        raise SourceError("the venue does not answer\x1b[2J")

    monkeypatch.setattr(trained, "newest_bars", fail)
    with serve(site) as (port, _):
        status, content, _ = ask(port, "/api/forecast?series=BTCUSDT_1h")
    told = json.loads(content)
    assert status == 200 and told["forecast"] is None and told["past"]["price"][0]["truth"]
    assert told["note"] == "No forecast of the next bars: the venue does not answer"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/site.js", 200),
        ("/index.html", 404),
        ("/../../etc/passwd", 404),
        ("/..%2f..%2fetc%2fpasswd", 404),
        ("//etc/passwd", 404),
        ("/series/BTCUSDT_1h.js", 404),
        ("/site.js%00.html", 404),
        ("/api/forecast", 400),
        ("/api/forecast?series=BTCUSDT_1h&series=ETHUSDT_1h", 400),
        ("/api/forecast?series=BTCUSDT_1h&bars=9999999", 400),
        ("/api/forecast?series=../../etc/passwd", 404),
        ("/api/forecast?series=" + "A" * 500, 414),
    ],
)
def test_what_is_not_there_is_not_answered(port, path, status):
    got, content, headers = ask(port, path)
    assert got == status and b"root:" not in content
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    assert status == 200 or set(json.loads(content)) == {"error"}


def test_only_get_without_a_body_and_under_its_own_name_is_answered(port):
    assert ask(port, "/", "HEAD")[:2] == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(port, "/", method)[0] == 405
    assert ask(port, "/", body=b"x" * 100)[0] == 413
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil.example", ""):
        assert ask(port, "/", Host=host)[0] in (400, 421)
    for host in ("localhost", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(port, "/", Host=host)[0] == 200


def test_another_address_is_served_only_with_the_token(site, monkeypatch):
    monkeypatch.setenv(serving.TOKEN, "only-for-me")
    with serve(site, host="0.0.0.0") as (port, address):
        assert address.endswith("/?token=only-for-me")
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "cpbkit=wrong"}, {"Cookie": "a=\x01;;;=["}):
            assert ask(port, "/api/forecast?series=BTCUSDT_1h", **given)[0] == 401
        assert ask(port, "/?token=wrong")[0] == 401
        status, _, headers = ask(port, "/?token=only-for-me")
        cookie = headers["Set-Cookie"]
        assert status == 303 and headers["Location"] == "/" and "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert ask(port, "/", Cookie=cookie.partition(";")[0])[0] == 200
        assert ask(port, "/", Authorization="Bearer only-for-me")[0] == 200
    monkeypatch.delenv(serving.TOKEN)
    _, address = serving.make_server(site, host="0.0.0.0")
    assert len(address.partition("token=")[2]) >= 32
    assert "token" not in serving.make_server(site)[1]


def talk(port, raw, patience=5.0):
    """Send raw bytes and return what comes back until the end, or nothing more comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as connection:
        with contextlib.suppress(OSError):  # it may hang up while we still talk
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(OSError):
            while piece := connection.recv(65536):
                found += piece
        return found


HOSTILE = [
    b"\x00" * 10_000,
    b"GET " + b"/" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 200_000,
    b"POST /api/forecast HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\n",
    b"GET /api/forecast?series=%ff%fe%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_request_leaves_the_server_standing(port, raw):
    answer = talk(port, raw)
    assert b"root:" not in answer and b"Traceback" not in answer
    assert ask(port, "/")[0] == 200


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=300), st.text(max_size=80).map(lambda path: f"GET /{path} HTTP/1.1\r\n".encode())))
def test_no_bytes_take_the_server_down(port, raw):
    talk(port, raw + b"Host: 127.0.0.1\r\n\r\n")
    assert ask(port, "/site.js")[0] == 200


def test_slow_requests_are_cut_and_nobody_waits_for_them(port):
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for k, connection in enumerate(slow):
        connection.sendall([b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", b""][k % 3])
    begun = time.monotonic()
    assert ask(port, "/")[0] == 200 and time.monotonic() - begun < 5
    time.sleep(0.7)
    for connection in slow:
        connection.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
        connection.close()


def test_a_port_that_is_taken_and_a_run_that_is_not_there_are_told(port, recent_run):
    taken = "Address already in use. Take another --port"
    for folder, words in ((recent_run.folder, taken), ("no", "is no run folder")):
        done = terminal("serve", folder, "--port", port)
        assert done.exit_code == 1 and words in done.output and done.output.count("\n") == 1


@pytest.mark.browser
def test_a_browser_shows_the_live_page(port, visit):
    page = visit(f"http://127.0.0.1:{port}/", 390, "dark")
    page.get_by_label("Coin").select_option("ETHUSDT")
    page.get_by_label("Bar length").select_option("1h")
    page.wait_for_selector("body[data-shown=ETHUSDT_1h]")
    page.locator("#next canvas").first.wait_for()
    assert page.locator("#verdict").inner_text() and page.locator("#note").inner_text() == ""
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_the_benchmark_of_the_server_counts_answers(port):
    rounds = [bench.load(port, 0.3) for _ in range(2)]
    side = bench.summary(rounds, 0.3)
    assert side["low"] <= side["rate"] <= side["high"] and side["rate"] == pytest.approx(sum(map(len, rounds)) / 0.6)
    assert 0 < side["p50_ms"] <= side["p99_ms"] and len(bench.first(port)) > 10_000
    shown = bench.render({"clients": 8, "bytes": 1, "sides": {"page": side, "bare": side}})
    assert shown[1].startswith(f"a kept forecast: {side['rate']:.0f} a second") and shown[-1].endswith(
        "leaves 1.00 of the library's rate"
    )
