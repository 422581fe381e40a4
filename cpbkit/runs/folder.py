"""The run folder: settings, ledger, models and checkpoints, each file whole or absent.

Settings and ledger are vital; whatever else is lost or damaged counts as never written, which is logged.
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import filelock

from cpbkit import __version__, atomic, foreign
from cpbkit.config import own
from cpbkit.config.experiment import Experiment, difference, from_json, to_json, vary
from cpbkit.errors import CpbkitError, RunError, check_name
from cpbkit.evaluation.results import ResultLine
from cpbkit.foreign import Damaged
from cpbkit.quantities import Standing

try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None  # type: ignore[assignment]  # Windows has none

if TYPE_CHECKING:
    import pandas as pd

EXPERIMENT, LEDGER, ABOUT, AUDIT = "experiment.json", "results.jsonl", "about.json", "audit.json"
CLOCK, MONITOR, REPORT = "clock.json", "monitor.parquet", "report.html"
# Why a model stopped that a budget, or a person, did not let finish.
OUT_OF_TIME, BY_HAND = "the time is up", "stopped by hand"
SETTLED = ("steps", "epochs", "patience", "stacked", "precision")  # what a plan decides of its experiment
PLAN, STATUS, LOCK, HOLDER = "progress/plan.json", "progress/status.json", ".lock", ".holder.json"
STOP = "progress/stop.json"
PARTS = ("models", "losses", "progress")  # folders
FILES = (EXPERIMENT, LEDGER, ABOUT, AUDIT, CLOCK, MONITOR, REPORT, LOCK, HOLDER)  # beside what is in the folders
SET_ASIDE = "set_aside"  # folder of what stood in the way
NAME = re.compile(r"\w{1,90}")  # of a series, which becomes that of files
LARGE = 1 << 28  # bytes of a model at most
SMALLER = 1 << 25  # of the losses and forecasts of a series, and of a monitor
YEAR_5000 = 1e11  # s since 1970; no time of a run is later
CHECKPOINT_SIZE = 1 << 36

log = logging.getLogger(__name__)

# What is read of each document, as `foreign.check` takes it; a run of an earlier version may lack what ends in "?".
PLAN_FORM = {
    **{"jobs": [[str]], "steps": int, "epochs": int, "patience": int, "devices": [str]},
    **{"seconds?": float, "reason?": str, "stacked?": bool, "precision?": str},
}
STATUS_FORM = {"stage?": str, "at?": float, **foreign.form_of(Standing)}
STOP_FORM = {"end": bool, "series": [str]}
HOLDER_FORM = {"pid": int, "host": str, "since": float}
ABOUT_FORM = {
    **dict.fromkeys(("command?", "date?", "commit?", "parent?", "executor?"), str),
    **{"machine?": dict, "versions?": dict, "starts?": [dict]},
}


@dataclass(frozen=True)
class Line:
    """A line of the ledger as it lies on the disk."""

    number: int  # the first is 1
    raw: bytes
    result: ResultLine | None  # None where it is damaged
    damage: str = ""


def tell_stopped(results: Sequence[ResultLine]) -> str:
    """Say how many models a budget of time, or a person, stopped; empty where none was."""
    counts = Counter(line.reason for line in results)
    how = [(counts[OUT_OF_TIME], "when the time was up"), (counts[BY_HAND], "by hand")]
    told = " and ".join(f"{count} of {len(results)} stopped {why}" for count, why in how if count)
    return f"{told}, and may have had more to learn" if told else ""


class RunFolder:
    """One run folder. Reading needs no lock; `writing` holds it."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._said: set[str] = set()  # of what is damaged, each once

    @property
    def experiment(self) -> Experiment:
        """Read the settings. Errors: RunError where there is no run or it cannot be read."""
        try:
            content = foreign.read_bytes(self.folder, EXPERIMENT)
            if content is not None:
                return from_json(content.decode())
        except (CpbkitError, ValueError, TypeError) as error:
            where = self.folder / EXPERIMENT
            raise RunError(f"{where} cannot be read as settings of cpbkit {__version__}: {error}") from error
        raise RunError(f"{self.folder} is no run folder: it has no {EXPERIMENT}. Start one with `cpbkit sweep`")

    @property
    def settled(self) -> Experiment:
        """Read the settings as the models are trained, with what the plan decided. Errors: RunError as above."""
        plan = self.plan() or {}
        return vary(self.experiment, **{name: plan[name] for name in SETTLED if plan.get(name, "") != ""})

    def keep_plan(self, plan: dict) -> None:
        """Keep how the series are shared out, as `plan` reads it."""
        self._write(PLAN, plan)

    def plan(self) -> dict | None:
        """Read how the series are shared out; None before that is known, and where it is known no more."""
        plan = self._read(PLAN, PLAN_FORM)
        if not plan:
            return None
        names = [name for job in plan["jobs"] for name in job]
        if min(plan["steps"], plan["epochs"], plan["patience"], len(plan["devices"])) < 1:
            self._give_up(PLAN, "its steps, epochs, patience and devices must be at least 1")
        elif len(set(names)) < len(names) or not all(plan["jobs"]) or not set(names) <= set(self.experiment.series):
            self._give_up(PLAN, "its jobs must hold series of this run, each once")
        else:
            return plan
        return None

    def _give_up(self, name: str, why: object) -> None:
        self._say(f"{self.folder / name} counts as lost: {why}. All results are kept")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    def _say_lost(self, damaged: Sequence[Line], then: str = "") -> None:
        """Say which lines of the ledger count as lost: the first, and how many there are."""
        first, *others = damaged
        more = f" (and {len(others):,} more)" if others else ""
        self._say(f"{self.folder / LEDGER}, line {first.number}, counts as lost{more}: {first.damage}{then}")

    def _read(self, name: str, form: dict) -> dict:
        """Read a document that is not vital; empty where there is none, or none that can be used."""
        try:
            content = foreign.read_bytes(self.folder, name)
            return {} if content is None else foreign.parse(content, form)
        except Damaged as error:
            self._give_up(name, error)
            return {}

    def _write(self, name: str, document: dict) -> None:
        atomic.write_bytes(self.folder / name, json.dumps(document, indent=2).encode())

    @contextmanager
    def writing(self, experiment: Experiment) -> Iterator["RunFolder"]:
        """Hold the folder for one sweep; make it, or check that it is this experiment's once anything was begun.

        Errors: RunError when another sweep holds it, or when it belongs to other settings; OSError from the disk.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._refuse_links()
        self._clear_way(LOCK)
        lock = filelock.FileLock(self.folder / LOCK)
        try:
            lock.acquire(timeout=1)  # `cpbkit status` takes it for an instant
        except filelock.Timeout:
            raise RunError(
                f"another sweep writes to {self.folder}: {self._describe()}. Wait for it, or stop it"
            ) from None
        try:
            self._clear_way(*FILES, *PARTS)
            for part in PARTS:
                (self.folder / part).mkdir(exist_ok=True)
                self._clear_way(*(f"{part}/{found.name}" for found in (self.folder / part).iterdir()))
            self._write(HOLDER, {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()})
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
            self._mend()
            (self.folder / STOP).unlink(missing_ok=True)  # it was meant for a sweep before this one
            yield self
        finally:
            try:
                (self.folder / HOLDER).unlink(missing_ok=True)
            finally:  # or a kernel, which goes on, would shut itself out
                lock.release()

    def _refuse_links(self) -> None:
        """Refuse to write through links, which may lead anywhere. Errors: RunError."""
        for name in (*PARTS, "own", EXPERIMENT, LEDGER, LOCK):
            try:
                foreign.refuse_links(self.folder, name)
            except Damaged as error:
                raise RunError(f"{self.folder} cannot be written to: {error}. Take another folder") from None

    def _clear_way(self, *names: str) -> None:
        """Set aside a folder where a file belongs, and what is no folder where one belongs; nothing is deleted."""
        for name in names:
            path = self.folder / name
            if path.is_dir() if name not in PARTS else path.exists() and not path.is_dir():
                place = self.folder / SET_ASIDE / f"{path.name}.{uuid.uuid4().hex[:6]}"
                place.parent.mkdir(exist_ok=True)
                path.rename(place)
                kind = "a file" if name in PARTS else "a folder"
                self._say(f"{path} is {kind}, which cannot be; it lies in {place} now, and what it held counts as lost")

    def holder(self) -> str:
        """Say who writes to the folder now, or return an empty string. Changes nothing in it."""
        try:
            with foreign.open_file(self.folder, LOCK) as file:
                return self._describe() if file and _is_locked(file) else ""
        except Damaged:
            return ""

    def _describe(self) -> str:
        told = self._read(HOLDER, HOLDER_FORM)
        if not told:
            return "it has not said who it is"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(max(told["since"], 0.0), YEAR_5000)))
        return f"process {told['pid']} on {told['host']}, since {since}"

    def results(self) -> list[ResultLine]:
        """Read the ledger: a line per finished series, in the order they ended; of two lines of one the later.

        A damaged line is logged with its number. Errors: RunError where the ledger cannot be read at all.
        """
        found: dict[str, ResultLine] = {}
        damaged = []
        for line in self.ledger():
            if line.result is None:
                damaged.append(line)
            else:
                found.pop(line.result.series, None)
                found[line.result.series] = line.result
        if damaged:
            self._say_lost(damaged)
        return list(found.values())

    def ledger(self) -> Iterator[Line]:
        """Read the ledger line by line. Half a line at the end, which a kill may leave, is none.

        Errors: RunError where it cannot be read at all.
        """
        try:
            with foreign.open_file(self.folder, LEDGER) as file:
                yield from self._lines(file) if file else ()
        except Damaged as error:
            raise RunError(f"{self.folder / LEDGER}, the results of this run: {error}") from None

    def _lines(self, file: BinaryIO) -> Iterator[Line]:
        number = 0
        while raw := file.readline(foreign.SIZE + 1):  # of a longer one the rest counts as the next
            number += 1
            try:
                result = ResultLine.from_json(raw)
                if not NAME.fullmatch(result.series):
                    raise Damaged(f"{result.series[:40]!r} is no name of a series")
            except Damaged as error:
                if raw.strip() and (raw.endswith(b"\n") or len(raw) > foreign.SIZE):
                    yield Line(number, raw, None, str(error))
                continue
            yield Line(number, raw.rstrip(b"\r\n") + b"\n", result)

    def _mend(self) -> None:
        """Drop what a kill may have left, files that have no name yet and half a line, and set damaged lines aside."""
        for part in self.folder.rglob(".*.part"):
            part.unlink()
        path = self.folder / LEDGER
        if not path.exists():
            return
        before, lines = path.read_bytes(), list(self.ledger())
        whole = b"".join(line.raw for line in lines if line.result is not None)
        if whole == before:
            return
        half = before.rpartition(b"\n")[2]
        if half.strip() and not whole.endswith(half + b"\n"):
            self._say(f"{path}: its last line is cut off, as a kill leaves it; that series is trained anew")
        if damaged := [line for line in lines if line.result is None]:
            aside = f"progress/{LEDGER}.damaged"
            atomic.write_bytes(self.folder / aside, before)
            self._say_lost(damaged, f". The ledger as it was lies in {aside}; what was lost is trained anew")
        atomic.write_bytes(path, whole)

    def keep_sources(self, files: Iterable[Path]) -> None:
        """Keep the files of own parts beside what they made; they are never run from here."""
        for path in files:
            (self.folder / "own").mkdir(exist_ok=True)
            atomic.write_bytes(self.folder / "own" / path.name, path.read_bytes())

    def losses(self, series: str) -> bytes | None:
        """Read what `pooled` packed of a series, or None where there is nothing that can be read."""
        return self._content(f"losses/{series}.npz", SMALLER)

    def model(self, series: str) -> bytes | None:
        """Read the file of a trained model, or None where there is none that can be read."""
        return self._content(f"models/{series}.safetensors")

    def models(self) -> dict[str, bytes]:
        """Read the files of all models that are finished, by series."""
        found = {line.series: self.model(line.series) for line in self.results() if line.status == "done"}
        return {series: content for series, content in found.items() if content is not None}

    def _content(self, name: str, limit: int = LARGE) -> bytes | None:
        try:
            return foreign.read_bytes(self.folder, name, limit)
        except Damaged as error:
            self._give_up(name, error)
            return None

    def finish(self, result: ResultLine, model: bytes | None, losses: bytes | None = None) -> None:
        """Keep a finished series: its model and losses first, then its line in the ledger, flushed to disk."""
        if model is not None:
            atomic.write_bytes(self.folder / "models" / f"{result.series}.safetensors", model)
        if losses is not None:
            atomic.write_bytes(self.folder / "losses" / f"{result.series}.npz", losses)
        with atomic.named(self.folder / LEDGER), open(self.folder / LEDGER, "ab") as ledger:
            ledger.write(f"{result.to_json()}\n".encode())
            ledger.flush()
            os.fsync(ledger.fileno())

    def checkpoint(self, job: str) -> bytes | None:
        """Read where a job stands, or None where nothing says so."""
        return self._content(f"progress/{job}.safetensors", CHECKPOINT_SIZE)

    def keep_checkpoint(self, job: str, content: bytes | None) -> None:
        """Keep where a job stands; None drops it."""
        path = self.folder / "progress" / f"{job}.safetensors"
        if content is None:
            path.unlink(missing_ok=True)
        else:
            atomic.write_bytes(path, content)

    def begin(self, about: dict) -> None:
        """Keep on what a start of the sweep runs, beside the starts before it."""
        before = self._read(ABOUT, ABOUT_FORM)
        starts = before.pop("starts", [before] if before else [])
        starts.append({name: about[name] for name in ("date", "commit", "command", "versions") if name in about})
        self._write(ABOUT, about | {"starts": starts})

    def about(self) -> dict:
        """Read on what the last start ran, and `starts`, all of them; empty before the first."""
        return self._read(ABOUT, ABOUT_FORM)

    def audit(self) -> dict[str, list[dict]]:
        """Read what the last audit of the run found, by series; empty before one."""
        return self._read(AUDIT, {"*": [{"check": str, "verdict": str, "evidence": str}]})

    def failed_checks(self) -> list[str]:
        """Return the checks in which the last audit of the run failed, each with its series."""
        return [
            f"{name}: {x['check']}" for name, group in self.audit().items() for x in group if x["verdict"] == "FAIL"
        ]

    def unaudited_features(self) -> list[str]:
        """Return the features of a person's own, where no audit of the run is kept: who else knows what they know?"""
        return [] if self.audit() else list(filter(own.is_own, self.experiment.task.features))

    def keep_audit(self, found: Mapping[str, list[dict]]) -> None:
        """Keep what an audit of the run found, by series, where the folder can be written to."""
        if os.access(self.folder, os.W_OK):
            foreign.refuse_links(self.folder, AUDIT)
            self._write(AUDIT, dict(found))

    def tell(self, status: dict) -> None:
        """Leave word for `cpbkit status` of what the sweep is doing."""
        self._write(STATUS, status | {"at": time.time()})

    def status(self) -> dict:
        """Read what the last sweep here said it was doing, and when (`at`, seconds since 1970); empty before one."""
        return self._read(STATUS, STATUS_FORM)

    def stop(self, series: Iterable[str] = ()) -> None:
        """Ask whoever sweeps here to end, or the models of some series to end with the running epoch.

        Errors: RunError where there is no run, or nobody sweeps; UnknownName.
        """
        known = self.experiment.series
        names = [check_name("series", name, known) for name in series]
        if not self.holder():
            raise RunError(f"nobody works on {self.folder}, so there is nothing to stop")
        if names and self.about().get("executor") == "ray":
            raise RunError(
                "on a Ray cluster models end neither one by one nor after an epoch; `cpbkit stop RUN` alone stops the "
                "whole sweep"
            )
        before = self.wishes()
        self._write(STOP, {"end": before["end"] or not names, "series": sorted({*before["series"], *names})})

    def wishes(self) -> dict:
        """Read what `stop` has asked for since the sweep began: `end`, and `series`."""
        return {"end": False, "series": []} | self._read(STOP, STOP_FORM)

    def monitor(self) -> "pd.DataFrame | None":
        """Read what was seen of memory and load over all starts; None before the first end."""
        content = self._content(MONITOR, SMALLER)
        if content is None:
            return None
        import pyarrow as pa  # here, since `status` and others do without them

        from cpbkit.data.tables import from_parquet

        try:
            frame = from_parquet(content, 4 * SMALLER)
            numbers = dict.fromkeys(("time", "allocated", "reserved", "host", "utilisation"), float)
            return frame.astype({"device": str, "text": str, **numbers})
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            self._give_up(MONITOR, Damaged(str(error).splitlines()[0]))
            return None

    def add_monitor(self, frame: "pd.DataFrame") -> None:
        """Add what was seen since this start to what earlier ones saw."""
        import pandas as pd

        if (earlier := self.monitor()) is not None:
            frame = pd.concat([earlier, frame.assign(time=frame["time"] + earlier["time"].max())], ignore_index=True)
        atomic.write_bytes(self.folder / MONITOR, frame.to_parquet())

    def clock(self) -> dict[str, float]:
        """Return the seconds of each stage, over all starts of this run; `worker: ...` are inside "training"."""
        return self._read(CLOCK, {"*": float})

    def add_clock(self, seconds: dict[str, float]) -> dict[str, float]:
        """Add the seconds of each stage to those of earlier starts of this run; return the sums."""
        total = self.clock()
        total |= {stage: total.get(stage, 0.0) + spent for stage, spent in seconds.items()}
        self._write(CLOCK, total)
        return total


def _is_locked(file: BinaryIO) -> bool:
    """Say whether another process holds the lock that an open file is; it need not be writable."""
    if fcntl is None:
        lock = filelock.FileLock(file.name)  # there it cannot be asked without being taken
        with contextlib.suppress(filelock.Timeout, OSError):
            lock.acquire(blocking=False)
            lock.release()
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the end of the file's life gives it back
    except BlockingIOError:
        return True
    return False
