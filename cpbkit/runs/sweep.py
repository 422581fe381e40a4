"""The forty: plan the jobs, run what is left of them, keep each result as it comes."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import numbers
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from cpbkit.config import own
from cpbkit.config.experiment import Experiment, vary
from cpbkit.data import binance
from cpbkit.data.klines import Klines, say_doubts
from cpbkit.data.load import load_klines
from cpbkit.data.traces import Trace
from cpbkit.errors import CpbkitError, DataError, RunError, Terminated, check_name
from cpbkit.evaluation.results import ResultLine
from cpbkit.hardware import provenance
from cpbkit.hardware.environment import count_cores
from cpbkit.hardware.monitor import Monitor
from cpbkit.models import zoo
from cpbkit.quantities import counted
from cpbkit.runs import executors, stopping
from cpbkit.runs.clock import Clock
from cpbkit.runs.folder import LEDGER, RunFolder
from cpbkit.runs.plan import Plan, find_places, job_name, make_plan
from cpbkit.runs.progress import Pace, State
from cpbkit.runs.worker import Checkpoint, Job, Message, Note, Progress, Result, Shrunk, shrink, work
from cpbkit.texts import redact
from cpbkit.training import checkpoint
from cpbkit.windows.series import Series, Table, data_sha256, times_of, to_series
from cpbkit.windows.splits import folds, split

log = logging.getLogger(__name__)
# Gets the bars of an experiment by series, and tells what it is doing.
Load: TypeAlias = Callable[[Experiment, Callable[[str], None]], Mapping[str, Klines | Trace | Table]]
# At most, while anything is heard, between two words left for `cpbkit status` and two looks for `cpbkit stop`.
STATUS_SECONDS = 1.0
T = TypeVar("T")


def sweep(
    experiment: Experiment,
    folder: str | os.PathLike,
    *,
    klines: Load = load_klines,
    executor: str | executors.Ray = "processes",
    workers: int | None = None,
    minutes: float | None = None,
    command: str = "",
    parent: RunFolder | None = None,
    on_progress: Callable[[State], None] = lambda state: None,
) -> list[ResultLine]:
    """Train and judge every series of the experiment into a run folder; return the ledger.

    klines: gets the bars.
    executor: processes (one per core or GPU; a single one is this process), local (this process), or a
    Ray cluster; "ray" is one of this machine. workers: processes at once; None takes what is there. minutes: a budget
    from now. command: kept for the report. parent: the run of which this is a refit, see `plan_refit`.
    What is in the folder already is kept, and an interrupted job goes on from its checkpoint.
    Errors: RunError for a folder in use or of other settings, DataError, OSError.
    """
    if isinstance(executor, str):
        check_name("executor", executor, ("processes", "local", "ray"))
    if workers is not None and not (isinstance(workers, numbers.Integral) and workers > 0):
        raise CpbkitError(f"workers must be a whole number from 1 on; got {workers!r}")
    if minutes is not None and not (isinstance(minutes, numbers.Real) and minutes > 0):
        raise CpbkitError(f"minutes must be a number above 0; got {minutes!r}")
    parents = _read_parents(experiment, parent)
    deadline = None if minutes is None else time.time() + 60 * minutes
    run, clock = RunFolder(folder), Clock()
    is_new = not run.folder.exists()
    state = State(experiment, len(experiment.series))
    with stopping.listening(), run.writing(experiment), _taking_back(run, is_new), Monitor() as watch:
        state.watch = watch
        state.saved = _saved_shares(run)
        failed = _look_over(run, state, watch)
        tell = _teller(run, state, on_progress)
        if state.missing:
            try:
                place = _place(executor, workers)
                origin = {"parent": str(parent.folder)} if parent else {}
                origin["executor"] = "processes" if place.gpus is None else "ray"
                run.begin({"command": redact(command), **origin, **provenance.describe()})
                run.keep_sources(map(own.source, experiment.own_parts))
                _sweep(run, state, clock, tell, klines, place, deadline, failed, parents)
            except Terminated:
                if not run.wishes()["end"]:
                    raise
                raise RunError(
                    f"stopped by hand with {state.done} of {state.total} done; the same call goes on from there"
                ) from None
            finally:
                run.add_monitor(watch.frame())
                run.add_clock(clock.take())
                _leave_word(run, state)
        else:
            tell("complete")
        for path in run.folder.glob("progress/*.safetensors"):  # of jobs that are through, by whatever name
            path.unlink()
    return run.results()


@contextlib.contextmanager
def _taking_back(run: RunFolder, is_new: bool) -> Iterator[None]:
    """Remove a folder that this call made where an error comes before anything is trained, as with a mistyped name.

    An interrupt and `stop` leave it: the same command goes on. It must be held, or another sweep could begin in it.
    """
    try:
        yield
    except Exception:
        trained = (LEDGER, "models/*", "progress/*.safetensors")
        if is_new and not run.wishes()["end"] and not any(any(run.folder.glob(place)) for place in trained):
            shutil.rmtree(run.folder, ignore_errors=True)
        raise


def plan_refit(parent: RunFolder, until: str, from_zero: bool = False, trust_code: bool = False) -> Experiment:
    """Return the experiment of a run on bars up to a later day, begun from its weights unless `from_zero`.

    Errors: RunError for a run without models, or one that has bars up to that day; CpbkitError for what is no day, and
    for own parts and a foundation model without consent, `trust_code`.
    """
    experiment, models = parent.experiment, parent.models()
    own.require_consent(experiment.own_parts, trust_code, str(parent.folder), experiment.task.zero_shot)
    if not models:
        raise RunError(f"{parent.folder} has no finished model to go on from")
    settings = {"end": until, "parent": _fingerprint(models), "warm_start": not from_zero}
    later = vary(experiment, **settings, folds=1)  # the weights before it have seen earlier test periods
    if experiment.data.end and until <= experiment.data.end:
        raise RunError(f"a refit needs more bars than the run has, up to {experiment.data.end}; got until {until}")
    return later


def name_refit(parent: Path, until: str, from_zero: bool = False) -> Path:
    """Return where a refit lies that has no folder of its own: beside the run before it."""
    return parent.with_name(f"{parent.name}-until-{until}" + ("-from-zero" if from_zero else ""))


def _fingerprint(models: Mapping[str, bytes]) -> str:
    return fingerprint({series: hashlib.sha256(content).hexdigest() for series, content in models.items()})


def fingerprint(models: Mapping[str, str]) -> str:
    """Return what tells the models of a run from others; models: the SHA-256 of each file, by series."""
    return hashlib.sha256(json.dumps(dict(sorted(models.items()))).encode()).hexdigest()


def _read_parents(experiment: Experiment, parent: RunFolder | None) -> dict[str, bytes]:
    """Return the models that a refit goes on from. Errors: RunError where they are not those that it began with."""
    if not experiment.training.parent:
        return {}
    models = parent.models() if parent else {}
    if _fingerprint(models) != experiment.training.parent:
        raise RunError(
            "a refit goes on from the models that it began with; "
            + (f"those of {parent.folder} are others now" if parent else "name their run: `cpbkit refit RUN`")
        )
    return models


def _find_seen(experiment: Experiment, series: Mapping[str, Series], parents: Mapping[str, bytes]) -> dict[str, str]:
    """Say of which series the models before a refit have seen bars that it would be tested on."""
    seen = {}
    for name in series.keys() & parents.keys():
        _, about = checkpoint.load(parents[name], {"dates": {"validation": (str, str)}})
        known = about["dates"]["validation"][1]
        first = split(series[name], experiment.task).dates(series[name])["test"][0]
        if first <= known:
            seen[name] = f"the weights before it have seen bars up to {known}, and its test would begin at {first}"
    return seen


def _look_over(run: RunFolder, state: State, watch: Monitor) -> dict[str, ResultLine]:
    """Take up what is done; return the lines of series that failed, which are tried again.

    A series whose model is lost or damaged is trained anew.
    """
    failed = {}
    for line in run.results():
        name = line.series
        if line.status == "failed":
            failed[name] = line
            continue
        if line.status == "done" and (damage := _find_damage(run, name)):
            log.warning("the model of %s is trained anew: %s", name, damage)
            watch.mark(f"the model of {name} is trained anew: {damage}")
            continue
        state.add(line)
    return failed


def _find_damage(run: RunFolder, series: str) -> str:
    content = run.model(series)
    if content is None:
        return "its file is lost"
    try:
        checkpoint.load(content)
    except RunError as error:
        return str(error)
    return ""


def preview(
    experiment: Experiment,
    *,
    klines: Load = load_klines,
    executor: str | executors.Ray = "processes",
    workers: int | None = None,
    minutes: float | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Plan:
    """Return the plan that `sweep` would make, with its predicted time, and train nothing."""
    series, failed = prepare(experiment, klines(experiment, tell))
    if not series:
        raise DataError(next(iter(failed.values())))
    tell("timing a few steps")
    place = _place(executor, workers)
    return place.call(make_plan, experiment, series, place.workers, minutes)


@dataclass(frozen=True)
class Place:
    """Where the jobs run."""

    workers: int | None  # as `make_plan` takes it
    gpus: float | None = None  # of a Ray cluster, that a stack takes; None: on this machine

    def call(self, function: Callable[..., T], *args) -> T:
        """Return what a function gives where the jobs will run."""
        return function(*args) if self.gpus is None else executors.call_on_ray(function, *args, gpus=self.gpus)

    def run(self, jobs: list[Job], plan: Plan, retry: executors.Retry) -> Iterator[Message]:
        """Run the jobs and stream their messages; `retry` is asked about those whose worker is lost."""
        if self.gpus is not None:
            return executors.on_ray(jobs, work, self.gpus, retry)
        if len(plan.devices) > 1:
            return executors.processes(jobs, work, plan.devices, retry)
        return executors.local(jobs, work)


def _place(executor: str | executors.Ray, workers: int | None) -> Place:
    if executor == "ray":
        executor = executors.Ray()
    if isinstance(executor, executors.Ray):
        has = executors.connect(executor.address)
        gpus = executor.gpus if has.get("GPU") else 0.0
        count = int(has["GPU"] / gpus) if gpus else int(has["CPU"])
        return Place(workers or max(1, count), gpus)
    return Place(1 if executor == "local" else workers)


def _sweep(run, state, clock, tell, klines, place, deadline, failed_before, parents) -> None:
    def note(text: str) -> None:
        """Tell what a person should know, and put it on the time line of the report."""
        state.watch.mark(text)
        tell(text)

    if name := state.experiment.task.zero_shot:  # what cannot be had is known before anything is trained
        from cpbkit.models import zero_shot

        zero_shot.load(name)
    with clock("bars"):
        tell("getting bars")
        try:
            bars, incomplete = klines(state.experiment, tell), None
        except binance.Incomplete as error:  # train what is there; the same command fetches the rest later
            if state.experiment.training.pooled:
                raise
            bars, incomplete = error.klines, error
    if said := say_doubts(one.passport for one in bars.values() if isinstance(one, Klines)):
        log.warning(said)
        state.watch.mark(said)
    with clock("features"):
        tell("computing features")
        series, failed = prepare(state.experiment, bars)
        for name, one in series.items():
            _tell_gaps(one, bars[name])
        for name, why in _find_seen(state.experiment, series, parents).items():
            failed[name] = why
            del series[name]
        for line in state.results:
            known = series.get(line.series)
            if known and line.data_sha256 not in ("", data_sha256(known)):
                note(f"{known.name} is kept as it ended, on other bars than are there now")
    if not series:
        reasons = "; ".join(failed.values())
        raise incomplete or DataError(f"no series of this experiment can be trained: {reasons}")
    for name in [name for name in state.missing if name in failed]:
        before = failed_before.get(name)
        if before and before.reason == failed[name]:
            state.add(before)
        else:
            _keep(run, state, ResultLine(name, "failed", failed[name]), bars)
    with clock("plan"):
        tell("timing a few steps")
        minutes = None if deadline is None else (deadline - time.time()) / 60
        plan = _settle_plan(run, state, series, place, minutes)
        run.keep_plan(vars(plan))
        _tell_begin(state, plan, series)
    jobs = _jobs(run, state, plan, series, deadline, parents)
    with clock("training"):
        tell(f"training, {plan.reason}")  # said until a job has something to note
        state.pace = Pace(max(1, min(len(jobs), len(plan.devices))), plan.epochs, plan.patience, deadline)
        retry = _retry(run, state)
        with stopping.patiently(), contextlib.closing(place.run(jobs, plan, retry)) as messages:
            for message in messages:
                match message:
                    case Result():
                        if message.line.series not in state.ended:
                            _keep(run, state, message.line, bars, message.model, message.losses)
                    case Checkpoint():
                        run.keep_checkpoint(message.job, message.content)
                    case Shrunk():
                        run.keep_checkpoint(message.job, None)
                        # Not by the job's name: it may be a part of a planned one, or one that was shrunk before.
                        gone = {name for names in message.jobs for name in names}
                        kept = [[name for name in names if name not in gone] for names in plan.jobs]
                        plan = replace(plan, jobs=[*filter(None, kept), *message.jobs])
                        run.keep_plan(vars(plan))
                        note(message.reason)
                    case Note():
                        note(message.text)
                    case Progress():
                        state.hear(message)
                        for stage, seconds in message.seconds.items():
                            clock.add(f"worker: {stage}", seconds)
                tell("stopping, with a checkpoint" if stopping.is_asked() else state.stage)
    if incomplete:
        raise incomplete


def _settle_plan(
    run: RunFolder, state: State, series: Mapping[str, Series], place: Place, minutes: float | None
) -> Plan:
    """Return how the series are shared out: as when the run began, beside it what was not available then.

    Errors: RunError where one model for all series was trained without some of these.
    """
    plan = _read_plan(run)
    planned = {name for names in plan.jobs for name in names} if plan else set()
    fresh = [name for name in state.missing if name in series and name not in planned]
    if plan and fresh and state.experiment.training.pooled:
        if state.ended & series.keys():
            names = ", ".join(fresh)
            raise RunError(f"the one model for all series was trained without {names}: sweep into another folder")
        log.warning("the one model for all series begins anew, now with %s", ", ".join(fresh))
        plan = None
    if plan is None:
        plan = place.call(make_plan, state.experiment, series, place.workers, minutes)
    elif fresh:
        made = place.call(make_plan, state.experiment, {n: series[n] for n in fresh}, place.workers, minutes)
        plan = replace(plan, jobs=[*plan.jobs, *made.jobs])
    # It may have been made on another machine, with other devices.
    return replace(plan, devices=place.call(find_places, place.workers, len(series)))


def _tell_begin(state: State, plan: Plan, series: dict[str, Series]) -> None:
    """Put into the state what a person wants to know before the training."""
    task, ordered = state.experiment.task, sorted(series.values(), key=len)
    ends = [split(one, task) for one in (ordered[0], ordered[-1])]
    parts = {part: [len(getattr(each, part)) for each in ends] for part in ("train", "validation", "test")}
    state.windows = {part: (min(counts), max(counts)) for part, counts in parts.items()}
    net = zoo.build(1, task, state.experiment.model)
    state.parameters = sum(parameter.numel() for parameter in net.parameters())
    state.plan = plan


def _retry(run: RunFolder, state: State) -> executors.Retry:
    """Return what decides about a job whose worker was lost: half of it, and a single series once more as it was."""
    again: set[str] = set()

    def retry(job: Job, why: str, halve: bool) -> tuple[list[Message], list[Job]]:
        if job.name not in again and not (halve and len(job.series) > 1):
            again.add(job.name)
            whole = replace(job, checkpoint=run.checkpoint(job.name), tried=(*job.tried, f"{job.name} {why}"))
            return [Note(f"{job.name} {why}; it is tried again")], [whole]
        return shrink(job, state.ended, why)

    return retry


def prepare(
    experiment: Experiment, bars: Mapping[str, Klines | Trace | Table]
) -> tuple[dict[str, Series], dict[str, str]]:
    """Return the series that can be trained, and why the others cannot."""
    series: dict[str, Series] = {}
    failed: dict[str, str] = {}
    for name in (name for name in experiment.series if name in bars):
        try:
            one = to_series(bars[name], experiment.task)
            for fold in folds(experiment.task, experiment.training.folds):
                split(fold.cut(one), fold.task)
            series[name] = one
        except DataError as error:
            failed[name] = str(error)
    return series, failed


def _tell_gaps(series: Series, rows: Klines | Trace | Table) -> None:
    """Say what windows cannot cross: rows after the first with a number that is not finite, and gaps of own tables."""
    times = times_of(rows.frame)
    if left := int(np.sum(times >= series.times[0])) - len(series):
        log.warning(
            "%s: %d of %d rows left out, in which a feature or target is no finite number; no window crosses them",
            *(series.name, left, len(times)),
        )
    elif isinstance(rows, Table) and (gaps := int(series.segment[-1])):
        even = "frame.reset_index(drop=True) takes the rows as even steps"
        log.warning("%s: no window crosses the %s in its times; %s", series.name, counted(gaps, "gap"), even)


def _jobs(
    run: RunFolder, state: State, plan: Plan, series: dict[str, Series], deadline: float | None, parents
) -> list[Job]:
    """Return the jobs that hold a missing series, each with the checkpoint it goes on from."""
    here = [[name for name in names if name in series] for names in plan.jobs]
    missing = set(state.missing)
    named = {job_name(names): names for names in here if missing & set(names)}
    experiment = run.settled
    return [
        Job(
            name,
            experiment,
            tuple(series[n] for n in names),
            device=plan.devices[0],
            checkpoint=run.checkpoint(name),
            threads=count_cores() if experiment.training.pooled else 1,
            deadline=deadline,
            parents={n: parents[n] for n in names if n in parents},
            turns=math.ceil((len(named) - i) / len(plan.devices)),
        )
        for i, (name, names) in enumerate(named.items())
    ]


def _teller(run: RunFolder, state: State, on_progress: Callable[[State], None]) -> Callable[[str], None]:
    """Return the function that tells the caller, and now and then the run folder, what is going on."""
    told = -math.inf

    def tell(stage: str) -> None:
        nonlocal told
        state.stage = stage
        on_progress(state)
        if time.monotonic() - told >= STATUS_SECONDS:
            told = time.monotonic()
            _leave_word(run, state)
            wishes = run.wishes()
            stopping.wish(wishes["end"], wishes["series"])

    return tell


def _leave_word(run: RunFolder, state: State) -> None:
    """Write where the sweep stands into the run folder, for `cpbkit status`."""
    run.tell(
        {
            "stage": state.stage,
            **vars(state.standing()),
            "running": {name: round(one.share, 4) for name, one in state.running.items()},
        }
    )


def _keep(
    run: RunFolder,
    state: State,
    line: ResultLine,
    bars: Mapping[str, Klines | Trace | Table],
    model: bytes | None = None,
    losses: bytes | None = None,
) -> None:
    origin = bars[line.series]
    if not isinstance(origin, Table):
        line = replace(line, passport=origin.passport.to_dict())
    run.finish(line, model, losses)
    state.add(line)


def _read_plan(run: RunFolder) -> Plan | None:
    """Return the plan this run started with, without what another version may have added."""
    known = {f.name for f in dataclasses.fields(Plan)}
    plan = run.plan()
    return None if plan is None else Plan(**{name: value for name, value in plan.items() if name in known})


def _saved_shares(run: RunFolder) -> dict[str, float]:
    """Return how far the checkpoints of an earlier start have brought each series of their jobs."""
    plan = _read_plan(run)
    if plan is None:
        return {}
    shares: dict[str, float] = {}
    for names in plan.jobs:
        if saved := run.checkpoint(job_name(names)):
            shares |= dict.fromkeys(names, checkpoint.read_share(saved, plan.steps, plan.epochs))
    return shares
