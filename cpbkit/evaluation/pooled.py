"""One verdict over all series of a run, and over several runs: the mean loss over series at each time, tested.

Series that move together are one piece of evidence and not forty; the mean over them at each time knows that.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy

from cpbkit.errors import CpbkitError
from cpbkit.evaluation import metrics, past
from cpbkit.evaluation.verdicts import (
    OLD,
    TOO_FEW,
    Judgement,
    Verdict,
    advise,
    compare,
    headline,
    in_words,
    is_enough,
    least_windows,
    say_skill,
    verdicts,
    word_of,
)

if TYPE_CHECKING:  # windows needs torch
    from cpbkit.evaluation.results import ResultLine
    from cpbkit.windows.series import Series

DRAWS = 20_000  # of the largest statistic among several runs
SAME_BARS = 1e-3  # share of persistence's loss by which two runs on the same bars may differ: a venue mends some
SHARED = 0.8  # of the test times of a series that runs must share to be compared


@dataclass(frozen=True)
class Losses:
    """What a model and each naive forecast lost at the test windows of one head of one series."""

    times: np.ndarray  # (W,) seconds since 1970 of the origins, of bars shorter than a second with their fractions
    step_seconds: float  # bar length
    horizon: int  # bars
    variance: np.ndarray  # (W,) known at the origin, which losses are divided by
    model: np.ndarray  # (W,) mean squared error of a window
    baselines: dict[str, np.ndarray]  # (W,) each

    def __post_init__(self):
        past.check_array(self.times, "times", (len(self.times),), "f" if self.times.dtype.kind == "f" else "i")
        for name, loss in {"variance": self.variance, "model": self.model, **self.baselines}.items():
            past.check_array(loss, name, self.times.shape, "f")
        if not 0 < self.step_seconds < 1e8 or not 1 <= self.horizon <= 1e6:
            raise ValueError(f"losses are of bars of some seconds, some ahead; got {self.step_seconds}, {self.horizon}")

    def at(self, rows: np.ndarray) -> "Losses":
        """Return the losses of some windows."""
        baselines = {name: loss[rows] for name, loss in self.baselines.items()}
        each = {name: getattr(self, name)[rows] for name in ("times", "variance", "model")}
        return replace(self, **each, baselines=baselines)


def losses_of(series: "Series", origins: np.ndarray, part: Mapping, model: str = "") -> Losses:
    """Return the losses of one head from what `verdicts.evidence` gathered of it at the origins."""
    truth, variance = part["truth"], part["variance"]
    lost = {name: np.mean((truth - y) ** 2, axis=(1, 2)) for name, y in part["baselines"].items() if name != model}
    own = np.mean((truth - part["forecast"]) ** 2, axis=(1, 2))
    times = series.times[origins].astype("datetime64[ms]").astype(np.int64) / 1000
    return Losses(times, series.step_seconds, truth.shape[1], variance, own, lost)


def to_bytes(by_head: Mapping[str, Losses], shown: Mapping[str, Mapping[str, past.Past]] | None = None) -> bytes:
    """Pack the losses of a series, and its last forecasts to be shown by head and target, as a file of numpy arrays."""
    arrays: dict[str, Any] = past.arrays_of(shown or {})
    for head, one in by_head.items():
        arrays |= {f"{head}/about": np.array([one.step_seconds, one.horizon]), f"{head}/times": one.times}
        arrays |= {f"{head}/variance": one.variance.astype(np.float32), f"{head}/model": one.model}
        arrays |= {f"{head}/baseline {name}": loss for name, loss in one.baselines.items()}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def from_bytes(content: bytes) -> dict[str, Losses]:
    """Read what `to_bytes` packed. Errors: ValueError, KeyError, TypeError or OverflowError for something else."""
    arrays = past.read_arrays(content, shown=False)
    found = {}
    for head in dict.fromkeys(name.partition("/")[0] for name in arrays):
        named = (f"{head}/baseline ", f"{head}/floor ")  # as earlier versions called them
        baselines = {n.removeprefix(f"{head}/").partition(" ")[2]: v for n, v in arrays.items() if n.startswith(named)}
        step_seconds, horizon = arrays[f"{head}/about"].tolist()
        times, variance, model = (arrays[f"{head}/{name}"] for name in ("times", "variance", "model"))
        found[head] = Losses(times, step_seconds, int(horizon), variance, model, baselines)
    return found


def gather(names: Iterable[str], read: Callable[[str], bytes | None]) -> tuple[dict[str, dict[str, Losses]], list[str]]:
    """Read the losses of series, as {head: {series: Losses}}, and return the names of those that cannot be read.

    read: gives what `to_bytes` packed, such as `Run.losses`. A series whose baseline makes no error is left out.
    """
    found: dict[str, dict[str, Losses]] = {}
    missing = []
    for name in names:
        try:
            by_head = from_bytes(read(name) or b"")
        except (ValueError, KeyError, TypeError, OverflowError):
            by_head = {}
        if not by_head:  # nor of one whose list of arrays is cut off
            missing.append(name)
        for head, one in by_head.items():
            if one.baselines and all(loss.any() for loss in one.baselines.values()):
                found.setdefault(head, {})[name] = one
    return found, missing


@dataclass(frozen=True)
class Pooled:
    """How a run did on one head, over all its series at once. Shares are of 1."""

    verdict: Verdict
    series: int
    times: int  # at which the mean over series is taken, a bar of the longest interval apart
    baseline: str  # the naive forecast with the least loss over all series
    skill: float  # 1 - sqrt(mean over series of loss / loss of the baseline), with its 95 % interval
    skill_low: float
    skill_high: float
    statistic: float  # Student's t, negative favours the models
    win_rate: float  # share of the series with a skill above 0 against this baseline

    def sentence(self) -> str:
        """Say it in one line."""
        return f"all {self.series} series at once: {self.verdict.word}, {self.verdict.reason}"


def pool(parts: Mapping[str, Losses]) -> Pooled:
    """Return one verdict over the losses of several series on one head.

    Each series' losses are divided by the variance known at the origin and by their mean for its best baseline, so that
    all count alike; the mean over series at each time is then tested as a single series' would be, against the one
    baseline that does best over all.
    """
    table, horizon = _means(parts, [{name: one.model for name, one in parts.items()}])
    model, baselines = table[0], dict(zip(_shared_baselines(parts), table[1:], strict=True))
    best = min(baselines, key=lambda name: baselines[name].mean())
    count, against = len(model), baselines[best]
    wins = [np.mean(one.model / one.variance) < np.mean(one.baselines[best] / one.variance) for one in parts.values()]
    win_rate = float(np.mean(wins))
    found, _ = compare(model, against, horizon, len(baselines))
    p = found.pop("p")
    skill, low, high = (found[name] for name in ("skill", "skill_low", "skill_high"))
    if is_enough(count, horizon):
        word = word_of(p, low, high)
        reason = f"skill {say_skill(skill, low, high)} against {best}, p {p:.2g}, "
        reason += f"better on {100 * win_rate:.0f} % of them"
    else:
        word, reason = TOO_FEW, f"{count} times of {horizon} bars, a word takes {least_windows(horizon)}; "
        reason += f"skill {100 * skill:+.2f} % against {best}"
    return Pooled(Verdict(word, p, reason), len(parts), count, best, **found, win_rate=win_rate)


KINDS = ("", ", all series", ", new and old", ", advice")  # what is said of a head, by what follows its name


def say_all(
    results: "Sequence[ResultLine]",
    by_head: Mapping[str, Mapping[str, Judgement]],
    losses: Mapping[str, Mapping[str, Losses]],
    together: Mapping[str, Pooled],
) -> dict[str, str]:
    """Say of each head how many models beat the best naive forecast, how all series did at once, of a refit whether the
    new weights are better than the old, and what to take; named by the head: `price`, `price, all series`.

    by_head: the judgements of the results. together: what `pool` made of the losses of each head.
    """
    said = {head: headline(verdicts(group), head, len(results) - len(group)) for head, group in by_head.items()}
    several = {head: pooled for head, pooled in together.items() if pooled.series > 1}  # of one, its verdict says it
    said |= {f"{head}, all series": f"{head}, {pooled.sentence()}" for head, pooled in several.items()}
    for head, parts in losses.items():
        if head + OLD in by_head and (old := losses.get(head + OLD)):
            pair = compare_pairs({"new": parts, "old": old}).iloc[0]
            which = f"{head}, {pair['run']} weights against {pair['other']}"
            skill = say_skill(*(pair[share] / 100 for share in ("skill %", "low %", "high %")))
            said[f"{head}, new and old"] = f"{which}: {pair['verdict']}, skill {skill}, p {pair['p']:.2g}"
    for head, group in by_head.items():
        if advice := advise(group, head, together[head].verdict if head in together else None):
            said[f"{head}, advice"] = advice
    return said


def _shared_baselines(parts: Mapping[str, Losses]) -> list[str]:
    first = next(iter(parts.values()))
    return [name for name in first.baselines if all(name in one.baselines for one in parts.values())]


def _means(parts: Mapping[str, Losses], models: Sequence[Mapping[str, np.ndarray]]) -> tuple[np.ndarray, int]:
    """Return mean losses over series at each time, of the models and then of the baselines all series have, and the
    horizon in such times: (models + baselines, T). Times are bars of the longest interval.

    models: losses (W,) by series, of each model.
    """
    width = max(one.step_seconds for one in parts.values())
    horizon = max(int(-(-one.horizon * one.step_seconds // width)) for one in parts.values())
    names = _shared_baselines(parts)
    places = [np.floor((one.times + 5e-4) / width) for one in parts.values()]  # a fraction of a second is not exact
    slots, inverse = np.unique(np.concatenate(places), return_inverse=True)
    columns = []
    for series, one in parts.items():
        lost = np.stack([model[series] for model in models] + [one.baselines[name] for name in names]) / one.variance
        columns.append(lost / lost[len(models) :].mean(axis=1).min())
    lost = np.concatenate(columns, axis=1)
    counts = np.bincount(inverse)
    return np.stack([np.bincount(inverse, row, len(slots)) / counts for row in lost]), horizon


def compare_runs(runs: Mapping[str, Mapping[str, Losses]]) -> pd.DataFrame:
    """Return a row for each run, all judged on one head of the same series: the best first.

    p is corrected for the choice: the chance that the best of as many runs would do so well if none were better than
    the naive forecast (Hansen 2005, stepwise as Romano & Wolf 2005), where runs that err alike count as few. Intervals
    hold 95 %, each by itself. Errors: CpbkitError for runs that were not judged on the same windows.
    """
    lost, baselines, horizon, series = _align(runs)
    best = min(baselines, key=lambda name: baselines[name].mean())
    told = _tested(lost, np.broadcast_to(baselines[best], lost.shape), horizon, baselines=len(baselines))
    table = pd.DataFrame({"run": list(runs)}).join(told)
    table = table.assign(against=best, series=series, times=lost.shape[1])
    return table.sort_values("skill %", ascending=False, ignore_index=True)


def compare_pairs(runs: Mapping[str, Mapping[str, Losses]]) -> pd.DataFrame:
    """Return a row for each pair of runs, the better one first: its skill against the other; p corrected over pairs.

    Errors: as `compare_runs`.
    """
    lost, _, horizon, _ = _align(runs)
    pairs = list(itertools.combinations(np.argsort(lost.mean(axis=1), kind="stable"), 2))
    better, other = (list(part) for part in zip(*pairs, strict=True))
    names = np.array(list(runs))
    return pd.DataFrame({"run": names[better], "other": names[other]}).join(_tested(lost[better], lost[other], horizon))


def _tested(lost: np.ndarray, against: np.ndarray, horizon: int, baselines: int = 1) -> pd.DataFrame:
    """Return the skill of losses against others (P, T), row by row, with words corrected for all rows.

    baselines: of how many `against` is the luckiest.
    """
    found = pd.DataFrame([compare(*pair, horizon, baselines)[0] for pair in zip(lost, against, strict=True)])
    found["enough"] = is_enough(lost.shape[1], horizon)
    if found["enough"].all():
        statistics = found["statistic"].to_numpy()
        p = _corrected(lost - against, statistics, horizon)
        found["p"] = np.where(statistics > 0, np.minimum(1, p * baselines), p)
    return in_words(found).assign(t=found["statistic"], p=found["p"])


def _align(runs: Mapping[str, Mapping[str, Losses]]) -> tuple[np.ndarray, dict[str, np.ndarray], int, int]:
    """Return mean losses over the series that runs share, at the times that they share: of the runs (R, T) and of each
    baseline, with the horizon in such times and the number of series. Errors: CpbkitError.
    """
    first, *others = runs.values()
    shared = [name for name in first if all(name in other for other in others)]
    if not shared:
        raise CpbkitError("runs to compare must have a series in common; these have none")
    parts: dict[str, Losses] = {}
    models: list[dict[str, np.ndarray]] = [{} for _ in runs]
    for name in shared:
        group = [run[name] for run in runs.values()]
        times = group[0].times
        for one in group[1:]:
            times = np.intersect1d(times, one.times)
        alike = {(one.horizon, one.step_seconds) for one in group}
        if len(alike) > 1 or len(times) < SHARED * max(len(one.times) for one in group):
            told = [f"{len(one.times)} of {one.horizon} bars of {one.step_seconds:g} s" for one in group]
            told += [f"{len(times)} of them at the same times"] * (len(alike) == 1)
            why = f"those of {name} are {', '.join(told)}"
            raise CpbkitError(f"runs to compare must be judged on the same windows; {why}")
        parts[name], *rest = [one.at(np.searchsorted(one.times, times)) for one in group]
        for one in rest:
            known = [each.baselines["persistence"] for each in (parts[name], one) if "persistence" in each.baselines]
            if len(known) > 1 and np.abs(known[0] - known[1]).mean() > SAME_BARS * known[0].mean():
                raise CpbkitError(f"runs to compare must be judged on the same bars; those of {name} move otherwise")
        for model, one in zip(models, [parts[name], *rest], strict=True):
            model[name] = one.model
    table, horizon = _means(parts, models)
    baselines = dict(zip(_shared_baselines(parts), table[len(runs) :], strict=True))
    return table[: len(runs)], baselines, horizon, len(parts)


def _corrected(differences: np.ndarray, statistics: np.ndarray, horizon: int) -> np.ndarray:
    """Return two-sided p values (P,) of differences (P, T), corrected for their number.

    Statistics without any difference are drawn with the correlations of these, and the largest of what is left at
    each step is compared (Romano & Wolf 2005).
    """
    _, waves = metrics.cosines(differences, horizon)
    count = waves.shape[1]
    size = np.sqrt(np.mean(waves**2, axis=1, keepdims=True))
    mix = np.divide(waves, size, out=np.zeros_like(waves), where=size > 0) / math.sqrt(count)  # rows of length 1
    rng, largest = np.random.default_rng(0), np.empty((DRAWS, len(mix)))
    for rows in np.array_split(np.arange(DRAWS), 20):
        drawn = rng.normal(size=(len(rows), count + 1, count)) @ mix.T  # (D, nu + 1, P)
        with np.errstate(divide="ignore", invalid="ignore"):
            largest[rows] = np.nan_to_num(np.abs(drawn[:, 0]) / np.sqrt(np.mean(drawn[:, 1:] ** 2, axis=1)))
    order = np.argsort(-np.abs(statistics))
    corrected = np.empty(len(statistics))
    before = 0.0
    for step, run in enumerate(order):
        alone = 2 * scipy.special.stdtr(count, -abs(statistics[run]))  # exact; what is drawn cannot be less
        chance = np.mean(largest[:, order[step:]].max(axis=1) >= abs(statistics[run]))
        before = corrected[run] = max(before, alone, chance)
    return corrected
