"""Files that are whole or absent."""

import contextlib
import os
import uuid
from pathlib import Path


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it, flushed to disk before it takes the name.

    A kill at any moment, or a full disk, leaves the old file or none. Errors: OSError.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise
