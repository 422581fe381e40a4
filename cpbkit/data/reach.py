"""Whether the hosts that bars and models come from answer from here, and how soon."""

import itertools
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

from cpbkit.data.binance import Hosts
from cpbkit.texts import redact

SECONDS = 5.0  # to wait for an answer
REFUSED = (403, 451)  # what a host says to places that it does not serve


@dataclass(frozen=True)
class Reach:
    """One host."""

    name: str
    url: str
    seconds: float | None  # to its answer; None: there was none
    problem: str = ""

    def __str__(self) -> str:
        head = f"{self.name} ({self.url})"
        if self.problem:
            return f"  WARN  {head}: {self.problem}"
        return f"  ok    {head} answers in {self.seconds:.2f} s"


def find_hosts() -> dict[str, str]:
    """Return the addresses of the archive, the REST host and the Hub, as they are set here."""
    hosts = Hosts.from_environment()
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return {"archive": hosts.archive_url, "REST": hosts.rest("spot", "ping"), "Hub": hub}


def try_hosts(hosts: Mapping[str, str] | None = None, seconds: float = SECONDS) -> list[Reach]:
    """Ask each host once, all at the same time."""
    hosts = find_hosts() if hosts is None else hosts
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(_try, hosts, hosts.values(), itertools.repeat(seconds)))


def _try(name: str, url: str, seconds: float) -> Reach:
    begun, shown = time.monotonic(), redact(url)
    try:
        with requests.get(url, timeout=seconds, stream=True, allow_redirects=False) as answer:
            status = answer.status_code
    except requests.RequestException as error:
        kind = "no answer in time" if isinstance(error, requests.Timeout) else "it cannot be reached from here"
        return Reach(name, shown, None, f"{kind} ({type(error).__name__})")
    took = time.monotonic() - begun
    if status in REFUSED:
        return Reach(name, shown, took, f"it answers, and refuses this place ({status}); name a mirror of it")
    return Reach(name, shown, took, f"it answers with an error ({status})" if status >= 500 else "")
