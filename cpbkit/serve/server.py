"""The server itself: uvicorn, on loopback unless a token guards it, and patient only for so long."""

import asyncio
import os
import secrets
import socket
import time
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpbkit.serve.app import LOOPBACK, make_app
from cpbkit.views.site import Site

PATIENCE = 30.0  # s from a connection's last answer until its next one must have been taken; then it is cut
CHECK = 2.0  # s between two looks at a connection
AT_ONCE = 512  # connections; whoever comes when there are more is told to come again
TOKEN = "CPBKIT_TOKEN"


class Impatient(H11Protocol):
    """uvicorn's protocol, which by itself waits for ever for a request, and for an answer to be taken."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to count."""
        super().connection_made(cast(asyncio.Transport, transport))
        # asyncio leaves it off for a socket made outside; then each answer waits 40 ms for its head's acknowledgement.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answered = time.monotonic()
        self._look = self.loop.call_later(CHECK, self._check)

    def on_response_complete(self) -> None:
        """Begin to count again, once the answer has left."""
        if not self.transport.get_write_buffer_size():
            self._answered = time.monotonic()
        super().on_response_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """Stop counting."""
        self._look.cancel()
        super().connection_lost(error)

    def _check(self) -> None:
        if time.monotonic() - self._answered > PATIENCE:
            self.transport.abort()
        else:
            self._look = self.loop.call_later(CHECK, self._check)


def make_server(site: Site, host: str = "127.0.0.1", port: int = 8765) -> tuple[uvicorn.Server, str]:
    """Return a server, and the address to open; on another address than loopback every request needs a token.

    The token is that of the environment variable CPBKIT_TOKEN, else a new one. port: 0 takes a free one.
    """
    open_to_others = host not in (*LOOPBACK, "::1")
    token = os.environ.get(TOKEN, "")
    if open_to_others and not token:
        token = secrets.token_urlsafe(24)
    config = uvicorn.Config(
        make_app(site, token),
        host=host,
        port=port,
        http=Impatient,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,  # queries may hold the token
        server_header=False,
        proxy_headers=False,
        limit_concurrency=AT_ONCE,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=2,
    )
    shown = f"[{host}]" if ":" in host else host
    return uvicorn.Server(config), f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
