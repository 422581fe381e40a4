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
# The same of the move of one later row, of which many are looked at: a walk 3 or 12 rows ahead has 0.99 with noise of a
# tenth of a step and 0.79 with half a step. Clocks, weather and copies of past days keep at most 0.70 in drawn days of
# 24 or 96 rows, and that of targets without noise.
TELLING_LATER = 0.75
# It has to tell this much more of the moves ahead than, with time turned round, of those behind: a leak has 0.1 there.
MARGIN = 0.1
LEADS, MOST_LEADS = 24, 192  # rows ahead: twice the horizon, at least and at most
ROWS_PER_LEAD = 10  # a correlation with a far row is left out where it has few rows
MOST_ROWS = 20_000  # the newest, for later rows
SEASON = 700  # lags, in which a season is looked for: a week of quarters of an hour is 672
ENOUGH = 200  # rows for any of it
ENOUGH_LATER = 400  # bars: of some thousand correlations one reaches 0.25 by chance with 200
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

    Each feature and its change are held against the next move and each later one alone, and of bars against that over
    the horizon too, by rank correlation; of a table, whose past may tell much by itself, with what that leaves open of
    both.
    """
    if isinstance(data, Klines):
        return _check_bars(data, task)
    check, telling = "no feature tells too much", _find_telling(to_series(data, task), task.horizon)
    if not telling:
        return Finding(check, "NOTE", "no feature but the targets' own past, or too few rows to say")
    (share, feature, target, ahead), *others = telling
    said = f"`{feature}` ranks what the past of `{target}` leaves open of its next row"
    if ahead > 1:
        said = f"`{feature}` ranks the move of `{target}` {ahead} rows ahead"
    said += f" with a correlation of {share:.2f}"
    bound = TELLING_LATER if ahead > 1 else TELLING_OF_TABLE
    if share > bound:
        said += f", above {bound:g}: it knows that row, unless it is a plan or a cause that was there before"
        likewise = [
            f"`{other}` of `{of}`" + (f" {rows} rows ahead" if rows > 1 else "")
            for high, other, of, rows in others
            if high > TELLING_OF_TABLE
        ]
        said += f". Likewise {', '.join(likewise[:MOST_NAMED])}" if likewise else ""
        return Finding(check, "FAIL", said)
    return Finding(check, "OK", said)


def _find_telling(series: Series, horizon: int) -> list[tuple[float, str, str, int]]:
    """Return each feature's highest rank correlation with a target's move, past removed, the highest first.

    The move is the next one, or a later one where that is an alarm: (correlation, feature, target, rows ahead).
    """
    worst: dict[str, tuple[float, str, str, int]] = {}
    if len(series) - 1 - LAGS < ENOUGH:
        return []
    inputs = np.concatenate([series.inputs, np.diff(series.inputs, axis=0, prepend=series.inputs[:1])], axis=1)
    leads = _later_leads(horizon, len(series) - LAGS)
    new = slice(-MOST_ROWS, None)
    for level, target in zip(series.levels.T, series.targets, strict=True):
        shares = _hold_against(level, inputs, range(1, 2))[0]
        found = [(share, c, 1) for c, share in enumerate(shares) if share > 0]
        found += _find_later(level[new], inputs[new], leads)
        for share, c, lead in found:
            feature = series.features[c % len(series.features)]
            worst[feature] = max(worst.get(feature, (0.0, "", "", 1)), (float(share), feature, target, lead))
    return sorted(worst.values(), reverse=True)


def _find_later(level: np.ndarray, inputs: np.ndarray, leads: range) -> list[tuple[float, int, int]]:
    """Return the columns that know a later move: (correlation, column, rows ahead).

    An honest clock or a copy of last week ranks such a move too, so it has to hold twice more. With time turned round
    a clock tells as much, a leak nothing. And the values of the season before are removed as well: of the lag beyond
    LAGS at which the column looks most like a move that was.
    """
    found: list[tuple[float, int, int]] = []
    shares = _hold_against(level, inputs, leads) if leads else np.zeros((1, inputs.shape[1]))
    high = np.flatnonzero(shares.max(axis=0) > TELLING_LATER)
    if not len(high):
        return found
    behind = _hold_against(level[::-1], inputs[::-1][:, high], leads).max(axis=0)
    moves = _rank(np.diff(level, prepend=level[:1])[:, None])[:, 0]
    for c in high[shares[:, high].max(axis=0) > behind + MARGIN]:
        lead, column = leads[int(shares[:, c].argmax())], _rank(inputs[:, [c]])[:, 0]
        alike = [abs(column[back:] @ moves[:-back]) for back in range(LAGS, min(SEASON, len(level) // 3))]
        again = _hold_against(level, inputs[:, [c]], range(lead, lead + 1), LAGS + int(np.argmax(alike)))[0, 0]
        found += [(again, int(c), lead)] if again > TELLING_LATER else []
    return found


def _hold_against(level: np.ndarray, inputs: np.ndarray, leads: range, season: int = 0) -> np.ndarray:
    """Return how features rank single moves of a level, the past removed from both: (N,), (N, C) -> (leads, C).

    leads: 1 for the move to the next row. season: a lag beyond LAGS, which is removed too. All in 0..1.
    """
    rows = np.arange(max(LAGS, season + 1), len(level) - leads[-1])
    lags = [*range(LAGS), *([season, season + 1] if season else [])]
    past = np.column_stack([np.ones(len(rows)), *(level[rows - back] for back in lags)])
    moves = np.column_stack([level[rows + lead] - level[rows + lead - 1] for lead in leads])
    both = np.concatenate([moves, inputs[rows]], axis=1)
    left = both - past @ np.linalg.lstsq(past, both, rcond=None)[0]
    told = left.std(axis=0) > LEFT * both.std(axis=0)  # the target's own column leaves nothing
    ranks = np.where(told, _rank(left), 0.0)
    return np.abs(ranks[:, : len(leads)].T @ ranks[:, len(leads) :])


def _rank(values: np.ndarray) -> np.ndarray:
    """Return ranks of mean 0 and length 1, whose products are rank correlations; 0 where a value is not finite."""
    ranks = pd.DataFrame(np.where(np.isfinite(values), values, np.nan)).rank()
    ranks = (ranks - ranks.mean()).fillna(0.0).to_numpy()
    length = np.linalg.norm(ranks, axis=0)
    return ranks / np.where(length > 0, length, 1.0)


def _later_leads(horizon: int, rows: int) -> range:
    return range(2, min(max(2 * horizon, LEADS), MOST_LEADS, rows // ROWS_PER_LEAD) + 1)


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
    later = _find_later_bar(table, close, _later_leads(task.horizon, len(close)))
    if later[0] > max(share, TELLING):
        share, name, ahead = later
        evidence = f"`{name}` ranks the move of the bar {ahead} ahead with a correlation of {share:.2f}"
    if share > TELLING and not klines.passport.synthetic:
        return Finding(check, "FAIL", f"{evidence}, above {TELLING:g}: no liquid market gives that; look for a leak")
    return Finding(check, "OK" if name else "NOTE", evidence)


def _find_later_bar(table: pd.DataFrame, close: pd.Series, leads: range) -> tuple[float, str, int]:
    """Return the highest rank correlation of a column or its change with the move of one later bar."""
    names = [name for name in table if np.isfinite(table[name]).sum() >= ENOUGH_LATER]
    if not names or not leads:
        return 0.0, "", 0
    columns = table[names].astype(float)
    held = _rank(np.concatenate([columns, columns.diff(), columns.sub(close, axis=0)], axis=1))
    moves = _rank(np.column_stack([close.diff().shift(-lead) for lead in leads]))
    shares = np.abs(moves.T @ held)
    lead, column = np.unravel_index(shares.argmax(), shares.shape)
    return float(shares[lead, column]), names[column % len(names)], leads[lead]
