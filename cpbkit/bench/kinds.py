"""Where the time of the engine's step goes: the products that the arithmetic needs, and what stands beside them."""

import re
from collections import defaultdict

from torch.profiler import ProfilerActivity, profile

from cpbkit.bench.engine import Here, Job

SECONDS = 0.5  # of steps under the profiler
# Kind -> names of torch's operators, without namespace, a trailing `_` and `_backward`; the first that matches. On a
# CPU torch's own LSTM is one operator, products and gates alike.
KINDS = {
    "products": r"(add)?(mm|bmm|mv)|baddbmm|dot|convolution|_linear_pointwise",
    "torch's LSTM": r"mkldnn_rnn_layer|_cudnn_rnn|_thnn_fused_lstm_cell",
    "attention": r".*(scaled_dot_product|softmax).*",
    "activations": r"sigmoid|tanh|relu|gelu|threshold|native_layer_norm",
    "element by element": r"add|sub|mul|div|addcmul|addcdiv|lerp|neg|square|pow|sum|mean|where|masked_fill",
    "copies": r"copy|cat|stack|clone|flip|index.*|gather|select.*|slice.*|fill|zero|_to_copy|constant_pad_nd",
    "dropout": r"bernoulli|native_dropout",
    "optimiser": r"_fused_.*|_foreach_.*|linalg_vector_norm|_amp_.*",
}
REST = "rest"  # Python, autograd's own work, and what no kind names


def share_out(job: Job) -> dict[str, float]:
    """Step a stack under torch's profiler: the share of each kind in the time of an operator by itself.

    The profiler lengthens each operator by some microseconds: many small ones seem to take more than they do.
    """
    here = Here.of(job)
    steps = max(1, round(SECONDS / here.run(1)[0]))
    on_gpu = here.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as seen:
        here.run(steps)
    taken: defaultdict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        taken[find_kind(event.key)] += spent
    whole = sum(taken.values())
    return {kind: taken[kind] / whole for kind in (*KINDS, REST)} if whole else {}


def find_kind(operator: str) -> str:
    """Return the kind of an operator by its name in a profile: `aten::addmm_` -> `products`."""
    namespace, _, name = operator.partition("::")
    if namespace not in ("aten", "mkldnn"):
        return REST
    name = re.sub(r"_?(_backward.*)?$", "", name)
    return next((kind for kind, names in KINDS.items() if re.fullmatch(names, name)), REST)
