"""`cpbkit bench sweep`: the loop in circulation, the same loop done well, and this engine, side by side."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from cpbkit.bench import gauges
from cpbkit.bench.engine import Here, Job, Workers
from cpbkit.bench.kinds import share_out
from cpbkit.bench.loops import loop_done_well, loop_in_circulation
from cpbkit.bench.market import make_series
from cpbkit.bench.twins import TWINS
from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import check_name
from cpbkit.hardware import provenance
from cpbkit.hardware.environment import count_cores
from cpbkit.models import zoo
from cpbkit.runs.plan import Plan, make_plan
from cpbkit.windows.series import Series

MODELS = 40
# Besides `quick`: a CPU spends their time on launching. The dense one is the network that other libraries have.
NARROW = (("gru_dense", 8), ("gru", 8), ("lstm", 8), ("lstm", 16))
GROWTH = (1, 10, 40, 200)  # models
GROWTH_STEPS = 100  # of every model
GROWTH_BARS = 1500
RATES = (2e-3, 1e-3, 5e-4)  # learning rates that a search tries at once
LOOP, WELL, ENGINE = "loop", "loop done well", "engine"
LEAST_ROUNDS, CASE_SECONDS = 3, 8.0  # fewer rounds than an effort has, where they take longer
SAMPLE = 30_000  # steps a job is prepared for at most; see Job.steps


@dataclass(frozen=True)
class Effort:
    """How long a measurement may take."""

    seconds: float  # of one block of steps
    rounds: int  # in which all sides take turns
    growth: tuple[int, ...] = GROWTH


QUICK, FULL = Effort(0.15, 3, (1, 10, 40)), Effort(0.4, 5)
Say = Callable[[str], None]
Pace = tuple[float, float]  # steps of one model a second, and CPU seconds of one


def bench_sweep(
    presets: Sequence[str] | None = None,
    *,
    quick: bool = False,
    peers: bool = False,
    models: int = MODELS,
    say: Say = lambda text: None,
) -> dict:
    """Measure the cases on this machine; return the document that `render` shows.

    presets: names of PRESETS, all by default. quick: fewer cases and shorter blocks. peers: also time other libraries,
    each installed for the purpose. say: hears what is going on.
    """
    effort = QUICK if quick else FULL
    cases, left_out = choose_cases(presets, quick)
    document = {"bench": "sweep", **provenance.describe(), "models": models, "device": device().type}
    say("the machine's own ceiling")
    places = 1 if torch.cuda.is_available() else count_cores()
    precisions = sorted({experiment.training.precision for experiment in cases.values()})
    document["matmul"] = {
        name: places * gauges.matmul_rate(device(), name) for name in precisions
    }  # operations a second
    rows = []
    with Workers(count_workers()) as workers:
        for name, experiment in cases.items():
            say(f"{name}: loop, loop done well, engine")
            rows.append(measure_case(name, experiment, models, workers, effort, document["matmul"]))
        first = next(iter(cases))
        say(f"{first}: {', '.join(map(str, effort.growth))} series")
        growth = measure_growth(first, cases[first], workers, effort)
        say(f"{first}: a search beside one sweep after another")
        search = measure_search(first, cases[first], models, workers, effort)
    document |= {"cases": rows, "growth": growth, "search": search, "left_out": left_out}
    if peers:
        from cpbkit.bench.peers import bench_peers

        document["peers"] = bench_peers(rows, cases, say)
    return document


def choose_cases(presets: Sequence[str] | None, quick: bool) -> tuple[dict[str, Experiment], dict[str, str]]:
    """Return the experiments to measure by name, and why others are not among them."""
    if presets is None:
        presets = ("quick", "gru_dense", "gru") if quick else tuple(PRESETS)
    cases: dict[str, Experiment] = {}
    left_out: dict[str, str] = {}
    seen: dict[tuple, str] = {}  # the same work by its first name
    if "quick" in presets:
        for model, width in NARROW[:2] if quick else NARROW:
            cases[f"{model}, width {width}"] = vary(PRESETS["quick"], name=model, width=width)
    for name in presets:
        experiment = PRESETS[check_name("preset", name, PRESETS)]
        work = (experiment.task, experiment.model, experiment.training.batch)
        if experiment.model.name not in TWINS:
            left_out[name] = f"no plain torch.nn twin of {experiment.model.name}"
        elif work in seen:
            left_out[name] = f"the same work as {seen[work]}"
        else:
            seen[work] = name
            cases[name] = experiment
    return cases, left_out


def count_workers() -> int:
    """Return how many processes a plan for this machine can ask for."""
    places = torch.cuda.device_count() or count_cores()
    return places if places > 1 else 0


def device() -> torch.device:
    """Return where the steps run."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def count_flops(experiment: Experiment) -> int:
    """Count the floating-point operations of one training step of one model, on tensors without content."""
    task, batch = experiment.task, experiment.training.batch
    net = zoo.build(1, task, experiment.model).to("meta")
    x = torch.empty(1, batch, task.context, len(task.features), device="meta")
    last = torch.empty(1, batch, len(task.targets), device="meta")
    truth = torch.empty(1, batch, task.horizon, len(task.targets), device="meta")
    forced = torch.empty(task.horizon, dtype=torch.bool, device="meta")
    forcing = experiment.training.teacher_forcing
    teacher = (truth, None if forcing == 1 else forced) if forcing else None
    with FlopCounterMode(display=False) as counter:
        (net(x, last, teacher) - truth).square().mean().backward()
    return counter.get_total_flops()


def measure_case(
    name: str, experiment: Experiment, models: int, workers: Workers, effort: Effort, ceilings: dict[str, float]
) -> dict:
    """Let all sides of one case take turns, and return its row of the document."""
    series, where = make_series(experiment.task, models), device()
    # Elsewhere: what a plan tries leaves a process with memory that would speed up a loop which comes after it.
    plan = workers.call(make_plan, experiment, {one.name: one for one in series})
    loop = Here(partial(loop_in_circulation, experiment, series[0], where), where)
    well = Here(partial(loop_done_well, experiment, series[0], where), where)
    loop.threads = well.threads = best_threads(loop)
    sides = {LOOP: loop, WELL: well, ENGINE: start_engine(experiment, series, plan, workers)}
    times = take_turns({side: make_turn(runner, effort) for side, runner in sides.items()}, effort)
    batch, flops = experiment.training.batch, count_flops(experiment)
    roofline = ceilings[experiment.training.precision] / flops  # model-steps a second
    rows = {side: _summary(runner, times[side], batch, roofline) for side, runner in sides.items()}
    rows[ENGINE] |= {"stacks": len(plan.jobs), "processes": len(plan.devices), "plan": plan.reason}
    stack = tuple(one for one in series if one.name in plan.jobs[0])
    rows[ENGINE]["kinds"] = workers.call(share_out, Job(experiment, stack, plan.devices[0]))
    return {
        "case": name,
        "model": experiment.model.name,
        "width": experiment.model.width,
        "context": experiment.task.context,
        "horizon": experiment.task.horizon,
        "batch": batch,
        "precision": experiment.training.precision,
        "models": models,
        "flops": flops,
        "roofline_steps_per_second": roofline,
        "sides": rows,
        "ratios": {f"{ENGINE} / {other}": compare(times, ENGINE, other) for other in (LOOP, WELL)},
    }


def make_turn(runner: Here | Workers, effort: Effort) -> Callable[[], Pace]:
    """Return a function that steps for about as long as a block takes, and returns the pace."""
    steps = max(1, round(effort.seconds / runner.run(1)[0]))

    def turn() -> Pace:
        wall, cpu = runner.run(steps)
        count = runner.rows * steps
        return count / wall, cpu / count

    return turn


def take_turns(sides: Mapping[str, Callable[[], Pace]], effort: Effort) -> dict[str, list[Pace]]:
    """Return the paces of each side, round by round: in all rounds, or in the least where these took long."""
    paces: dict[str, list[Pace]] = {side: [] for side in sides}
    begun = time.perf_counter()
    for turn in range(effort.rounds):
        if turn >= LEAST_ROUNDS and time.perf_counter() - begun > CASE_SECONDS:
            break
        for side, measure in sides.items():
            paces[side].append(measure())
    return paces


def best_threads(loop: Here) -> int:
    """Return the number of threads that suits a loop: one, or one a core."""
    if loop.device.type != "cpu" or count_cores() == 1:
        return loop.threads
    paces = {}
    for loop.threads in (1, count_cores()):
        loop.run(1)
        paces[loop.threads] = min(loop.run(1)[0] for _ in range(2))
    return min(paces, key=paces.__getitem__)


def start_engine(experiment: Experiment, series: Sequence[Series], plan: Plan, workers: Workers) -> Here | Workers:
    """Start the stacks that the plan would run first, all at once."""
    known = {one.name: one for one in series}
    stacks = [tuple(known[name] for name in names) for names in plan.jobs]
    steps = max(200, SAMPLE // (experiment.training.batch * max(map(len, stacks))))
    jobs = [Job(experiment, stack, place, steps=steps) for stack, place in zip(stacks, plan.devices, strict=False)]
    if len(jobs) == 1:
        return Here.of(jobs[0])
    workers.start(jobs)
    return workers


def compare(times: dict[str, list[Pace]], ours: str, theirs: str) -> dict:
    """Return the ratio of two sides' paces, round by round, with both sides."""
    ratios = [a / b for (a, _), (b, _) in zip(times[ours], times[theirs], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "ours": statistics.median(pace for pace, _ in times[ours]),
        "theirs": statistics.median(pace for pace, _ in times[theirs]),
        "unit": "steps of one model a second",
    }


def _summary(runner: Here | Workers, times: list[Pace], batch: int, roofline: float) -> dict:
    paces = [pace for pace, _ in times]
    pace = statistics.median(paces)
    return {
        "steps_per_second": pace,
        "lowest": min(paces),
        "highest": max(paces),
        "samples_per_second": pace * batch,
        "cpu_seconds_per_step": min(cpu for _, cpu in times),
        "threads": runner.threads,
        "models_at_once": runner.rows,
        "memory": runner.memory,
        "seconds_to_start": runner.seconds_to_start,
        "share_of_roofline": pace / roofline,
    }


def measure_growth(name: str, experiment: Experiment, workers: Workers, effort: Effort) -> dict:
    """Time the steps of more and more models; the loop takes them one after another, so its time is scaled from one."""
    where = device()
    series = make_series(experiment.task, max(effort.growth), GROWTH_BARS)
    loop = Here(partial(loop_in_circulation, experiment, series[0], where), where)
    loop.threads = best_threads(loop)
    rows = []
    for count in effort.growth:
        runner = None  # before the next one: both at once would count as its memory
        plan = workers.call(make_plan, experiment, {one.name: one for one in series[:count]})
        runner = start_engine(experiment, series[:count], plan, workers)
        times = take_turns({side: make_turn(one, effort) for side, one in ((LOOP, loop), (ENGINE, runner))}, effort)
        seconds = {side: count * GROWTH_STEPS / statistics.median(pace for pace, _ in times[side]) for side in times}
        rows.append({"models": count, **seconds})
    return {"case": name, "steps": GROWTH_STEPS, "rows": rows, "scaled": [LOOP]}


def measure_search(name: str, experiment: Experiment, models: int, workers: Workers, effort: Effort) -> dict:
    """Time a search, which steps the rows of all its settings at once, beside as many sweeps one after another."""
    series = make_series(experiment.task, models)
    sides = {"search": vary(experiment, search=(("learning_rate", RATES),)), "sweep": experiment}
    known = {one.name: one for one in series}
    plans = {side: workers.call(make_plan, wanted, known) for side, wanted in sides.items()}

    def turn(side: str) -> Pace:  # starts anew each time: a process holds one stack
        return make_turn(start_engine(sides[side], series, plans[side], workers), effort)()

    times = take_turns({side: partial(turn, side) for side in sides}, effort)
    return {"case": name, "settings": len(RATES), **compare(times, "search", "sweep")}
