"""Are the features honest? Their making is rerun on bars whose future is garbage, or not there yet.

A column that came finished with the data has no making to rerun, and is told as unaudited, never as OK.
"""

import numpy as np
import pandas as pd
import scipy

from cpbkit import indicators
from cpbkit.config import own
from cpbkit.config.experiment import Task
from cpbkit.data.klines import Klines
from cpbkit.data.traces import Trace
from cpbkit.evaluation.baselines import LAGS
from cpbkit.evaluation.poison import GARBAGE, Finding, poison
from cpbkit.windows.series import TARGETS, Series, Table, times_of, to_series

SPREAD, EDGE = 40, 3  # spots: evenly over the rows, and at each end
BORDERS = 300  # spots around gaps and changes of day, at most
CLOCK = 96  # spots at times of day, at most: all of them for bars of a quarter of an hour and longer
SHORTEST = 0.25  # share of the rows that a feature must be computable on, when the rest is cut off
DIGITS = 1e-9  # to which fewer rows give the same: sums of another length round otherwise
TELLING = 0.25  # rank correlation with a move to come: 58 % right signs, of normal moves, from one column alone
# The same of a table, with what its own last 48 rows leave open: no column of ETTh1 reaches 0.10, none of the drawn
# trace of a link 0.61; the next value itself has 1, a zero-phase filter of it 0.83, a mean centred on it 0.68.
TELLING_OF_TABLE = 0.65
ENOUGH = 200  # rows for it
MOST_NAMED = 8  # further features that tell too much
LEFT = 1e-6  # share of its deviation above which a column has something left


def finished_columns(data: Klines | Trace | Table, task: Task) -> list[str]:
    """Name the columns that came finished: of bars the features that are neither indicators nor functions."""
    if not isinstance(data, Klines):
        return [name for name in dict.fromkeys([*task.features, *task.targets]) if not own.is_own(name)]
    made = {name for name in task.features if indicators.is_indicator(name) or own.is_own(name)}
    return [name for name in task.features if name in data.frame and name not in made]


def choose_spots(frame: pd.DataFrame) -> list[int]:
    """Choose the rows after which rows are poisoned: evenly, the ends, around gaps and days, at each time of day."""
    last, times = len(frame) - 2, times_of(frame).astype("datetime64[s]").astype(np.int64)
    steps = np.diff(times)
    gaps = np.flatnonzero(steps > np.median(steps)) + 1  # the first row after each
    days = np.flatnonzero(np.diff(times // indicators.DAY)) + 1
    if 3 * len(days) > BORDERS - 3 * len(gaps):
        days = days[np.linspace(0, len(days) - 1, max(1, BORDERS // 3 - len(gaps))).astype(int)]
    borders = [row + near for row in (*gaps[: BORDERS // 3], *days) for near in (-2, -1, 0)]
    draw = np.random.default_rng(0).permutation(last + 1)
    _, first = np.unique(times[draw] % indicators.DAY, return_index=True)  # one row of each time of day
    clock = draw[first[:: -(-len(first) // CLOCK)]]
    spots = [*np.linspace(1, last, SPREAD), *range(EDGE), *range(last - EDGE, last + 1), *borders, *clock]
    return sorted({int(spot) for spot in spots if 0 <= spot <= last})


def check_making(data: Klines | Trace | Table, task: Task) -> Finding:
    """Rerun the making of each feature and target with the rows after a spot scaled, shuffled or cut off.

    What was there up to the spot must stay as it is: to the bit, or to nine digits where rows are cut off. Files of own
    functions are run anew each time, or what one remembers of all bars would hide that it does.
    """
    check = "the making of features knows no future"
    finished, frame, targets = finished_columns(data, task), data.frame, list(task.targets)
    if isinstance(data, Klines):
        frame, targets = frame.drop(columns=finished), [TARGETS[target][0] for target in task.targets]
    names = [name for name in dict.fromkeys([*task.features, *targets]) if name not in finished]
    if not names:
        return Finding(check, "NOTE", "no column is made here")

    def make(frame: pd.DataFrame) -> np.ndarray:
        own.forget(names)
        return indicators.compute(frame, names).to_numpy()

    clean, spots = make(frame), choose_spots(frame)
    for spot in spots:
        known = clean[: spot + 1]
        remade = {kind: make(poison(frame, spot, garble))[: spot + 1] for kind, garble in GARBAGE.items()}
        differs = {kind: (now != known) & ~(np.isnan(now) & np.isnan(known)) for kind, now in remade.items()}
        if spot >= SHORTEST * len(frame):
            differs["not there yet"] = ~np.isclose(make(frame.iloc[: spot + 1]), known, DIGITS, 0.0, equal_nan=True)
        for kind, cells in differs.items():
            if cells.any():
                row, column = np.argwhere(cells)[0]
                at = f"`{names[column]}` of row {row} changes when the rows after {spot} are {kind}"
                return Finding(check, "FAIL", f"{at}: it knows the future")
    evidence = f"{len(names)} columns are made anew and stay the same, at {len(spots)} spots of {len(frame)} rows"
    return Finding(check, "OK", evidence)


def note_finished(data: Klines | Trace | Table, task: Task) -> list[Finding]:
    """Say of which columns nothing is known, because nobody can make them anew."""
    finished = finished_columns(data, task)
    if not finished:
        return []
    whole = "bars" if isinstance(data, Klines) else "table"
    said = f"{', '.join(finished)} came finished with the {whole}, so their making cannot be rerun"
    said += ": nothing is known of it. A function, mine.py:name, can be audited"
    return [Finding("finished columns", "NOTE", said)]


def check_telling(data: Klines | Trace | Table, task: Task) -> Finding:
    """Raise an alarm at a feature that tells a move to come better than an honest one does.

    Each feature and its change are held against the next move, and of bars that over the horizon, by rank correlation;
    of a table, whose past may tell much by itself, with what that leaves open of both.
    """
    if isinstance(data, Klines):
        return _check_bars(data, task)
    check, telling = "no feature tells too much", _find_telling(to_series(data, task))
    if not telling:
        return Finding(check, "NOTE", "no feature but the targets' own past, or too few rows to say")
    (share, feature, target), *others = telling
    said = (
        f"`{feature}` ranks what the past of `{target}` leaves open of its next row with a correlation of {share:.2f}"
    )
    if share > TELLING_OF_TABLE:
        said += f", above {TELLING_OF_TABLE:g}: it knows that row, unless it is a plan or a cause that was there before"
        likewise = [f"`{other}` of `{of}`" for high, other, of in others if high > TELLING_OF_TABLE]
        said += f". Likewise {', '.join(likewise[:MOST_NAMED])}" if likewise else ""
        return Finding(check, "FAIL", said)
    return Finding(check, "OK", said)


def _find_telling(series: Series) -> list[tuple[float, str, str]]:
    """Return each feature's highest rank correlation with a target's next move, past removed, the highest first."""
    worst: dict[str, tuple[float, str, str]] = {}
    rows = np.arange(LAGS, len(series) - 1)
    if len(rows) < ENOUGH:
        return []
    inputs = np.concatenate([series.inputs[rows], series.inputs[rows] - series.inputs[rows - 1]], axis=1)
    for level, target in zip(series.levels.T, series.targets, strict=True):
        past = np.column_stack([np.ones(len(rows)), *(level[rows - back] for back in range(LAGS))])
        both = np.column_stack([level[rows + 1] - level[rows], inputs])
        left = both - past @ np.linalg.lstsq(past, both, rcond=None)[0]
        told = left.std(axis=0) > LEFT * both.std(axis=0)  # the target's own column leaves nothing
        for c in np.flatnonzero(told[1:]) if told[0] else ():
            share = abs(scipy.stats.spearmanr(left[:, 0], left[:, 1 + c])[0])
            feature = series.features[c % len(series.features)]
            worst[feature] = max(worst.get(feature, (0.0, "", "")), (share, feature, target))
    return sorted(worst.values(), reverse=True)


def _check_bars(klines: Klines, task: Task) -> Finding:
    check, finished = "no feature tells too much", finished_columns(klines, task)
    made = [name for name in task.features if name not in finished]
    table = indicators.compute(klines.frame, made).join(klines.frame[finished])
    close = np.log(klines.frame["close"])
    moves = {ahead: close.shift(-ahead) - close for ahead in {1, task.horizon}}
    worst = (0.0, "", 0)
    for name in table:
        for column in (table[name], table[name].diff(), table[name] - close):
            for ahead, move in moves.items():
                both = np.isfinite(column) & np.isfinite(move)
                if both.sum() < ENOUGH * ahead or np.ptp(column[both]) == 0:
                    continue
                worst = max(worst, (abs(scipy.stats.spearmanr(column[both], move[both])[0]), name, ahead))
    share, name, ahead = worst
    evidence = (
        f"`{name}` ranks moves {ahead} ahead with a correlation of {share:.2f}" if name else "too few rows to say"
    )
    if share > TELLING and not klines.passport.synthetic:
        return Finding(check, "FAIL", f"{evidence}, above {TELLING:g}: no liquid market gives that; look for a leak")
    return Finding(check, "OK" if name else "NOTE", evidence)
