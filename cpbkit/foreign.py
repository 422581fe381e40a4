"""What a stranger may have written: files that are no links, JSON of a bounded size and depth and a known form."""

import contextlib
import dataclasses
import json
import os
import re
import stat
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from cpbkit.errors import CpbkitError

SIZE = 8 << 20  # bytes of one document; parsed it takes up to thirty times as much
DEPTH = 32  # lists and objects inside each other; the kit's own have at most seven
LARGEST = 1e100  # of a number
DIGITS = 25  # of a whole number, and more than one of 64 bits has


class Damaged(CpbkitError):
    """Bytes that are not what they should be; the message says why, not where."""


def read_bytes(folder: Path, name: str, limit: int = SIZE) -> bytes | None:
    """Read a file of a folder that somebody else may have made; None where there is none.

    Errors: Damaged where it is a link or lies behind one, is no file, has more than `limit` bytes or cannot be read.
    """
    with open_file(folder, name) as file:
        # A read sets aside all that it is allowed to bring.
        content = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1) if file else None
    if content is not None and len(content) > limit:
        raise Damaged(f"it has more than {limit:,} bytes")
    return content


@contextlib.contextmanager
def open_file(folder: Path, name: str) -> Iterator[BinaryIO | None]:
    """Open such a file for reading; None where there is none. Errors: Damaged, but for its size."""
    refuse_links(folder, name)
    path = folder / name
    try:
        if not path.exists():
            yield None
            return
        with open(path, "rb", opener=_opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damaged("it is no file")
            yield file
    except OSError as error:
        raise Damaged(f"it cannot be read: {error.strerror}") from None


def refuse_links(folder: Path, name: str) -> None:
    """Raise Damaged where `name`, or a folder on the way to it inside `folder`, is a link to somewhere else."""
    path = folder
    for part in Path(name).parts:
        path /= part
        if path.is_symlink():
            raise Damaged(f"{path.relative_to(folder)} is a link, which is not followed")


def _opener(path: str, flags: int) -> int:
    # A pipe under the name of a file would keep its reader waiting for ever.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def parse(text: bytes | str, form: Any = object, limit: int = SIZE) -> Any:
    """Read JSON of a known form, see `check`. Errors: Damaged with the reason in one line."""
    if len(text) > limit:
        raise Damaged(f"it has more than {limit:,} bytes")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise Damaged(f"it is nested deeper than {DEPTH}") from None
    except UnicodeDecodeError:
        raise Damaged("it is no UTF-8 text") from None
    except ValueError as error:
        raise Damaged(f"it is no JSON: {error}") from None
    _measure(value)
    check(value, form)
    return value


def _whole(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if not abs(number := float(text)) < LARGEST:  # NaN, Infinity, 1e999, and what overflows when it is squared
        raise ValueError(f"the number {text[:20]}")
    return number


def _measure(value: object) -> None:
    level, depth = [value], 0
    while level := [x for x in level if isinstance(x, dict | list)]:
        depth += 1
        if depth > DEPTH:
            raise Damaged(f"it is nested deeper than {DEPTH}")
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]


def check(value: Any, form: Any, what: str = "it") -> None:
    """Raise Damaged unless a value has a form.

    A form is a type (float admits whole numbers, object everything), [form] for a list of them, (form, form) for one of
    this length, or {"name": form, "other?": form} for an object that may leave out the second and hold others too;
    {"*": form} is of every value in it. float | None admits null, datetime a text `2025-03-01T00:00`.
    """
    if type(value) is form:  # as most values are, of which a large ledger has millions
        return
    if isinstance(form, types.UnionType):
        if value is not None:
            check(value, typing.get_args(form)[0], what)
    elif form is datetime:
        _expect(isinstance(value, str) and _is_time(value), value, "a time such as 2025-03-01T00:00", what)
    elif isinstance(form, dict):
        _expect(isinstance(value, dict), value, "an object", what)
        for key, inner in form.items():
            if key == "*":
                for name, one in value.items():
                    check(one, inner, repr(name[:40]))
                continue
            name = key.removesuffix("?")
            if name in value:
                check(value[name], inner, f"{name!r}")
            elif name == key:
                raise Damaged(f"{name!r} is missing")
    elif isinstance(form, list | tuple):
        _expect(isinstance(value, list | tuple), value, "a list", what)
        if isinstance(form, tuple):
            _expect(len(value) == len(form), value, f"a list of {len(form)}", what)
        for one, inner in zip(value, form * len(value) if isinstance(form, list) else form, strict=True):
            check(one, inner, f"each of {what}" if isinstance(form, list) else what)
    elif form in (int, float):
        kinds = int | float if form is float else int
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        _expect(fits, value, "a number" if form is float else "a whole number", what)
    else:
        words = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
        _expect(isinstance(value, form), value, words.get(form, ""), what)


def form_of(kind: Any) -> Any:
    """Return the form of what a dataclass looks like in JSON; a field with a default may be absent."""
    if dataclasses.is_dataclass(kind):
        absent = dataclasses.MISSING
        return {
            field.name + ("" if field.default is field.default_factory is absent else "?"): form_of(field.type)
            for field in dataclasses.fields(kind)
        }
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (tuple, list):
        return [form_of(inner[0])] if len(inner) == 1 or inner[1] is Ellipsis else tuple(map(form_of, inner))
    if typing.get_origin(kind) is dict:
        return {"*": form_of(inner[1])}
    return object if kind is Any else kind


def _is_time(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?", text):
        return False
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False


def _expect(fits: bool, value: object, wanted: str, what: str) -> None:
    if not fits:
        raise Damaged(f"{what} must be {wanted}; got {repr(value)[:40]}")
