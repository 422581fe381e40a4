"""The networks by name."""

from torch import nn

from cpbkit.errors import check_name
from cpbkit.experiment import Model, Task
from cpbkit.models import recurrent

MODELS = {
    "gru": recurrent.GRUSeq2Seq,
}


def build(models: int, task: Task, settings: Model) -> nn.Module:
    """Build a network for M models: (M, B, L, C), last (M, B, K) -> (M, B, H, K)."""
    return MODELS[check_name("model", settings.name, MODELS)](models, task, settings)
