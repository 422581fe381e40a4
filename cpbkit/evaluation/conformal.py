"""Adaptive conformal prediction intervals around any point forecast, and what they held.

N windows (oldest first), H horizon, K targets.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cpbkit.evaluation import metrics
from cpbkit.evaluation.results import ResultLine, group_heads
from cpbkit.evaluation.verdicts import UNITS, is_enough

if TYPE_CHECKING:  # windows needs torch
    from cpbkit.windows.series import Series
    from cpbkit.windows.splits import Splits

ALPHA = 0.1  # share of the truth that may lie outside
WILD = 0.1  # share of the test windows that follow the wildest bars
POINTS, LEAST = 40, 20  # most points of coverage over time, and fewest windows of one


@dataclass(frozen=True)
class PredictionIntervals:
    """Prediction intervals forecast +- half, and whether they held."""

    half: np.ndarray  # (N, H, K) half widths, in the unit of the errors
    inside: np.ndarray  # (N, H, K) whether the truth was inside
    level: np.ndarray  # (N, H, K) the alpha in force, which adapts


def conformal_prediction_intervals(
    calibration: np.ndarray, errors: np.ndarray, alpha: float = ALPHA, rate: float = 0.02, memory: int = 500
) -> PredictionIntervals:
    """Put adaptive prediction intervals around any point forecast (Gibbs & Candès 2021), per step and target.

    calibration (V, H, K): truth - forecast on the validation windows, oldest first. errors (N, H, K): the same on
    the test windows, which are a bar apart; the error h + 1 bars ahead is used from h + 1 bars later on, when it is
    known. rate: their gamma. memory: scores that are kept. Where the level in force asks for more than the largest
    score in memory, or less than the smallest, that one is taken, and not infinity or nothing.
    """
    if len(calibration) == 0 or calibration.shape[1:] != errors.shape[1:]:
        raise ValueError(f"calibration must be (V, H, K) as errors {errors.shape}; got {calibration.shape}")
    scores, before = np.abs(errors), np.abs(calibration[-memory:])
    half, levels = np.empty_like(scores), np.empty_like(scores)
    for h, k in np.ndindex(scores.shape[1:]):
        stream = before[:, h, k].tolist(), scores[:, h, k].tolist()
        half[:, h, k], levels[:, h, k] = _stream(*stream, h + 1, alpha, rate)
    return PredictionIntervals(half, scores <= half, levels)


def _stream(before: list[float], scores: list[float], ahead: int, alpha: float, rate: float):
    """Return half widths and levels of one stream, whose score i is known at window i + ahead."""
    ranked, all_scores, size, level = sorted(before), before + scores, len(before), alpha
    half: list[float] = []
    levels: list[float] = []
    for i in range(len(scores)):  # a sorted list, since numpy would sort the memory anew each time
        if i >= ahead:
            new = scores[i - ahead]
            level += rate * (alpha - (new > half[i - ahead]))
            del ranked[bisect.bisect_left(ranked, all_scores[i - ahead])]
            bisect.insort(ranked, new)
        half.append(ranked[min(max(math.ceil((size + 1) * (1 - level)), 1), size) - 1])
        levels.append(level)
    return half, levels


def judge_prediction_intervals(
    series: "Series", splits: "Splits", context: int, validation: np.ndarray, test: np.ndarray
) -> tuple[dict[str, dict], dict[str, np.ndarray]]:
    """Say by head, in plain JSON types, what prediction intervals around a model's y held on the test windows.

    Also return their half widths through the test, (W, H, K) of y, by head.

    Widths and scores are in the unit of the judgements, less is better; those of persistence stand beside them. Wild
    windows follow the wildest tenth of contexts, by their mean absolute move of a bar. CRPS: of the forecast spread
    by its errors on validation, which early stopping has seen; on test the intervals adapt, this does not.
    """
    horizon, found, halves = test.shape[1], {}, {}
    scale = UNITS.get(series.unit, 1.0)
    truths = [scale * series.truth(origins, horizon) for origins in (splits.validation, splits.test)]
    moves = np.abs(series.levels[1:] - series.anchors[:-1])
    for head, columns in series.columns.items():
        naive = truths[0][..., columns], truths[1][..., columns]
        own = naive[0] - scale * validation[..., columns], naive[1] - scale * test[..., columns]
        running = np.concatenate([[0.0], np.cumsum(moves[:, columns].mean(axis=1))])
        wildness = running[splits.test] - running[splits.test - max(1, context - 1)]
        intervals = conformal_prediction_intervals(*own)
        halves[head] = intervals.half / scale
        inside = intervals.inside.mean(axis=(1, 2))
        blocks = np.array_split(np.arange(len(inside)), max(1, min(POINTS, len(inside) // LEAST)))
        times = series.times[splits.test[[block[-1] for block in blocks]]]
        found[head] = {
            "nominal": 1 - ALPHA,
            "half_width": halves[head][-1].tolist(),  # (H, K) of y, in force at the end of test
            "coverage": float(inside.mean()),
            "coverage_wild": float(inside[wildness >= np.quantile(wildness, 1 - WILD)].mean()),
            "coverage_worst_step": float(intervals.inside.mean(axis=(0, 2)).min()),
            "width": float(2 * intervals.half.mean()),
            "score": _score(own[1], intervals),
            "score_persistence": _score(naive[1], conformal_prediction_intervals(*naive)),
            "crps": _crps(*own),
            "crps_persistence": _crps(*naive),
            "unit": series.unit,
            "dates": [str(time.astype("datetime64[m]")) for time in times],
            "over_time": [round(float(inside[block].mean()), 4) for block in blocks],
        }
    return found, halves


def _score(errors: np.ndarray, intervals: PredictionIntervals) -> float:
    return float(metrics.prediction_interval_score(errors, -intervals.half, intervals.half, ALPHA).mean())


def _crps(members: np.ndarray, truth: np.ndarray) -> float:
    """Return the mean CRPS of forecasts that are all `members` (V, H, K) alike, against truths (W, H, K)."""
    return float(np.mean([metrics.crps(members[:, h, k], truth[:, h, k]) for h, k in np.ndindex(truth.shape[1:])]))


def judge_quantiles(
    series: "Series", splits: "Splits", levels: Sequence[float], forecast: np.ndarray
) -> dict[str, dict]:
    """Say by head, in plain JSON types, what quantiles of y of the test windows (W, H, K, Q) held.

    loss: twice the pinball loss over the mean absolute truth, mean over the quantiles (the weighted quantile loss of
    GluonTS). Those of persistence, from adaptive conformal intervals around it, stand beside: skill is 1 - loss / its
    loss, with a 95 % interval. below: the share of truths under each quantile.
    """
    horizon, found = forecast.shape[1], {}
    truths = [series.truth(origins, horizon) for origins in (splits.validation, splits.test)]
    share = np.array(levels)
    for head, columns in series.columns.items():
        before, truth = (y[..., columns] for y in truths)
        half = {
            a: conformal_prediction_intervals(before, truth, a).half
            for a in {2 * min(q, 1 - q) for q in levels} - {1.0}
        }
        naive = np.stack(
            [np.sign(q - 0.5) * half.get(2 * min(q, 1 - q), np.zeros_like(truth)) for q in levels], axis=-1
        )
        size = np.abs(truth).mean() or 1.0
        own = forecast[..., columns, :]
        loss, other = (
            2 * metrics.pinball(truth[..., None], q, share).mean(axis=(1, 2, 3)) / size for q in (own, naive)
        )
        enough = is_enough(len(loss), horizon) and other.any()
        low, high = metrics.ratio_confidence_interval(loss, other, horizon) if enough else (-math.inf, math.inf)
        found[head] = {
            "levels": list(levels),
            "loss": float(loss.mean()),
            "loss_persistence": float(other.mean()),
            "skill": float(1 - loss.mean() / other.mean()) if other.any() else None,
            "skill_low": 1 - high if math.isfinite(high) else None,
            "skill_high": 1 - low if math.isfinite(low) else None,
            "below": (truth[..., None] < own).mean(axis=(0, 1, 2)).tolist(),
            "below_persistence": (truth[..., None] < naive).mean(axis=(0, 1, 2)).tolist(),
        }
    return found


def say_quantiles(results: Iterable[ResultLine]) -> dict[str, str]:
    """Say by head, in one line, how the quantiles of a run did beside those of persistence; lines of a ledger."""
    said = {}
    for head, group in group_heads(line.quantiles for line in results).items():
        losses, others = ([told[name] for told in group] for name in ("loss", "loss_persistence"))
        sure = sum((told["skill_low"] or 0) > 0 for told in group)
        said[f"{head}, quantiles"] = (
            f"{head}, quantiles: weighted quantile loss {np.mean(losses):.3f} on average, {np.mean(others):.3f} of "
            f"persistence between conformal intervals; the skill and its interval are above 0 on {sure} of {len(group)}"
        )
    return said
