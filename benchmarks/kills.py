"""Kill a sweep at random moments, with the period of checkpoints that users have, until it is through.

`python -m benchmarks.kills --kills 50`: each sweep must end equal to the bit to one that nothing disturbed.
"""

import multiprocessing
import random
import shutil
import tempfile
import time
from pathlib import Path

import click

from benchmarks.histories import difference, outcome
from cpbkit.config.experiment import SYMBOLS, vary
from cpbkit.config.presets import PRESETS
from cpbkit.runs.sweep import sweep

EXPERIMENT = vary(
    PRESETS["quick"],
    source="synthetic",
    symbols=SYMBOLS[:4],
    intervals=("1h",),
    start="2024-01-01",
    end="2024-03-31",
    epochs=40,
    patience=40,
)


def _sweep(folder: Path) -> None:
    sweep(EXPERIMENT, folder, workers=1)


@click.command()
@click.option("--kills", type=click.IntRange(1), default=50, show_default=True)
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Of the longest life.")
@click.option("--seed", default="0", show_default=True)
def main(kills: int, seconds: float, seed: str) -> None:
    """Count kills, and the sweeps that ended otherwise than one that nothing disturbed."""
    rng, killed, swept, wrong = random.Random(seed), 0, 0, []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.histories", "torch._dynamo"])  # so that a child starts at once

    def live(folder: Path, limit: float | None) -> bool:
        """Sweep in a process that is killed after a time; return whether it was."""
        child = context.Process(target=_sweep, args=(folder,))
        child.start()
        child.join(limit)
        late = child.is_alive()
        child.kill()
        child.join()
        if not late and child.exitcode:
            raise SystemExit(f"the sweep ended with exit code {child.exitcode}")
        return late

    with tempfile.TemporaryDirectory() as place:
        whole, begun = Path(place, "whole"), time.monotonic()
        live(whole, None)
        click.echo(f"undisturbed: {time.monotonic() - begun:.0f} s")
        while killed < kills:
            swept += 1
            folder = Path(place, f"{swept}")
            shutil.copytree(whole / "progress", folder / "progress")  # the same plan: another stack rounds otherwise
            while live(folder, rng.uniform(0, seconds) if killed < kills else None):
                killed += 1
            ours, theirs = outcome(folder), outcome(whole)
            if ours.keys() != theirs.keys() or any(difference(ours[name], theirs[name]) for name in theirs):
                wrong.append(swept)
            click.echo(f"{killed} kills, {swept} sweeps, {len(wrong)} ended otherwise")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
