"""Models trained together: all weights are the rows of one matrix, row m is model m."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from cpbkit.config.experiment import Training, derive_seed, series_of

ALIGN = 64  # elements; keeps every view 16-byte aligned in half precision
# What torch.optim's fused optimisers call. They themselves would ask each row, which has a rate of its own, for its
# settings at every step, and that takes longer than to move a small row.
KERNELS: dict[str, Callable] = {
    name: partial(kernel, beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=False, maximize=False)  # as torch.optim has them
    for name, kernel in (("adamw", torch._fused_adamw_), ("adam", torch._fused_adam_))
}


class Stack:
    """M models as rows of `weights` (M, P), their gradients as rows of `gradients` (M, P).

    `moments` holds the optimiser's, and `table` whatever else belongs to a model, each tensor with a leading model
    axis. A row's first weights depend on the seed and its series' name alone.
    """

    def __init__(self, build: Callable[[int], nn.Module], names: Sequence[str], training: Training, device, dtype):
        self.names, self.training = [row for name in names for row in training.rows(name)], training
        with torch.random.fork_rng(devices=[]):
            self.net = build(len(self.names)).to(device, dtype)
            singles = [self._first_weights(build, name) for name in self.names]
        self.layout: list[tuple[str, torch.Size, int, int]] = []  # name, shape of one model, offset, length
        size = 0
        for name, parameter in self.net.named_parameters():
            self.layout.append((name, parameter.shape[1:], size, parameter[0].numel()))
            size += -(-parameter[0].numel() // ALIGN) * ALIGN
        self.parameters = sum(length for *_, length in self.layout)  # of one model
        weights = torch.zeros(len(self.names), size, device=device, dtype=dtype)
        for row, single in zip(weights, singles, strict=True):
            for (*_, offset, length), tensor in zip(self.layout, single, strict=True):
                row[offset : offset + length] = tensor
        rates = torch.tensor(self.settings("learning_rate"), device=device, dtype=torch.float32)
        self.table: dict[str, Tensor] = {"best": weights.clone(), "learning_rate": rates}
        self._attach(weights)

    def __len__(self) -> int:
        return len(self.names)

    def _first_weights(self, build: Callable[[int], nn.Module], name: str) -> list[Tensor]:
        series = series_of(self.training.of_row(name)[0])  # all folds of a series begin alike
        torch.manual_seed(derive_seed("weights", self.training.seed, series))
        return [parameter.detach().flatten() for parameter in build(1).parameters()]

    def begin_from(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Let the rows of some series begin from weights that are there, by the names that `export` gives them."""
        for row, name in zip(self.weights, self.names, strict=True):
            known = weights.get(self.training.of_row(name)[0], {})
            for leaf, _, offset, length in self.layout if known else ():
                row[offset : offset + length] = known[leaf].flatten()
        self.table["best"].copy_(self.weights)

    def settings(self, name: str) -> list[float]:
        """Return a setting of each row; rows of one series differ in what is searched."""
        return [getattr(self.training.of_row(row)[1], name) for row in self.names]

    def _attach(self, weights: Tensor, moments: dict[str, Tensor] | None = None) -> None:
        """Make the network's parameters views of `weights`, and give each row its place in the optimiser."""
        self.weights, self.gradients = weights, torch.zeros_like(weights)
        self._views = []
        for name, shape, offset, length in self.layout:
            owner, _, leaf = name.rpartition(".")
            view = nn.Parameter(weights[:, offset : offset + length].unflatten(1, shape))
            setattr(self.net.get_submodule(owner), leaf, view)
            self._views.append((view, self.gradients[:, offset : offset + length].unflatten(1, shape)))
        self.clip_norms = torch.tensor(self.settings("clip_norm"), device=weights.device, dtype=weights.dtype)  # (M,)
        self.moments = moments or {
            "step": weights.new_zeros(len(weights), dtype=torch.float32),  # of each row, on its device: it is fused
            "exp_avg": torch.zeros_like(weights),
            "exp_avg_sq": torch.zeros_like(weights),
        }
        tensors = weights, self.gradients, *(self.moments[name] for name in ("exp_avg", "exp_avg_sq", "step"))
        self._rows = [[[tensor] for tensor in row] for row in zip(*tensors, strict=True)]  # as the kernel takes them
        self._decays = self.settings("weight_decay")

    def backward(self, loss: Tensor) -> None:
        """Write the gradients of the sum of all models' losses into `gradients`; models do not mix."""
        if not self.parameters:  # a foundation model has none here
            return
        parameters, views = zip(*self._views, strict=True)
        torch._foreach_copy_(views, torch.autograd.grad(loss, parameters, materialize_grads=True))

    def step(self) -> None:
        """Move each row by its gradients, at its own learning rate."""
        kernel = KERNELS[self.training.optimizer]
        self.moments["step"] += 1
        own = zip(self._rows, self.table["learning_rate"].unbind(), self._decays, strict=True)
        for (*tensors, steps), rate, decay in own:
            kernel(*tensors, [], steps, lr=rate, weight_decay=decay)

    def keep(self, rows: Sequence[int]) -> None:
        """Let all other models leave; what stays is unchanged."""
        self.names = [self.names[r] for r in rows]
        if not rows:
            return
        index = torch.as_tensor(list(rows), device=self.weights.device)
        self.table = {name: tensor[index] for name, tensor in self.table.items()}
        self._attach(self.weights[index], {name: moment[index] for name, moment in self.moments.items()})

    def export(self, row: int) -> dict[str, Tensor]:
        """Return one model's best tensors by name, without the model axis, on the host."""
        best = self.table["best"][row].cpu()
        return {
            name: best[offset : offset + length].reshape(shape).clone() for name, shape, offset, length in self.layout
        }

    def state(self) -> dict[str, Tensor]:
        """Return everything a resume needs, as tensors with a leading model axis."""
        moments = {f"moment.{name}": moment for name, moment in self.moments.items()}
        return moments | {f"table.{name}": tensor for name, tensor in self.table.items()} | {"weights": self.weights}

    def rewind(self, saved: dict[str, Tensor]) -> None:
        """Go back, in place, to what `state` said."""
        for name, tensor in self.state().items():
            tensor.copy_(saved[name])

    def restore(self, names: Sequence[str], saved: dict[str, Tensor]) -> None:
        """Become the stack whose `state` was saved: the same models in the same order."""
        self.names = list(names)
        held = {name: tensor.to(self.weights.device) for name, tensor in saved.items()}
        self.table, moments = (
            {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
            for prefix in ("table.", "moment.")
        )
        self._attach(held["weights"], moments)
