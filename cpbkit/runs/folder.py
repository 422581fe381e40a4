"""The run folder: settings, ledger, models and checkpoints, each file whole or absent."""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

from cpbkit import __version__, atomic
from cpbkit.config.experiment import Experiment, difference, from_json, to_json, vary
from cpbkit.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

EXPERIMENT, LEDGER, ABOUT = "experiment.json", "results.jsonl", "about.json"
CLOCK, MONITOR, REPORT = "clock.json", "monitor.parquet", "report.html"
OUT_OF_TIME = "the time is up"  # why a model stopped that a budget did not let finish
SETTLED = ("steps", "epochs", "patience", "stacked")  # what a plan decides of its experiment
PLAN, STATUS = "progress/plan.json", "progress/status.json"


def tell_stopped(results: Sequence[Mapping]) -> str:
    """Say how many models a budget of time stopped; empty where it stopped none."""
    stopped = sum(line.get("reason") == OUT_OF_TIME for line in results)
    if not stopped:
        return ""
    return f"{stopped} of {len(results)} stopped when the time was up, and may have had more to learn"


class RunFolder:
    """One run folder. Reading needs no lock; `writing` holds it."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)

    @property
    def experiment(self) -> Experiment:
        """Read the settings. Errors: RunError where there is no run or it cannot be read."""
        path = self.folder / EXPERIMENT
        try:
            return from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(
                f"{self.folder} is no run folder: it has no {EXPERIMENT}. Start one with `cpbkit sweep`"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} cannot be read as settings of cpbkit {__version__}: {error}") from error

    @property
    def settled(self) -> Experiment:
        """Read the settings as the models are trained, with what the plan decided. Errors: RunError as above."""
        path = self.folder / PLAN
        plan = json.loads(path.read_text()) if path.exists() else {}
        return vary(self.experiment, **{name: plan[name] for name in SETTLED if name in plan})

    @contextmanager
    def writing(self, experiment: Experiment) -> Iterator["RunFolder"]:
        """Hold the folder for one sweep; make it, or check that it is this experiment's once anything was begun.

        Errors: RunError when another sweep holds it, or when it belongs to other settings; OSError from the disk.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock, holder = filelock.FileLock(self.folder / ".lock"), self.folder / ".holder.json"
        try:
            lock.acquire(timeout=1)  # `cpbkit status` takes it for an instant
        except filelock.Timeout:
            raise RunError(
                f"another sweep writes to {self.folder}: {_describe(holder)}. Wait for it, or stop it"
            ) from None
        try:
            atomic.write_bytes(
                holder,
                json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode(),
            )
            begun = any((self.folder / name).exists() for name in (PLAN, LEDGER))
            if begun and (self.folder / EXPERIMENT).exists():
                if lines := difference(self.experiment, experiment):
                    raise RunError(
                        f"{self.folder} belongs to another experiment; it differs in\n  "
                        + "\n  ".join(lines)
                        + "\nTake another folder, or the same settings"
                    )
            else:
                atomic.write_bytes(self.folder / EXPERIMENT, to_json(experiment).encode())
            for part in ("models", "losses", "progress"):
                (self.folder / part).mkdir(exist_ok=True)
            self._mend()
            yield self
        finally:
            holder.unlink(missing_ok=True)
            lock.release()

    def holder(self) -> str:
        """Say who writes to the folder now, or return an empty string."""
        path = self.folder / ".lock"
        if not path.exists():
            return ""
        lock = filelock.FileLock(path)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return _describe(self.folder / ".holder.json")
        lock.release()
        return ""

    def results(self) -> list[dict]:
        """Read the ledger: a dict a finished series, in the order they ended."""
        path = self.folder / LEDGER
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _mend(self) -> None:
        """Drop what a kill may have left: half a line at the end of the ledger, files that have no name yet."""
        for part in self.folder.rglob(".*.part"):
            part.unlink()
        path = self.folder / LEDGER
        if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
            atomic.write_bytes(path, content[: content.rfind(b"\n") + 1])

    def keep_sources(self, files: Iterable[Path]) -> None:
        """Keep the files of own parts beside what they made; they are never run from here."""
        for path in files:
            (self.folder / "own").mkdir(exist_ok=True)
            atomic.write_bytes(self.folder / "own" / path.name, path.read_bytes())

    def losses(self, series: str) -> bytes | None:
        """Read what `pooled` packed of a series, or None where there is nothing."""
        path = self.folder / "losses" / f"{series}.npz"
        return path.read_bytes() if path.exists() else None

    def finish(self, result: dict, model: bytes | None, losses: bytes | None = None) -> None:
        """Keep a finished series: its model and losses first, then its line in the ledger, flushed to disk."""
        if model is not None:
            atomic.write_bytes(self.folder / "models" / f"{result['series']}.safetensors", model)
        if losses is not None:
            atomic.write_bytes(self.folder / "losses" / f"{result['series']}.npz", losses)
        line = json.dumps(result, allow_nan=False, separators=(",", ":")) + "\n"
        with open(self.folder / LEDGER, "ab") as ledger:
            ledger.write(line.encode())
            ledger.flush()
            os.fsync(ledger.fileno())

    def checkpoint(self, unit: str) -> Path:
        """Return where the checkpoint of a unit of work lies."""
        return self.folder / "progress" / f"{unit}.safetensors"

    def tell(self, status: dict) -> None:
        """Leave word for `cpbkit status` of what the sweep is doing."""
        atomic.write_bytes(self.folder / STATUS, json.dumps(status | {"at": time.time()}).encode())

    def status(self) -> dict:
        """Read what the last sweep here said it was doing, and when (`at`, seconds since 1970); empty before one."""
        path = self.folder / STATUS
        return json.loads(path.read_text()) if path.exists() else {}

    def monitor(self) -> "pd.DataFrame | None":
        """Read what was seen of memory and load over all starts; None before the first end."""
        import pandas as pd  # here, since `status` and others do without it

        path = self.folder / MONITOR
        return pd.read_parquet(path) if path.exists() else None

    def clock(self) -> dict[str, float]:
        """Return the seconds of each stage, over all starts of this run; `worker: ...` are inside "training"."""
        path = self.folder / CLOCK
        return json.loads(path.read_text()) if path.exists() else {}

    def add_clock(self, seconds: dict[str, float]) -> dict[str, float]:
        """Add the seconds of each stage to those of earlier starts of this run; return the sums."""
        total = self.clock()
        for stage, spent in seconds.items():
            total[stage] = total.get(stage, 0.0) + spent
        atomic.write_bytes(self.folder / CLOCK, json.dumps(total, indent=2).encode())
        return total


def _describe(holder: Path) -> str:
    try:
        told = json.loads(holder.read_text())
    except (FileNotFoundError, ValueError):
        return "it has not said who it is"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["since"]))
    return f"process {told['pid']} on {told['host']}, since {since}"
