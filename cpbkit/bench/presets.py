"""`cpbkit bench presets`: which preset to take on this machine, in one table."""

import concurrent.futures
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from cpbkit.bench.market import BARS, make_series
from cpbkit.bench.sweep import MODELS, count_flops
from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.presets import PRESETS, TRAINED
from cpbkit.data.synthetic import planted_skill, predictable_series
from cpbkit.errors import check_name
from cpbkit.evaluation.results import ResultLine
from cpbkit.hardware import provenance
from cpbkit.hardware.chips import find_chip
from cpbkit.hardware.environment import count_cores
from cpbkit.runs.plan import TRIAL_SECONDS, make_plan
from cpbkit.runs.worker import Job, Result, work

SERIES = 4  # that skill is measured on
TRAINING, QUICK_TRAINING = 20.0, 4.0  # seconds of training a preset gets
QUICK_TRIAL_SECONDS = 1.0  # of the steps of a size of stack; wide networks are then timed in small stacks alone


def bench_presets(
    presets: Sequence[str] | None = None,
    *,
    quick: bool = False,
    models: int = MODELS,
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """Time each preset and train it for a short while on the same few series; return the document.

    Time for forty is extrapolated from timed steps, with all epochs and no early stop. As many presets as there are
    cores are measured at once, each on one: so the processes of a sweep share the machine too.
    """
    names = [check_name("preset", name, TRAINED) for name in presets or TRAINED]
    seconds = QUICK_TRAINING if quick else TRAINING
    rows: dict[str, dict] = {}
    places = 1 if torch.cuda.is_available() else min(count_cores(), len(names))
    say(f"{len(names)} presets, {places} at once: steps are timed, then {seconds:.0f} s of training each")
    with concurrent.futures.ProcessPoolExecutor(places, multiprocessing.get_context("spawn")) as pool:
        trial_seconds = QUICK_TRIAL_SECONDS if quick else TRIAL_SECONDS
        asked = {pool.submit(measure, name, models, trial_seconds, seconds): name for name in names}
        try:
            for done in concurrent.futures.as_completed(asked):
                rows[asked[done]] = done.result()
                say(f"[{len(rows)}/{len(names)}] {asked[done]}: {done.result()['plan']}")
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt nobody waits for what has not begun
    return {
        "bench": "presets",
        **provenance.describe(),
        "models": models,
        "bars": BARS,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "training_seconds": seconds,
        "rows": [rows[name] for name in names],
    }


def measure(name: str, models: int, trial_seconds: float, training_seconds: float) -> dict:
    """Plan for so many series and extrapolate; then train a few of them in this process, judged as a sweep does.

    A preset whose epoch takes longer than the training is timed alone, and shows no skill.
    """
    experiment = PRESETS[name]
    series = make_series(experiment.task, max(models, SERIES))
    plan = make_plan(experiment, {one.name: one for one in series[:models]}, trial_seconds=trial_seconds)
    epoch = plan.seconds / plan.epochs
    alone = epoch * len(plan.devices) * SERIES / models  # an epoch of the few on one core
    epochs = min(plan.epochs, int(training_seconds / alone))
    lines, begun = [], time.perf_counter()
    if epochs:  # less than one would say nothing of the preset
        trained = vary(experiment, epochs=epochs, steps=plan.steps)
        job = Job(name, trained, series[:SERIES], plan.devices[0])
        lines = [message.line for message in work(job) if isinstance(message, Result)]
    return {
        "preset": name,
        "model": experiment.model.name,
        "width": experiment.model.width,
        "seconds_an_epoch": epoch,
        **roofline(experiment, models * plan.steps, epoch * len(set(plan.devices)), plan.devices[0]),
        "epochs": plan.epochs,
        "seconds_for_all": plan.seconds,
        "memory": plan.bytes,
        "plan": plan.reason,
        "trained_epochs": epochs,
        "trained_seconds": time.perf_counter() - begun,
        "skill": skills(lines, experiment),
    }


def roofline(experiment: Experiment, steps: int, seconds: float, place: str) -> dict[str, float | None]:
    """Return the seconds that the arithmetic of so many steps takes at the peak that the GPU's maker states, and its
    share of the seconds that all GPUs took (MFU); None where no peak is known. The validation is not counted.
    """
    chip = find_chip(torch.cuda.get_device_name(place)) if place.startswith("cuda") else None
    peak = chip.peak(experiment.training.precision) if chip else math.nan
    least = count_flops(experiment) * steps / peak
    known = not math.isnan(least)
    return {"roofline_seconds": least if known else None, "mfu": least / seconds if known else None}


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
