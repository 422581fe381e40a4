"""Known leaks and sicknesses, planted one by one: does the audit see them, and the health table?"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn

from cpbkit.config.experiment import Model, Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data.synthetic import make_market
from cpbkit.evaluation.leakage import Finding, Pipeline, autoregression, check_future, check_splits, whole_way
from cpbkit.runs.table import train_and_judge
from cpbkit.windows.series import Series, from_klines
from cpbkit.windows.splits import Splits, split

PLANTED = {  # settings of the models that are made sick
    "context": 10,
    "horizon": 2,
    "features": ("close_return",),
    "epochs": 4,
    "steps": 40,
    "schedule": "constant",
}

LEAKS: dict[str, Callable[[pd.Series], pd.Series]] = {  # what a column may not be of the closes
    "a centred mean": lambda close: close.rolling(9, center=True).mean(),
    "a back-fill of the warm-up": lambda close: close.rolling(50).mean().bfill(),
    "a scaler fitted on all rows": lambda close: (close - close.mean()) / close.std(),
    "a roll that wraps around": lambda close: pd.Series(np.roll(close, 24), close.index),
}


def plant_leaks() -> list[Finding]:
    """Plant known leaks in the kit's own way of the data, one by one, and say whether they are caught.

    OK: caught, with what the check said. FAIL: not caught, or in the last row, where nothing is planted, caught.
    """
    (klines,) = make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-02-15").values()
    task = Task(context=16, horizon=4, features=("close_return", "rsi"))
    splits = split(from_klines(klines, task), task)

    def peek(series: Series, task: Task, splits: Splits) -> np.ndarray:
        return 1e-6 * series.truth(splits.test, task.horizon)

    def with_column(make: Callable[[pd.Series], pd.Series]) -> Pipeline:
        way = whole_way(klines, replace(task, features=(*task.features, "planted")))
        return lambda frame: way(frame.assign(planted=make(frame["close"])))

    found = {name: check_future(with_column(make), klines.frame) for name, make in LEAKS.items()}
    found["overlapping splits"] = check_splits(
        {"train": splits.train, "test": splits.test - (splits.test[0] - splits.train[-1])}, task.context, task.horizon
    )
    found["targets passed at evaluation"] = check_future(whole_way(klines, task, peek), klines.frame)
    honest = check_future(with_column(lambda close: close.rolling(9).mean()), klines.frame)
    caught = [Finding(name, "OK" if f.verdict == "FAIL" else "FAIL", f.evidence) for name, f in found.items()]
    return [*caught, replace(honest, check="no leak")]


class Dead(nn.Module):
    """A network whose last unit is below zero on every input: a sickness to plant."""

    def __init__(self, task: Task, model: Model):
        super().__init__()
        self.shape = task.horizon, len(task.targets)
        self.head = nn.Linear(task.context * len(task.features), task.horizon * len(task.targets))
        nn.init.constant_(self.head.bias, -1000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)).relu().unflatten(1, self.shape)  # (B, L, C) -> (B, H, K)


def _resized(series: Series, factor: float) -> Series:
    return replace(series, levels=factor * series.levels, anchors=factor * series.anchors)


def _shuffled_moves(series: Series) -> Series:
    moves = np.diff(series.levels, axis=0, prepend=0.0)
    levels = np.random.default_rng(0).permutation(moves).cumsum(axis=0)
    return replace(series, levels=levels, anchors=levels)


def _spoiled(series: Series) -> Series:
    return replace(series, inputs=np.where(np.arange(len(series))[:, None] < 200, np.nan, series.inputs))


def _as_it_is(series: Series) -> Series:
    return series


# By name: the check that must see it, the settings and the data that make it.
SICKNESSES: dict[str, tuple[str, dict, Callable[[Series], Series]]] = {
    "huge targets, not scaled": ("target scale", {"target_scale": "none"}, partial(_resized, factor=1e6)),
    "tiny targets, not scaled": ("target scale", {"target_scale": "none"}, partial(_resized, factor=1e-3)),
    "targets that are noise": ("holds", {}, _shuffled_moves),
    "inputs that are not finite": ("finite", {}, _spoiled),
    "a rate far too high": ("first loss", {"learning_rate": 30.0}, _as_it_is),
    "a rate beyond all numbers": ("finite", {"learning_rate": 1e38, "clip_norm": 0.0}, _as_it_is),
    "a rate far too low": ("output price", {"learning_rate": 1e-7}, _as_it_is),
    "a dead output": ("gradient", {"name": f"{__name__}:Dead"}, _as_it_is),
}


def plant_sicknesses() -> list[Finding]:
    """Train a small model with each known sickness, and say whether the health table sees it.

    OK: seen, with what its check said. FAIL: not seen, or in the last row, where nothing is planted, seen.
    """
    sound, series = vary(PRESETS["quick"], **PLANTED), autoregression(0.6, 1500, 0)
    found = []
    for name, (suspect, settings, spoil) in SICKNESSES.items():
        _, checks = train_and_judge(vary(sound, **settings), spoil(series))
        seen = [f"{suspect} {c.verdict}: {c.evidence}" for c in checks if c.check == suspect and c.verdict != "OK"]
        found.append(Finding(name, "OK", seen[0]) if seen else Finding(name, "FAIL", f"{suspect} sees nothing"))
    _, checks = train_and_judge(sound, series)
    wrong = [check for check in checks if check.verdict != "OK"]
    text = "; ".join(f"{check.check}: {check.evidence}" for check in wrong) or f"{len(checks)} checks are OK"
    return [*found, Finding("no sickness", "FAIL" if wrong else "OK", text)]
