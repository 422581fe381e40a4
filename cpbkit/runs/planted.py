"""Known leaks and sicknesses, planted one by one: does the audit see them, and the health table?"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import nn

from cpbkit.config.experiment import Experiment, Model, Task, vary
from cpbkit.config.presets import BANDWIDTH_CHANGES, PRESETS, one_change_each
from cpbkit.data.synthetic import make_market, make_network_trace, predictable_series
from cpbkit.errors import stoppable
from cpbkit.evaluation.leakage import Finding, Pipeline, autoregression, check_future, check_splits, whole_way
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.verdicts import judgements, verdicts
from cpbkit.runs.table import compare, train_and_judge
from cpbkit.windows.series import Series, from_klines, from_table
from cpbkit.windows.splits import Splits, split

TOLD = 0.005  # of R2: less is the same to two digits

LEAKS: dict[str, Callable[[pd.Series], pd.Series]] = {  # what a column may not be of the closes
    "a centred mean": lambda close: close.rolling(9, center=True).mean(),
    "a back-fill of the warm-up": lambda close: close.rolling(50).mean().bfill(),
    "a scaler fitted on all rows": lambda close: (close - close.mean()) / close.std(),
    "a roll that wraps around": lambda close: pd.Series(np.roll(close, 24), close.index),
}


@stoppable()
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


@stoppable()
def plant_sicknesses() -> list[Finding]:
    """Train a small model with each known sickness, and say whether the health table sees it.

    OK: seen, with what its check said. FAIL: not seen, or in the last row, where nothing is planted, seen.
    """
    small = {"context": 10, "horizon": 2, "features": ("close_return",), "epochs": 4, "steps": 40}
    sound, series = vary(PRESETS["quick"], **small, schedule="constant"), autoregression(0.6, 1500, 0)
    found = []
    for name, (suspect, settings, spoil) in SICKNESSES.items():
        _, checks = train_and_judge(vary(sound, **settings), spoil(series))
        seen = [f"{suspect} {c.verdict}: {c.evidence}" for c in checks if c.check == suspect and c.verdict != "OK"]
        found.append(Finding(name, "OK", seen[0]) if seen else Finding(name, "FAIL", f"{suspect} sees nothing"))
    _, checks = train_and_judge(sound, series)
    wrong = [check for check in checks if check.verdict != "OK"]
    text = "; ".join(f"{check.check}: {check.evidence}" for check in wrong) or f"{len(checks)} checks are OK"
    return [*found, Finding("no sickness", "FAIL" if wrong else "OK", text)]


def tell_found(experiment: Experiment, results: Iterable[ResultLine]) -> list[str]:
    """Say of each series of the seeded market what its model found, and whether there was anything to find."""
    planted = predictable_series(experiment.data.symbols, experiment.data.intervals, experiment.data.seed)
    told = {
        (True, True): "a part of it is planted, and it is found",
        (True, False): "a part of it is planted, and it is not found: train longer, on more bars",
        (False, True): "nothing is planted, and yet something is found: look for a leak",
        (False, False): "nothing is planted, and nothing is found",
    }
    return [
        f"{name}, {head}: {verdict.word}; {told[name in planted, verdict.word == 'BEATS']}"
        for head, group in judgements(results).items()
        for name, verdict in verdicts(group).items()
    ]


@stoppable()
def compare_changes(epochs: int, steps: int) -> pd.DataFrame:
    """Train the bandwidth preset with each of its eight changes alone, and with all but each, on a made-up trace.

    Returns a row per trial, as `compare`.
    """
    bandwidth = vary(PRESETS["bandwidth"], epochs=epochs, steps=steps)
    trace = make_network_trace(seed=0, rows=12_000)
    columns = from_table("trace", trace, bandwidth.task.features, bandwidth.task.targets)
    return compare(one_change_each(bandwidth, BANDWIDTH_CHANGES), columns)


def tell_changes(trials: pd.DataFrame) -> list[str]:
    """Say which change matters most in `compare_changes`, and which ones the result is better without."""
    r2 = trials.set_index("trial")["r2"].astype(float).fillna(-math.inf)  # a diverged trial has none
    if r2.max() - r2.min() < TOLD:
        return [f"R2 is {r2['all']:.2f} with and without each change: train longer (`trial_epochs`, `trial_steps`)."]
    without = {name: r2[f"all but {name}"] for name in BANDWIDTH_CHANGES}
    most = min(without, key=without.__getitem__)
    better = [name for name, reached in without.items() if reached > r2["all"] + TOLD]
    low = f"falls most, to {without[most]:.2f}," if math.isfinite(without[most]) else "diverges"
    return [
        f"R2 is {r2['none']:.2f} before the eight changes and {r2['all']:.2f} after them.",
        f"It {low} without {most}; that change alone gives {r2[f'{most} alone']:.2f}.",
        f"It is higher without {', '.join(better)}." if better else "It is higher without none of them.",
    ]
