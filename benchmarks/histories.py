"""Random histories of sweeps and fetches: kills, damaged files, a sick disk, a sick network, a clock that jumps.

`python -m benchmarks.histories --seed 0 --count 100` plays some, each from its own seed, and names those that ended
wrong; `--boundaries` goes through every single operation on the disk instead. After every step ledger and models must
agree, bars be right and the screen's last line true; at the end the same sweep must have every series once, equal to
the bit to one that nothing disturbed.
"""

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click
import numpy as np
import safetensors.torch
import torch

from benchmarks.archive_server import ArchiveServer, Fault, make_rows, milliseconds, serving
from benchmarks.disk import FATES, Disk, Killed
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance, download
from cpbkit.data.download import Retries
from cpbkit.data.klines import Incomplete, Klines
from cpbkit.errors import CpbkitError, RunError, Terminated
from cpbkit.evaluation.results import ResultLine
from cpbkit.hardware import provenance
from cpbkit.runs import sweep as module
from cpbkit.runs import worker
from cpbkit.runs.folder import LEDGER, RunFolder
from cpbkit.runs.plan import Plan
from cpbkit.training import checkpoint
from cpbkit.views.account import Account
from cpbkit.views.live import Terminal

NOW = "2025-03-03T10:30"
START, END = "2025-02-22", "2025-03-02"  # of a month, two days, and where the second of them is not out yet, of REST
TINY = vary(
    PRESETS["nlinear"],
    source="binance",
    symbols=("BTCUSDT", "ETHUSDT", "SOLUSDT"),
    intervals=("1h",),
    start=START,
    end=END,
    **{"context": 8, "horizon": 2, "epochs": 2, "steps": 2, "batch": 8},
)
NOT_YET = "SOLUSDT-1h-2025-03-02.zip"  # in the archive
FIXED = Plan([list(TINY.series[:2]), list(TINY.series[2:])], steps=2, epochs=2, patience=2, devices=["cpu"])
FIELDS = (1, 2, 3, 4, 5, 7, 8, 9)  # of a row of the server, as the columns of a frame
PATIENT = Retries(connect=10, read=10, whole=30, backoff=0.002, longest_wait=0.02)
HASTY = Retries(connect=10, read=0.1, whole=0.3, tries=2, backoff=0.002, longest_wait=0.02)
KINDS = "404 401 403 418 451 429 500 503 204 206 short reset elsewhere circle wrong_sha garbage escape html".split()
LASTING = ("slow", "silent", "drip")  # faults that take real time
PLACES = ("", "CHECKSUM", r"zip$", "monthly", "daily", r"klines\?", "BTCUSDT", "ETHUSDT", "SOLUSDT")
JUMPS = (-1e6, -36_000.0, -60.0, 3600.0, 1e9)  # s by which the clock may jump; before END no bar can be asked for
SHORT_JUMPS = (*JUMPS, -115_200.0)  # with the last, END is not over: too early for a sweep that is to end the same
JUNK = (b"", b"{", b"[]", b"{}", b"null", b'{"jobs": [["../x"]]}', b"[" * 5000, bytes(range(256)), b"9" * 5000)
LENGTH = 270  # operations, about, of a whole sweep


@dataclass(frozen=True)
class Trouble:
    """What goes wrong while one command runs."""

    at: int | None = None  # operation on the disk
    fate: str = "killed"
    faults: tuple[Fault, ...] = ()  # of the network
    jump: float = 0.0  # s of the clock
    since: int = 0  # operations after which it has jumped

    @classmethod
    def draw(cls, rng: random.Random, jumps: Iterable[float], fates: Iterable[str]) -> "Trouble":
        """Draw what goes wrong; with luck nothing does."""
        at = rng.choice((None, rng.randrange(LENGTH), rng.randrange(LENGTH), rng.randrange(LENGTH // 4)))
        faults = []
        for _ in range(rng.choice((0, 0, 1, 2))):
            kind = rng.choice(LASTING) if rng.random() < 0.02 else rng.choice(KINDS)
            faults.append(Fault(kind, rng.choice(PLACES), rng.choice((1, 2, 5, 10**9))))
        since = rng.choice((0, rng.randrange(LENGTH)))
        return cls(at, rng.choice(list(fates)), tuple(faults), rng.choice((0.0, 0.0, 0.0, *jumps)), since)

    @property
    def is_none(self) -> bool:
        """Say whether nothing goes wrong."""
        return self.at is None and not self.faults and not self.jump

    def __str__(self) -> str:
        told = [f"{self.fate} at operation {self.at}"] if self.at is not None else []
        told += [f"{fault.kind} at {fault.where!r} {fault.times} times" for fault in self.faults]
        if self.jump:
            told.append(f"clock {self.jump:+g} s from operation {self.since}")
        return ", ".join(told) or "no trouble"


CALM = Trouble()


class Screen(io.StringIO):
    """A terminal that keeps all that was written to it."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


class Inline:
    """A pool that works where it is asked: threads would take turns as they like."""

    def __init__(self, threads: int):
        del threads

    def submit(self, function: Callable, *arguments) -> Future:
        """Call a function; return its Future."""
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # handed to whoever asks for the result, as by a thread
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing: no job waits."""


class World:
    """A tiny experiment, a server that has its bars, and how each of its series may end."""

    def __init__(self, place: Path, server: ArchiveServer):
        self.place, self.server = place, server
        self.fewer = 0  # models that rightly ended on fewer bars than there are
        self.bars = {}  # name -> starts in ms (N,) and values (N, 8)
        for i, (symbol, name) in enumerate(zip(TINY.data.symbols, TINY.series, strict=True)):
            server.rows["spot", symbol, "1h"] = rows = make_rows("1h", "2025-02-20", "2025-03-03T12:00", seed=i)
            values = np.array([[float(row[k]) for k in FIELDS] for row in rows])
            self.bars[name] = np.array([int(row[0]) for row in rows]), values
        server.hidden.add(NOT_YET)
        with self.around(place / "whole"):
            self.sweep(place / "whole")
            klines = binance.fetch_klines(TINY.data.symbols, TINY.data.intervals, START, END)
        with self.around(place / "short", Trouble(faults=(Fault("503", r"klines\?"),))):
            self.sweep(place / "short")  # without the bars that only REST has
        for name in FIXED.jobs[0]:  # without the other one of its stack: the same, but for the last bits
            with self.around(place / name):
                self.sweep(place / name, klines=lambda *_, name=name: {name: klines[name]})
        if wrong := next(filter(None, map(self.judge_bars, klines.values())), ""):
            raise AssertionError(wrong)
        self.ends = [outcome(place / one / "run") for one in ("whole", "short", *FIXED.jobs[0])]

    @contextlib.contextmanager
    def around(self, folder: Path, trouble: Trouble = CALM) -> Iterator[Disk]:
        """Settle what a command finds: cache and hosts, trouble, as many checkpoints as steps, a word at each."""
        self.server.faults = [Fault(**vars(fault)) for fault in trouble.faults]  # which count down
        real, disk = time.time, Disk(folder, trouble.at, trouble.fate)
        lasting = any(fault.kind in LASTING for fault in trouble.faults)

        def jumped() -> float:
            return trouble.jump if len(disk.seen) >= trouble.since else 0.0

        places = {"CACHE": str(folder / "cache"), "ARCHIVE_URL": self.server.url, "REST_URL": self.server.rest_url}
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {f"CPBKIT_{k}": v for k, v in places.items()}))
            for owner, name, value in (
                (module, "make_plan", lambda *_: FIXED),  # it would depend on the machine
                (module, "STATUS_SECONDS", -1.0),
                (worker, "PROGRESS_SECONDS", -1.0),
                (worker, "CHECKPOINT_SECONDS", -1.0),
                (worker, "CHECKPOINT_SHARE", 1e9),
                (provenance, "describe", dict),
                (binance, "Pool", Inline),  # or no seed would play the same again
                (binance, "_now", lambda: milliseconds(NOW) * 10**6 + int(1e9 * jumped())),
                (download, "Retries", lambda: HASTY if lasting else PATIENT),
                (time, "time", lambda: real() + jumped()),
                (threading, "Timer", mock.MagicMock()),  # of the second SIGTERM, which a later step would hear
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield stack.enter_context(disk)

    def sweep(self, folder: Path, **given) -> None:
        """Sweep into a folder, beside its cache."""
        module.sweep(TINY, folder / "run", executor="local", **given)

    def judge(self, folder: Path) -> str:
        """Say what is wrong with a run that was swept to its end; nothing where all is right."""
        found = outcome(folder / "run")
        if sorted(found) != sorted(TINY.series):
            return f"the ledger has {sorted(found)}"
        for name, ours in found.items():
            differs = [difference(ours, end[name]) for end in self.ends if name in end]
            if all(differs) and ours[0].passport["got"] < ours[0].passport["expected"]:
                self.fewer += 1  # archive and REST host were gone at once, and the passport says what lacked
            elif all(differs):
                return f"{name} differs in {differs[0]}"
        left = [path.name for path in folder.glob("run/**/*") if path.suffix == ".part" or path.name == ".holder.json"]
        left += [path.name for path in folder.glob("run/progress/*.safetensors")]
        return f"it left {left}" if left else ""

    def judge_bars(self, klines: Klines) -> str:
        """Say what is wrong with bars: those that are there must be the server's, the others be missed."""
        passport, (starts, values) = klines.passport, self.bars[klines.passport.series]
        ours = klines.frame.index.as_unit("ms").asi8
        at = np.searchsorted(starts, ours)
        if not (starts[at] == ours).all() or not (klines.frame.to_numpy() == values[at]).all():
            return f"bars of {passport.series} are wrong"
        if passport.got != len(ours) or (passport.missing and not passport.notes):
            return f"the passport of {passport.series} does not say what is missing"
        return ""

    def standing(self, folder: Path, spoiled: set[str]) -> tuple[set[str], str]:
        """Return the series that are through, with a model where they should have one, and what is wrong with others.

        spoiled: series whose model was damaged, which the ledger cannot know.
        """
        run, through = RunFolder(folder / "run"), set()
        for line in run.results():
            if line.status != "done":
                continue
            try:
                _, about = checkpoint.load(run.model(line.series) or b"")
            except RunError:
                about = {}
            if about.get("data_sha256") == line.data_sha256:
                through.add(line.series)
                spoiled.discard(line.series)
            elif line.series not in spoiled:
                return through, f"ledger and model of {line.series} do not agree"
        return through, ""

    def disturb(self, folder: Path, trouble: Trouble, spoiled: set[str]) -> tuple[str, str, list[str]]:
        """Sweep under trouble; return how that ended, what is wrong with it, and the operations on the disk."""
        screen, ended = Screen(), "through"
        view = Terminal(screen)
        with self.around(folder, trouble) as disk:
            try:
                self.sweep(folder, on_progress=Account(view))
            except Killed:
                ended = "killed"
            except (CpbkitError, OSError, Terminated) as error:
                ended = f"{type(error).__name__}: {error}"
        if ended != "killed":
            view.__exit__()
        through, wrong = self.standing(folder, spoiled)
        if not wrong:
            wrong = _judge_screen(screen.getvalue(), ended, through)
        if not wrong and trouble.is_none and ended != "through":
            wrong = f"without trouble it ended with {ended}"
        return ended, wrong, disk.seen

    def fetch(self, folder: Path, trouble: Trouble) -> tuple[str, str]:
        """Fetch under trouble; return how that ended, and what is wrong with it."""
        got, ended = {}, "through"
        with self.around(folder, trouble):
            try:
                got = binance.fetch_klines(TINY.data.symbols, TINY.data.intervals, START, END)
            except Killed:
                ended = "killed"
            except Incomplete as error:
                got, ended = error.klines, "incomplete"
            except (CpbkitError, OSError) as error:
                ended = f"{type(error).__name__}: {error}"
        wrong = next(filter(None, map(self.judge_bars, got.values())), "")
        if not wrong and trouble.is_none and (ended != "through" or any(k.passport.missing for k in got.values())):
            wrong = f"without trouble the fetch was {ended}"
        return ended, wrong

    def end(self, folder: Path, spoiled: set[str]) -> str:
        """Sweep undisturbed and judge; an error is wrong too."""
        _, wrong, _ = self.disturb(folder, CALM, spoiled)
        return wrong or self.judge(folder)


def outcome(folder: Path) -> dict[str, tuple[ResultLine, dict | None]]:
    """Return by series the line of the ledger, and the tensors of the model."""
    run = RunFolder(folder)
    models = {line.series: (line, run.model(line.series)) for line in run.results()}
    return {name: (line, safetensors.torch.load(model) if model else None) for name, (line, model) in models.items()}


def difference(ours: tuple[ResultLine, dict | None], theirs: tuple[ResultLine, dict | None]) -> str:
    """Say in what two ends of a series differ; nothing where they are equal to the bit, but for times and sources."""
    (line, tensors), (other, others) = ours, theirs
    fields = [key for key, value in vars(other).items() if getattr(line, key) != value]
    if fields := sorted({*fields} - {"seconds", "passport"}):
        return f"the fields {fields} of its line"
    same = tensors and tensors.keys() == others.keys() and all(torch.equal(tensors[k], others[k]) for k in others)
    return "" if same else "its model"


def _judge_screen(text: str, ended: str, through: set[str]) -> str:
    """Say what is wrong with what a person saw of a sweep, after which these series are through."""
    shown = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    told = [match[1] for line in shown if (match := re.match(r"\[\d/3\] (\w+) done", line))]
    if len(set(told)) < len(told) or not through.issuperset(told):
        return f"{told} were told as done, and {sorted(through)} are"
    if ended == "killed":  # which may have been before it could tell
        claims = [int(match[1]) for line in shown if (match := re.search(r"(\d) of 3 done", line))]
        return f"{claims[-1]} of 3 were told, and {len(through)} are" if claims and claims[-1] > len(through) else ""
    last = re.search(r"(\d) of 3 done", shown[-1]) if shown else None
    # A line that could not be flushed is no result to the sweep, and may be there all the same.
    right = {len(through), len(through) - ended.startswith("OSError")}
    if (ended == "through" and not last) or (last and int(last[1]) not in right):
        return f"the last line is {shown[-1:]}, and {len(through)} are through; it ended {ended}"
    return ""


def go_through_boundaries(world: World, pick: Callable[[int], Iterable[int]] = range) -> dict:
    """Strike at each operation of a sweep that fetches; return their counts, the number of trials, what went wrong.

    pick: which of so many operations.
    """
    _, wrong, seen = world.disturb(world.place / "counted", CALM, set())
    found, trials = [wrong] if wrong else [], 0
    for at in pick(len(seen)):
        for fate in ("full", "killed", "torn"):
            folder, spoiled = world.place / f"at{at}{fate}", set()
            wrong = world.disturb(folder, Trouble(at, fate), spoiled)[1] or world.end(folder, spoiled)
            if wrong:
                found.append(f"operation {at} ({seen[at]}), {fate}: {wrong}")
            shutil.rmtree(folder)
            trials += 1
    return {"operations": dict(Counter(seen)), "trials": trials, "wrong": found}


def play(world: World, seed: str) -> tuple[str, list[str]]:
    """Play one history; return what is wrong with it, and what happened."""
    rng, folder = random.Random(seed), world.place / "history"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if rng.random() < 0.7:
        shutil.copytree(world.place / "whole/cache", folder / "cache")
    happened: list[str] = []
    spoiled: set[str] = set()
    try:
        for _ in range(rng.randint(1, 4)):
            if wrong := _happen(world, folder, rng, happened, spoiled):
                return wrong, happened
        return world.end(folder, spoiled), happened
    except Exception as error:  # what else it is, it is the finding
        logging.getLogger(__name__).debug("history %s", seed, exc_info=True)
        return f"{type(error).__name__}: {error}", happened


def _happen(world: World, folder: Path, rng: random.Random, happened: list[str], spoiled: set[str]) -> str:
    """Let one thing happen; return what is wrong then."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    what = rng.choices(("damage", "fetch", "sweep"), (3 * bool(files), 2, 5))[0]
    if what == "damage":
        happened.append(_damage(rng.choice(files), rng, spoiled))
        return ""
    sweeps = what == "sweep"
    fates = FATES if sweeps else [fate for fate in FATES if fate != "asked"]  # a fetch does not listen
    trouble = Trouble.draw(rng, JUMPS if sweeps else SHORT_JUMPS, fates)
    happened.append(f"{what} with {trouble}")
    ended, wrong, *_ = world.disturb(folder, trouble, spoiled) if sweeps else world.fetch(folder, trouble)
    happened[-1] += f" ({ended.partition(chr(10))[0][:100]})"
    return wrong


def _damage(path: Path, rng: random.Random, spoiled: set[str]) -> str:
    content, name = path.read_bytes(), path.name
    if name == "experiment.json":
        return "nothing: the settings are vital"
    if name == LEDGER:
        lines = content.splitlines(keepends=True)
        if lines:
            at = rng.randrange(len(lines))
            lines[at] = rng.choice((b"{\n", b"\x00\xff\n", lines[at][: len(lines[at]) // 2] + b"\n"))
            path.write_bytes(b"".join(lines))
        return "a damaged line of the ledger"
    if path.parent.name == "models":
        spoiled.add(path.stem)
    way = rng.choice(("lost", "cut", "flipped", "junk"))
    if way == "lost":
        path.unlink()
    elif way == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif way == "flipped" and content:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 200)):
            changed[rng.randrange(len(changed))] ^= rng.randrange(1, 256)
        path.write_bytes(changed)
    else:
        path.write_bytes(rng.choice(JUNK))
    return f"{name} {way}"


@click.command()
@click.option("--seed", default="0", show_default=True, help="History i is played from SEED/i.")
@click.option("--count", type=click.IntRange(1), default=100, show_default=True)
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Number of the first history.")
@click.option("--only", type=int, help="Play this history alone, and say what happens in it.")
@click.option("--boundaries", is_flag=True, help="Go through every operation on the disk instead.")
def main(seed: str, count: int, first: int, only: int | None, boundaries: bool) -> None:
    """Play histories of a run; exit code 1 where one ends wrong, with the command that plays it again."""
    torch.set_num_threads(1)
    logging.getLogger("cpbkit").setLevel(logging.CRITICAL)  # what is damaged here is damaged on purpose
    if only is not None:
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger(__name__).setLevel(logging.DEBUG)
    failed, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place, serving(NOW[:10]) as server:
        world = World(Path(place), server)
        if boundaries:
            told = go_through_boundaries(world)
            click.echo(json.dumps(told, indent=2))
            failed = len(told["wrong"])
        else:
            chosen = range(first, first + count) if only is None else [only]
            for played, i in enumerate(chosen, start=1):
                found, happened = play(world, f"{seed}/{i}")
                if found or only is not None:
                    click.echo(f"history {i}: {'; '.join(happened)}: {found or 'right'}")
                if found:
                    failed += 1
                    click.echo(f"  again: python -m benchmarks.histories --seed {seed} --only {i}")
                if played % 100 == 0 or played == len(chosen):
                    spent, fewer = time.monotonic() - begun, f"{world.fewer} models on fewer bars"
                    click.echo(f"{played} histories from {seed}/{chosen[0]}: {failed} wrong, {fewer}, {spent:.0f} s")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
