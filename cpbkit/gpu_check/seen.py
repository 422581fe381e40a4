"""What a watch has seen of a loop: facts alone, from which its verdict is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cpbkit.gpu_check.numbers import NAN
from cpbkit.gpu_check.shares import Line
from cpbkit.gpu_check.soundness import Unsound


@dataclass(frozen=True)
class Taken:
    """A batch that the loop takes apart row by row."""

    line: Line
    rows: int  # a step
    share: float  # of the loop's time, under the inner loop


@dataclass(frozen=True)
class Seen:
    """What was seen of a loop. Shares are of its time between its first and last step; NaN means not known."""

    seconds: float
    steps: int
    looks: int
    shares: Mapping[str, float]  # by account
    lines: tuple[Line, ...] = ()
    inside: float = 0.0  # share of a validation within the loop over batches
    python: tuple[Line, ...] = ()  # lines in the step that are no work of torch's
    operators: float = NAN  # a step
    starting: float = NAN  # share of the model's time that goes into starting operators
    operators_all: float = NAN  # a step, with those inside nn.LSTM and nn.GRU
    starting_all: float = NAN  # share of the model's time likewise
    float64: float = 0.0  # share of the operators' time
    taken: Taken | None = None
    pairs: Line | None = None  # a loop over the pairs of a batch, in which most operators are started
    dense: tuple[int, tuple[int, int]] | None = None  # rows of the largest embedding, (of which are read, numbers)
    dense_line: Line | None = None  # that makes one
    threads: float = 1.0  # of torch, as a share of the cores
    threads_line: Line | None = None  # that sets them
    unsound: tuple[tuple[Unsound, Line | None], ...] = ()  # the worst first
    unused: float = 0.0  # share of the gradients, in numbers, that no optimiser uses
    unused_line: Line | None = None  # that calls a model which has nothing else
    thrown: float = 0.0  # share of the gradients, in numbers, that are set to zero before a step uses them
    thrown_line: Line | None = None  # the pass backward that makes them
    repeated: float = 0.0  # share of the time in which the same numbers are computed again
    repeated_within: bool = False  # a step, or else from step to step
    repeated_line: Line | None = None
    second_graph: Line | None = None  # a pass backward that can be differentiated, and is not
    retained: Line | None = None  # a pass backward that keeps its graph for another one
    retraced: float = 0.0  # share of the graph that is of earlier steps
    passes: float = 0.0  # backward, a step
    optimizer_line: Line | None = None  # that makes it
    float64_line: Line | None = None  # that asks for it
    small_batch: tuple[int, Line | None] = (0, None)  # samples, where they are few, and the line that says so
    one_hot: float = 0.0  # share of the operators' time in products of rows that are 0 but for a 1
    one_hot_line: Line | None = None
    gates: int = 0  # of a recurrence written out, a step
    waits: int = 0  # a step
    wait_lines: tuple[Line, ...] = ()
    modes: tuple[str, ...] = ()  # of debugging, that are on
    mode_line: Line | None = None  # that switches them on
    kept: str = ""  # the line that keeps the graphs of earlier steps
    hooks: float = 0.0  # more at each step, on one module
    hooks_line: Line | None = None  # that registers one
    thread: tuple[float, Line | None] = (0.0, None)  # looks at another one that runs Python, a look; its line
    denormal: tuple[float, Line | None] = (0.0, None)  # share of the operators' time on such numbers; what makes them
    one_by_one: tuple[int, Line | None] = (0, None)  # calls of the model a step, one after another from a loop
    every_sample: bool = False  # they are as many as the batch has samples
    waiting: float = 0.0  # share of the time in which the thread that trains did not run
    padding: tuple[float, bool] = (0.0, False)  # share of the ids that a model reads; whether the longest row has some
    padding_line: Line | None = None
    last: int = 0  # steps in time of which a wide layer's outputs are computed, for one that is used
    last_line: Line | None = None
    graphs: bool = False  # a validation builds graphs, and no pass backward follows
    asked: bool = False  # the trained model makes most of its data, as where a policy acts
    fused: bool = True  # the optimiser has such an option
    growth: float = 0.0  # bytes a step, where memory grows steadily
    slowing: float = 1.0  # times as long as in the first third of the time a step takes in the last
    growing: Line | None = None  # that makes a table anew of itself and more
    held: Line | None = None  # that keeps more than numbers of every step
    workers: int = 0  # of the loader
    starts: int = 0  # of workers, from one line
    starts_line: Line | None = None
    loads_in_own_code: bool = False  # the loader's time is under a line of the person's
    gpu_there: bool = False
    on_gpu: bool = False
    busy: float = NAN  # share of the time in which the device worked
    behind: float = NAN  # share of steps at whose end the device was not yet done with the step before
    problems: tuple[str, ...] = field(default=())

    def share(self, account: str) -> float:
        return self.shares.get(account, 0.0)

    @property
    def model(self) -> float:
        """The share of forward, backward and optimiser."""
        return self.share("forward") + self.share("backward") + self.share("optimiser")
