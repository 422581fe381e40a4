"""The page of a run with live forecasts, for the browsers of this machine.

Nothing of a request becomes a path: what can be asked for lies in memory by its name.
"""

import asyncio
import datetime as dt
import hmac
import importlib.resources
import re
import time
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cpbkit.views.site import Site, to_json

LONGEST = 200  # characters of a path or query
GRACE, AGAIN = 5.0, 30.0  # s after a bar's close until it is asked for, and between two tries of what failed
COOKIE = "cpbkit"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "json": "application/json"}
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class Live:
    """The documents of all series, each made when it is asked for and kept until the next bar has closed."""

    def __init__(self, site: Site):
        self._site = site
        self._kept: dict[str, tuple[float, bytes]] = {}  # series -> (until when, the document)
        self._locks = {name: asyncio.Lock() for name in site.models}
        self._thread = ThreadPoolExecutor(1)  # torch computes in it, and one fetch at a time is enough

    async def document(self, name: str) -> bytes:
        """Return the document of a series as JSON; a hundred who ask at once cost one forecast."""
        until, content = self._kept.get(name, (0.0, b""))
        if time.time() < until:
            return content
        async with self._locks[name]:
            until, content = self._kept.get(name, (0.0, b""))
            if time.time() >= until:
                making = asyncio.get_running_loop().run_in_executor(self._thread, self._make, name)
                self._kept[name] = await asyncio.shield(making)  # who asked may be gone, the next one is not
            return self._kept[name][1]

    def _make(self, name: str) -> tuple[float, bytes]:
        document, due = self._site.documents([name])[name], 0.0
        if document["forecast"]:
            last = dt.datetime.fromisoformat(document["forecast"]["last_bar"]).replace(tzinfo=dt.timezone.utc)
            due = last.timestamp() + 2e-3 * document["step_ms"] + GRACE
        return max(due, time.time() + AGAIN), to_json(document).encode()


class Guard:
    """What stands before every request: only GET, of a known host, small, and with the token where one is in force."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with what is wrong."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send) if scope["type"] == "lifespan" else None
        answer = self._refuse(Request(scope))

        async def send_safely(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SAFE | ({"Connection": "close"} if answer else {}))
            await send(message)

        await (answer or self._app)(scope, receive, send_safely)

    def _refuse(self, request: Request) -> Response | None:
        scope, headers = request.scope, request.headers
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "only GET is answered")
        if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
            return refusal(413, "a request has no body here")
        if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST:
            return refusal(414, f"a path and its query have {LONGEST} characters at most")
        if not self._token:
            # A name of somebody else's that leads here (DNS rebinding) must not read what only this machine may.
            known = re.sub(r":\d+$", "", headers.get("host", "")) in LOOPBACK
            return None if known else refusal(421, "this host is not served here")
        if self._is_right(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        given = headers.get("authorization", "").removeprefix("Bearer ") or request.cookies.get(COOKIE, "")
        return None if self._is_right(given) else refusal(401, "a token is needed: open the address with ?token=...")

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def refusal(status: int, error: str) -> Response:
    """Return an answer that says in JSON what was wrong."""
    return JSONResponse({"error": error}, status)


def make_app(site: Site, token: str = "") -> ASGIApp:
    """Return the application: the page, `/api/forecast?series=NAME` and the schema of its answers.

    token: what each request must bring; empty: none, and only this machine's own names are served.
    """
    schema = (importlib.resources.files("cpbkit.serve") / "forecast.schema.json").read_bytes()
    files = {f"/{name}": content for name, content in site.files().items()}
    files |= {"/": site.index(live=True), "/api/schema.json": schema}
    live = Live(site)

    async def give(request: Request) -> Response:
        name = request.url.path
        if name not in files:
            return refusal(404, "there is nothing of this name")
        return Response(files[name], media_type=TYPES[name.rpartition(".")[2] if "." in name else "html"])

    async def forecast(request: Request) -> Response:
        asked = request.query_params.multi_items()
        if len(asked) != 1 or asked[0][0] != "series":
            return refusal(400, "ask as /api/forecast?series=BTCUSDT_1h, and for nothing else")
        if asked[0][1] not in site.models:
            return refusal(404, f"there is no model of this series; there are {', '.join(list(site.models)[:40])}")
        content = await live.document(asked[0][1])
        return Response(content, media_type="application/json", headers={"Cache-Control": "no-store"})

    routes = [Route("/api/forecast", forecast), Route("/{rest:path}", give)]
    return Guard(Starlette(routes=routes), token)
