"""Which kernels nn.LSTM and nn.GRU will run on a GPU: cuDNN persistent, cuDNN standard, or native.

The rules are those of PyTorch's aten/src/ATen/native/cudnn/RNN.cpp (get_algo): read, not measured. On a GPU
`probes.time_recurrence` holds them against the kernels of a real run.
"""

import re
from dataclasses import dataclass

MODES = ("lstm", "gru", "relu", "tanh")
SMALL_HIDDEN = {True: {"lstm": 192, "gru": 192, "relu": 384, "tanh": 384},
                False: {"lstm": 128, "gru": 128, "relu": 256, "tanh": 256}}  # forward, backward  # fmt: skip


@dataclass(frozen=True)
class Recurrence:
    """A recurrent layer as it is called."""

    mode: str = "lstm"  # lstm | gru | relu | tanh
    hidden: int = 128
    inputs: int = 8  # features of a step
    layers: int = 1
    bidirectional: bool = False
    dtype: str = "float32"  # float32 | float16 | bfloat16 | float64
    packed: bool = False  # a PackedSequence
    projection: int = 0  # proj_size of nn.LSTM
    batch: int = 32
    length: int = 60  # steps in time

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}; got {self.mode!r}")


@dataclass(frozen=True)
class Path:
    """What will run, forward and backward, and the rule that decides."""

    forward: str  # persistent | standard | native
    backward: str
    reason: str

    @property
    def name(self) -> str:
        """As `numbers.Numbers.rnn`: the worse of the two directions."""
        worst = max((self.forward, self.backward), key=("persistent", "standard", "native").index)
        return "native" if worst == "native" else f"cudnn {worst}"


def predict_path(
    r: Recurrence,
    capability: tuple[int, int] = (7, 5),
    multiprocessors: int = 40,
    cudnn: int = 91002,
    enabled: bool = True,
) -> Path:
    """Predict the path on a chip; cudnn: the version as torch.backends.cudnn.version() says it."""
    if not enabled:
        return Path("native", "native", "cuDNN is off")
    if r.dtype == "bfloat16" and (capability < (8, 0) or cudnn < 91300):
        return Path("native", "native", "bfloat16 needs capability 8.0 and cuDNN 9.13")
    if r.projection:
        return Path("standard", "standard", "a projection has the standard algorithm only")
    if r.packed:
        return Path("standard", "standard", "a PackedSequence has the standard algorithm only")
    if r.dtype == "float64":
        return Path("standard", "standard", "float64 has the standard algorithm only")
    if capability >= (6, 0) and cudnn >= 8201:
        small = [r.hidden <= SMALL_HIDDEN[forward][r.mode] for forward in (True, False)]
    else:
        small = [False, False]
    large = r.dtype == "float16" and _large_persists(r, capability, multiprocessors)
    forward, backward = ("persistent" if good or large else "standard" for good in small)
    limits = f"{SMALL_HIDDEN[True][r.mode]} forward, {SMALL_HIDDEN[False][r.mode]} backward"
    reason = "the float16 rule for large layers" if large and not all(small) else f"hidden {r.hidden}: limits {limits}"
    return Path(forward, backward, reason)


def _large_persists(r: Recurrence, capability: tuple[int, int], multiprocessors: int) -> bool:
    shaped = r.layers == 1 and not r.bidirectional and r.hidden <= 1024 and r.hidden % 128 == 0
    if not (shaped and r.inputs % 128 == 0):
        return False
    b = r.batch
    if capability[0] == 7:
        if capability[1] == 5:
            return False
        good = (b % 16 == 0 and b not in (80, 112)) or b == 8
        return good and any(r.length >= length and b <= most for length, most in ((40, 128), (20, 96), (10, 32)))
    if capability[0] < 8 or capability[1] == 6 or multiprocessors < 98 or r.mode == "gru":
        return False
    return b % 8 == 0 and b <= 128 and (r.mode == "lstm" or b < 96 or r.hidden < 896)


def read_path(kernels: tuple[str, ...]) -> str:
    """Name the path from the kernels that ran, as Path.name; "" where no recurrence is seen."""
    text = "\n".join(kernels)
    persists = {found for found in re.findall(r"[Pp]ersist\w*?_(fp|bp)", text)}
    if persists == {"fp", "bp"}:
        return "cudnn persistent"
    if persists or re.search(r"elemWiseRNN|LSTM_elementWise|GRU_elementWise", text):
        return "cudnn standard"
    return "native" if re.search(r"lstm_cell|gru_cell", text) else ""
