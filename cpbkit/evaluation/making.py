"""Are the features honest? Their making is rerun on bars whose future is garbage, or not there yet.

A column that came finished with the bars has no making to rerun, and is told as unaudited, never as OK.
"""

import numpy as np
import pandas as pd
import scipy

from cpbkit import indicators
from cpbkit.config import own
from cpbkit.config.experiment import Task
from cpbkit.data.klines import Klines
from cpbkit.evaluation.poison import GARBAGE, Finding, poison
from cpbkit.windows.series import TARGETS

SPREAD, EDGE = 40, 3  # spots: evenly over the rows, and at each end
BORDERS = 300  # spots around gaps and changes of day, at most
CLOCK = 96  # spots at times of day, at most: all of them for bars of a quarter of an hour and longer
SHORTEST = 0.25  # share of the rows that a feature must be computable on, when the rest is cut off
DIGITS = 1e-9  # to which fewer rows give the same: sums of another length round otherwise
TELLING = 0.25  # rank correlation with a move to come: 58 % right signs, of normal moves, from one column alone
ENOUGH = 200  # rows for it


def finished_columns(klines: Klines, task: Task) -> list[str]:
    """Name the features that came finished with the bars: neither indicators nor functions."""
    made = {name for name in task.features if indicators.is_indicator(name) or own.is_own(name)}
    return [name for name in task.features if name in klines.frame and name not in made]


def choose_spots(index: pd.DatetimeIndex) -> list[int]:
    """Choose the rows after which bars are poisoned: evenly, the ends, around gaps and days, at each time of day."""
    last, times = len(index) - 2, index.as_unit("s").asi8
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


def check_making(klines: Klines, task: Task) -> Finding:
    """Rerun the making of each feature and target with the bars after a spot scaled, shuffled or cut off.

    What was there up to the spot must stay as it is: to the bit, or to nine digits where bars are cut off. Files of own
    functions are run anew each time, or what one remembers of all bars would hide that it does.
    """
    check = "the making of features knows no future"
    finished = finished_columns(klines, task)
    names = [name for name in dict.fromkeys([*task.features, *(TARGETS[t][0] for t in task.targets)])]
    names = [name for name in names if name not in finished]
    frame = klines.frame.drop(columns=finished)

    def make(frame: pd.DataFrame) -> np.ndarray:
        own.forget(names)
        return indicators.compute(frame, names).to_numpy()

    clean, spots = make(frame), choose_spots(frame.index)
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


def note_finished(klines: Klines, task: Task) -> list[Finding]:
    """Say of which columns nothing is known, because nobody can make them anew."""
    finished = finished_columns(klines, task)
    if not finished:
        return []
    said = f"{', '.join(finished)} came finished with the bars, so their making cannot be rerun: nothing is known of it"
    return [Finding("finished columns", "NOTE", f"{said}. A function, mine.py:name, can be audited")]


def check_telling(klines: Klines, task: Task) -> Finding:
    """Raise an alarm at a feature that tells a move to come better than any market's own past does.

    Each feature and its change are held against the next move and that over the horizon, by rank correlation.
    """
    check, made = "no feature tells too much", [n for n in task.features if n not in finished_columns(klines, task)]
    table = indicators.compute(klines.frame, made).join(klines.frame[finished_columns(klines, task)])
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
