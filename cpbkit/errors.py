"""The exceptions of the kit: one small tree, each with a sentence for the person who reads it."""

import contextlib
import datetime as dt
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator

from cpbkit.texts import one_line, printable, redact, wrapped


class CpbkitError(Exception):
    """Something a person can act on; the message says the rule, what was got, and what to do.

    Messages end in logs, reports and issues of others, so no password of a URL stays in one.
    """

    def __init__(self, *args: object):
        super().__init__(*(redact(each) if isinstance(each, str) else each for each in args))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows of it: what to do, not where in the kit it was raised."""
        return [f"{type(self).__name__}: {printable(str(self))}"]


@contextlib.contextmanager
def stoppable(then: str = "run the same again, it begins anew") -> Iterator[None]:
    """Let an interrupt end in a sentence, for a person who need not read where in the kit it was; also a decorator."""
    try:
        yield
    except KeyboardInterrupt:
        stopped = KeyboardInterrupt(f"stopped; {then}")  # no class of its own: Python ends a program by the exact one
        stopped._render_traceback_ = lambda: [str(stopped)]  # type: ignore[attr-defined]  # what a notebook shows
        raise stopped from None


class DataError(CpbkitError):
    """Bars that cannot be used, or are not available; in one line, as it may quote names and cells of strangers."""

    def __init__(self, *args: object):
        super().__init__(*(one_line(each) if isinstance(each, str) else each for each in args))


class SourceError(DataError):
    """A host did not give what was asked for; of several series a line each."""

    def __init__(self, *args: object):
        CpbkitError.__init__(self, *args)

    def _render_traceback_(self) -> list[str]:
        switch = "in Kaggle turn on Settings > Internet; " if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else ""
        other = 'os.environ["CPBKIT_ARCHIVE_URL"] names a mirror, source="synthetic" takes the seeded market'
        lines = "".join(super()._render_traceback_()).split("\n")
        lines = [line for line in lines if "--archive-url" not in line]  # the way out in a terminal
        return [*lines, wrapped([f"In a notebook: {switch}{other}; then run the cell again."])]


class RunError(CpbkitError):
    """A run folder that cannot be used as asked."""


class UnknownName(CpbkitError, ValueError):
    """A name that is not in a closed set."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # of an OSError: the disk is full, or this user's part of it
# How torch says that memory is short.
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
TERMINATED = 143  # exit code after a SIGTERM, as in a shell


class Terminated(SystemExit):
    """SIGTERM, which batch systems and containers send some seconds before they kill."""

    def __init__(self):
        super().__init__(TERMINATED)


def check_day(name: str, day: str, error: type[CpbkitError] = CpbkitError) -> dt.date:
    """Return a day that is written like 2025-03-01; raise for anything else, other forms of ISO 8601 too."""
    if isinstance(day, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", day, re.ASCII):
        with contextlib.suppress(ValueError):  # as for February 30
            return dt.date.fromisoformat(day)
    raise error(f"{name} must be a day like 2025-03-01; got {day!r}")


def check_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return `name`; raise UnknownName with the nearest members when it is not one of `known`."""
    known = list(known)
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    more = ", ..." if len(known) > 40 else ""
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known[:40])}{more}"
    raise UnknownName(f"{kind} must be a known name; got {name!r} ({hint})")
