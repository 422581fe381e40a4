"""The graph of a loss: the weights it reaches, the parts whose gradients nobody uses, and those of earlier steps."""

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from torch import nn

from cpbkit.gpu_check.call_stacks import OwnLine
from cpbkit.gpu_check.tensors import is_capturing

LARGEST = 20_000  # nodes of a graph that is looked through
LOOKS = 24  # at graphs of several optimisers
LEAST = 3  # looks that must agree
RARELY = 100  # times what a look took
# Steps by which a node is of an earlier one; by hand each pass backward counts as a step, and some may share a graph.
EARLIER, EARLIER_BY_HAND = 2, 8
PASSES = 32  # backward, after which gradients that are still there count as used
BRANCH = 0.5  # of an optimiser's weights: less may be a single layer with weights of its own


def tie_mark(node, name: str) -> weakref.ref:
    """Tie a mark to a node of a graph; return a weak reference to it, which dies with the node."""
    mark = node.metadata[name] = frozenset({name})  # a set can be referred to weakly
    return weakref.ref(mark)


def find_weights(root) -> dict[int, nn.Parameter]:
    """Return the weights that a graph reaches, by identity; none of a graph too large to look through."""
    nodes = _list_nodes(root)
    return {id(node.variable): node.variable for node in nodes if _is_weight(node)}


def find_branches(root, owners: Mapping[int, int]) -> tuple[set[int], dict[int, list[nn.Parameter]], int]:
    """Return (the owners of all weights of a graph, owner -> weights of its branches, numbers of all weights).

    owners: identity of a weight -> that of its optimiser. A branch leads to one owner's weights alone, as from a
    generator's picture back to its inputs: where another's step follows, it could have been cut off.
    """
    nodes = _list_nodes(root)
    below: dict[Any, set[int]] = {}
    for node in reversed(nodes):  # what a node leads to comes after it in the list
        own = {owners.get(id(node.variable), 0)} if _is_weight(node) else set()
        below[node] = own.union(*(below.get(following, set()) for following in _follow(node)))
    tops = {x for n in nodes if len(below[n]) > 1 for x in _follow(n) if len(below[x]) == 1 and not _is_weight(x)}
    branches: dict[int, list[nn.Parameter]] = {}
    for top in tops:
        weights, (owner,) = find_weights(top), below[top]
        if len(weights) > len(branches.get(owner, [])):
            branches[owner] = list(weights.values())
    numbers = sum(node.variable.numel() for node in nodes if _is_weight(node))  # one node for each weight
    return set().union(*below.values()), branches, numbers


def _follow(node) -> Iterator:
    return (following for following, _ in node.next_functions if following is not None)


def _is_weight(node) -> bool:
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def _list_nodes(root) -> list:
    """Return a graph's nodes, each before those it leads to; none of a graph that is too large."""
    order: list[Any] = []
    known: set[Any] = set()
    stack = [(root, False)] if root is not None else []
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in known:
            known.add(node)
            if len(known) > LARGEST:
                return []
            stack.append((node, True))
            stack += ((following, False) for following in _follow(node))
    return order[::-1]


class Retraced:
    """Passes backward that go through what was computed at earlier steps, whose graphs were retained."""

    def __init__(self) -> None:
        self._shares: list[float] = []  # of each graph: nodes of earlier steps
        self._next = 0.0  # s: when the next is looked at

    def note_graph(self, root, step: int, by_hand: bool) -> None:
        """Look at the graph of a pass backward, rarely."""
        now = time.perf_counter()
        if len(self._shares) >= LOOKS or now < self._next or is_capturing():
            return
        # A weight's own node outlives its graph where the next one is built before that one is gone.
        nodes = [node for node in _list_nodes(root) if node.next_functions]
        if nodes:
            before = step - (EARLIER_BY_HAND if by_hand else EARLIER)
            earlier = sum(node.metadata.setdefault("cpbkit step", step) <= before for node in nodes)
            self._shares.append(earlier / len(nodes))
        self._next = now + RARELY * (time.perf_counter() - now)

    def find(self) -> float:
        """Return the share of a graph that is of earlier steps, in the middle one of those looked at."""
        return median(self._shares) if len(self._shares) >= LEAST else 0.0


class ThrownAway:
    """Gradients of one optimiser's weights that are made for another's step, and set to zero before its own."""

    def __init__(self) -> None:
        self._looks: list[tuple[float, OwnLine | None]] = []  # (share of the gradients, own line)
        self._stepped: set[int] = set()
        self._branches: dict[int, list[weakref.ref]] = {}
        self._reached: set[int] = set()
        self._numbers = self._passes = 0
        self._at: OwnLine | None = None
        self.waits = False  # for the next pass backward

    def note_graph(self, root, optimizers: Mapping[int, set[int]], at: OwnLine | None) -> None:
        """Look at the graph of a pass backward; optimizers: identity -> identities of its weights."""
        if self.waits or len(self._looks) >= LOOKS or len(optimizers) < 2 or is_capturing():
            return
        owners = {weight: optimizer for optimizer, weights in optimizers.items() for weight in weights}
        self._reached, branches, self._numbers = find_branches(root, owners)
        self._branches = {
            owner: [weakref.ref(weight) for weight in weights]
            for owner, weights in branches.items()
            if owner and len(weights) > BRANCH * len(optimizers[owner])
        }
        self._at, self._stepped, self._passes, self.waits = at, set(), 0, True

    def note_step(self, optimizer: int) -> None:
        self._stepped.add(optimizer)

    def note_backward(self) -> None:
        """Call it before each pass backward that follows: by then gradients that are thrown away are zero or none."""
        if not self.waits or is_capturing() or not self._stepped & self._reached:
            self.waits = False  # gradients are still being added up
            return
        thrown, self._passes = 0, self._passes + 1
        for owner, refs in self._branches.items():
            weights = [weight for ref in refs if (weight := ref()) is not None]
            if owner in self._stepped:
                continue
            if not any(w.grad is not None and bool(w.grad.any()) for w in weights):
                thrown += sum(weight.numel() for weight in weights)
            elif self._passes < PASSES:
                return  # neither used nor zero: a generator may have its turn after several of its critic's
        self.waits = False
        self._looks.append((thrown / max(self._numbers, 1), self._at))

    def find(self) -> tuple[float, OwnLine | None]:
        """Return (share of all gradients that are thrown away, own line of the pass backward that makes them)."""
        lines: defaultdict[OwnLine | None, list[float]] = defaultdict(list)
        for share, at in self._looks:
            lines[at].append(share)
        worst = max(lines, key=lambda at: sum(lines[at]), default=None)
        if worst is None or sum(map(bool, lines[worst])) < LEAST:
            return 0.0, None
        # Passes backward of several optimisers take turns, and are not seen equally often.
        return fmean(map(fmean, lines.values())), worst
