"""Rows after a spot replaced by garbage: what may know the rows up to it only must not change by a bit.

It takes plain callables and tables, so that it examines the kit's own way of the data and anybody's alike.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from cpbkit.texts import wrapped


@dataclass(frozen=True)
class Finding:
    """One line of the audit's table."""

    check: str
    verdict: str  # OK | NOTE | FAIL
    evidence: str


class Findings(pd.DataFrame):
    """What an audit found, a row per `Finding`; printed in lines, for evidence is too long for a column."""

    @property
    def _constructor(self) -> type["Findings"]:  # of its parts, as pandas asks for
        return Findings

    def _repr_html_(self) -> str | None:
        with pd.option_context("display.max_colwidth", None):
            return super()._repr_html_()

    def __repr__(self) -> str:
        if list(self) != [field.name for field in fields(Finding)]:  # a part of it
            return super().__repr__()
        return wrapped(f"{verdict:5} {check}: {evidence}" for check, verdict, evidence in self.to_numpy())


@dataclass(frozen=True)
class Column:
    """What a pipeline made, entry by entry, and the last raw row that each entry may know."""

    values: np.ndarray  # (n, ...)
    knows: np.ndarray  # (n,) int, rows of the raw table


Pipeline = Callable[[pd.DataFrame], Mapping[str, Column]]


def check_future(
    pipeline: Pipeline, raw: pd.DataFrame, spots: Iterable[int] | None = None, check: str = "future"
) -> Finding:
    """Replace every row after a spot by garbage; what may know the rows up to it only must not change by a bit.

    raw: the table that the pipeline starts from, numbers only. spots: rows; by default two dozen, and the first
    and last that each column may know. FAIL names the first column that changes, in the pipeline's order.
    """
    last = len(raw) - 2
    clean = pipeline(raw)
    if spots is None:
        borders = [border for c in clean.values() for border in (c.knows.min(), c.knows.max())]
        spots = [*np.linspace(1, last, 24), *borders]
    spots = sorted({min(int(spot), last) for spot in spots})
    for spot in spots:
        for kind, garble in GARBAGE.items():
            dirty = pipeline(poison(raw, spot, garble))
            for name, column in clean.items():
                row = _first_difference(column, dirty[name], spot)
                if row is not None:
                    at = f"`{name}` of row {row} changes when the rows after {spot} are {kind}"
                    return Finding(check, "FAIL", f"{at}: it knows the future")
    evidence = f"{len(clean)} columns are the same to the bit, at {len(spots)} spots of {len(raw)} rows"
    return Finding(check, "OK", evidence)


GARBAGE: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    # One factor a row: open, high, low and close stay in order, as a check at the door may ask.
    "scaled": lambda values, rng: values * (1000 * rng.lognormal(size=(len(values), 1))),
    "shuffled": lambda values, rng: rng.permutation(values),
}


def poison(raw: pd.DataFrame, spot: int, garble: Callable) -> pd.DataFrame:
    values = raw.to_numpy(np.float64).copy()
    values[spot + 1 :] = garble(values[spot + 1 :], np.random.default_rng(spot))
    return pd.DataFrame(values, raw.index, raw.columns)


def _first_difference(clean: Column, dirty: Column, spot: int) -> int | None:
    mine, other = clean.knows <= spot, dirty.knows <= spot
    if not np.array_equal(clean.knows[mine], dirty.knows[other]):
        return int(np.setxor1d(clean.knows[mine], dirty.knows[other])[0])
    a, b = clean.values[mine], dirty.values[other]
    same = (a == b) | ((a != a) & (b != b))  # NaN in both is the same
    same = same.all(axis=tuple(range(1, a.ndim)))
    return None if same.all() else int(clean.knows[mine][same.argmin()])
