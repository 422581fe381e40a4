"""A disk that fails, or at which the process dies, at a chosen write, fsync, rename, unlink or mkdir."""

import builtins
import errno
import os
import random
import signal
import time
from pathlib import Path
from unittest import mock

OPERATIONS = ("fsync", "replace", "unlink", "mkdir")  # of the module os, beside every write to a file
FATES = {
    "full": "from then on nothing more can be written",
    "failing": "that operation fails",
    "slow": "that operation takes its time",
    "killed": "the process dies, as by kill -9",
    "torn": "the power fails: the process dies, and of what was not flushed a part is kept",
    "asked": "the process hears a SIGTERM, where it listens",
}


class Killed(BaseException):
    """The process is dead: whatever it still tries on the disk does nothing."""


class Disk:
    """Watch what is done to the files below a folder while the body of a `with` runs, and strike once.

    at: the operation that is struck, 0 is the first; None never. fate: how, one of FATES. A write that fails has
    written half.
    """

    def __init__(self, folder: Path, at: int | None = None, fate: str = "full"):
        self.folder, self.at, self.fate = str(folder), at, fate
        self.seen: list[str] = []  # operations, in their order
        self._dead = False
        self._descriptors: dict[int, str] = {}  # paths of the files that are written
        self._flushed: dict[str, int] = {}  # path of a file with bytes that may be lost -> how many are safe

    def __enter__(self) -> "Disk":
        self._open = builtins.open
        self._patches = [mock.patch("builtins.open", self._opened), mock.patch("io.open", self._opened)]
        for name in OPERATIONS:
            self._patches.append(mock.patch.object(os, name, self._guarded(name, getattr(os, name))))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error) -> None:
        for patch in self._patches:
            patch.stop()

    def is_struck(self, operation: str) -> bool:
        """Count an operation that comes now; return whether it is one to strike. Errors: Killed when dead."""
        if self._dead:
            raise Killed
        self.seen.append(operation)
        at = len(self.seen) - 1
        return at == self.at or (self.fate == "full" and operation == "write" and self.at is not None and at > self.at)

    def strike(self) -> None:
        """Let the running operation fail, if it does."""
        if self.fate in ("killed", "torn"):
            self._dead = True
            if self.fate == "torn":
                self._tear()
            raise Killed
        if self.fate == "slow":
            time.sleep(0.02)
        elif self.fate == "asked":
            if callable(signal.getsignal(signal.SIGTERM)):
                signal.raise_signal(signal.SIGTERM)
        else:
            number = errno.ENOSPC if self.fate == "full" else errno.EIO
            raise OSError(number, os.strerror(number))

    def _tear(self) -> None:
        """Keep a part of the bytes that were not flushed, and of the others their place, as a file system may."""
        rng = random.Random(self.at)
        for path, safe in self._flushed.items():
            if os.path.exists(path):
                with self._open(path, "rb+") as file:
                    size = file.seek(0, os.SEEK_END)
                    kept = rng.randint(min(safe, size), size)
                    file.truncate(kept)
                    file.truncate(rng.choice((kept, size)))

    def _guarded(self, name: str, real):
        def operation(target, *rest, **more):
            path = self._descriptors.get(target, "") if isinstance(target, int) else str(target)
            if "dir_fd" not in more and not path.startswith(self.folder):  # with one it is a step of rmtree
                return real(target, *rest, **more)
            if self.is_struck(name):
                self.strike()
            done = real(target, *rest, **more)
            if name == "fsync":
                self._flushed.pop(path, None)
            elif name == "replace" and path in self._flushed:
                self._flushed[str(rest[0])] = self._flushed.pop(path)
            return done

        return operation

    def _opened(self, file, mode="r", *rest, **more):
        opened, path = self._open(file, mode, *rest, **more), str(file)
        if set(mode) & set("wax+") and path.startswith(self.folder):
            self._descriptors[opened.fileno()] = path
            return Watched(opened, self, path)
        if not isinstance(file, int):
            self._descriptors.pop(opened.fileno(), None)
        return opened

    def write(self, file, path: str, content: bytes) -> int:
        """Write to a file, or half of it and fail."""
        self._flushed.setdefault(path, file.tell())
        if self.is_struck("write"):
            if self.fate not in ("slow", "asked"):
                file.write(content[: len(content) // 2])
                file.flush()
            self.strike()
        return file.write(content)


class Watched:
    """A file whose writes go through a disk."""

    def __init__(self, file, disk: Disk, path: str):
        self._file, self._disk, self._path = file, disk, path

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error) -> None:
        self._file.close()

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        """Write, as the disk lets it."""
        return self._disk.write(self._file, self._path, content)
