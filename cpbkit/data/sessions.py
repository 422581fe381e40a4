"""When a market that does not trade around the clock is closed, as its own bars tell."""

import numpy as np

DAY_NS = 86_400_000_000_000  # ns
AROUND = 10  # days before and after that say which hours are usual: summer time moves them
LONGEST = 5 * DAY_NS  # of what may be closed; all of a longer hole is missing
HOLIDAY = 5 * DAY_NS // 6  # of a market that is closed at weekends alone
SHORT_DAY = 4  # the rest of a session may be closed where it is at least this part of it
ODD = 0.05  # the largest share of bars at unusual hours, or on a free day of the week
LEAST = 3  # days with bars
SPARSE = 100  # hours of the week, and some more, for one that has bars


def closed_bars(starts: np.ndarray, low: int, high: int, step: int) -> np.ndarray:
    """Return the bar starts from low to high (all ns) at which a market with sessions was closed; else none.

    starts (N,): of the bars, on the grid. Closed are the hours that have no bar on most days around, and where all of
    it is missing a session, a large rest of one, or a day of a market that has free days in the week.
    """
    if step > DAY_NS or (high - low) // step > SPARSE * len(starts):
        return starts[:0]
    grid = np.arange(low, high + step, step)
    traded = np.zeros(len(grid), bool)
    traded[(starts - low) // step] = True
    table = np.pad(traded, (0, -len(grid) % (DAY_NS // step))).reshape(-1, DAY_NS // step)
    days = np.asarray(table.any(axis=1))[:, None]
    if traded.all() or days.sum() < LEAST:
        return starts[:0]
    usual = np.where(_around(days) > 0, 2 * _around(table) > _around(days), 2 * table.sum(axis=0) > days.sum())
    usual = usual.ravel()[: len(grid)]
    weekday = (grid // DAY_NS + 3) % 7
    by_weekday = [traded[weekday == day] for day in range(7)]
    free = np.array([len(bars) >= 2 * DAY_NS // step and bars.mean() < ODD for bars in by_weekday])[weekday]

    gaps, sessions = _runs(~traded), _runs(usual)
    closed = ~usual & ~traded
    for begin, end in _runs(usual & ~traded):
        gap = gaps[np.searchsorted(gaps[:, 0], begin, side="right") - 1]
        opens, closes = sessions[np.searchsorted(sessions[:, 0], begin, side="right") - 1]
        at_edge = begin == opens > 0 or end == closes < len(grid)
        rest = at_edge and SHORT_DAY * (end - begin) >= closes - opens
        # A day or two before the clock is changed, at the edge of a file: as much is traded beyond the other end.
        before, after = traded[max(0, opens - (end - begin)) : opens], traded[closes : closes + end - begin]
        moved = (end == closes and before.any() and before.all()) or (begin == opens and after.any() and after.all())
        if (gap[1] - gap[0]) * step > LONGEST:
            closed[begin:end] = free[begin:end]
        elif rest or moved or (free.any() and (end - begin) * step >= HOLIDAY):
            closed[begin:end] = True
    odd, missing = (traded & ~usual).sum(), (~traded & ~closed).sum()
    return grid[closed] if odd <= ODD * len(starts) and 4 * missing <= len(starts) else starts[:0]


def _around(table: np.ndarray) -> np.ndarray:
    """Count what is true in the rows (days) around each, itself included: (D, C)."""
    sums = np.cumsum(np.pad(table.astype(np.int32), ((1, 0), (0, 0))), axis=0)
    day = np.arange(len(table))
    return sums[np.minimum(day + AROUND + 1, len(table))] - sums[np.maximum(day - AROUND, 0)]


def _runs(mask: np.ndarray) -> np.ndarray:
    """Return where the true stretches of a mask begin and end: (R, 2)."""
    return np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8))).reshape(-1, 2)
