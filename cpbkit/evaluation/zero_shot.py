"""A foundation model that was trained elsewhere, as one more forecast to beat: Chronos, from a folder or the Hub."""

import functools
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from cpbkit.errors import CpbkitError
from cpbkit.texts import printable

if TYPE_CHECKING:
    from cpbkit.windows.series import Series

CONTEXT = 512  # rows that it sees at most
WINDOWS = 256  # at once
# Days on which the families were published; what came later none of them can have seen in training.
PUBLISHED = {"chronos-t5": "2024-03-13", "chronos-bolt": "2024-11-26", "chronos-2": "2025-10-20"}


def name_of(place: str) -> str:
    """Return the name of a model beside the other naive forecasts: `chronos-bolt-tiny`."""
    return Path(place).name


@functools.lru_cache(maxsize=1)
def load(place: str):
    """Load a Chronos model from a local folder or, by its name, from the Hub; safetensors alone.

    Errors: CpbkitError for what is no such model; ModuleNotFoundError without `cpbkit[zeroshot]`.
    """
    from chronos import BaseChronosPipeline

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return BaseChronosPipeline.from_pretrained(
            os.path.expanduser(place), device_map=device, dtype=torch.float32, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        reason = printable(str(error).splitlines()[0])
        raise CpbkitError(f"zero_shot must name a folder or a repository with a Chronos model; {reason}") from None


@torch.no_grad()
def forecast(place: str, series: "Series", columns: list[int], origins: np.ndarray, horizon: int) -> np.ndarray:
    """Return the model's median y at the origins, (W,) -> (W, H, targets); what lies before a gap it does not see."""
    model = load(place)
    rows = origins[:, None] + np.arange(1 - CONTEXT, 1)
    seen = (rows >= 0) & (series.segment[np.maximum(rows, 0)] == series.segment[origins][:, None])
    found = np.empty((len(origins), horizon, len(columns)))
    for i, k in enumerate(columns):
        last = series.levels[origins, k]
        past = np.where(seen, series.levels[np.maximum(rows, 0), k] - last[:, None], np.nan)
        for at in np.array_split(np.arange(len(origins)), -(-len(origins) // WINDOWS)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that long horizons are worse: the row itself shows that
                context = torch.as_tensor(past[at], dtype=torch.float32)
                told, _ = model.predict_quantiles(context, prediction_length=horizon, quantile_levels=[0.5])
            found[at, :, i] = told[..., 0].double().cpu().numpy() + (last - series.anchors[origins, k])[at, None]
    return found


def say_dates(place: str, series: "Series", origins: np.ndarray) -> str:
    """Say whether its training can have reached into the test."""
    name, first = name_of(place), str(series.times[origins[0]].astype("datetime64[D]"))
    published = next((day for family, day in PUBLISHED.items() if name.startswith(family)), None)
    if published is None:
        return f"{name}: it is not known here when it was trained; it may have seen the test dates, from {first} on"
    if first > published:
        return f"{name} was published on {published}, before the test begins ({first}): it has not seen it"
    return f"{name} was published on {published} and the test begins on {first}: it may have seen such bars in training"
