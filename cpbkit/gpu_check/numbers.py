"""What is measured of one training step, from which difference on it counts, and what a fix could gain: pure."""

import math
from dataclasses import dataclass, replace

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


def predict(n: Numbers, *, host=None, device=None, lost=None) -> float:
    """Predict the loop's time when some of its parts change.

    On a GPU host and device overlap and the loader runs on the host: W = max(H + L, D) + lost, where what is
    lost to waiting closes the sum. On a CPU nothing overlaps. Workers load beside the host.
    """
    lost = max(0.0, n.loop - _combine(n, n.host, n.device)) if lost is None else lost
    return _combine(n, n.host if host is None else host, n.device if device is None else device) + lost


def _combine(n: Numbers, host: float, device: float) -> float:
    if n.serial:
        return host + device + (0.0 if n.workers else n.loader)
    return max(host, device, n.loader) if n.workers else max(host + n.loader, device)


def pool(n: Numbers) -> Numbers:
    """Average what must be equal on a GPU, and is within the noise: the gain is then told from three looks, not one.

    A step without waits takes the longer of host and device: N = max(H, D); a loop is what its parts predict.
    """
    if n.serial:
        return n
    clear, busy = n.clear_ratio, max(n.host, n.device)
    waits = not 1 / clear <= n.cached / busy <= clear
    if not waits:
        cached = (n.cached + busy) / 2
        n = replace(n, cached=cached, host=cached) if n.host > n.device else replace(n, cached=cached, device=cached)
    lost = max(0.0, n.cached - busy) if waits else 0.0
    expected = _combine(n, n.host, n.device) + lost
    if not 1 / clear <= n.loop / expected <= clear:
        return n
    loop = (n.loop + expected * (2 - waits)) / (3 - waits)  # without waits the expected one stands for two looks
    if waits:
        return replace(n, loop=loop)
    factor = loop / expected
    if n.host + n.loader > n.device:
        return replace(n, loop=loop, host=n.host * factor, loader=n.loader * factor)
    return replace(n, loop=loop, device=n.device * factor)


def list_ceilings(n: Numbers) -> dict[str, tuple[float, str]]:
    """Return fix -> (the most it could gain, why) for everything that applies to these numbers."""
    launched = n.loop / predict(n, host=0.0, lost=0.0)
    kept = min(n.cached, n.resident) if math.isfinite(n.resident) else n.cached
    fixes = {}
    if n.rnn in ("cells", "native"):
        fixes["library layer"] = launched, f"{n.kernels:,.0f} calls a step, written out"
    if not n.serial:
        fixes["CUDA graph"] = launched, f"the device needs {n.device:.3g} ms of {n.loop:.3g}"
    # Series beside each other share the launches, and the multiprocessors that one leaves idle.
    shared = NAN
    if math.isfinite(n.filled):
        shared = n.loop / predict(n, host=0.0, device=n.device * max(n.filled, 0.01), lost=0.0)
    fixes["stack of series"] = shared, "many series a launch; a series, not a step, gets faster"
    if n.serial:  # on a CPU larger operators also compute faster: no bound from the calls alone
        fixes = {name: (NAN, why) for name, (_, why) in fixes.items()}
    else:
        fixes["no waits"] = n.loop / predict(n, lost=0.0), f"{n.waits:.3g} waits a step"
    if n.loader > 0 or n.copy > 0:
        why = f"the loader and copies cost {max(n.loop - kept, 0):.3g} ms a step"
        fixes["data on the device"] = n.loop / kept, why
    if n.optimizer_share > 0:
        host = n.host * (1 - n.optimizer_share)
        fixes["fused optimiser"] = n.loop / predict(n, host=host), f"{n.optimizer_share:.0%} of the host time"
    if n.copy > 0:
        fixes["no copies"] = n.loop / predict(n, device=n.device - n.copy), f"copies take {n.copy:.3g} ms"
    if math.isfinite(n.arithmetic) and n.precision == "float32" and n.capability >= (7, 0):
        device = n.device - min(n.arithmetic, n.device)
        fixes["float16"] = n.loop / predict(n, device=device), f"arithmetic is {n.arithmetic:.2g} ms of {n.loop:.3g}"
    if n.rnn == "cudnn standard":
        fixes["persistent width"] = NAN, "a width up to 128, fixed windows, float32 or float16: time it again"
    fixes["larger batch"] = NAN, "for samples a second; look for the knee"
    return fixes
