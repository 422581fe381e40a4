"""Whether the plan of a sweep picks well on a CPU: its choice against stacks and processes of other sizes.

python -m benchmarks.stacks
"""

import math
import statistics
import sys
from collections.abc import Callable

import torch

from cpbkit.bench.engine import Here, Job, Workers
from cpbkit.bench.market import make_series
from cpbkit.bench.report import about, table
from cpbkit.bench.sweep import MODELS, count_workers
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.hardware import provenance
from cpbkit.runs.plan import make_plan

WIDTHS = (8, 16, 32, 64, 128)  # of the `gru` preset
SIZES = (1, 2, 4, 8)  # models a stack, besides all that fall to a process
BLOCK, ROUNDS = 0.4, 3  # seconds, times
LIMIT = 20.0  # s; a way whose step would take longer is not tried


def measure_stacks(models: int, processes: int, workers: Workers, say: Callable[[str], None]) -> list[dict]:
    """Time each way to step so many models, width by width; `planned` is the way that a sweep would take.

    Wall time is the least of the rounds, for a machine that others use too; CPU time is of all processes.
    """
    rows = []
    for width in WIDTHS:
        experiment = vary(PRESETS["gru"], width=width)
        series = make_series(experiment.task, models)
        plan = workers.call(make_plan, experiment, {one.name: one for one in series})
        planned = max(map(len, plan.jobs))
        share = math.ceil(models / processes)
        one, ways = 0.0, []
        for size in sorted({*(min(size, share) for size in SIZES), share, planned}):
            if 1 < size != planned and size * one > LIMIT:
                continue
            say(f"gru, width {width}: {processes} processes, stacks of {size}")
            jobs = [Job(experiment, series[i * size : (i + 1) * size], steps=200) for i in range(processes)]
            workers.start(jobs)
            ways.append(_time(workers, "processes", size, processes) | {"planned": size == planned})
            one = one or ways[0]["seconds"] * processes
        for threads in (1, processes):
            if models * one <= LIMIT:
                say(f"gru, width {width}: one stack of {models}, {threads} threads")
                here = None  # before the next one: both at once would count as its memory
                here = Here.of(Job(experiment, series, threads=threads, steps=200))
                ways.append(_time(here, "stack" if threads == 1 else "threads", models, threads) | {"planned": False})
        best = min(way["seconds"] for way in ways)
        chosen = next(way["seconds"] for way in ways if way["planned"])
        rows.append({"width": width, "models": models, "ways": ways, "planned_over_best": best / chosen})
    return rows


def _time(runner: Here | Workers, way: str, size: int, cores: int) -> dict:
    steps = max(1, round(BLOCK / runner.run(1)[0]))
    times = [runner.run(steps) for _ in range(ROUNDS)]
    count = runner.rows * steps
    return {
        "way": way,
        "stack": size,
        "cores": cores,
        "seconds": min(wall for wall, _ in times) / count,  # a step of one model
        "median": statistics.median(wall for wall, _ in times) / count,
        "cpu_seconds": min(cpu for _, cpu in times) / count,
        "memory": runner.memory,
    }


def render(rows: list[dict]) -> list[str]:
    """Show what was measured as lines of text."""
    names = list(dict.fromkeys((way["way"], way["stack"]) for row in rows for way in row["ways"]))
    names.sort(key=lambda name: (name[0] != "processes", name))
    shown = []
    for row in rows:
        found = {(way["way"], way["stack"]): way for way in row["ways"]}
        cells = [
            f"{1e3 * found[name]['seconds']:.2f}{'*' if found[name]['planned'] else ''}" if name in found else ""
            for name in names
        ]
        shown.append([f"gru, width {row['width']}", *cells, f"{row['planned_over_best']:.2f}"])
    heads = [f"{way} of {size}" if way == "processes" else f"{way} {size}" for way, size in names]
    return [
        "Ways to step on this CPU, ms a step of one model, the least of the rounds; * is what a sweep plans:",
        *table(["", *heads, "* / best"], shown),
    ]


if __name__ == "__main__":
    processes = count_workers()
    if not processes or torch.cuda.is_available():
        sys.exit("it needs a CPU of two cores or more, and no GPU")
    with Workers(processes) as workers:
        measured = measure_stacks(MODELS, processes, workers, lambda text: print(text, file=sys.stderr))
    print(*about(provenance.describe()), "", *render(measured), sep="\n")
