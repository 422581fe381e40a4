"""Take apart what is packed, with a bound on what comes out: a few bytes can promise any amount."""

import bz2
import gzip
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import IO

PACKED = {"gz": gzip, "bz2": bz2, "xz": lzma}  # by the end of a name
PIECE = 1 << 20  # bytes that come out at once
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others cannot be read piece by piece
# Sees name, each piece of what comes out, and how many bytes came before it; may raise before there is more.
Check = Callable[[str, bytes, int], None]


class NotUnpacked(ValueError):
    """Packed bytes that are damaged, of another kind, or that hold more than they may."""


def unpack(packed: IO[bytes], name: str, limit: int, check: Check | None = None) -> tuple[str, bytes]:
    """Return name and content, of at most `limit` bytes, of what a name of PACKED has packed; NotUnpacked else."""
    stem, _, kind = name.rpartition(".")
    try:
        with PACKED[kind].open(packed) as file:  # several members too
            return stem, _gather(file, stem, limit, check)
    except NotUnpacked:
        raise
    except EOFError:
        raise NotUnpacked("its end is missing") from None
    except (OSError, zlib.error, lzma.LZMAError, ValueError, MemoryError) as error:
        raise NotUnpacked(f"it is not .{kind} that can be read ({error})") from None


def unzip(packed: IO[bytes], limit: int, check: Check | None = None) -> tuple[str, bytes]:
    """Return name and content, of at most `limit` bytes, of the one file in a zip; NotUnpacked else."""
    try:
        with zipfile.ZipFile(packed) as box:
            # macOS adds a shadow of each file.
            members = [m for m in box.infolist() if not m.is_dir() and not m.filename.startswith("__MACOSX/")]
            if len(members) != 1:
                raise NotUnpacked(f"a zip must hold one file; got {len(members)}. Unpack it first")
            check_methods(members)
            with box.open(members[0]) as member:
                return member.name, _gather(member, member.name, limit, check)
    except NotUnpacked:
        raise
    # What garbage makes zipfile raise, besides its own error, depends on where the garbage is.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError) as error:
        raise NotUnpacked(f"it is not a zip that can be read ({error})") from None


def _gather(file: IO[bytes], name: str, limit: int, check: Check | None) -> bytes:
    out = io.BytesIO()  # read(), told how much, holds it twice
    while out.tell() <= limit and (piece := file.read(PIECE)):  # whatever the file says of itself
        if check:
            check(name, piece, out.tell())
        out.write(piece)
    if out.tell() > limit:
        raise NotUnpacked(f"it unpacks to more than {limit:,} bytes")
    return out.getvalue()


def check_methods(members: list[zipfile.ZipInfo]) -> None:
    """Raise NotUnpacked for a member that is packed in a way whose output has no bound."""
    for member in members:
        if member.compress_type not in METHODS:
            raise NotUnpacked(f"a zip must be stored or deflated; {member.filename!r} is packed in another way")
