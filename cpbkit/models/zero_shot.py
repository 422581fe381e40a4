"""A foundation model that was trained elsewhere, as a network or as one more forecast to beat: Chronos."""

import functools
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from cpbkit.config.experiment import Model, Task
from cpbkit.errors import CpbkitError
from cpbkit.models.layers import Teacher
from cpbkit.texts import printable

if TYPE_CHECKING:
    from cpbkit.windows.series import Series
    from cpbkit.windows.windows import Windows

SEEN = 512  # rows, at most, by the naive forecast
WINDOWS = 256  # at once
# Days on which the families were published; what came later none of them can have seen in training.
PUBLISHED = {"chronos-t5": "2024-03-13", "chronos-bolt": "2024-11-26", "chronos-2": "2025-10-20"}


def name_of(place: str) -> str:
    """Return the name of a model beside the other naive forecasts: `chronos-bolt-tiny`."""
    return Path(place).name


def is_local(place: str) -> bool:
    """Say whether a place is a folder of this machine, there or not, and no repository of the Hub."""
    return os.path.isdir(os.path.expanduser(place)) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", place)


@functools.lru_cache(maxsize=1)
def load(place: str):
    """Load a Chronos model from a local folder or, by its name, from the Hub; safetensors alone, and no code.

    Errors: CpbkitError for what is no such model; ModuleNotFoundError without `cpbkit[zeroshot]`.
    """
    from chronos import BaseChronosPipeline
    from transformers.utils import logging

    folder = os.path.expanduser(place)
    if is_local(place) and not os.path.isdir(folder):
        raise CpbkitError(
            f"zero_shot must name a folder with a Chronos model, found from {os.getcwd()}, or a repository of the Hub; "
            f"there is no folder {place!r}"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {"device_map": device, "dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of a moment's work, in each worker
    try:
        return BaseChronosPipeline.from_pretrained(folder, **given)
    except (OSError, ValueError) as error:
        reason = printable(str(error).splitlines()[0])
        raise CpbkitError(f"zero_shot must name a folder or a repository with a Chronos model; {reason}") from None
    finally:
        if drawn:
            logging.enable_progress_bar()


@torch.no_grad()
def predict(place: str, past: Tensor, horizon: int, quantiles: Sequence[float] = (0.5,)) -> Tensor:
    """Return the model's quantiles of what follows each window, in order: (N, L), NaN where unseen -> (N, H, Q).

    Errors: as of `load`; CpbkitError for quantiles that the model does not know.
    """
    model, found = load(place), []
    known = getattr(model, "quantiles", (0, 1))  # the first family draws samples, which have any
    if not min(known) <= min(quantiles) <= max(quantiles) <= max(known):
        raise CpbkitError(
            f"quantiles of {name_of(place)} must be from {min(known):g} to {max(known):g}, which it was trained for; "
            f"got {', '.join(f'{level:g}' for level in quantiles)}"
        )
    for windows in past.float().split(WINDOWS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that long horizons are worse: the verdict itself shows that
            told, _ = model.predict_quantiles(  # a list is what all families take
                list(windows), prediction_length=horizon, quantile_levels=list(quantiles)
            )
        found += told if isinstance(told, list) else [told]  # Chronos-2 gives a tensor (1, H, Q) for each window
    return torch.cat(found).sort(dim=-1).values.to(past)


class Chronos(nn.Module):
    """Chronos-Bolt or Chronos-2 as they were trained; Ansari et al. 2024, arxiv.org/abs/2403.07815, and 2510.15821.

    All channels of all series are windows of one batch. It has no weights here: the task knows where they are.
    """

    gives_quantiles = True

    def __init__(self, models: int, task: Task, settings: Model):
        super().__init__()
        if not task.zero_shot:
            raise CpbkitError(
                "chronos needs zero_shot, a folder or a name on the Hub, such as amazon/chronos-bolt-tiny"
            )
        self.task = task

    def forward(self, x: Tensor, last: Tensor, teacher: Teacher | None = None) -> Tensor:
        task, past = self.task, (x - x[:, :, -1:]).transpose(2, 3)  # (M, B, L, C) -> (M, B, C, L)
        told = predict(task.zero_shot, past.flatten(0, 2), task.horizon, task.quantiles or (0.5,))
        y = told.unflatten(0, past.shape[:3]).transpose(2, 3) + last[:, :, None, :, None]  # (M, B, H, C, Q)
        return y if task.quantiles else y[..., 0]


def check(windows: "Windows") -> None:
    """Refuse inputs that are not the past of the targets, at their scale: the model goes on with what it sees.

    Errors: CpbkitError.
    """
    task = windows.task
    for series, scaler in zip(windows.series, windows.scalers, strict=True):
        scales = scaler.input_std, scaler.target_scale
        if not np.array_equal(series.inputs, series.levels) or not np.allclose(*scales):
            raise CpbkitError(
                "chronos goes on with what it sees: each feature must be its target's own past, log_close for close or "
                f"a table's column for itself, and target_scale standard; got {', '.join(task.features)} for "
                f"{', '.join(task.targets)}, target_scale {task.target_scale}"
            )


def forecast(place: str, series: "Series", columns: list[int], origins: np.ndarray, horizon: int) -> np.ndarray:
    """Return the model's median y at the origins, (W,) -> (W, H, targets); what lies before a gap it does not see."""
    rows = origins[:, None] + np.arange(1 - SEEN, 1)
    seen = (rows >= 0) & (series.segment[np.maximum(rows, 0)] == series.segment[origins][:, None])
    found = np.empty((len(origins), horizon, len(columns)))
    for i, k in enumerate(columns):
        last = series.levels[origins, k]
        past = np.where(seen, series.levels[np.maximum(rows, 0), k] - last[:, None], np.nan)
        told = predict(place, torch.as_tensor(past), horizon)[..., 0].numpy()
        found[..., i] = told + (last - series.anchors[origins, k])[:, None]
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
