"""A disk that fails, or at which the process dies, at a chosen write, fsync, rename, unlink or mkdir."""

import builtins
import errno
import os
from pathlib import Path
from unittest import mock

OPERATIONS = ("fsync", "replace", "unlink", "mkdir")  # of the module os, beside every write to a file


class Killed(BaseException):
    """The process is dead: whatever it still tries on the disk does nothing."""


class Disk:
    """Watch what is done to the files below a folder while the body of a `with` runs, and fail once.

    at: the operation that fails, 0 is the first; None never. deadly: whether the process dies there, as by kill -9,
    instead of hearing that the disk is full. A write that fails has written half.
    """

    def __init__(self, folder: Path, at: int | None = None, deadly: bool = False):
        self.folder, self.at, self.deadly = str(folder), at, deadly
        self.seen: list[str] = []  # operations, in their order
        self._dead, self._descriptors = False, set()

    def __enter__(self) -> "Disk":
        self._open = builtins.open
        self._patches = [mock.patch("builtins.open", self._opened)]
        for name in OPERATIONS:
            self._patches.append(mock.patch.object(os, name, self._guarded(name, getattr(os, name))))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error) -> None:
        for patch in self._patches:
            patch.stop()

    def count(self, operation: str) -> bool:
        """Count an operation that comes now; return whether it is the one to fail. Errors: Killed when dead."""
        if self._dead:
            raise Killed
        self.seen.append(operation)
        return len(self.seen) - 1 == self.at

    def fail(self) -> None:
        """Let the running operation fail."""
        if self.deadly:
            self._dead = True
            raise Killed
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _guarded(self, name: str, real):
        def operation(target, *rest, **more):
            known = target in self._descriptors if isinstance(target, int) else str(target).startswith(self.folder)
            if known and self.count(name):
                self.fail()
            return real(target, *rest, **more)

        return operation

    def _opened(self, file, mode="r", *rest, **more):
        opened = self._open(file, mode, *rest, **more)
        if set(mode) & set("wax+") and str(file).startswith(self.folder):
            self._descriptors.add(opened.fileno())
            return Watched(opened, self)
        if not isinstance(file, int):
            self._descriptors.discard(opened.fileno())
        return opened


class Watched:
    """A file whose writes a disk counts."""

    def __init__(self, file, disk: Disk):
        self._file, self._disk = file, disk

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *error) -> None:
        self._file.close()

    def __getattr__(self, name: str):
        return getattr(self._file, name)

    def write(self, content: bytes) -> int:
        """Write, or write half and fail."""
        if self._disk.count("write"):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            self._disk.fail()
        return self._file.write(content)
