"""Where runs lie, and where they are kept for the day the machine is taken away."""

import atexit
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpbkit import atomic
from cpbkit.runs.folder import EXPERIMENT, LEDGER, RunFolder

EVERY = 10.0  # s between two looks at what has changed
RUNS = f"[!.]*/{EXPERIMENT}"  # in a folder of runs
CHECKPOINTS = "progress/*.safetensors"  # in a run
DRIVE = Path("/content/drive")  # where Colab mounts it
INPUTS = Path("/kaggle/input")  # what is attached to a notebook in Kaggle, such as the output of an earlier version

log = logging.getLogger(__name__)


class Workspace:
    """A folder of runs, to be given to `sweep` as `runs`; a thread keeps what changes in it in another folder.

    With a checkpoint every 30 s, a machine that is gone at any moment takes at most a minute's work with it; more only
    where a checkpoint takes so long to write (0.5 s or more) that one is due less often.
    """

    def __init__(self, folder: Path, kept: Path | None = None, sources: Sequence[Path] = (), note: str = ""):
        self.folder, self.kept, self.note = folder, kept, note
        self.trouble = ""  # why the last try to keep something did not succeed
        self.seconds, self.bytes = 0.0, 0  # that keeping has taken so far
        self._sources = [*sources, *([kept] if kept else [])]
        self._seen: dict[Path, tuple[int, int] | None] = {}  # local file -> time and size of what is kept of it
        self._begun, self._lock, self._over = time.monotonic(), threading.Lock(), threading.Event()
        if kept:
            atexit.register(self.close)
            threading.Thread(target=self._follow, daemon=True).start()

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        found = list(self._stored())
        parts = [f"Runs lie in {self.folder}"]
        if self.kept:
            share = self.seconds / max(time.monotonic() - self._begun, 1e-9)
            parts[0] += f" and are kept in {self.kept}, what changes every {EVERY:.0f} s"
            if self.bytes:
                cost = f"{self.seconds:.1f} s, {share:.1%} of the time, for {self.bytes / 1e6:.1f} MB"
                parts.append(f"That has cost {cost}")
        if found:
            told = RunFolder(found[-1]).status()
            stands = f", {told['done']} of {told['total']} done" if {"done", "total"} <= told.keys() else ""
            parts.append(f"The newest of {len(found)} is {found[-1].name}{stands}")
        return ". ".join(filter(None, [*parts, self.note, self.trouble])) + "."

    def _stored(self) -> Iterator[Path]:
        """Go through all runs, each where its newest state is, the newest last."""
        homes = [self.folder, *self._sources]
        runs = sorted((path.parent for home in homes for path in home.glob(RUNS)), key=_told_at)
        newest = {run.name: run for run in runs}
        yield from (run for run in runs if newest[run.name] == run)

    def find(self, name: str) -> Path:
        """Return the folder of a run, which is brought here where a newer state of it is kept. Errors: OSError."""
        local = self.folder / name
        newest = next((run for run in self._stored() if run.name == name), local)
        if newest == local or (local.exists() and _told_at(newest) == _told_at(local)) or RunFolder(local).holder():
            return local
        with self._lock:
            part = self.folder / f".{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            for path in _files(newest):
                (part / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(newest / path, part / path)
            if local.exists():
                shutil.rmtree(local)
            os.replace(part, local)
            if newest.parent == self.kept:
                self._seen |= {local / path: _stamp(local / path) for path in _files(local)}
        return local

    def keep(self) -> None:
        """Keep now what has changed since the last look. Without a folder to keep it in, nothing happens."""
        if not self.kept:
            return
        with self._lock:
            begun = time.monotonic()
            try:
                for path in self.folder.glob(RUNS):
                    self._keep_run(path.parent)
                self.trouble = ""
            except OSError as error:
                trouble = f"Not kept in {self.kept} since: {error.strerror}, {error.filename}"
                if trouble != self.trouble:
                    log.warning(trouble)
                self.trouble = trouble
            self.seconds += time.monotonic() - begun

    def _keep_run(self, run: Path) -> None:
        """Keep a run so that a sweep goes on from what is kept, whenever this ends.

        A model that a checkpoint has no more must be in the ledger, and one that is in the ledger must be there.
        """
        for path in _files(run):
            if path.match(CHECKPOINTS) and (fresh := self._take(run / path)):
                self._keep_results(run)  # of the moment of that checkpoint, or later
                self._write(run / path, *fresh)
        self._keep_results(run)
        for path in [path for path in self._seen if path.is_relative_to(run) and not path.exists()]:
            self._place(path).unlink(missing_ok=True)
            del self._seen[path]

    def _keep_results(self, run: Path) -> None:
        ledger = self._take(run / LEDGER)
        for path in _files(run):
            if not path.match(CHECKPOINTS) and path.name != LEDGER and (fresh := self._take(run / path)):
                self._write(run / path, *fresh)
        if ledger:
            self._write(run / LEDGER, *ledger)

    def _take(self, path: Path) -> tuple[bytes, tuple[int, int]] | None:
        """Read a file and what it is known by; None where it is kept as it is, or is not there."""
        stamp = _stamp(path)
        if path not in self._seen and stamp and (there := _stamp(self._place(path))):  # by a process before this one
            self._seen[path] = stamp if there[0] >= stamp[0] and there[1] == stamp[1] else there
        if stamp is None or self._seen.get(path) == stamp:
            return None
        try:
            return path.read_bytes(), stamp
        except FileNotFoundError:  # a sweep drops the checkpoints that it needs no more
            return None

    def _place(self, path: Path) -> Path:
        assert self.kept  # else nothing is kept
        return self.kept / path.relative_to(self.folder)

    def _write(self, path: Path, content: bytes, stamp: tuple[int, int]) -> None:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(place, content)
        self._seen[path] = stamp
        self.bytes += len(content)

    def _follow(self) -> None:
        while not self._over.wait(EVERY):
            self.keep()

    def close(self) -> None:
        """Keep what there is, and end the thread."""
        self._over.set()
        self.keep()
        atexit.unregister(self.close)


_open: dict[tuple[Path, Path | None], Workspace] = {}  # by both folders: a cell that is run again takes the same one


def workspace(keep: str | os.PathLike | None = None, runs: str | os.PathLike = "runs") -> Workspace:
    """Return the folder for runs that suits this machine, for `sweep(runs=...)` and `find_run(runs=...)`.

    runs: where they lie while they are worked on. keep: a folder that outlives the machine, where all that changes is
    kept and where runs are found again; None takes Drive in Colab, which asks for it once, and else nothing. In Kaggle
    runs are also found in what is attached as input.
    """
    folder, sources, note = Path(runs).absolute(), [], ""
    kept = Path(keep).absolute() if keep else None
    if "COLAB_RELEASE_TAG" in os.environ and keep is None:
        kept, note = _mount_drive()
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        # attached as `NAME/runs`, or below the kind and the owner of what is attached
        sources = [path for depth in range(1, 4) for path in sorted(INPUTS.glob("/".join(["*"] * depth + ["runs"])))]
        note = "Save Version keeps them; attached as input to another notebook, its output is found there"
    if (folder, kept) not in _open:
        _open[folder, kept] = Workspace(folder, kept, sources, note)
    return _open[folder, kept]


def _mount_drive() -> tuple[Path | None, str]:
    """Return the folder on Drive, which is asked for where it is not there yet, or none and why."""
    kept = DRIVE / "MyDrive" / "cpbkit" / "runs"
    if (DRIVE / "MyDrive").is_dir():  # by an earlier cell: to ask again would print what is no concern of this one
        return kept, ""
    try:
        from google.colab import drive

        drive.mount(str(DRIVE))
    except Exception as error:  # refused, or a machine without a page: its errors have no common class
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        lost = "what is here is lost with this machine; run the cell again to allow it"
        return None, f"Drive is not mounted ({reason}), so {lost}"
    return kept, ""


def _files(run: Path) -> list[Path]:
    """Return the files of a run, relative to it, without links and what is of one process alone."""
    found = []
    for place, folders, names in os.walk(run):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name).relative_to(run) for name in names if not name.startswith(".")]
    return [path for path in sorted(found) if not (run / path).is_symlink()]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_mtime_ns, stat.st_size


def _told_at(run: Path) -> float:
    """Return when a sweep last said something of the run, seconds since 1970."""
    return RunFolder(run).status().get("at", 0.0)
