"""Random histories of a run: sweeps that are killed or meet a full disk, damaged files, a clock that jumps.

`python -m benchmarks.histories --seed 0 --count 100` plays some, each from its own seed, and names those that ended
wrong; `--boundaries` goes through every single operation on the disk instead. After each the same sweep must end with
every series once, models and ledger equal to the bit to those of a sweep that nothing disturbed.
"""

import contextlib
import json
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import click
import safetensors.torch
import torch

from benchmarks.disk import Disk, Killed
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError
from cpbkit.hardware import provenance
from cpbkit.runs import sweep as module
from cpbkit.runs import worker
from cpbkit.runs.folder import LEDGER, RunFolder
from cpbkit.runs.plan import Plan

TINY = vary(
    PRESETS["quick"],
    source="synthetic",
    symbols=("BTCUSDT", "ETHUSDT", "SOLUSDT"),
    intervals=("1h",),
    start="2025-01-01",
    end="2025-01-10",
    **{"width": 2, "context": 8, "horizon": 2, "epochs": 2, "steps": 2, "batch": 8},
)
FIXED = Plan([list(TINY.series[:2]), list(TINY.series[2:])], steps=2, epochs=2, patience=2, devices=["cpu"])
JUMPS = (-1e6, -60.0, 3600.0, 1e9)  # s by which the clock of the machine may jump
JUNK = (b"", b"{", b"[]", b"{}", b"null", b'{"units": [["../x"]]}', b"[" * 5000, bytes(range(256)), b"9" * 5000)


class World:
    """A tiny experiment, its bars, and how a sweep of it ends that nothing disturbs."""

    def __init__(self, place: Path):
        self.place = place
        self.bars = make_market(TINY.data.symbols, TINY.data.intervals, TINY.data.start, TINY.data.end)
        self.sweep(place / "undisturbed")
        self.lines, self.models = self.outcome(place / "undisturbed")

    def sweep(self, folder: Path) -> None:
        """Sweep with a plan that does not depend on this machine, as many checkpoints as steps, a word at each."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (module, "make_plan", lambda *_: FIXED),
                (module, "STATUS_SECONDS", -1.0),
                (worker, "PROGRESS_SECONDS", -1.0),
                (worker, "CHECKPOINT_SECONDS", -1.0),
                (worker, "CHECKPOINT_SHARE", 1e9),
                (provenance, "describe", dict),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            module.sweep(TINY, folder, executor="local", klines=lambda *_: dict(self.bars))

    def outcome(self, folder: Path) -> tuple[dict, dict]:
        """Return the ledger by series without its times, and the tensors of the models."""
        lines = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
        timeless = {line["series"]: {k: v for k, v in line.items() if k != "seconds"} for line in lines}
        models = {}
        for name in timeless:
            content = RunFolder(folder).model(name)
            models[name] = safetensors.torch.load(content) if content else None
        return timeless, models

    def judge(self, folder: Path) -> str:
        """Say what is wrong with a run that was swept to its end; nothing where all is right."""
        results = RunFolder(folder).results()
        if sorted(line.series for line in results) != sorted(TINY.series):
            return f"the ledger has {[line.series for line in results]}"
        lines, models = self.outcome(folder)
        for name, line in self.lines.items():
            if lines[name] != line:
                return f"the line of {name} differs in {[k for k in line if lines[name].get(k) != line[k]]}"
            ours = models[name]
            if ours is None or any(not torch.equal(ours[key], tensor) for key, tensor in self.models[name].items()):
                return f"the model of {name} differs"
        if left := [path.name for path in folder.rglob("*") if path.suffix == ".part" or path.name == ".holder.json"]:
            return f"it left {left}"
        return ""

    def disturb(self, folder: Path, at: int | None, deadly: bool = False) -> list[str]:
        """Sweep on a disk that fails; return the operations that it saw."""
        with Disk(folder, at, deadly) as disk:
            try:
                self.sweep(folder)
            except (Killed, OSError):
                if at is None:
                    raise
        return disk.seen

    def end(self, folder: Path) -> str:
        """Sweep undisturbed and judge; an error is wrong too."""
        try:
            self.sweep(folder)
        except (CpbkitError, OSError) as error:
            return f"the sweep ended with {type(error).__name__}: {error}"
        return self.judge(folder)


def go_through_boundaries(world: World, pick: Callable[[int], Iterator[int]] = lambda n: iter(range(n))) -> dict:
    """Fail, and kill, at each operation of a sweep; return their counts, the number of trials and what went wrong.

    pick: which of so many operations.
    """
    seen = world.disturb(world.place / "counted", None)
    wrong, trials = [], 0
    for at in pick(len(seen)):
        for deadly in (False, True):
            folder = world.place / f"at{at}{'k' * deadly}"
            world.disturb(folder, at, deadly)
            if found := world.end(folder):
                wrong.append(f"operation {at} ({seen[at]}), {'killed' if deadly else 'failed'}: {found}")
            shutil.rmtree(folder)
            trials += 1
    return {"operations": dict(Counter(seen)), "trials": trials, "wrong": wrong}


def play(world: World, seed: str) -> tuple[str, list[str]]:
    """Play one history; return what is wrong at its end, and what happened."""
    rng, folder = random.Random(seed), world.place / "history"
    shutil.rmtree(folder, ignore_errors=True)
    happened = []
    try:
        for _ in range(rng.randint(1, 5)):
            happened.append(_happen(world, folder, rng))
        return world.end(folder), happened
    except Exception as error:  # what else it is, it is the finding
        return f"{type(error).__name__}: {error}", happened


def _happen(world: World, folder: Path, rng: random.Random) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.exists() else []
    if files and rng.random() < 0.5:
        return _damage(rng.choice(files), rng)
    at, deadly, jump = rng.randrange(120), rng.random() < 0.6, rng.choice((0.0, 0.0, *JUMPS))
    real = time.time
    with mock.patch.object(time, "time", lambda: real() + jump):
        world.disturb(folder, at, deadly)
    return f"{'killed' if deadly else 'full disk'} at operation {at}, clock {jump:+g} s"


def _damage(path: Path, rng: random.Random) -> str:
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
@click.option("--only", type=int, help="Play this history alone, and say what happens in it.")
@click.option("--boundaries", is_flag=True, help="Go through every operation on the disk instead.")
def main(seed: str, count: int, only: int | None, boundaries: bool) -> None:
    """Play histories of a run; exit code 1 where one ends wrong, with the command that plays it again."""
    torch.set_num_threads(1)
    logging.getLogger("cpbkit").setLevel(logging.ERROR)  # what is damaged here is damaged on purpose
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        world = World(Path(place))
        if boundaries:
            told = go_through_boundaries(world)
            click.echo(json.dumps(told, indent=2))
            failed = len(told["wrong"])
        else:
            chosen = range(count) if only is None else [only]
            for i in chosen:
                found, happened = play(world, f"{seed}/{i}")
                if found or only is not None:
                    click.echo(f"history {i}: {'; '.join(happened)}: {found or 'right'}")
                if found:
                    failed += 1
                    click.echo(f"  again: python -m benchmarks.histories --seed {seed} --only {i}")
            click.echo(f"{len(chosen)} histories from seed {seed}, {failed} ended wrong")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
