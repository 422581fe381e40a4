"""What a sweep tells besides where it stands: how it begins, the end of each model, losses now and then."""

from typing import TYPE_CHECKING

import numpy as np

from cpbkit.config.experiment import Experiment
from cpbkit.evaluation.results import ResultLine, relative
from cpbkit.evaluation.verdicts import Judgement, verdicts
from cpbkit.quantities import counted, duration
from cpbkit.views.live import Terminal

if TYPE_CHECKING:  # they load torch, which a view does not need
    from cpbkit.runs.plan import Plan
    from cpbkit.runs.progress import State

LOSS_LINES = 10  # of a training, if it goes through all its epochs
WORDS = 500  # models whose endings are told with a verdict


class Account:
    """Tells a sweep to a terminal: lines that stay, above the one that changes.

    verbose: also the losses, every few epochs. To be given to a sweep as `on_progress`.
    """

    def __init__(self, view: Terminal, verbose: bool = False):
        self.view, self.verbose = view, verbose
        self._told: int | None = None  # results that were told, or were there before
        self._begun, self._epoch = False, 0
        self._judged: dict[str, Judgement] = {}

    def __call__(self, state: "State") -> None:
        """Tell what is new, then where the sweep stands."""
        if self._told is None:
            self._told = state.done
            for line in state.results:
                self._take_up(line)
        if state.plan and not self._begun:
            self._begun = True
            self.view.keep(*opening(state, state.plan))
        for i, line in enumerate(state.results[self._told :], start=self._told + 1):
            self.view.keep(ending(line, i, state.total, self._judge(line)))
        self._told = state.done
        if self.verbose and (said := self._losses(state)):
            self.view.keep(said)
        self.view(state)

    def _judge(self, line: ResultLine) -> str:
        """Say the skill of a model's first head, and the word that it has among those which are through."""
        if not (judged := self._take_up(line)):
            return ""
        # The correction takes all of them anew for each one that ends, which few have the time for.
        word = verdicts(self._judged)[line.series].word if len(self._judged) <= WORDS else ""
        return f"{100 * judged.skill:+.1f} % {word}".rstrip()

    def _take_up(self, line: ResultLine) -> Judgement | None:
        if not line.test:
            return None
        judged = self._judged[line.series] = Judgement.from_dict(next(iter(line.test.values())))
        return judged

    def _losses(self, state: "State") -> str:
        epochs = state.experiment.training.epochs
        running = [one for one in state.running.values() if one.curve["validation"]]
        epoch = max((len(one.curve["validation"]) for one in running), default=0)
        if epoch - self._epoch < max(1, epochs // LOSS_LINES):
            return ""
        self._epoch = epoch
        parts = [
            f"{part} {np.median([relative(one, part)[-1] for one in running]):.4f}" for part in ("train", "validation")
        ]
        line = f"epoch {epoch} of {epochs}: {', '.join(parts)}, median of {counted(len(running), 'model')}"
        return "  ".join(filter(None, (f"{line}; persistence is 1", _memory(state))))


def opening(state: "State", plan: "Plan") -> list[str]:
    """Say before the training what is trained, on what, and how long that takes."""
    experiment, data = state.experiment, state.experiment.data
    source = {"synthetic": "the seeded market", "files": data.files}.get(data.source, data.source)
    days = f", {data.start} to {data.end}" if data.start else ""
    windows = ", ".join(f"{_range(*counts)} {part}" for part, counts in state.windows.items())
    at_most = f"at most {plan.epochs} epochs of {counted(plan.steps, 'step')}, or {plan.patience} without a better one"
    lines = [
        f"Settings: {describe(experiment)}",
        f"Data: {len(experiment.series):,} series of {source}{days}; windows of each: {windows}",
        f"Models: {counted(state.parameters, 'parameter')} each; {at_most}",
        f"Plan: {plan.reason}",
    ]
    if plan.seconds:
        lines.append(f"Time: about {duration(plan.seconds)} if none stops early, predicted from timed steps")
    return lines


def describe(experiment: Experiment) -> str:
    """Say the settings that matter most in one line."""
    task, model, training = experiment.task, experiment.model, experiment.training
    network = experiment.pretrained or f"{model.name} of width {model.width}"
    return (
        f"{experiment.preset}, {network}; {task.context} bars of "
        f"{counted(len(task.features), 'channel')} in, {task.horizon} of {', '.join(task.targets)} out; "
        f"batch {training.batch}, {training.optimizer} {training.learning_rate:g} ({training.schedule})"
    )


def ending(line: ResultLine, number: int, total: int, judged: str) -> str:
    """Say how one model ended: `[7/40] ADAUSDT_15m done: best epoch 6 of 12, -0.1 % TIES, 41 s`."""
    head = f"[{number}/{total}] {line.series} {line.status}: "
    if line.status != "done":
        return head + line.reason
    chosen = ", ".join(f"{name} {value:g}" for name, value in line.chosen.items())
    parts = [f"best epoch {line.best_epoch} of {line.epochs}", chosen, judged, duration(line.seconds)]
    return head + ", ".join(filter(None, parts))


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _memory(state: "State") -> str:
    """Say the memory of each GPU, or of this process and its children where there is none."""
    samples = state.monitor
    if samples is None or samples.empty:
        return ""
    last = samples.groupby("device", sort=False).last()
    gpus = last[last.index.str.startswith("cuda")]
    found = gpus["used"] if len(gpus) else last["host"].rename({"cpu": "memory"})
    return ", ".join(f"{device} {held / 1e9:.2f} GB" for device, held in found.dropna().items())
