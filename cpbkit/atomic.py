"""Files that are whole or absent."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, flushed to disk before it takes the name.

    A kill at any moment, or a full disk, leaves the old file or none. Errors: OSError with the file's name.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with named(path):
            with open(part, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong before is what to tell
            part.unlink()
        raise


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Give errors of the disk the name of the file that was to be written, which a full one does not tell."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
