"""Ways to compute a recurrent layer of M models on a GPU: the kit's own scan against the candidates, shape by shape.

python -m benchmarks.cells
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cpbkit.bench.report import about, table
from cpbkit.bench.sweep import MODELS
from cpbkit.config.presets import PRESETS
from cpbkit.hardware import provenance
from cpbkit.models.layers import GRU, LSTM, Linear, Recurrent
from cpbkit.training.cuda_graph import capture

SHAPES = ("quick", "gru", "seq2seq_lstm", "v8_stable")  # presets whose first layer is measured
STREAMS = 8
ROUNDS, BLOCK = 5, 0.1  # times, seconds


class FusedLSTM(LSTM):
    """The pointwise part of a step as one kernel, that of torch.nn.LSTMCell on a GPU; a private call of torch."""

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flat = (tensor.to(h.dtype).flatten(0, 1) for tensor in (x, h, state[1]))
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(*flat)
        return hidden.unflatten(0, x.shape[:2]), cell.unflatten(0, x.shape[:2])


class FusedGRU(GRU):
    """The pointwise part of a step as one kernel, that of torch.nn.GRUCell on a GPU; a private call of torch."""

    def cell(self, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flat = (tensor.to(h.dtype).flatten(0, 1) for tensor in (x, h, state[0]))
        return (torch.ops.aten._thnn_fused_gru_cell(*flat)[0].unflatten(0, x.shape[:2]),)


def in_streams(layer: Recurrent) -> Callable:
    """Return a scan that gives each model to cuDNN, on several streams at once."""
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    def scan(x: Tensor, now: tuple[Tensor, ...], input: Linear, hidden: Linear) -> tuple[Tensor, tuple]:
        here, rows = torch.cuda.current_stream(), []
        for stream in streams:
            stream.wait_stream(here)
        for m, run in enumerate(layer.each(x, now, input, hidden)):
            with torch.cuda.stream(streams[m % STREAMS]):
                rows.append(run())
        for stream in streams:
            here.wait_stream(stream)
        out, *state = zip(*rows, strict=True)
        return torch.stack(out), tuple(torch.cat(tensors) for tensors in state)

    return scan


def ways(kind: type[Recurrent], models: int, inputs: int, width: int) -> Iterator[tuple[str, Recurrent]]:
    """Yield the candidates by name, all with the same weights."""
    fused = FusedLSTM if kind is LSTM else FusedGRU
    first = kind(models, inputs, width).cuda()
    yield "scan", first
    for name in ("cells", "fused cell", "compiled cell", f"cuDNN in {STREAMS} streams"):
        layer = (fused if name == "fused cell" else kind)(models, inputs, width).cuda()
        layer.load_state_dict(first.state_dict())
        # In place of the methods, of this layer alone.
        vars(layer)["scan"] = in_streams(layer) if name.startswith("cuDNN") else layer.scan_by_steps
        if name == "compiled cell":
            vars(layer)["cell"] = torch.compile(layer.cell)
        yield name, layer


def measure_cells(models: int, say: Callable[[str], None]) -> list[dict]:
    """Time each candidate forward and backward as one CUDA graph; one that cannot run has its reason instead.

    `error` is the largest difference to the scan's output in the same precision.
    """
    half = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    rows = []
    for name in SHAPES:
        task, model, batch = PRESETS[name].task, PRESETS[name].model, PRESETS[name].training.batch
        kind = GRU if model.name == "gru" else LSTM
        x = torch.randn(models, batch, task.context, len(task.features), device="cuda")
        for dtype in (torch.float32, half):
            precision, found = str(dtype).removeprefix("torch."), []
            truth = None
            for way, layer in ways(kind, models, x.shape[-1], model.width):
                say(f"{name}, {precision}: {way}")
                try:
                    seconds, out = _time(layer, x, dtype)
                    truth = out if truth is None else truth
                    found.append({"way": way, "seconds": seconds / models, "error": (out - truth).abs().max().item()})
                except Exception as error:  # whatever a private call, a compiler or a capture says
                    said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    found.append({"way": way, "reason": said})
            rows.append({"preset": name, "width": model.width, "precision": precision, "ways": found})
    return rows


def _time(layer: Recurrent, x: Tensor, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Return seconds of forward and backward, and what came out."""
    autocast = torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=False)
        with autocast:
            out = layer(x)[0]
        out.float().square().mean().backward()
        return out.detach()

    outs = []
    graph = capture(lambda: outs.append(step()))
    seconds, count = [], 1
    for _ in range(1 + ROUNDS):  # the first only says how many fill a block
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / count)
        count = max(1, round(BLOCK / seconds[0]))
    return statistics.median(seconds[1:]), outs[-1].float()


def render(rows: list[dict]) -> list[str]:
    """Show what was measured as lines of text."""
    names = [way["way"] for way in rows[0]["ways"]]
    shown: list[list[str]] = []
    reasons: dict[str, str] = {}  # by way
    for row in rows:
        reasons |= {way["way"]: way["reason"] for way in row["ways"] if "reason" in way}
        cells = [f"{1e3 * way['seconds']:.3f}" if "seconds" in way else "" for way in row["ways"]]
        shown.append([f"{row['preset']}, width {row['width']}, {row['precision']}", *cells])
    return [
        "Ways to compute a recurrent layer, forward and backward in a CUDA graph, ms a model:",
        *table(["", *names], shown),
        *(f"{way}: {reason}" for way, reason in reasons.items()),
    ]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("it needs an NVIDIA GPU")
    measured = measure_cells(MODELS, lambda text: print(text, file=sys.stderr))
    print(*about(provenance.describe()), "", *render(measured), sep="\n")
