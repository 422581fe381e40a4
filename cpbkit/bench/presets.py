"""`cpbkit bench presets`: which preset to take on this machine, in one table."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from cpbkit.bench.engine import Workers
from cpbkit.bench.market import BARS, make_series
from cpbkit.bench.sweep import MODELS, block, count_workers, start_engine
from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import planted_skill, predictable_series
from cpbkit.errors import check_name
from cpbkit.evaluation.results import ResultLine
from cpbkit.hardware import provenance
from cpbkit.runs.plan import FORWARD_SHARE, Plan, make_plan
from cpbkit.runs.sweep import Place
from cpbkit.runs.worker import Result, Unit
from cpbkit.windows.series import Series
from cpbkit.windows.splits import split

SERIES = 4  # that skill is measured on
BLOCK, ROUNDS = 0.3, 3  # seconds, times
TRAINING, QUICK_TRAINING = 20.0, 5.0  # seconds of training a preset gets


def bench_presets(
    presets: Sequence[str] | None = None,
    *,
    quick: bool = False,
    models: int = MODELS,
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """Time each preset and train it for a short while on the same few series; return the document.

    Time for forty is extrapolated from timed steps, with all epochs and no early stop.
    """
    names = [check_name("preset", name, PRESETS) for name in presets or PRESETS]
    seconds = QUICK_TRAINING if quick else TRAINING
    rows = []
    with Workers(count_workers()) as workers:
        for name in names:
            say(f"{name}: timing, then training for {seconds:.0f} s")
            rows.append(time_preset(name, models, workers) | train_briefly(name, seconds))
    return {
        "bench": "presets",
        **provenance.describe(),
        "models": models,
        "bars": BARS,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "training_seconds": seconds,
        "rows": rows,
    }


def time_preset(name: str, models: int, workers: Workers) -> dict:
    """Time steps of the plan for so many series, and extrapolate."""
    experiment = PRESETS[name]
    series = make_series(experiment.task, models)
    plan = make_plan(experiment, {one.name: one for one in series})
    runner = start_engine(experiment, series, plan, workers)
    steps = block(runner, BLOCK)
    pace = statistics.median(runner.rows * steps / runner.run(steps)[0] for _ in range(ROUNDS))
    extra = FORWARD_SHARE * len(split(series[0], experiment.task).validation) / experiment.training.batch
    epoch = (plan.steps + extra) * models / pace
    return {
        "preset": name,
        "model": experiment.model.name,
        "width": experiment.model.width,
        "steps_per_second": pace,
        "seconds_an_epoch": epoch,
        "epochs": experiment.training.epochs,
        "seconds_for_all": epoch * experiment.training.epochs,
        "memory": runner.memory,
        "plan": plan.reason,
    }


def train_briefly(name: str, seconds: float) -> dict:
    """Train a preset on a few series for about so many seconds and judge it as the sweep does."""
    experiment = PRESETS[name]
    series = make_series(experiment.task, SERIES)
    plan = make_plan(experiment, {one.name: one for one in series})
    epoch = plan.seconds / plan.epochs
    epochs = min(experiment.training.epochs, max(1, int(seconds / epoch)))
    steps = plan.steps if epoch <= seconds else max(1, int(plan.steps * seconds / epoch))
    trained = vary(experiment, epochs=epochs, steps=steps)
    begun = time.perf_counter()
    lines = run(trained, series, plan)
    return {
        "trained_epochs": epochs * steps / plan.steps,
        "trained_seconds": time.perf_counter() - begun,
        "skill": skills(lines, experiment),
    }


def run(experiment: Experiment, series: Sequence[Series], plan: Plan) -> list[ResultLine]:
    """Run the units where the sweep would, and return the lines of their ledger."""
    known = {one.name: one for one in series}
    units = [
        Unit(name, experiment, tuple(known[n] for n in names), plan.devices[0])
        for name, names in plan.named_units().items()
    ]
    messages = Place("processes", None).run(units, plan)
    return [message.line for message in messages if isinstance(message, Result)]


def skills(lines: Sequence[ResultLine], experiment: Experiment) -> dict:
    """Return the mean skill on the first head, over the series whose next bar can be forecast and over the others.

    `limit` is what no forecast of closes can pass on the first kind.
    """
    planted = predictable_series([line.series.partition("_")[0] for line in lines], ["15m"])
    groups: dict[str, list[float]] = {"predictable": [], "others": []}
    head = ""
    for line in lines:
        if line.status == "done":
            head = next(iter(line.test))
            groups["predictable" if line.series in planted else "others"].append(line.test[head]["skill"])
    limit = float(planted_skill(experiment.task.horizon)) if experiment.task.targets == ("close",) else None
    return {"head": head, "limit": limit, **{name: statistics.mean(v) if v else None for name, v in groups.items()}}
