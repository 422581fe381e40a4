"""What is measured of one training step, and from which difference on it counts: pure."""

import math
from dataclasses import dataclass

NAN = float("nan")


@dataclass(frozen=True)
class Policy:
    """The thresholds; they travel with every verdict."""

    least_excess: float = 0.10  # a ratio must exceed 1 by this, and by `sigmas` standard errors
    sigmas: float = 3.0
    copy_share: float = 0.15  # of the device time: above, copies are the reason
    filled_share: float = 0.30  # of the multiprocessors: below, the device waits for its own latency
    doubling: float = 1.25  # device time of twice the batch, as a ratio: below, the device has room
    least_gain: float = 1.10  # a fix that cannot gain this is not advised


POLICY = Policy()


@dataclass(frozen=True)
class Numbers:
    """What was measured for one optimiser step: medians, in ms. NaN means not known."""

    loop: float  # W: the person's loop, loader and copies included
    cached: float  # N: the same step on one batch that lies on the host
    host: float  # H: what Python and the driver need to enqueue it
    device: float  # D: what the device needs when everything is enqueued
    resident: float = NAN  # N with the batch already on the device
    loader: float = 0.0  # L: the loader alone
    copy: float = 0.0  # C: host to device, within D
    kernels: float = 0.0  # K: launches; on a CPU, operator calls
    waits: float = 0.0  # S: times the host waits for the device
    filled: float = NAN  # share of the multiprocessors with work while the device works
    doubling: float = NAN  # device time of twice the batch over D
    arithmetic: float = NAN  # the step's FLOP at the chip's stated peak of its precision
    optimizer_share: float = 0.0  # of H, spent in an optimiser that walks tensor by tensor
    growth: float = 0.0  # bytes of live memory a step, where it grows steadily
    spread: float = 0.0  # relative standard error of the medians, the largest
    batch: int = 0  # samples a step
    workers: int = 0  # of the loader
    rnn: str = ""  # "" none | cudnn persistent | cudnn standard | native | cells
    precision: str = "float32"
    capability: tuple[int, int] = (0, 0)  # of the chip; (0, 0) is a CPU
    serial: bool = False  # host and device are the same processor: times add up
    misplaced: tuple[str, ...] = ()  # tensors on another device than the model should use
    wait_lines: tuple[str, ...] = ()  # where in the person's code the waits are

    def __post_init__(self):
        for name in ("loop", "cached", "host", "device"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive time in ms; got {value!r}")

    @property
    def clear_ratio(self) -> float:
        """The ratio of two of these times above which they differ, whatever the noise."""
        return 1 + max(POLICY.least_excess, POLICY.sigmas * math.sqrt(2) * self.spread)
