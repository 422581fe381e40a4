"""Texts that may hold what somebody else wrote, made fit to be shown and kept."""

import os
import re
import textwrap
from collections.abc import Iterable
from typing import TextIO

COLUMNS = 100  # of a line
# Commands to a terminal (OSC, CSI, single ones), other control characters but tab and line feed, and marks that turn
# the direction of writing, by which a line can show another order than it has. Halves of a pair, as Python reads file
# names that are no UTF-8, cannot be written at all.
_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b.?", re.DOTALL)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")


def printable(text: str) -> str:
    """Return a text without what a terminal would obey instead of showing."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def one_line(text: str) -> str:
    """Return a text as `printable` does, whose line breaks cannot begin a line that looks like one of the kit's."""
    return printable(text).replace("\n", "\\n")


def cut(text: str, most: int) -> str:
    """Shorten a text, which may be one long word, to so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def width_of(stream: TextIO) -> int:
    """Return how many columns the terminal behind a stream has; the other streams may lead elsewhere."""
    asked = int(os.environ.get("COLUMNS") or 0)
    try:
        return asked or os.get_terminal_size(stream.fileno()).columns or 80  # 0 where nobody has said it
    except OSError:  # a console of an editor says that it is a terminal, and has no file behind it
        return 80


def rewrite(stream: TextIO, text: str, end: str = "") -> None:
    """Put a text in the place of the line that stands on a terminal, cut to its width; `end` follows it."""
    width = width_of(stream) - 1  # in the last column some terminals begin a new line
    stream.write("\r" + cut(text, width).ljust(width) + end)
    stream.flush()


def redact(text: str) -> str:
    """Return a text in which no URL holds a name and password: `https://***@host`."""
    return _LOGIN.sub("***@", text)


def wrapped(lines: Iterable[str]) -> str:
    """Join lines for a terminal or a notebook, whose page of 1000 px breaks longer ones within words."""
    fill = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill.fill, lines))
