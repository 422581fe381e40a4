"""The exceptions of the kit: one small tree, each with a sentence for the person who reads it."""

import difflib
from collections.abc import Iterable

from cpbkit.texts import redact


class CpbkitError(Exception):
    """Something a person can act on; the message says the rule, what was got, and what to do.

    Messages end in logs, reports and issues of others, so no password of a URL stays in one.
    """

    def __init__(self, *args: object):
        super().__init__(*(redact(each) if isinstance(each, str) else each for each in args))


class DataError(CpbkitError):
    """Bars that cannot be used, or are not available."""


class SourceError(DataError):
    """A host did not give what was asked for."""


class RunError(CpbkitError):
    """A run folder that cannot be used as asked."""


class UnknownName(CpbkitError, ValueError):
    """A name that is not in a closed set."""


TERMINATED = 143  # exit code after a SIGTERM, as in a shell


class Terminated(SystemExit):
    """SIGTERM, which batch systems and containers send some seconds before they kill."""

    def __init__(self):
        super().__init__(TERMINATED)


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `name`; raise UnknownName with the nearest members when it is not one of `known`."""
    known = list(known)
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known[:40])}"
    raise UnknownName(f"{kind} must be a known name; got {name!r} ({hint})")
