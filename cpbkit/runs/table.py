"""Any time series: train one model as published tables do, or several side by side as a sweep does."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from cpbkit.config.experiment import Experiment, Model, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError, check_name
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.training_checks import FIRST_LOSS, Check, check_results
from cpbkit.evaluation.verdicts import Judgement, judge_heads, verdict_table
from cpbkit.runs.settle import suit_rate
from cpbkit.runs.worker import Job, Result, work
from cpbkit.training.alone import train_alone
from cpbkit.training.loop import assemble, forecast, median
from cpbkit.training.precision import precision
from cpbkit.windows.series import Series, from_table
from cpbkit.windows.splits import split, split_rows
from cpbkit.windows.windows import Windows

PERSISTENCE = "persistence"
CHOICES = (PERSISTENCE, *PRESETS)
TEST_WINDOWS = 256  # a batch


@dataclass(frozen=True)
class Errors:
    """Errors over windows, horizon and columns, in units of each column's scale."""

    windows: int
    mse: float
    mae: float


@dataclass(frozen=True)
class SeriesResult:
    """How a model did on a table, beside the forecast that nothing changes."""

    name: str
    model: str
    columns: tuple[str, ...]
    context: int  # rows
    horizon: int  # rows
    windows: dict[str, int]  # of each split
    errors: Errors
    persistence: Errors
    drop_last: int  # the batch whose incomplete last one is left out below; 0: none is
    errors_dropped: Errors | None
    persistence_dropped: Errors | None
    by_column: dict[str, tuple[Errors, Errors]]  # the model's and persistence's
    parameters: int = 0
    epochs: int = 0
    best_epoch: int = 0
    seconds: float = 0.0  # of the training
    notes: tuple[str, ...] = ()
    judged: dict[str, Judgement] = field(default_factory=dict)  # of a trained model, by column

    @property
    def verdicts(self) -> pd.DataFrame:
        """A row per column: whether it beats the best naive forecast, as a sweep is told."""
        return verdict_table({head: {self.name: judgement} for head, judgement in self.judged.items()})

    def to_dict(self) -> dict:
        """Return plain JSON types."""
        found = dataclasses.asdict(dataclasses.replace(self, judged={}))
        found["verdicts"] = json.loads(self.verdicts.to_json(orient="records"))
        return {name: value for name, value in found.items() if name != "judged"}


def plan_series(
    model: str, columns: Sequence[str], context: int, horizon: int, scale: str = "standard", settings: Mapping = {}
) -> Experiment:
    """Return the experiment of a preset, or of `persistence`, on the columns of a table; settings by their flat names.

    scale: what the columns are divided by, standard (train deviation), persistence or none.
    Errors: CpbkitError for a setting that the table or another argument decides.
    """
    check_name("model", model, CHOICES)
    base = Experiment(preset=model, model=Model(name=model)) if model == PERSISTENCE else PRESETS[model]
    if base.data.market == "network":
        raise CpbkitError(
            f"{model} forecasts a network trace, with ranges, weights and repeats of its own: "
            f"`cpbkit sweep --preset {model} --files trace.csv`"
        )
    base = suit_rate(base, settings)
    columns = tuple(columns)
    task: dict[str, object] = {"features": columns, "targets": columns, "target_weights": (1.0,) * len(columns)}
    task |= {"target_scale": scale, "context": context, "horizon": horizon}
    if twice := sorted(task.keys() & settings.keys()):
        raise CpbkitError(f"the table and its options decide {', '.join(task)}; got {', '.join(twice)} as settings too")
    return vary(base, **{**task, "purge": 0, "input_clip": math.inf, **settings})


def run_series(
    table: pd.DataFrame,
    name: str,
    experiment: Experiment,
    rows: tuple[int, int, int],
    *,
    drop_last: int = 0,
    slide_over_gaps: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> SeriesResult:
    """Train on the first rows of a table, validate on the next, test on those that follow.

    rows: (train, validation, test). drop_last: also leave out the last incomplete batch of test windows of this
    size, as tables before mid-2024 did. slide_over_gaps: take rows as even steps, as published tables do.
    Errors: DataError for a table that is too short or not finite, CpbkitError for a training that diverges.
    """
    task, training, notes = experiment.task, experiment.training, []
    series = from_table(name, table, task.features, task.targets)
    gaps = int(series.segment[-1])
    if gaps and slide_over_gaps:
        series = from_table(name, table.reset_index(drop=True), task.features, task.targets)
        notes.append(f"windows slide over {gaps} gaps in the times")
    elif gaps:
        notes.append(f"no window crosses one of the {gaps} gaps in the times")
    if not isinstance(table.index, pd.DatetimeIndex):
        notes.append("it has no column of times: its rows are taken as even steps")
    splits = split_rows(series, task, *rows)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = None
    about: dict[str, Any] = {}
    if experiment.model.name == PERSISTENCE:
        windows = Windows([series], task, device, torch.float32, [splits])
    else:
        begun = time.monotonic()
        windows, stack = assemble(experiment, [series], device, [splits])
        net, end = train_alone(experiment, windows, stack, on_progress)
        about = {"parameters": stack.parameters, "epochs": end.epochs, "best_epoch": end.best_epoch}
        about["seconds"] = time.monotonic() - begun
        for setting, values in training.search:
            tried = ", ".join(f"{value:g}" for value in values)
            notes.append(f"{setting} {getattr(end.training, setting):g}, which validation chose among {tried}")
    on_progress("testing")
    with precision(training, device) as autocast, autocast:
        errors, persistence = _errors(net, windows)
        if net is not None:
            test = median(forecast(net, windows, "test", [0])[0], task)
            about["judged"] = judge_heads(series, splits.test, test, splits.bounds["train"][1], experiment.model.name)
            spread = (series.levels / windows.scalers[0].target_scale).var(0).mean()
            got, naive = _mean(errors).mse, max(_mean(persistence).mse, spread)
            if got > FIRST_LOSS * naive:
                notes.append(
                    f"not trained soundly: its MSE is {got:.3g}, that of the last row or the mean {naive:.3g}; is the "
                    f"learning rate, {end.training.learning_rate:g}, too high?"
                )
    kept = len(splits.test) // drop_last * drop_last if drop_last else 0
    return SeriesResult(
        name=name,
        model=experiment.preset,
        columns=task.targets,
        context=task.context,
        horizon=task.horizon,
        windows={part: len(getattr(splits, part)) for part in ("train", "validation", "test")},
        errors=_mean(errors),
        persistence=_mean(persistence),
        drop_last=drop_last,
        errors_dropped=_mean(errors[:, :kept]) if kept else None,
        persistence_dropped=_mean(persistence[:, :kept]) if kept else None,
        by_column={c: (_mean(errors[..., [k]]), _mean(persistence[..., [k]])) for k, c in enumerate(task.targets)},
        notes=tuple(notes),
        **about,
    )


@torch.no_grad()
def _errors(net: nn.Module | None, windows: Windows) -> tuple[np.ndarray, np.ndarray]:
    """Return squared and absolute error of the model and of persistence, mean over the horizon: two (2, W, K)."""
    if net is not None:
        net.eval()
    found = []
    for rows, _ in windows.batches("test", [0], TEST_WINDOWS):
        x, last, y = windows.gather(rows)
        error = y if net is None else net(x, last) - y
        pair = [torch.stack([e.double().square().mean(2), e.double().abs().mean(2)], 1) for e in (error, y)]
        found.append(torch.stack(pair)[:, 0])  # (2, 1, 2, B, K) -> (2, 2, B, K)
    model, persistence = torch.cat(found, 2).cpu().numpy()
    return model, persistence


def _mean(errors: np.ndarray) -> Errors:
    return Errors(errors.shape[1], *errors.mean((1, 2)).tolist())


def compare(trials: Mapping[str, Experiment], series: Series) -> pd.DataFrame:
    """Train and judge each trial as a sweep does; return a row each: errors on the test split, and how healthy it is.

    r2 and mae are of the first head's level, in its own unit; `why` is the first of the worst rows of its health.
    """
    rows, known = [], {}
    for name, experiment in trials.items():
        if experiment not in known:  # the same again would end the same
            known[experiment] = train_and_judge(experiment, series)
        line, checks = known[experiment]
        judged: dict[str, Any] = next(iter(line.test.values()), {})
        worst = max(checks, key=lambda check: ("OK", "NOTE", "SICK").index(check.verdict))
        rows.append(
            {
                "trial": name,
                "r2": judged.get("r2"),
                "persistence's r2": judged.get("r2_persistence"),
                "mae": judged.get("level_mae"),
                "health": worst.verdict,
                "why": "" if worst.verdict == "OK" else f"{worst.check}: {worst.evidence}",
            }
        )
    return pd.DataFrame(rows)


def train_and_judge(experiment: Experiment, series: Series) -> tuple[ResultLine, list[Check]]:
    """Train and judge one model as a sweep does: its line of the ledger, and its rows of the health table."""
    windows = len(split(series, experiment.task).train)
    stated = vary(experiment, steps=experiment.training.count_steps(windows))
    job = Job(series.name, stated, (series,), "cuda" if torch.cuda.is_available() else "cpu")
    (line,) = (message.line for message in work(job) if isinstance(message, Result))
    return line, check_results([line])
