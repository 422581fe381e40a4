"""One model, trained to its end."""

from collections.abc import Callable

from torch import nn

from cpbkit.config.experiment import Experiment
from cpbkit.errors import CpbkitError
from cpbkit.models import zoo
from cpbkit.training.loop import Finished, Fit, fit
from cpbkit.training.stack import Stack
from cpbkit.windows.windows import Windows


def train_alone(
    experiment: Experiment, windows: Windows, stack: Stack, on_progress: Callable[[str], None] = lambda text: None
) -> tuple[nn.Module, Finished]:
    """Train the one model of a stack to its end; return the network with its best weights, and how it ended.

    Errors: CpbkitError for a training that diverged.
    """
    training = experiment.training
    steps = training.count_steps(len(windows.splits[0].train))
    for state in fit(Fit(stack), windows, training, steps):
        if state.step == 0 and not state.finished:
            best = min(min(curve["validation"]) for curve in state.curves.values())
            on_progress(f"epoch {state.epoch} of {training.epochs}, best validation loss {best:.4f}")
        elif state.step % 16 == 1:
            on_progress(f"epoch {state.epoch + 1} of {training.epochs}, step {state.step} of {steps}")
    (end,) = state.finished
    if end.status != "done":
        raise CpbkitError(f"{end.name} diverged: {end.reason}")
    net = zoo.restore(windows.task, experiment.model, end.weights)
    return net.to(windows.device, windows.inputs.dtype), end
