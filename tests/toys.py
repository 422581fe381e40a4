"""Small training steps that the tests measure."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cpbkit.gpu_check.step import Step

LENGTH, FEATURES, BATCH, ROWS = 40, 8, 32, 1500


class WrittenLSTM(nn.Module):
    """The cell in circulation: eight products a step instead of one layer of the library."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.inner = nn.ModuleList(nn.Linear(inputs, hidden) for _ in range(4))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = c = x.new_zeros(len(x), self.hidden)
        out = []
        for row in x.unbind(1):
            i, f, g, o = (a(row) + b(h) for a, b in zip(self.inner, self.outer, strict=True))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out, 1), None  # (B, L, H)


class Toy(nn.Module):
    """A recurrent layer and a head, or layers without a recurrence: (B, L, C) -> (B, 1)."""

    def __init__(self, layer: nn.Module, hidden: int):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        out = out[0] if isinstance(out, tuple) else out  # (B, L, H), or (B, H) of a layer without time
        return self.head(out[:, -1] if out.dim() == 3 else out)


class PandasWindows(Dataset):
    """A window a sample, cut out of a data frame: what most tutorials do."""

    def __init__(self):
        self.frame = pd.DataFrame(np.random.default_rng(0).normal(size=(ROWS, FEATURES)))

    def __len__(self) -> int:
        return len(self.frame) - LENGTH - 1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        window = self.frame.iloc[i : i + LENGTH].to_numpy("float32")
        return torch.tensor(window), torch.tensor([self.frame.iloc[i + LENGTH, 0]], dtype=torch.float32)


def make_toy(
    device: str,
    layer: nn.Module | None = None,
    hidden: int = 64,
    loader: DataLoader | None = None,
    after: Callable[[Tensor], object] | None = None,
    dtype: torch.dtype = torch.float32,
    **optimizer,
) -> Step:
    """Return the step of a toy loop over windows in memory; after: what the loop does with each loss."""
    torch.manual_seed(0)
    layer = layer or nn.LSTM(FEATURES, hidden, batch_first=True)
    model = Toy(layer, hidden).to(device, dtype)
    adam = torch.optim.Adam(model.parameters(), **({"fused": True} | optimizer))
    if loader is None:
        windows = torch.randn(4 * BATCH, LENGTH, FEATURES), torch.randn(4 * BATCH, 1)
        batches = list(zip(*(t.to(device).split(BATCH) for t in windows), strict=True))
    else:
        batches = loader

    def train(batch) -> None:
        x, y = (t.to(device, dtype, non_blocking=True) for t in batch)  # a plain copy would be a fault of its own
        adam.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        adam.step()
        if after:
            after(loss)

    return Step(train, lambda: batches, model, adam, device=device, workers=getattr(loader, "num_workers", 0))
