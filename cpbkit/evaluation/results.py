"""What a run knows of its models: a line of the ledger for each that is through, and where the others stand."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from cpbkit import foreign

LOSSES = {"train?": float, "validation?": float}
WHOLE = ("nominal", "dates", "over_time", "unit", "width", "coverage")  # of what intervals held, what views show
HELD = {  # by the prediction intervals of a head
    "dates?": [datetime],
    "over_time?": [float],
    "unit?": str,
    **dict.fromkeys(("nominal?", "width?", "coverage?"), float),
    **dict.fromkeys(("coverage_wild?", "coverage_worst_step?"), float | None),
    **dict.fromkeys(("score?", "crps?", "score_persistence?", "crps_persistence?"), float),
}
MADE_UP = "SYNTHETIC: the data were made up, so no figure here is one of a market"
INNER = {  # what the types of the fields leave open
    **{"test?": {"*": {"spread?": float}}, "persistence?": LOSSES, "mean?": LOSSES, "dates?": {"*": (str, str)}},
    **{"prediction_intervals?": {"*": HELD}},
}


@dataclass(frozen=True)
class ResultLine:
    """How the training of one series ended, and what its model is worth: a line of the ledger."""

    series: str
    status: str  # done | sick (a value was not finite) | failed (never trained)
    reason: str = ""  # why the training ended, or why there is none
    test: dict[str, dict] = field(default_factory=dict)  # head -> Judgement.to_dict; `judgements` reads it
    before: dict[str, dict] = field(default_factory=dict)  # of a refit: the same of the model before it
    synthetic: bool = False
    preset: str = ""
    parameters: int = 0
    epochs: int = 0  # trained
    best_epoch: int = 0  # of the lowest validation loss; the first is 1
    seconds: float = 0.0  # from the start of its stack
    mode: str = ""  # how a step was computed
    curve: dict[str, list[float | None]] = field(default_factory=dict)  # train, ... -> of each epoch; None: not finite
    persistence: dict[str, float] = field(default_factory=dict)  # train, validation -> loss of this baseline
    mean: dict[str, float] = field(default_factory=dict)
    windows: dict[str, int] = field(default_factory=dict)  # of each split
    dates: dict[str, list[str]] = field(default_factory=dict)  # of each split: its first and last bar, UTC
    prediction_intervals: dict[str, dict] = field(default_factory=dict)  # head -> what they held in the test split
    quantiles: dict[str, dict] = field(default_factory=dict)  # head -> what forecast quantiles held there
    passport: dict[str, Any] = field(default_factory=dict)  # of its bars
    data_sha256: str = ""  # of the columns it was trained and judged on
    folds: list[dict[str, list[str]]] = field(default_factory=list)  # the dates of each, where there are several
    search: list[dict] = field(default_factory=list)  # the settings that were tried, with their validation losses
    tried: list[str] = field(default_factory=list)  # larger stacks that were tried before, and how they ended

    @classmethod
    def from_json(cls, text: bytes | str) -> "ResultLine":
        """Read a line of any version: what it lacks has its default, and what only that version knows is left out.

        Errors: Damaged for what is no such line.
        """
        raw = foreign.parse(text, dict)
        if "intervals" in raw:  # as earlier versions called them
            raw["prediction_intervals"] = raw.pop("intervals")
        foreign.check(raw, FORM)
        for told in raw.get("prediction_intervals", {}).values():
            if len(told.get("dates", ())) != len(told.get("over_time", ())):
                raise foreign.Damaged("'over_time' is of other dates")
        fields = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in raw.items() if name in fields})

    @property
    def chosen(self) -> dict[str, float]:
        """The settings that validation chose of those that were tried; empty without a search."""
        done = [trial for trial in self.search if trial.get("validation") is not None]
        best = min(done, key=lambda trial: trial["validation"], default={})
        return {name: value for name, value in best.items() if name != "validation"}

    def coverage(self) -> dict[str, dict]:
        """Return what the prediction intervals held, by head, where all of it is told."""
        by_head = self.prediction_intervals.items()
        return {head: told for head, told in by_head if told.keys() >= set(WHOLE) and told["dates"]}

    def to_json(self) -> str:
        """Write it as one line of JSON. Errors: ValueError for a number that is not finite."""
        return json.dumps(vars(self), allow_nan=False, separators=(",", ":"))


FORM = {**foreign.form_of(ResultLine), **INNER}


def is_synthetic(results: Iterable[ResultLine]) -> bool:
    """Say whether any of the results came from made-up bars."""
    return any(line.synthetic or line.passport.get("synthetic") for line in results)


def group_heads(told: Iterable[Mapping[str, Any]]) -> dict[str, list]:
    """Put together by head what is told by head of each of several: series, or test periods."""
    found: dict[str, list] = {}
    for by_head in told:
        for head, one in by_head.items():
            found.setdefault(head, []).append(one)
    return found


@dataclass(frozen=True)
class Running:
    """A model that trains now."""

    curve: Mapping[str, Sequence[float]]
    persistence: Mapping[str, float]
    share: float = 0.0  # of its epochs that it has behind it


def relative(entry: ResultLine | Running, split: str) -> np.ndarray:
    """Return each epoch's loss as a share of persistence's on the same split: below 1 is better.

    Where that is not above 0, as an own loss may have it, 1 and what it differs by.
    """
    losses = np.asarray(entry.curve.get(split, ()), dtype=float)  # null in the ledger is NaN here
    naive = entry.persistence.get(split, math.nan)
    return losses - naive + 1 if naive <= 0 else losses / naive
