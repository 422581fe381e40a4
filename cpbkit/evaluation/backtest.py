"""Rolling origins: a model refitted up to each of several test periods, and all of them judged together."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from cpbkit.config.experiment import Experiment, Task
from cpbkit.evaluation.results import group_heads
from cpbkit.evaluation.verdicts import Judgement, evidence, judge
from cpbkit.training.alone import train_alone
from cpbkit.training.loop import assemble, forecast, median
from cpbkit.windows.series import Series
from cpbkit.windows.splits import Fold, Splits, split

Forecaster = Callable[[Series, Task, Splits], np.ndarray]  # fits, returns y of the test windows (W, H, K)


def judge_folds(series: Series, parts: Iterable[Fold], forecaster: Forecaster, model: str = "") -> dict[str, Judgement]:
    """Refit and forecast over the folds, and judge all their test windows together, head by head.

    forecaster: fits on the piece it is handed and returns y of the test windows of its splits, (W, H, K).
    model: its name; the baseline of that name is left out.
    """
    gathered = []
    for fold in parts:
        piece = fold.cut(series)
        splits = split(piece, fold.task)
        y = forecaster(piece, fold.task, splits)
        gathered.append(evidence(piece, splits.test, y, splits.bounds["train"][1]))
    return {head: judge(**join(found), unit=series.unit, model=model) for head, found in group_heads(gathered).items()}


def join(found: list[dict]) -> dict:
    """Return what `evidence` gathered of one head in several test periods as one, with the baselines that all have."""
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
        part = dataclasses.replace(experiment, task=task, training=dataclasses.replace(experiment.training, folds=1))
        windows, stack = assemble(part, [series], "cpu")
        net, _ = train_alone(part, windows, stack)
        return median(forecast(net, windows, "test", [0])[0], task)

    return forecaster
