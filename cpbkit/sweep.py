"""The forty: plan the units of work, run what is left of them, keep each result as it comes."""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch

from cpbkit import __version__, atomic, executors
from cpbkit.clock import Clock
from cpbkit.data import binance, synthetic
from cpbkit.data.klines import Klines
from cpbkit.errors import DataError
from cpbkit.experiment import Experiment, vary
from cpbkit.gpu_check.monitor import Monitor
from cpbkit.run import ABOUT, MONITOR, PLAN, Run
from cpbkit.windows import Series, from_klines, split
from cpbkit.work import Checkpoint, Progress, Result, Unit, work

NARROW = 32  # units of width up to which a stack beats a process a model on a CPU
STATUS_SECONDS = 2.0  # between two words left for `cpbkit status`
WIDE_STACK = 2  # models a stack on a CPU above that width


@dataclass
class State:
    """Where a sweep stands; `on_progress` gets it at every change."""

    experiment: Experiment
    total: int
    stage: str = "starting"  # what it is doing now
    results: list[dict] = field(default_factory=list)  # lines of the ledger
    running: dict[str, dict] = field(default_factory=dict)  # series -> curve, persistence and share done
    seconds_left: float | None = None
    samples_per_second: float = 0.0
    watch: Monitor | None = None

    @property
    def done(self) -> int:
        """How many series are through."""
        return len(self.results)

    @property
    def monitor(self) -> pd.DataFrame | None:
        """The memory and utilisation of this session so far."""
        return self.watch.frame() if self.watch else None


@dataclass(frozen=True)
class Plan:
    """How the series are shared out. A resumed sweep keeps the plan it started with."""

    units: list[list[str]]  # names of the series of each stack
    steps: int  # optimiser steps an epoch, the same for every model of the run
    workers: int  # processes at once; 0 runs the units in this one
    devices: list[str]  # of the workers in turn
    reason: str  # why so

    def unit_name(self, i: int) -> str:
        """Return the name of the i-th unit."""
        return f"unit-{i:03d}"


def plan(experiment: Experiment, series: dict[str, Series], workers: int | None = None) -> Plan:
    """Choose stacks and workers for the series. workers: None decides, 0 stays in this process."""
    names, steps = list(series), experiment.training.steps or _steps(experiment, series)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        count = workers if workers is not None else (gpus if gpus > 1 else 0)
        devices = [f"cuda:{i}" for i in range(gpus)]
        stacks = _share(names, max(1, count))
        return Plan(stacks, steps, count, devices, f"{len(stacks)} stack(s) on {gpus} GPU(s)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = workers if workers is not None else (cores if cores > 1 and len(names) > 1 else 0)
    if experiment.model.width <= NARROW:
        stacks, why = _share(names, max(1, count)), "narrow models gain from stacking"
    else:
        stacks, why = _share(names, math.ceil(len(names) / WIDE_STACK)), "wide models fill a core each"
    return Plan(
        stacks,
        steps,
        min(count, len(stacks)),
        ["cpu"],
        f"{len(stacks)} stack(s) on {max(1, count)} core(s): {why}",
    )


def _share(names: Sequence[str], count: int) -> list[list[str]]:
    """Deal the series out evenly."""
    return [part for part in (list(names[i::count]) for i in range(count)) if part]


def sweep(
    experiment: Experiment,
    folder: str | os.PathLike,
    *,
    klines: Callable[[Experiment, Callable], dict[str, Klines]] | None = None,
    workers: int | None = None,
    command: str = "",
    on_progress: Callable[[State], None] = lambda state: None,
) -> list[dict]:
    """Train and judge every series of the experiment into a run folder; return the ledger.

    klines: gets the bars, `load_klines` by default. workers: see `plan`. command: kept for the report.
    What is in the folder already is kept, and an interrupted unit goes on from its checkpoint.
    Errors: RunError for a folder in use or of other settings, DataError, OSError.
    """
    run, clock, told = Run(folder), Clock(), -math.inf
    state = State(experiment, len(experiment.series))

    def tell(stage: str) -> None:
        nonlocal told
        state.stage = stage
        on_progress(state)
        if time.monotonic() - told > STATUS_SECONDS:
            told = time.monotonic()
            shares = {name: round(one["share"], 4) for name, one in state.running.items()}
            run.tell(
                {"stage": stage, "done": state.done, "total": state.total, "running": shares}
                | {"seconds_left": state.seconds_left, "samples_per_second": state.samples_per_second}
            )

    with run.writing(experiment), Monitor() as state.watch:
        state.results = run.results()
        missing = [name for name in experiment.series if name not in {line["series"] for line in state.results}]
        if missing:
            _save_about(run, command)
            with clock("bars"):
                tell("getting bars")
                bars = (klines or load_klines)(experiment, tell)
            _train(run, experiment, bars, missing, workers, state, clock, tell)
            _save_monitor(run, state.watch.frame())
            run.add_clock(clock.take())
    return state.results


def load_klines(experiment: Experiment, tell: Callable[[str], None] = lambda text: None) -> dict[str, Klines]:
    """Get the bars of an experiment from its source; `tell` hears what is going on."""
    data = experiment.data
    if data.source == "synthetic":
        tell("making the seeded market")
        return synthetic.make_market(data.symbols, data.intervals, data.start, data.end, data.seed)
    return binance.fetch_klines(
        data.symbols,
        data.intervals,
        data.start,
        data.end,
        market=data.market,
        progress=lambda done, total, size, text: tell(f"getting bars: {done} of {total} files, {size / 1e6:.1f} MB"),
    )


def _train(run, experiment, bars, missing, workers, state, clock, tell) -> None:
    """Run the units that hold a missing series and keep what they say."""
    series: dict[str, Series] = {}
    with clock("features"):
        tell("computing features")
        for name in experiment.series:
            try:
                series[name] = from_klines(bars[name], experiment.task)
                split(series[name], experiment.task)
            except DataError as error:
                series.pop(name, None)
                if name in missing:
                    _keep(run, state, {"series": name, "status": "failed", "reason": str(error)}, None, bars)
    if not series:
        raise DataError("no series of this experiment can be trained; the reasons are in the ledger")
    chosen = _keep_plan(run, plan(experiment, series, workers))
    experiment = vary(experiment, steps=chosen.steps)
    units = []
    for i, names in enumerate(chosen.units):
        if set(names) & set(missing):
            saved = run.checkpoint(chosen.unit_name(i))
            content = saved.read_bytes() if saved.exists() else None
            device = chosen.devices[i % len(chosen.devices)]
            units.append(Unit(chosen.unit_name(i), experiment, tuple(series[n] for n in names), device, 1, content))
    execute = executors.processes(units, work, chosen.workers) if chosen.workers else executors.local(units, work)
    pace = None
    with clock("training"):
        tell(f"training: {chosen.reason}")
        for message in execute:
            match message:
                case Result():
                    state.running.pop(message.line["series"], None)
                    if message.line["series"] in missing:
                        _keep(run, state, message.line, message.model, bars)
                        missing.remove(message.line["series"])
                case Checkpoint():
                    atomic.write_bytes(run.checkpoint(message.unit), message.content)
                case Progress():
                    state.running |= message.running
                    for stage, seconds in message.seconds.items():
                        clock.add(f"worker: {stage}", seconds)
                    pace = pace or Pace(_share_done(state))
                    pace.samples += message.samples
            if pace:
                state.seconds_left, state.samples_per_second = pace.tell(_share_done(state))
            tell("training")
    for i in range(len(chosen.units)):
        run.checkpoint(chosen.unit_name(i)).unlink(missing_ok=True)


@dataclass
class Pace:
    """How fast the work goes since the first word of a worker, so that building and loading do not count."""

    share: float  # of the whole work that was done then
    samples: int = 0
    begun: float = field(default_factory=time.monotonic)

    def tell(self, share: float) -> tuple[float | None, float]:
        """Return the seconds left and the windows trained on a second."""
        spent = max(time.monotonic() - self.begun, 1e-9)
        left = spent * (1 - share) / (share - self.share) if share > self.share else None
        return left, self.samples / spent


def _share_done(state: State) -> float:
    return (state.done + sum(one["share"] for one in state.running.values())) / state.total


def _steps(experiment: Experiment, series: dict[str, Series]) -> int:
    """Return the steps in which the longest series is seen once."""
    longest = max(len(split(s, experiment.task).train) for s in series.values())
    return math.ceil(longest / experiment.training.batch)


def _keep(run: Run, state: State, line: dict, model: bytes | None, bars: dict[str, Klines]) -> None:
    line = line | {"passport": bars[line["series"]].passport.to_dict()}
    run.finish(line, model)
    state.results.append(line)


def _keep_plan(run: Run, fresh: Plan) -> Plan:
    """Return the plan this run started with, or make `fresh` that plan."""
    path = run.folder / PLAN
    if path.exists():
        return Plan(**json.loads(path.read_text()))
    atomic.write_bytes(path, json.dumps(fresh.__dict__, indent=2).encode())
    return fresh


def _save_about(run: Run, command: str) -> None:
    about = {
        "command": command,
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "versions": {
            "cpbkit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "pandas": pd.__version__,
        },
    }
    atomic.write_bytes(run.folder / ABOUT, json.dumps(about, indent=2).encode())


def _save_monitor(run: Run, frame: pd.DataFrame) -> None:
    """Add this session's samples to those of earlier ones."""
    path = run.folder / MONITOR
    if path.exists():
        earlier = pd.read_parquet(path)
        frame = pd.concat([earlier, frame.assign(time=frame["time"] + earlier["time"].max())], ignore_index=True)
    atomic.write_bytes(path, frame.to_parquet())
