"""Rolling origins: a model refitted up to each piece of the test split, and all pieces judged together."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cpbkit.config.experiment import Experiment, Task
from cpbkit.errors import CpbkitError
from cpbkit.evaluation.verdicts import Judgement, evidence, judge
from cpbkit.training.alone import train_alone
from cpbkit.training.loop import assemble, forecast
from cpbkit.windows.series import Series
from cpbkit.windows.splits import Splits, split

Forecaster = Callable[[Series, Task, Splits], np.ndarray]  # fits, returns y of the test windows (W, H, K)


@dataclass(frozen=True)
class Fold:
    """One refit: the rows of every series that exist by then, and the task that splits them."""

    end: float  # share of the rows
    task: Task

    def cut(self, series: Series) -> Series:
        """Return the piece of a series that this fold may see."""
        last = round(self.end * len(series))
        columns = {f: getattr(series, f)[:last] for f in ("times", "inputs", "levels", "anchors")}
        return dataclasses.replace(series, **columns)


def folds(task: Task, count: int) -> list[Fold]:
    """Share the test split of a task out to `count` folds, each with a model of its own, refitted up to there.

    A purge longer than the horizon is an embargo. Nothing that follows a test is trained on, so none is needed after.
    """
    if count < 1:
        raise CpbkitError(f"folds must be at least 1; got {count!r}")
    step = (1 - task.train - task.validation) / count
    ends = [1 - (count - i) * step for i in range(1, count + 1)]
    return [
        Fold(end, dataclasses.replace(task, train=1 - (task.validation + step) / end, validation=task.validation / end))
        for end in ends
    ]


def judge_folds(series: Series, parts: Iterable[Fold], forecaster: Forecaster, model: str = "") -> dict[str, Judgement]:
    """Refit and forecast over the folds, and judge all their test windows together, head by head.

    forecaster: fits on the piece it is handed and returns y of the test windows of its splits, (W, H, K).
    model: its name; the baseline of that name is left out.
    """
    by_head: dict[str, list[dict]] = {}
    for fold in parts:
        piece = fold.cut(series)
        splits = split(piece, fold.task)
        y = forecaster(piece, fold.task, splits)
        for head, found in evidence(piece, splits.test, y, splits.bounds["train"][1]).items():
            by_head.setdefault(head, []).append(found)
    return {head: judge(**_pool(found), unit=series.unit, model=model) for head, found in by_head.items()}


def _pool(found: list[dict]) -> dict:
    names = [name for name in found[0]["baselines"] if all(name in f["baselines"] for f in found)]
    return {
        **{key: np.concatenate([f[key] for f in found]) for key in ("truth", "forecast", "anchors", "variance")},
        "baselines": {name: np.concatenate([f["baselines"][name] for f in found]) for name in names},
        "scale": np.mean([f["scale"] for f in found], axis=0),
        **{key: found[0][key] for key in ("direction_of", "is_price")},
        "notes": tuple(dict.fromkeys(note for f in found for note in f["notes"])),
    }


def refit(experiment: Experiment) -> Forecaster:
    """Return a forecaster that trains the experiment's model anew on each piece it is handed, alone, on the CPU.

    There the same piece gives the same forecasts to the bit, which the audit asks for.
    Errors: CpbkitError when the training diverges.
    """

    def forecaster(series: Series, task: Task, splits: Splits) -> np.ndarray:
        part = dataclasses.replace(experiment, task=task)
        windows, stack = assemble(part, [series], "cpu")
        net, _ = train_alone(part, windows, stack)
        return forecast(net, windows, "test", [0])[0]

    return forecaster
