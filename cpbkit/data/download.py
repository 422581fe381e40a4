"""HTTP for many small files: one pool of connections, retries with limits, and hosts that are left alone in time."""

import contextlib
import email.utils
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
import urllib3.connection

from cpbkit.errors import SourceError

REFUSALS = {
    401: "wants a login (HTTP 401)",
    407: "is behind a proxy that wants a login (HTTP 407)",
    451: "does not serve this place (HTTP 451): the venue shuts out many countries, and the data centres that "
    "Colab and Kaggle run in",
    403: "turned the request away (HTTP 403): its firewall does not want this address or what was asked",
    418: "has banned this address for asking too much (HTTP 418); that lasts from two minutes to three days",
}
REDIRECTS = (301, 302, 303, 307, 308)
HOPS = 3  # on the same host
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Retries:
    """How long to wait for a host, and how often to ask again."""

    connect: float = 10.0  # s
    read: float = 20.0  # s without a byte
    whole: float = 240.0  # s for one exchange, from the request to the last byte; a longer one is not tried again
    tries: int = 4
    backoff: float = 0.5  # s before the second try, then doubled, with jitter
    longest_wait: float = 30.0  # s, also of a Retry-After
    dead_after: int = 3  # bodies in a row that were given up before the host counts as down


@dataclass(frozen=True)
class Answer:
    """What a host said: 200 with a body, 404, or 400 with its reason."""

    status: int
    body: bytes = b""
    time: float | None = None  # the host's clock, s since 1970
    weight: int = 0  # what this address has used of the host's allowance a minute, where it says


class Unavailable(SourceError):
    """A body that is not available now, after all retries; later it may be."""


class Gone(Unavailable):
    """A host that is not asked any more."""


class Refused(Gone):
    """A host that does not want this client; asking on makes it worse."""


class _Again(Exception):
    """A try that failed in a way that another one may not."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


@dataclass(eq=False)
class _Host:
    """What is known of a host, shared by the threads."""

    settings: dict  # proxies and certificates
    paused_until: float = 0.0  # monotonic s
    given_up: int = 0  # bodies in a row
    gone: Gone | None = None


@dataclass(eq=False)
class _Exchange:
    """One request and its answer, as the watchman sees it."""

    deadline: float  # monotonic s
    late: bool = False
    sock: socket.socket | None = None

    def cut(self) -> None:
        """Wake the thread that waits for bytes."""
        if sock := self.sock:
            with contextlib.suppress(OSError):  # it may have just ended by itself
                sock.shutdown(socket.SHUT_RDWR)


_under_way = threading.local()  # .exchange: of this thread


class _Watched(urllib3.connection.HTTPConnection):
    """A connection that shows its socket: a header that drips byte by byte lets no timeout of a socket pass."""

    def getresponse(self, *args, **kwargs):
        exchange = getattr(_under_way, "exchange", None)
        if exchange:
            exchange.sock = self.sock
        return super().getresponse(*args, **kwargs)


class _Adapter(requests.adapters.HTTPAdapter):
    def get_connection_with_tls_context(self, *args, **kwargs):
        pool = super().get_connection_with_tls_context(*args, **kwargs)
        kind = pool.ConnectionCls  # over TLS or not, through a proxy or not
        if not issubclass(kind, _Watched):
            pool.ConnectionCls = type("Watched", (_Watched, kind), {})
        return pool


class Pool:
    """Threads for jobs, which do not keep the program alive: an interrupt ends it whatever they wait for."""

    def __init__(self, threads: int):
        self._jobs: queue.SimpleQueue[tuple[Future, Callable, tuple] | None] = queue.SimpleQueue()
        self._lock, self._closed, self._threads = threading.Lock(), False, threads
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments) -> Future:
        """Let a thread call a function; return its Future, which is cancelled where the pool is closed."""
        future: Future = Future()
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._jobs.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Drop the jobs that wait; the threads end when they are through with theirs."""
        with self._lock:
            self._closed = True  # whoever submits another would wait for it for ever
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            future, function, arguments = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # handed to whoever asks for the result
                future.set_exception(error)


class Client:
    """Gets bodies for many threads through one pool of connections, until it is closed."""

    def __init__(self, threads: int, retries: Retries | None = None):
        self.retries = retries or Retries()
        self.bytes = 0  # received so far
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._session = requests.Session()
        self._session.trust_env = False  # read once a host below: a look for proxies takes longer than a small file
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, _Adapter(pool_maxsize=threads))
        # Bodies are zips, or small: plain bytes keep Content-Length meaningful.
        self._session.headers["Accept-Encoding"] = "identity"
        self._exchanges: set[_Exchange] = set()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Make every thread give up at once."""
        self._stopped.set()
        with self._lock:
            for exchange in self._exchanges:
                exchange.cut()
        self._session.close()

    def _watch(self) -> None:
        while not self._stopped.wait(min(0.25, self.retries.whole / 4)):
            with self._lock:
                for exchange in self._exchanges:
                    if time.monotonic() > exchange.deadline:
                        exchange.late = True
                        exchange.cut()

    def get(self, url: str, params: dict | None = None, *, limit: int) -> Answer:
        """Get a body of at most `limit` bytes.

        404 and 400 are answers. Too many requests, server errors, resets and short bodies are tried again, with
        jittered and capped waits. Raises Refused at 403, 418 and 451, Unavailable after the last try; a host that
        refused, or gave up on several bodies in a row, is not asked again.
        """
        # urllib3's Retry does this but for short bodies, a cap on what Retry-After says, and other threads' news.
        host, retries, reason = self._host(url), self.retries, ""
        try:
            for attempt in range(retries.tries):
                if attempt:
                    self._wait(random.uniform(0.5, 1.0) * min(retries.longest_wait, retries.backoff * 2**attempt))
                self._wait(host.paused_until - time.monotonic())
                if host.gone:
                    raise host.gone
                try:
                    answer = self._once(host, url, params, limit)
                    host.given_up = 0
                    return answer
                except _Again as again:
                    reason = str(again)
                    self.pause(url, min(again.wait, retries.longest_wait))  # all threads: they share the allowance
            raise Unavailable(f"{url} was not available in {retries.tries} tries; the last: {reason}")
        except Refused as error:
            host.gone = error
            raise
        except Unavailable as error:
            with self._lock:
                host.given_up += 1
                if host.given_up >= retries.dead_after and not host.gone:
                    last = f"after {retries.tries} tries ({reason})" if reason else f"so: {error}"
                    host.gone = Gone(
                        f"{urlsplit(url).netloc} is not to be reached: {host.given_up} files in a row failed, the last "
                        f"{last}"
                    )
            raise

    def pause(self, url: str, seconds: float) -> None:
        """Ask the host of a URL for nothing more during this time."""
        host = self._host(url)
        with self._lock:
            host.paused_until = max(host.paused_until, time.monotonic() + seconds)

    def _host(self, url: str) -> _Host:
        name = urlsplit(url).netloc
        with self._lock:
            if name not in self._hosts:
                environment = requests.Session().merge_environment_settings(url, {}, True, None, None)
                self._hosts[name] = _Host(environment)
            return self._hosts[name]

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(max(0.0, seconds)):
            raise Unavailable("stopped")

    def _once(self, host: _Host, url: str, params: dict | None, limit: int) -> Answer:
        exchange = _under_way.exchange = _Exchange(time.monotonic() + self.retries.whole)
        with self._lock:
            self._exchanges.add(exchange)
        try:
            for _ in range(HOPS + 1):
                answer = self._hop(host, url, params, limit)
                if exchange.late:  # an answer that was cut off in its header looks whole
                    raise TimeoutError
                if isinstance(answer, Answer):
                    return answer
                url, params = answer, None
            raise Unavailable(f"{url} sends on in a circle: {HOPS} redirects led nowhere")
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise Unavailable(f"{url}: {error}") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            if exchange.late:  # ValueError: what reading from a socket that was cut can end in
                raise Unavailable(f"{url} took more than {self.retries.whole:.0f} s, which is too slow") from None
            self._wait(0)
            if isinstance(error, ValueError) and not isinstance(error, requests.RequestException):
                raise
            raise _Again(_plain(error)) from None
        finally:
            _under_way.exchange = None
            with self._lock:
                self._exchanges.discard(exchange)

    def _hop(self, host: _Host, url: str, params: dict | None, limit: int) -> Answer | str:
        """Ask once; return the answer, or where on the same host it is."""
        timeout = (self.retries.connect, self.retries.read)
        with self._session.get(url, params=params, timeout=timeout, allow_redirects=False, **host.settings) as response:
            status, headers = response.status_code, response.headers
            if status in REFUSALS:
                raise Refused(f"{urlsplit(url).netloc} {REFUSALS[status]}")
            if status in (408, 429) or status >= 500:
                asked = headers.get("Retry-After", "") if status == 429 else ""
                raise _Again(f"HTTP {status}", float(asked) if asked.isdigit() else 0.0)
            if status in REDIRECTS:
                there = urljoin(response.url, headers.get("Location", ""))
                if urlsplit(there)[:2] != urlsplit(response.url)[:2]:
                    raise Unavailable(
                        f"{urlsplit(url).netloc} sends on to {'://'.join(urlsplit(there)[:2])}, and other hosts are "
                        "not followed; name that one yourself if you trust it (--archive-url, --rest-url)"
                    )
                return there
            if status not in (200, 400, 404):
                raise Unavailable(f"{url} answered HTTP {status}, which is no whole file")
            body = self._body(response, url, limit)
        with self._lock:
            self.bytes += len(body)
        date, used = email.utils.parsedate_tz(headers.get("Date", "")), headers.get("X-MBX-USED-WEIGHT-1M", "")
        return Answer(status, body, email.utils.mktime_tz(date) if date else None, int(used) if used.isdigit() else 0)

    def _body(self, response: requests.Response, url: str, limit: int) -> bytes:
        body = bytearray()
        # read() of a drip of bytes would return only when the chunk is full.
        while chunk := response.raw.read1(_CHUNK):
            body += chunk
            if len(body) > limit:
                raise Unavailable(f"{url} sends more than {limit:,} bytes, which no file of bars has")
            self._wait(0)
        return bytes(body)


def _plain(error: Exception) -> str:
    """Say in a few words what a connection died of."""
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    cause = getattr(error, "reason", None)
    if isinstance(cause, Exception):
        return _plain(cause)
    text = str(error.args[0] if error.args else error).rpartition(": ")[2] or type(error).__name__
    return text[:200]
