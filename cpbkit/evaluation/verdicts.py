"""Is a model better than naive? Judgements of forecasts, and verdicts over a run.

N windows (oldest first), H horizon, K targets of one head.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from cpbkit import foreign
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import baselines, metrics
from cpbkit.evaluation.results import ResultLine
from cpbkit.quantities import counted, figure

if TYPE_CHECKING:  # windows needs torch, reading a verdict does not
    from cpbkit.windows.series import Series

SIGNIFICANCE = 0.05  # of a verdict, after Holm's correction
BEATS, TIES, LOSES, TOO_FEW = WORDS = ("BEATS", "TIES", "LOSES", "TOO FEW TO TELL")
LEAST_WINDOWS, LEAST_HORIZONS = 32, 16  # of test windows, for a word; with fewer it is said too often
UNITS = {"bp": 1e4}  # what y is multiplied by to be in its unit; any other unit is the table's own
# Of a price: a skill of 10 % is a correlation of 0.44 and, of normal moves, 64 % right signs, for anybody to trade on.
MOST_SKILL = 0.10
MUCH_WORSE = -0.1  # a skill that nobody would call a tie, however wide its interval
WORST_SKILL = -99.0  # stands for minus infinity, where a baseline is perfect
DECAY = 0.94  # a bar, of the variance known at an origin: RiskMetrics' daily constant
CALM = 0.1  # share of the variance in train that this one never falls below, or a dead hour would decide a verdict
EARLIER_NAMES = {  # of fields, in ledgers of earlier versions
    "best_floor": "best_baseline",
    "floor_rmse_by_horizon": "baseline_rmse_by_horizon",
    "floors": "baselines",
}
OLD = " (old weights)"  # ends the name of a head whose judgements are of the model before a refit


@dataclass(frozen=True)
class Judgement:
    """How one model did on one head of one series, beside the baselines. Errors are in `unit`, shares are of 1.

    Skill is 1 - sqrt(loss / loss of a baseline), where a loss is the squared error over the variance known at the
    origin: a wild week counts no more than a calm one, which finds twice as much. Intervals hold 95 %.
    """

    windows: int  # test windows, a bar apart
    horizon: int  # bars
    unit: str  # "bp", or a table's own
    rmse: float
    mae: float
    rmse_by_horizon: tuple[float, ...]
    best_baseline: str  # the naive forecast with the least loss on these windows: the hardest to beat
    baseline_rmse_by_horizon: tuple[float, ...]  # of the best baseline
    baselines: dict[str, float]  # RMSE of each, in the order of the table
    skill: float  # against the best baseline
    skill_low: float
    skill_high: float  # its chance to be too low is shared among the baselines, since the luckiest of them was taken
    statistic: float  # of the difference to the best baseline's loss, Student's t; negative favours the model
    p: float  # of equal loss, two-sided, not yet corrected for the number of models
    rmse_skill: float  # 1 - RMSE / RMSE of the best baseline
    rmse_skill_low: float
    rmse_skill_high: float
    diebold_mariano: float  # the same by the test that papers report, of unweighted losses; no verdict rests on it
    spread: float  # deviation of the forecasts over the windows, over that of the truth
    persistence_skill: float | None = None  # against plain persistence; None where that is no baseline
    persistence_skill_low: float | None = None
    persistence_skill_high: float | None = None
    mase: float | None = None
    direction: float | None = None  # share of right signs over the whole horizon; None where nothing is said
    direction_low: float | None = None
    direction_high: float | None = None
    ic: float | None = None  # information coefficient: rank correlation of forecast and truth over the whole horizon
    ic_low: float | None = None
    ic_high: float | None = None
    fee: float | None = None  # basis points at which following the sign breaks even, of each unit traded
    fee_low: float | None = None
    fee_high: float | None = None
    level_rmse: float | None = None  # of the price (or own level) itself, in its unit
    level_mae: float | None = None
    r2: float | None = None  # of the level; near 1 for any copy of the last price, hence beside persistence's
    r2_persistence: float | None = None
    mape: float | None = None  # percent
    mape_persistence: float | None = None
    notes: tuple[str, ...] = ()  # what the baselines lacked, and what could not be tested

    def to_dict(self) -> dict:
        """Return plain JSON types, without NaN."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, raw: Mapping) -> "Judgement":
        """Read what `to_dict` wrote, of this version or a later one. Errors: CpbkitError where something is missing."""
        named: dict[str, Any] = {EARLIER_NAMES.get(name, name): value for name, value in raw.items()}
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            foreign.check(named, FORM)
        except foreign.Damaged as error:
            raise CpbkitError(f"this run was judged by another version of cpbkit; sweep anew ({error})") from None
        if not (0 <= named["p"] <= 1 and named["windows"] >= 0 and named["horizon"] >= 1):
            raise CpbkitError(f"no model is judged so: p {named['p']}, {named['windows']} windows; sweep anew")
        if named["best_baseline"] not in named["baselines"]:
            raise CpbkitError(f"the best baseline must be one of {', '.join(named['baselines'])[:200]}; sweep anew")
        told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in named.items() if k in known}
        for name in ("persistence_skill", "direction", "ic", "fee"):  # a value without an interval says nothing
            if None in (told.get(f"{name}_low"), told.get(f"{name}_high")):
                told[name] = None
        return cls(**told)

    @property
    def is_enough(self) -> bool:
        """Whether there are windows enough for a word."""
        return is_enough(self.windows, self.horizon)

    @property
    def is_unbelievable(self) -> bool:
        """Whether it says more than any liquid market leaves to know of a price."""
        return self.is_enough and self.skill > MOST_SKILL


FORM = foreign.form_of(Judgement)


def least_windows(horizon: int) -> int:
    """Return how many windows, a bar apart, a word so many bars ahead takes."""
    return max(LEAST_WINDOWS, LEAST_HORIZONS * horizon)


def is_enough(windows: int, horizon: int) -> bool:
    """Return whether so many windows, a bar apart, are enough for a word so many bars ahead."""
    return windows >= least_windows(horizon)


def judge(
    truth: np.ndarray,
    forecast: np.ndarray,
    baselines: Mapping[str, np.ndarray],
    unit: str,
    *,
    model: str = "",
    anchors: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    variance: np.ndarray | None = None,
    direction_of: int = -1,
    is_price: bool = False,
    notes: tuple[str, ...] = (),
) -> Judgement:
    """Judge a forecast against the best of the baselines; truth, forecast and each baseline are y, (N, H, K).

    model: the baseline of that name is left out. anchors (N, K): to judge levels too. scale (K,): of MASE.
    variance (N,): known at each origin, which losses are divided by; None counts all windows alike.
    direction_of: the target whose sign counts, in a price head the close. is_price: that sign could be traded.
    Errors: ValueError for shapes that differ or values that are not finite.
    """
    baselines = {name: y for name, y in baselines.items() if name != model}
    if not baselines:
        raise ValueError("a judgement needs at least one baseline besides the model; got none")
    for name, y in {"truth": truth, "forecast": forecast, **baselines}.items():
        if y.shape != truth.shape or y.ndim != 3:
            raise ValueError(f"{name} must have the shape (N, H, K) of the truth {truth.shape}; got {y.shape}")
        if not np.isfinite(y).all():
            raise ValueError(f"{name} must be finite; got {np.sum(~np.isfinite(y))} other values of {y.size}")
    windows, horizon, _ = truth.shape
    unit_scale = UNITS.get(unit, 1.0)
    plain = {name: np.mean((truth - y) ** 2, axis=(1, 2)) for name, y in {"": forecast, **baselines}.items()}
    losses = plain if variance is None else {name: loss / variance for name, loss in plain.items()}
    best = min(baselines, key=lambda name: losses[name].mean())
    compared, untested = compare(losses[""], losses[best], horizon, len(baselines))
    moves, told = truth[:, -1, direction_of], forecast[:, -1, direction_of]
    enough = is_enough(windows, horizon)
    with_ends = {  # each a value and the ends of its interval, or None where nothing is said
        "rmse_skill": _skill(plain[""], plain[best], horizon, len(baselines)),
        "persistence_skill": _skill(losses[""], losses["persistence"], horizon) if "persistence" in losses else None,
        "direction": metrics.direction(moves, told, overlap=horizon),
        "ic": metrics.rank_correlation(moves, told, horizon) if enough else None,
        "fee": metrics.break_even_fee(moves * 1e4, told, horizon) if is_price and enough else None,
    }
    if (fee := with_ends["fee"]) and not np.isfinite(fee).all():
        with_ends["fee"] = None
    spans: dict[str, Any] = {
        name + end: value
        for name, found in with_ends.items()
        for end, value in zip(("", "_low", "_high"), found or (None,) * 3, strict=True)
    }
    moved = truth.var(axis=0).mean()
    diebold_mariano = metrics.diebold_mariano(plain[""], plain[best], horizon)[0] if windows > horizon else 0.0
    return Judgement(
        windows=windows,
        horizon=horizon,
        unit=unit,
        rmse=float(metrics.rmse(truth, forecast)) * unit_scale,
        mae=float(metrics.mae(truth, forecast)) * unit_scale,
        rmse_by_horizon=tuple((metrics.rmse(truth, forecast, axis=(0, 2)) * unit_scale).tolist()),
        best_baseline=best,
        baseline_rmse_by_horizon=tuple((metrics.rmse(truth, baselines[best], axis=(0, 2)) * unit_scale).tolist()),
        baselines={name: math.sqrt(plain[name].mean()) * unit_scale for name in baselines},
        **compared,
        **spans,
        diebold_mariano=float(np.clip(diebold_mariano, -99, 99)),
        spread=math.sqrt(forecast.var(axis=0).mean() / moved) if moved else 0.0,
        mase=metrics.mase(truth, forecast, scale) if scale is not None and scale.mean() > 0 else None,
        **({} if anchors is None else _level_errors(truth, forecast, anchors, unit)),
        notes=notes + untested,
    )


def _skill(loss: np.ndarray, baseline_loss: np.ndarray, horizon: int, count: int = 1) -> tuple[float, float, float]:
    """Return the skill of losses (N,) against the best of `count` baselines, with its interval."""
    if not baseline_loss.any():  # a baseline without error leaves nothing to win
        return (WORST_SKILL,) * 3 if loss.any() else (0.0, 0.0, 0.0)
    found = 1 - math.sqrt(loss.mean() / baseline_loss.mean())
    if not is_enough(len(loss), horizon):
        return max(WORST_SKILL, found), WORST_SKILL, 1.0
    outside = (1 - metrics.LEVEL) / 2
    ratios = metrics.ratio_confidence_interval(loss, baseline_loss, horizon, (outside / count, outside))
    low, high = (1 - math.sqrt(max(0.0, ratio)) for ratio in ratios[::-1])
    return max(WORST_SKILL, found), max(WORST_SKILL, low), max(WORST_SKILL, high)


def compare(
    loss: np.ndarray, baseline_loss: np.ndarray, horizon: int, count: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return skill, its interval and the test by name, and what could not be tested; losses (N,) of successive origins.

    count: of how many naive forecasts the best was taken.
    """
    skill, low, high = _skill(loss, baseline_loss, horizon, count)
    notes: tuple[str, ...] = ()
    enough = is_enough(len(loss), horizon)
    statistic, p = map(float, metrics.cosine_test(loss - baseline_loss, horizon)) if enough else (0.0, 1.0)
    if not baseline_loss.any():
        notes = ("the best baseline makes no error",)
    elif not enough:
        least = least_windows(horizon)
        notes = (f"{len(loss)} windows are too few to test {horizon} bars ahead; it takes {least}",)
    # The luckiest of several baselines was taken, so to lose against it happens by chance that many times as often.
    p = min(1.0, p * count) if statistic > 0 else p
    statistic = float(np.clip(statistic, -99, 99))
    return {"skill": skill, "skill_low": low, "skill_high": high, "statistic": statistic, "p": p}, notes


def _level_errors(truth, forecast, anchors, unit) -> dict[str, Any]:
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
    """Judge a model's y (W, H, K) at the origins of a series, head by head, against the baselines of each head."""
    found = each_evidence(series, origins, forecast, train_end)  # a table may have hundreds of heads: one at a time
    return {head: judge(**part, unit=series.unit, model=model) for head, part in found}


def evidence(*given, **more) -> dict[str, dict]:
    """Return all that `each_evidence` yields."""
    return dict(each_evidence(*given, **more))


def each_evidence(
    series: "Series",
    origins: np.ndarray,
    forecast: np.ndarray,
    train_end: int,
    pretrained: str = "",
    is_itself: bool = False,
) -> Iterator[tuple[str, dict]]:
    """Yield each head with what `judge` asks for of it, but for the unit and the model.

    pretrained: a Chronos model that stands among the naive forecasts, unless the forecast is its own.
    """
    horizon, truth = forecast.shape[1], series.truth(origins, forecast.shape[1])
    rows = np.arange(train_end - 1)
    rows = rows[series.segment[rows] == series.segment[rows + 1]]
    for head, columns in series.columns.items():
        naive, notes = baselines.forecasts(series, head, origins, horizon, train_end)
        if pretrained:
            from cpbkit.models import zero_shot  # needs torch

            if not is_itself:
                naive[zero_shot.name_of(pretrained)] = zero_shot.forecast(pretrained, series, columns, origins, horizon)
            notes = (*notes, zero_shot.say_dates(pretrained, series, origins))
        close = [i for i, k in enumerate(columns) if series.targets[k] == "close"]
        yield (
            head,
            {
                "truth": truth[..., columns],
                "forecast": forecast[..., columns],
                "baselines": naive,
                "anchors": series.anchors[origins][:, columns],
                "scale": np.abs(series.levels[rows + 1] - series.anchors[rows]).mean(axis=0)[columns],
                "variance": _variance_at(series, columns, origins, train_end),
                "direction_of": close[0] if close else -1,
                "is_price": head == "price" and series.unit == "bp",
                "notes": notes,
            },
        )


def known_variance(squares: np.ndarray) -> np.ndarray:
    """Return the exponentially weighted mean of squared moves (N,) or (N, S) up to each row: the variance known there.

    squares: in units of their mean in train, which stands before the first. It never falls below CALM.
    """
    moved = pd.DataFrame(np.concatenate([np.ones_like(squares[:1]), squares]))
    mean = moved.ewm(alpha=1 - DECAY, adjust=False).mean().to_numpy()[1:]
    return np.maximum(mean.reshape(squares.shape), CALM)


def _variance_at(series: "Series", columns: list[int], origins: np.ndarray, train_end: int) -> np.ndarray:
    """Return the variance of a bar's move of a head's targets, each in units of its own in train, at origins: (W,)."""
    squares = np.zeros(len(series))
    for k in columns:
        moves = np.square(series.levels[1:, k] - series.anchors[:-1, k])
        moves[np.diff(series.segment) > 0] = np.nan  # over a gap
        known = moves[: train_end - 1][np.isfinite(moves[: train_end - 1])]
        usual = known.mean() if len(known) else 0.0
        squares[1:] += np.nan_to_num(moves / usual, nan=1.0) if usual > 0 else 1.0
    squares[0] = len(columns)
    return known_variance(squares / len(columns))[origins]


@dataclass(frozen=True)
class Verdict:
    """What may be said of one model on one head, or of all models of a run on it together."""

    word: str  # of WORDS
    p: float  # corrected for the number of models
    reason: str  # one line, with the numbers


def word_of(p: float, low: float, high: float) -> str:
    """Return the word of a corrected p and the interval of a skill."""
    if p < SIGNIFICANCE and low > 0:
        return BEATS
    return LOSES if p < SIGNIFICANCE and high < 0 else TIES


def in_words(found: pd.DataFrame) -> pd.DataFrame:
    """Return what `compare` found, a row each with a corrected p, as people read it: the word, skills in percent.

    The column `enough` says of each row whether there were windows enough for a word and an interval.
    """
    told = found["enough"]
    rows = zip(found["p"], found["skill_low"], found["skill_high"], told, strict=True)
    words = [word_of(p, low, high) if enough else TOO_FEW for p, low, high, enough in rows]
    low = 100 * found["skill_low"].where(told & (found["skill_low"] > WORST_SKILL))  # no number where it is open
    high = 100 * found["skill_high"].where(told & (found["skill_high"] < 1))
    return pd.DataFrame({"verdict": words, "skill %": 100 * found["skill"], "low %": low, "high %": high})


def verdicts(judgements: Mapping[str, Judgement]) -> dict[str, Verdict]:
    """Return a verdict per series, over all models of one head together.

    BEATS: p below SIGNIFICANCE after Holm's correction over all series, and the interval of the skill above 0.
    LOSES: the mirror image. TIES: everything between. TOO FEW TO TELL: fewer windows than a word takes.
    """
    told = [series for series, j in judgements.items() if j.is_enough]
    corrected = dict(zip(told, metrics.holm([judgements[series].p for series in told]), strict=True))
    found = {}
    for series, j in judgements.items():
        against = f"against {j.best_baseline}"
        if series not in corrected:
            least = least_windows(j.horizon)
            reason = f"{j.windows} windows of {j.horizon} bars, a word takes {least}; skill {100 * j.skill:+.2f} %"
            found[series] = Verdict(TOO_FEW, 1.0, f"{reason} {against}")
            continue
        p = float(corrected[series])
        reason = f"skill {say_skill(j.skill, j.skill_low, j.skill_high)} {against}, corrected p {p:.2g}"
        found[series] = Verdict(word_of(p, j.skill_low, j.skill_high), p, reason)
    return found


def say_skill(skill: float, low: float, high: float) -> str:
    """Say a skill and its interval, which are shares of 1: `+1.20 % (+0.40 to +2.10)`."""
    return f"{100 * skill:+.2f} % ({say_ends(100 * low, 100 * high)})"


def say_ends(low: float, high: float) -> str:
    """Say the interval of a skill in percent; what it leaves open is no number: 100 % is a forecast without error."""
    least = f"{low:+.2f}" if low > 100 * WORST_SKILL else ""
    most = f"{high:+.2f}" if high < 100 else ""
    if least and most:
        return f"{least} to {most}"
    return f"{least} or more" if least else f"{most} or less" if most else "not known"


def say_worth(j: Judgement, word: str) -> str:
    """Say in one sentence what a forecast would be worth; empty where its sign cannot be traded.

    word: of its verdict, without which an interval above 0 is one lucky one of many.
    """
    if j.ic is None or j.fee is None or j.fee_low is None:
        return ""
    ic = f"information coefficient {j.ic:+.3f} ({j.ic_low:+.3f} to {j.ic_high:+.3f})"
    fee = f"break-even fee {j.fee:.1f} bp ({j.fee_low:.1f} to {j.fee_high:.1f})"
    if j.fee_low > 0 and word == BEATS:
        least = f"{j.fee_low:.1f} bp" if j.fee_low >= 0.05 else "less than 0.1 bp"
        said = f"following its sign would have paid a fee of {least}"
    elif j.fee_low > 0:
        said = f"following its sign would have paid a fee, but {word} says that this may be luck"
    elif j.fee > 0:
        said = "following its sign is not sure to pay any fee"
    else:
        said = "following its sign would not pay any fee"
    return f"{ic}; {said}: {fee}"


# What a table of verdicts has to say of its columns.
CORRECTED = "p: of the difference to the baseline; p and verdict are corrected for all models of a head, no interval is"
MEANING = {  # of a verdict, for who would act on it
    BEATS: "better than {baseline} in the test split, skill {skill:+.2f} %",
    TIES: "ties {baseline}: this is no edge",
    LOSES: "worse than {baseline}: take the naive forecast",
    TOO_FEW: "{reason}",
}


def meanings(results: Iterable[ResultLine]) -> dict[str, str]:
    """Say by series what its verdicts mean for who would act on them, of several heads each; lines of a ledger."""
    by_head = judgements(line for line in results if line.status == "done")
    said = {head: say_meanings(group) for head, group in by_head.items() if not head.endswith(OLD)}
    if len(said) < 2:
        return next(iter(said.values()), {})
    names = dict.fromkeys(name for group in said.values() for name in group)
    return {
        name: "; ".join(f"{head}: {group[name]}" for head, group in said.items() if name in group) for name in names
    }


def say_meanings(group: Mapping[str, Judgement]) -> dict[str, str]:
    """Say by series what the verdict of one head means for who would act on it."""
    return {name: f"{verdict.word}: {_say_meaning(group[name], verdict)}" for name, verdict in verdicts(group).items()}


def _say_meaning(j: Judgement, verdict: Verdict) -> str:
    if verdict.word == TIES and j.skill_low > 0:
        return f"better than {j.best_baseline} by itself, which one of so many models is by luck: this is no edge"
    if verdict.word == TIES and j.skill < MUCH_WORSE:
        return f"worse than {j.best_baseline} in these windows, if not for sure: this is no edge"
    return MEANING[verdict.word].format(baseline=j.best_baseline, skill=100 * j.skill, reason=verdict.reason)


def headline(found: Mapping[str, Verdict], head: str, unjudged: int = 0) -> str:
    """Say it in one line: `3 of 40 beat the best naive forecast of the price; 35 tie; 2 lose`."""
    count = {word: sum(v.word == word for v in found.values()) for word in WORDS}
    beat, tie, lose = (word.lower() if count[word] == 1 else word.lower()[:-1] for word in (BEATS, TIES, LOSES))
    line = f"{count[BEATS]} of {len(found) + unjudged} {beat} the best naive forecast of the {head}"
    line += f"; {count[TIES]} {tie}; {count[LOSES]} {lose}"
    line += f"; {count[TOO_FEW]} with too few windows to tell" if count[TOO_FEW] else ""
    return line + (f"; {unjudged} could not be judged" if unjudged else "")


def advise(judged: Mapping[str, Judgement], head: str, together: Verdict | None = None) -> str:
    """Say what to take where no model of a head is better than what needs no training; empty where one is.

    together: the verdict over all series at once.
    """
    words = [v.word for v in (*verdicts(judged).values(), together) if v]
    if BEATS in words or TOO_FEW in words:
        return ""
    against = collections.Counter(j.best_baseline for j in judged.values())
    best = against.most_common(1)[0][0]
    if best in baselines.BASELINES:
        naive = f"mostly {best}" if len(against) > 1 else best
        return f"no model of the {head} is worth its training: take the naive one, {naive}"
    return f"no model of the {head} is worth its training: download {best}, don't train"


def tell_unbelievable(results: Iterable[ResultLine], by_head: Mapping[str, Mapping[str, Judgement]]) -> str:
    """Say where the price of a real market was forecast better than can be believed; empty where it was nowhere.

    by_head: the `judgements` of the results.
    """
    judged = by_head.get("price", {})
    markets = [line.series for line in results if line.passport and not line.synthetic and line.series in judged]
    found = {name: judged[name].skill for name in markets if judged[name].is_unbelievable and judged[name].unit == "bp"}
    if not found:
        return ""
    best = max(found, key=lambda name: found[name])
    said = f"{counted(len(found), 'model')} with a skill above {100 * MOST_SKILL:g} %, {best} {100 * found[best]:.1f} %"
    return f"{said}: no liquid market leaves so much to know. Look for a leak: `cpbkit audit RUN`"


def tell_unaudited(features: Sequence[str], by_head: Mapping[str, Mapping[str, Judgement]]) -> str:
    """Say of own features that were not audited that a BEATS may come of them; empty where there is none."""
    beats = any(v.word == BEATS for group in by_head.values() for v in verdicts(group).values())
    said = f"BEATS with features of your own, {', '.join(features)}: does any know the future? `cpbkit audit RUN`"
    return said if features and beats else ""


def tell_too_few(by_head: Mapping[str, Mapping[str, Judgement]]) -> str:
    """Say how many windows a word takes; empty where all have enough."""
    few = [j for group in by_head.values() for j in group.values() if not j.is_enough]
    if not few:
        return ""
    one = min(few, key=lambda j: j.windows / least_windows(j.horizon))
    said = f"{TOO_FEW}: the least is {one.windows} windows of {one.horizon} bars, a verdict needs"
    return f"{said} {least_windows(one.horizon)}. Test more days, or forecast fewer bars"


def judgements(results: Iterable[ResultLine]) -> dict[str, dict[str, Judgement]]:
    """Read the judgements from lines of a ledger: {head: {series: Judgement}}; a line without any adds nothing.

    Of a refit the judgements of the models before it follow, on the same test windows, as heads of their own.
    """
    found: dict[str, dict[str, Judgement]] = {}
    for line in results:
        before = {head + OLD: raw for head, raw in line.before.items()}
        for head, raw in (line.test | before).items():
            try:
                found.setdefault(head, {})[line.series] = Judgement.from_dict(raw)
            except CpbkitError as error:
                raise CpbkitError(f"the line of {line.series} in the ledger, {head}: {error}") from None
    return found


def verdict_table(by_head: Mapping[str, Mapping[str, Judgement]]) -> pd.DataFrame:
    """Return a row per series and head, the best first within a head.

    Errors are in the unit, those of the level in the price's or the table's own. An end of an interval that is open has
    no number.
    """
    rows = []
    for head, group in by_head.items():
        found = verdicts(group)
        for series, j in sorted(group.items(), key=lambda item: -item[1].skill):
            told = found[series].word != TOO_FEW
            rows.append(
                {
                    "series": series,
                    "head": head,
                    "verdict": found[series].word,
                    "skill %": _percent(j.skill),
                    "low %": 100 * j.skill_low if told and j.skill_low > WORST_SKILL else math.nan,
                    "high %": 100 * j.skill_high if told and j.skill_high < 1 else math.nan,
                    "t": j.statistic,
                    "p": found[series].p if told else math.nan,
                    "best baseline": j.best_baseline,
                    "skill against persistence %": _percent(j.persistence_skill),
                    "RMSE skill %": _percent(j.rmse_skill),
                    "RMSE low %": _percent(j.rmse_skill_low),
                    "RMSE high %": _percent(j.rmse_skill_high),
                    "Diebold-Mariano": j.diebold_mariano,
                    "rmse": j.rmse,
                    "baseline rmse": j.baselines[j.best_baseline],
                    "mae": j.mae,
                    "unit": j.unit,
                    "mase": j.mase,
                    "direction %": _percent(j.direction),
                    "direction low %": _percent(j.direction_low),
                    "direction high %": _percent(j.direction_high),
                    "IC": j.ic,
                    "IC low": j.ic_low,
                    "IC high": j.ic_high,
                    "fee bp": j.fee,
                    "fee low bp": j.fee_low,
                    "fee high bp": j.fee_high,
                    "worth": say_worth(j, found[series].word),
                    "level rmse": j.level_rmse,
                    "level mae": j.level_mae,
                    "windows": j.windows,
                }
            )
    return pd.DataFrame(rows)


def say_p(p: float) -> str:
    """Say a p in three digits, of which none may read as certainty."""
    return "< 0.001" if p < 0.0005 else f"{p:.3f}"


def say_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return `verdict_table` as people read it: texts, empty where nothing is said, and what decides comes first."""

    def said(name: str, form: Callable[[float], str]) -> list[str]:
        return ["" if pd.isna(value) else form(value) for value in table[name]]

    ends = zip(table["verdict"], table["low %"], table["high %"], strict=True)
    errors = zip(table["rmse"], table["unit"], strict=True)
    return pd.DataFrame(
        {
            **{name: table[name] for name in ("series", "head", "verdict")},
            "skill %": said("skill %", "{:+.2f}".format),
            "95 % interval": ["" if word == TOO_FEW else say_ends(low, high) for word, low, high in ends],
            "p": said("p", say_p),
            "against": table["best baseline"],
            "persistence %": said("skill against persistence %", "{:+.2f}".format),
            "direction %": said("direction %", "{:.1f}".format),
            "IC": said("IC", "{:+.3f}".format),
            "fee bp": said("fee bp", "{:.1f}".format),
            "RMSE": [f"{figure(error, 4)} {unit}" for error, unit in errors],
            "naive RMSE": said("baseline rmse", lambda error: figure(error, 4)),
            "windows": table["windows"].map(str),
        }
    )


def table_text(table: pd.DataFrame, columns: int) -> str:
    """Return `verdict_table` for a terminal, with what its columns mean; the first ones always, others as they fit."""
    if table.empty:
        return ""
    several = table["head"].nunique() > 1
    whole = shown = say_table(table) if several else say_table(table).drop(columns="head")
    always = 4 + several  # series, verdict, skill and its interval
    while len((text := shown.to_string(index=False)).partition("\n")[0]) > columns and len(shown.columns) > always:
        shown = shown.iloc[:, :-1]
    notes = {
        "p": CORRECTED,
        "persistence %": "persistence %: skill against plain persistence",
        "IC": "IC: rank correlation of forecast and truth",
        "fee bp": "fee bp: at which following the sign breaks even",
    }
    sure_first = table.sort_values("verdict", key=lambda words: words != BEATS, kind="stable")
    worth = [f"{name}: {said}" for name, said in zip(sure_first["series"], sure_first["worth"], strict=True) if said]
    left = ", ".join(name for name in whole if name not in shown)
    out = [f"no room here for {left}"] if left else []
    return "\n".join([text, *out, *(note for name, note in notes.items() if name in shown), *worth[:1]])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def skill_by_horizon(by_head: Mapping[str, Mapping[str, Judgement]]) -> pd.DataFrame:
    """Return the skill against the best baseline in percent: a row per series and head, a column per bar ahead."""
    rows = {}
    for head, group in by_head.items():
        for series, j in group.items():
            with np.errstate(divide="ignore", invalid="ignore"):  # a baseline may make no error
                skill = metrics.skill(np.array(j.rmse_by_horizon), np.array(j.baseline_rmse_by_horizon))
            rows[series, head] = dict(enumerate(100 * skill, start=1))
    return pd.DataFrame.from_dict(rows, orient="index")


def seed_spread(runs: Iterable[Mapping[str, Mapping[str, Judgement]]]) -> pd.DataFrame:
    """Return how much the seed changes: a row per series and head, over runs that differ in the seed alone.

    runs: as `judgements` reads them. Skills in percent with their standard deviation; the words are counted.
    """
    by = ["series", "head"]
    table = pd.concat([verdict_table(run) for run in runs])
    skill = table.groupby(by, sort=False)["skill %"].agg(["count", "mean", "std", "min", "max"])
    words = table.groupby(by)["verdict"].value_counts().unstack().reindex(columns=WORDS).fillna(0).astype(int)
    named = {"count": "seeds"} | {name: f"skill %, {name}" for name in ("mean", "std", "min", "max")}
    return skill.rename(columns=named).join(words).reset_index()
