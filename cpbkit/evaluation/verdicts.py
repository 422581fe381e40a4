"""Is a model better than naive? Judgements of forecasts, and verdicts over a run.

N windows (oldest first), H horizon, K targets of one head.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cpbkit.evaluation import baselines, metrics

if TYPE_CHECKING:  # windows needs torch, reading a verdict does not
    from cpbkit.windows.series import Series

SIGNIFICANCE = 0.05  # of a verdict, after Holm's correction
WORDS = ("BEATS", "TIES", "LOSES")
UNITS = {"bp": 1e4}  # what y is multiplied by to be in its unit; any other unit is the table's own
WORST_SKILL = -99.0  # stands for minus infinity, where a floor is perfect


@dataclass(frozen=True)
class Judgement:
    """How one model did on one head of one series, beside the floors. Errors are in `unit`, shares are of 1."""

    windows: int  # test windows, a bar apart
    horizon: int  # bars
    unit: str  # "bp", or a table's own
    rmse: float
    mae: float
    rmse_by_horizon: tuple[float, ...]
    best_floor: str  # the naive forecast with the least RMSE on these windows: the hardest to beat
    floor_rmse_by_horizon: tuple[float, ...]  # of the best floor
    floors: dict[str, float]  # RMSE of each, in the order of the table
    skill: float  # 1 - RMSE / RMSE of the best floor
    skill_low: float  # 95 % interval by a moving-block bootstrap
    skill_high: float
    statistic: float  # Diebold-Mariano against the best floor; negative favours the model
    p: float  # of equal accuracy, two-sided, not yet corrected for the number of models
    spread: float  # deviation of the forecasts over the windows, over that of the truth
    mase: float | None = None
    direction: float | None = None  # share of right signs over the whole horizon; None where nothing is said
    direction_low: float | None = None
    direction_high: float | None = None
    level_rmse: float | None = None  # of the price (or own level) itself, in its unit
    level_mae: float | None = None
    r2: float | None = None  # of the level; near 1 for any copy of the last price, hence beside persistence's
    r2_persistence: float | None = None
    mape: float | None = None  # percent
    mape_persistence: float | None = None
    notes: tuple[str, ...] = ()  # what the floors lacked, and what could not be tested

    def to_dict(self) -> dict:
        """Return plain JSON types, without NaN."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: Mapping) -> "Judgement":
        """Read what `to_dict` wrote."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})


def judge(
    truth: np.ndarray,
    forecast: np.ndarray,
    floors: Mapping[str, np.ndarray],
    unit: str,
    *,
    model: str = "",
    anchors: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    direction_of: int = -1,
    notes: tuple[str, ...] = (),
) -> Judgement:
    """Judge a forecast against the best of the floors; truth, forecast and each floor are y, (N, H, K).

    model: the floor of that name is left out. anchors (N, K): to judge levels too. scale (K,): of MASE.
    direction_of: the target whose sign counts, in a price head the close.
    Errors: ValueError for shapes that differ or values that are not finite.
    """
    floors = {name: y for name, y in floors.items() if name != model}
    if not floors:
        raise ValueError("a judgement needs at least one floor besides the model; got none")
    for name, y in {"truth": truth, "forecast": forecast, **floors}.items():
        if y.shape != truth.shape or y.ndim != 3:
            raise ValueError(f"{name} must have the shape (N, H, K) of the truth {truth.shape}; got {y.shape}")
        if not np.isfinite(y).all():
            raise ValueError(f"{name} must be finite; got {np.sum(~np.isfinite(y))} other values of {y.size}")
    windows, horizon, _ = truth.shape
    unit_scale = UNITS.get(unit, 1.0)
    losses = {name: np.mean((truth - y) ** 2, axis=(1, 2)) for name, y in floors.items()}
    rms = {name: math.sqrt(loss.mean()) for name, loss in losses.items()}
    best = min(rms, key=rms.get)
    compared, untested = _compare(np.mean((truth - forecast) ** 2, axis=(1, 2)), losses[best], horizon)
    signs = metrics.direction(truth[:, -1, direction_of], forecast[:, -1, direction_of], overlap=horizon) or ()
    moved = truth.var(axis=0).mean()
    return Judgement(
        windows=windows,
        horizon=horizon,
        unit=unit,
        rmse=float(metrics.rmse(truth, forecast)) * unit_scale,
        mae=float(metrics.mae(truth, forecast)) * unit_scale,
        rmse_by_horizon=tuple((metrics.rmse(truth, forecast, axis=(0, 2)) * unit_scale).tolist()),
        best_floor=best,
        floor_rmse_by_horizon=tuple((metrics.rmse(truth, floors[best], axis=(0, 2)) * unit_scale).tolist()),
        floors={name: value * unit_scale for name, value in rms.items()},
        **compared,
        spread=math.sqrt(forecast.var(axis=0).mean() / moved) if moved else 0.0,
        mase=metrics.mase(truth, forecast, scale) if scale is not None and scale.mean() > 0 else None,
        **dict(zip(("direction", "direction_low", "direction_high"), signs, strict=False)),
        notes=notes + untested,
        **(_level_errors(truth, forecast, anchors, unit) if anchors is not None else {}),
    )


def _compare(loss: np.ndarray, floor_loss: np.ndarray, horizon: int) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return skill, its interval and the Diebold-Mariano test by name, and what could not be tested; losses (N,)."""
    names, count = ("skill", "skill_low", "skill_high", "statistic", "p"), len(loss)
    if not floor_loss.any():  # a floor without error leaves nothing to win
        values = (WORST_SKILL, WORST_SKILL, WORST_SKILL, 99.0, 0.0) if loss.any() else (0.0, 0.0, 0.0, 0.0, 1.0)
        return dict(zip(names, values, strict=True)), ("the best floor makes no error",)
    skill = max(WORST_SKILL, 1 - math.sqrt(loss.mean() / floor_loss.mean()))
    if count < 2 * horizon:
        note = f"{count} windows are too few to test {horizon} bars ahead"
        return dict(zip(names, (skill, WORST_SKILL, 1.0, 0.0, 1.0), strict=True)), (note,)
    # Windows share bars up to the horizon; beyond it calm and wild times still follow each other.
    block = min(count // 2, max(horizon, math.ceil(1.75 * count ** (1 / 3))))
    low, high = (max(WORST_SKILL, end) for end in metrics.block_bootstrap(loss, floor_loss, block))
    statistic, p = metrics.diebold_mariano(loss, floor_loss, horizon)
    return dict(zip(names, (skill, low, high, float(np.clip(statistic, -99, 99)), p), strict=True)), ()


def _level_errors(truth, forecast, anchors, unit) -> dict[str, float | None]:
    """Return errors of the level that was forecast, a price where y is a log change, beside persistence's."""
    back = np.exp if unit == "bp" else np.asarray
    with np.errstate(over="ignore"):  # a model gone wild may forecast a price beyond all numbers
        level, predicted, last = (back(anchors[:, None] + y) for y in (truth, forecast, np.zeros_like(truth)))
        found = {"level_rmse": float(metrics.rmse(level, predicted)), "level_mae": float(metrics.mae(level, predicted))}
        if level.std() > 0:
            found |= {"r2": metrics.r2(level, predicted), "r2_persistence": metrics.r2(level, last)}
        if (level != 0).all():
            found |= {"mape": metrics.mape(level, predicted), "mape_persistence": metrics.mape(level, last)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def judge_heads(
    series: "Series", origins: np.ndarray, forecast: np.ndarray, train_end: int, model: str = ""
) -> dict[str, Judgement]:
    """Judge a model's y (W, H, K) at the origins of a series, head by head, against the floors of each head."""
    found = evidence(series, origins, forecast, train_end)
    return {head: judge(**part, unit=series.unit, model=model) for head, part in found.items()}


def evidence(series: "Series", origins: np.ndarray, forecast: np.ndarray, train_end: int) -> dict[str, dict]:
    """Return what `judge` asks for, by head, but for the unit and the model."""
    horizon, found = forecast.shape[1], {}
    rows = np.arange(train_end - 1)
    rows = rows[series.segment[rows] == series.segment[rows + 1]]
    for head in dict.fromkeys(series.heads):
        columns = [k for k, owner in enumerate(series.heads) if owner == head]
        floors, notes = baselines.floors(series, head, origins, horizon, train_end)
        close = [i for i, k in enumerate(columns) if series.targets[k] == "close"]
        found[head] = {
            "truth": series.truth(origins, horizon)[..., columns],
            "forecast": forecast[..., columns],
            "floors": floors,
            "anchors": series.anchors[origins][:, columns],
            "scale": np.abs(series.levels[rows + 1] - series.anchors[rows]).mean(axis=0)[columns],
            "direction_of": close[0] if close else -1,
            "notes": notes,
        }
    return found


@dataclass(frozen=True)
class Verdict:
    """What may be said of one model on one head."""

    word: str  # BEATS | TIES | LOSES
    p: float  # corrected for the number of models
    reason: str  # one line, with the numbers


def verdicts(judgements: Mapping[str, Judgement]) -> dict[str, Verdict]:
    """Return a verdict a series, over all models of one head together.

    BEATS: skill above 0, p below SIGNIFICANCE after Holm's correction over all series, and the interval above 0.
    LOSES: the mirror image. TIES: everything between.
    """
    corrected = metrics.holm([j.p for j in judgements.values()])
    found = {}
    for (series, j), p in zip(judgements.items(), corrected, strict=True):
        sure, word = p < SIGNIFICANCE, "TIES"
        if sure and j.skill_low > 0 < j.skill:
            word = "BEATS"
        elif sure and j.skill_high < 0 > j.skill:
            word = "LOSES"
        reason = (
            f"skill {100 * j.skill:+.2f} % ({100 * j.skill_low:+.2f} to {100 * j.skill_high:+.2f}) "
            f"against {j.best_floor}, corrected p {p:.2g}"
        )
        found[series] = Verdict(word, float(p), reason)
    return found


def headline(found: Mapping[str, Verdict], head: str, unjudged: int = 0) -> str:
    """Say it in one line: `3 of 40 beat the best naive forecast of the price; 35 tie; 2 lose`."""
    count = {word: sum(v.word == word for v in found.values()) for word in WORDS}
    beat, tie, lose = (word.lower() if n == 1 else word.lower()[:-1] for word, n in count.items())
    line = f"{count['BEATS']} of {len(found) + unjudged} {beat} the best naive forecast of the {head}"
    line += f"; {count['TIES']} {tie}; {count['LOSES']} {lose}"
    return line + (f"; {unjudged} could not be judged" if unjudged else "")


def judgements(results: Iterable[Mapping]) -> dict[str, dict[str, Judgement]]:
    """Read the judgements from lines of a ledger: {head: {series: Judgement}}; a line without any adds nothing."""
    found: dict[str, dict[str, Judgement]] = {}
    for line in results:
        for head, raw in line["test"].items():
            found.setdefault(head, {})[line["series"]] = Judgement.from_dict(raw)
    return found


def verdict_table(by_head: Mapping[str, Mapping[str, Judgement]]) -> pd.DataFrame:
    """Return a row a series and head, the best first within a head.

    Errors are in the unit, those of the level in the price's or the table's own.
    """
    rows = []
    for head, group in by_head.items():
        found = verdicts(group)
        for series, j in sorted(group.items(), key=lambda item: -item[1].skill):
            rows.append(
                {
                    "series": series,
                    "head": head,
                    "verdict": found[series].word,
                    "skill %": _percent(j.skill),
                    "low %": _percent(j.skill_low),
                    "high %": _percent(j.skill_high),
                    "Diebold-Mariano": j.statistic,
                    "p": found[series].p,
                    "best floor": j.best_floor,
                    "rmse": j.rmse,
                    "floor rmse": j.floors[j.best_floor],
                    "mae": j.mae,
                    "unit": j.unit,
                    "mase": j.mase,
                    "direction %": _percent(j.direction),
                    "direction low %": _percent(j.direction_low),
                    "direction high %": _percent(j.direction_high),
                    "level rmse": j.level_rmse,
                    "level mae": j.level_mae,
                    "windows": j.windows,
                }
            )
    return pd.DataFrame(rows)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def skill_by_horizon(by_head: Mapping[str, Mapping[str, Judgement]]) -> pd.DataFrame:
    """Return the skill against the best floor in percent, a row a series and head, a column a bar ahead."""
    rows = {}
    for head, group in by_head.items():
        for series, j in group.items():
            with np.errstate(divide="ignore", invalid="ignore"):  # a floor may make no error
                skill = metrics.skill(np.array(j.rmse_by_horizon), np.array(j.floor_rmse_by_horizon))
            rows[series, head] = dict(enumerate(100 * skill, start=1))
    return pd.DataFrame.from_dict(rows, orient="index")


def seed_spread(runs: Iterable[Mapping[str, Mapping[str, Judgement]]]) -> pd.DataFrame:
    """Return what the luck of the seed does: a row a series and head, over runs of a seed each.

    runs: as `judgements` reads them. Skills in percent with their standard deviation; the words are counted.
    """
    by = ["series", "head"]
    table = pd.concat([verdict_table(run) for run in runs])
    skill = table.groupby(by, sort=False)["skill %"].agg(["count", "mean", "std", "min", "max"])
    words = table.groupby(by)["verdict"].value_counts().unstack().reindex(columns=WORDS).fillna(0).astype(int)
    named = {"count": "seeds"} | {name: f"skill %, {name}" for name in ("mean", "std", "min", "max")}
    return skill.rename(columns=named).join(words).reset_index()
