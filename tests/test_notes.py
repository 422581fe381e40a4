"""What is noted of a loop, apart from a loop."""

import copy
import dataclasses
import itertools
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import Roles
from cpbkit.gpu_check.causes import find_causes
from cpbkit.gpu_check.graphs import Retraced
from cpbkit.gpu_check.module_calls import ModuleCalls
from cpbkit.gpu_check.notes import PADDING, Notes, _goes_through_time
from cpbkit.gpu_check.operators import Operators
from cpbkit.gpu_check.seen import Seen, Taken
from cpbkit.gpu_check.shares import GROWING, Line, cure_of_data, find_kind
from cpbkit.gpu_check.watch import watch


@pytest.mark.parametrize(
    ("text", "fills"),
    [
        ("ids = np.full(self.max_len, 0)", True),
        ("x += [0] * (n - len(x))", True),
        ("torch.zeros(b, max(lengths))", True),
        ("self.pos = nn.Parameter(torch.zeros(cfg.max_len, d))", False),
        ("nn.Embedding(max_length, d)", False),
        ("ids = ids + [PAD] * (self.max_length - len(ids))", True),
        ("ids = ids[: self.max_length]", False),
    ],
)
def test_a_line_that_fills_rows_up_is_told_from_one_that_makes_weights(text, fills):
    assert bool(re.search(PADDING, text)) == fills


HERE = Path(__file__)
X, Y = torch.randn(64, 8), torch.randn(64, 1)
SECONDS = 2.0  # of a loop: those are run by `make test-long`, as in test_soundness


TAKEN_APART = Taken(None, 64, 0.5)
PAIRS_LINE = Line("a.py", 3, "for i in range(n):", "forward", 0.0)


def line_of(text):
    return next(i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(text))


def steps(least=0, seconds=SECONDS):
    """Go on for so many seconds, and at the least so many steps."""
    end = time.perf_counter() + seconds
    for i in itertools.count():
        if i >= least and time.perf_counter() > end:
            return
        yield i


def dense(width=256, depth=2):
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 1)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))


@pytest.mark.long
@pytest.mark.parametrize("asked", ["with", "without"])
def test_a_teacher_that_was_trained_for_a_few_steps_before_is_asked_for_gradients_that_nobody_uses(asked):
    teacher, student = dense(512), dense(32)

    def learn(model, optimizer, y):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(X), y).backward()
        optimizer.step()

    with watch(tell=False, live=False) as w:
        optimizer = torch.optim.Adam(teacher.parameters())
        for _ in range(6):
            learn(teacher, optimizer, Y)
        optimizer = torch.optim.Adam(student.parameters())
        for _ in steps(40):
            with torch.set_grad_enabled(asked == "with"):
                y = teacher(X)  # asked
            learn(student, optimizer, y)
    found = w.diagnosis
    assert ((found.verdict, found.reason) == ("WASTED_WORK", "UNUSED_GRADIENTS")) == (asked == "with"), w.report()
    assert asked == "without" or f"{HERE.name}:{line_of('# asked')}" in found.text


@pytest.mark.long
@pytest.mark.parametrize("critics", [1, 12])
def test_optimisers_that_take_turns_are_one_training_however_many(critics):
    one, other = dense(64), dense(64)
    optimizers = torch.optim.SGD(one.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            for model, optimizer, times in zip((one, other), optimizers, (1, critics), strict=True):
                for _ in range(times):
                    optimizer.zero_grad()
                    model(X).square().mean().backward()
                    optimizer.step()
    assert w.notes.main is optimizers[0] and not w.notes.past


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_of_all_rows_of_an_embedding_are_counted_unless_they_are_sparse(kind, sparse):
    table, counted = kind(100, 8, sparse=sparse), Operators(Roles(), ())
    with counted:
        table(torch.arange(12).view(3, 4)).sum().backward()
    assert counted.dense == ({} if sparse else {100: (12, 800)})


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("take", [lambda x, i: x[i], lambda x, i: torch.index_select(x, 0, i)])
def test_gradients_of_all_rows_of_a_weight_that_is_indexed_are_counted(take, moved):
    weight = nn.Parameter(torch.randn(100, 8))
    counted = Operators(Roles(), [weight] if moved else ())
    with counted:
        take(weight, torch.arange(12)).sum().backward()
    assert counted.dense == ({100: (12, 800)} if moved else {})


@pytest.mark.parametrize("hot", [True, False])
def test_a_product_of_ones_and_zeros_is_told_from_one_of_numbers(hot, monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.operators.SLOW", 0.0)
    x = torch.zeros(64, 300).scatter_(1, torch.randint(300, (64, 1)), 1.0) if hot else torch.rand(64, 300)
    layer, counted = nn.Linear(300, 8), Operators(Roles(), ())
    with counted:
        layer(x).sum().backward()  # product
    assert (counted.one_hot_line is not None) == (counted.one_hot_seconds > 0) == hot
    assert not hot or counted.one_hot_line[1] == line_of("# product")
    seen = Seen(10.0, 50, 100, {"forward": 0.4, "backward": 0.5}, one_hot=0.3 if hot else 0.0)
    assert [cause.reason for cause in find_causes(seen)] == ["ONE_HOT"] * hot


def test_operators_that_read_different_sizes_are_of_different_kinds():
    """A small product's time stood for a large one's where both made the same size."""
    counted = Operators(Roles(), ())
    with counted:
        for inner in (2, 512):
            torch.zeros(64, inner) @ torch.zeros(inner, 64)
    assert sum(packet is torch.ops.aten.mm for packet, *_ in counted.kinds) == 2


@pytest.mark.long
@pytest.mark.parametrize("how", ["copied", "in place"])
def test_lines_of_one_function_that_take_much_together_are_named(how):
    """None of them takes much alone."""
    torch.manual_seed(0)
    model = dense(384)
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.01), copy.deepcopy(model)
    x = X[:8]  # few rows, so that copies of weights outweigh products on any processor

    def update():
        with torch.no_grad():
            if how == "in place":
                return torch._foreach_lerp_([*average.parameters()], [*model.parameters()], 0.01)
            fresh = copy.deepcopy(model)
            old, new = average.state_dict(), fresh.state_dict()
            fresh.load_state_dict({name: 0.99 * old[name] + 0.01 * new[name] for name in old})
            return average.load_state_dict(fresh.state_dict())

    with watch(tell=False, live=False) as w:
        for _ in steps(40):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            update()
    assert (w.verdict == "PYTHON_OR_IO_IN_STEP") == (how == "copied"), w.report()


def test_an_optimiser_that_goes_backward_many_times_before_its_first_step_ends_is_counted_from_there():
    """Its passes backward were taken for steps until then."""
    torch.manual_seed(0)
    model = dense(16)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    with watch(tell=False) as w:
        for _ in range(20):
            optimizer.step(closure)
    assert w.steps == 20 and 0 < len(w.notes.counted) <= 3
    assert "failed" not in w.report() and w.to_dict()["steps"] == 20


def test_a_pass_backward_taken_for_a_step_counts_for_nothing_once_an_optimiser_steps():
    model = dense(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(tell=False) as w:
        for _ in range(3):
            for _ in range(9):  # the ninth without a step: as where there is no optimiser of torch's
                model(X).square().mean().backward()
            optimizer.step()
    assert "failed" not in w.report() and w.steps == 3
    assert w.notes.backwards == 18 and [step for step, _ in w.notes.hooks] == [1, 2]


def test_nothing_is_left_of_a_training_that_is_over():
    notes = Notes(Roles(), None, None)
    first = dataclasses.replace(notes)
    notes.collected, notes.kept, notes.thrown.waits, notes.retraced._shares = True, "a line", True, [1.0] * 9
    notes.begin_anew()
    assert (notes.collected, notes.kept, notes.thrown.waits, notes.retraced.find()) == (False, "", False, 0.0)
    assert dataclasses.replace(notes, soundness=first.soundness, thrown=first.thrown, retraced=first.retraced) == first


@pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True
@pytest.mark.parametrize("call", ["backward", "grad"])
@pytest.mark.parametrize("flag", ["retain_graph", "create_graph"])
def test_flags_of_a_pass_backward_are_read_by_place_and_by_name(call, flag):
    weight = torch.ones(3, requires_grad=True)
    for named in (True, False):
        with watch(tell=False, live=False) as w:
            for _ in range(3):
                loss, flags = weight.square().sum(), (True, flag == "create_graph")
                if call == "backward":
                    by_place = torch.autograd.backward, loss, None, *flags
                else:
                    by_place = torch.autograd.grad, loss, [weight], None, *flags
                function, *args = by_place[:-2] if named else by_place
                function(*args, **{flag: True} if named else {})
        # What is asked for by grad with create_graph is a part of a loss, and no pass backward.
        assert bool(w.notes.retained) == (flag == "retain_graph")
        assert w.notes.second_graph == (flag == "create_graph" and call == "backward")


class Sequence(nn.Module):
    """A recurrence over x (time, batch, channels), torch's own order."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        h = torch.zeros(x.shape[1], 16)
        for now in x:
            h = torch.tanh(self.of_input(now) + self.of_state(h))
        return self.head(h)


def noted(run):
    """Return the calls that a step makes."""
    calls = ModuleCalls(Roles())
    calls.begin()
    try:
        run()
    finally:
        calls.end()
    assert not calls.problem
    return calls


def test_a_part_that_is_called_for_every_sample_is_told_from_one_that_goes_through_time():
    part, x = Sequence(), torch.randn(20, 64, 8)
    assert not noted(lambda: part(x)).find_parts()
    model = Documents()
    documents = [torch.randn(5, 8) for _ in range(20)]
    assert set(noted(lambda: model(documents)).find_parts().values()) == {20}


def test_a_model_that_is_called_from_two_lines_is_counted_at_each():
    model = Documents()
    documents = [torch.randn(5, 8) for _ in range(20)]

    def both():
        model(documents)
        model(documents)

    assert list(noted(both).find_parts().values()) == [20] * 6  # three parts, twice


def test_a_batch_that_is_given_by_name_is_a_batch():
    model = ByName()
    calls = noted(lambda: [model(x=torch.randn(16, 8), mask=torch.ones(8)) for _ in range(3)])
    (called,) = calls.models
    assert calls.models[called] == 3 and calls.find_batch(called) == 16


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, *, x, mask):
        return self.head(input=x * mask)


def test_calls_that_carry_a_state_on_are_not_one_by_one():
    cell, x = nn.GRU(8, 16), torch.randn(4, 12, 8)

    def carry(detached):
        h = None
        for i in range(12):
            _, h = cell(x[:, i : i + 1], h)
            h = h.detach() if detached else h

    assert sum(noted(lambda: carry(False)).models.values()) == 1  # the first, which is given none
    assert sum(noted(lambda: carry(True)).models.values()) == 12  # as a picture beside another


def test_calls_in_another_thread_are_none_of_the_step():
    model = dense(8)

    def step():
        other = threading.Thread(target=lambda: model(X))
        other.start()
        other.join()
        model(X)

    assert sum(noted(step).models.values()) == 1


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ({"taken": TAKEN_APART, "pairs": PAIRS_LINE, "starting": 0.4, "operators": 900}, "SAMPLE_BY_SAMPLE"),
        ({"taken": TAKEN_APART, "pairs": PAIRS_LINE, "starting": 0.9, "operators": 900}, "HOST_BOUND"),
        ({"small_batch": (1, None), "one_by_one": (10, None), "starting": 0.9, "starting_all": 0.9, "operators": 300,
          "operators_all": 300}, "SAMPLE_BY_SAMPLE"),
    ],
)  # fmt: skip
def test_a_cause_is_silent_only_where_another_speaks_for_it(seen, told):
    base = Seen(10.0, 50, 100, {"forward": 0.4, "backward": 0.5})
    assert [cause.verdict for cause in find_causes(dataclasses.replace(base, **seen))] == [told]


def test_a_mistake_in_the_watch_is_told_and_costs_nobody_the_end_of_a_training(monkeypatch):
    model = dense(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(Notes, "add_up", lambda _: 1 / 0)
    with watch(tell=False) as w:
        for _ in range(5):
            model(X).mean().backward()
            optimizer.step()
    assert "The watch itself failed: ZeroDivisionError" in w.report() and w.to_dict()["verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize("how", ["carried", "detached", "two losses", "weights alone"])
def test_a_graph_of_earlier_steps_is_told_from_one_of_this_step(how):
    torch.manual_seed(0)
    layer, retraced, state, last = nn.Linear(8, 8), Retraced(), torch.zeros(64, 8), None
    for step in range(20):
        state = torch.tanh(layer(X) + (state if how == "carried" else state.detach()))
        losses = [state.square().mean()] + [state.abs().mean()] * (how == "two losses")
        for loss in losses:
            retraced._next = 0.0  # as where much else is done between two looks
            retraced.note_graph(loss.grad_fn, step, by_hand=False)
            loss.backward(retain_graph=True)
        last = losses if how == "weights alone" else None  # keeps the nodes of the weights until the next are made
    del last
    assert (retraced.find() > 0.5) == (how == "carried")


@pytest.mark.long
@pytest.mark.parametrize("state", ["carried", "detached"])
def test_a_state_that_a_model_carries_on_beside_its_batch_is_found(state):
    """Day by day anew: no graph of the first steps is left at the end."""
    torch.manual_seed(0)
    table = nn.Embedding(1000, 32)
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)
    trend = torch.zeros(32)
    with watch(tell=False) as w:
        for i in steps(least=60, seconds=2 * SECONDS):
            if i % 200 == 0:
                trend = torch.zeros(32)
            rows = table(torch.randint(1000, (256,)))
            score = rows.sum(1) + (rows * trend).sum(1) + rows[:, 0]
            trend = 0.9 * trend + 0.1 * rows.mean(0)
            loss = nn.functional.binary_cross_entropy_with_logits(score, torch.ones(256))
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()
            if state == "detached":
                trend = trend.detach()
    assert (w.verdict == "GRAPH_KEPT") == (state == "carried"), w.report()


@pytest.mark.long
@pytest.mark.parametrize("state", ["carried", "detached"])
def test_a_pass_backward_that_goes_through_earlier_ones_again_is_named(state):
    torch.manual_seed(0)
    cell, x = nn.GRU(8, 64, batch_first=True), torch.randn(16, 48, 5, 8)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps(4, 4.0):
            optimizer.zero_grad()
            h = torch.zeros(1, 16, 64)
            for day in range(48):
                out, h = cell(x[:, day], h if state == "carried" else h.detach())
                out.square().mean().backward(retain_graph=True)  # again
            optimizer.step()
    assert (w.verdict == "GRAPH_KEPT") == (state == "carried"), w.report()
    assert state == "detached" or f"{HERE.name}:{line_of('# again')}" in w.diagnosis.text
    assert state == "detached" or "SAMPLE-BY-SAMPLE" not in w.report()


@pytest.mark.long
@pytest.mark.parametrize("state", ["carried", "detached"])
def test_a_state_that_is_carried_on_in_a_loop_written_from_equations_is_found(state):
    """Its loss is a sum over steps in time: the graph that is kept lies below the last term."""
    torch.manual_seed(0)
    weights = of_input, of_state, of_output = [torch.randn(n, m) * 0.1 for n, m in ((8, 32), (32, 32), (32, 1))]
    for weight in weights:
        weight.requires_grad_()
    h = torch.zeros(64, 32)
    with watch(tell=False) as w:
        for i in steps(least=60):
            if i % 100 == 0:
                h = torch.zeros(64, 32)
            loss = 0.0
            for _ in range(5):
                h = torch.tanh(X @ of_input + h @ of_state)
                loss = loss + nn.functional.mse_loss(h @ of_output, Y)
            loss.backward(retain_graph=True)
            for weight in weights:
                weight.data -= 0.001 * weight.grad
                weight.grad = None
            if state == "detached":
                h = h.detach()
    assert (w.verdict == "GRAPH_KEPT") == (state == "carried"), w.report()


@pytest.mark.long
def test_two_losses_of_one_graph_are_no_fault():
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps():
            optimizer.zero_grad()
            y = model(X)
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
            optimizer.step()
    assert w.verdict != "GRAPH_KEPT", w.report()


@pytest.mark.long
@pytest.mark.parametrize("kept", ["tensors", "numbers"])
def test_what_a_hook_holds_on_to_is_found(kept, monkeypatch):
    model, store = dense(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def keep(module, given, made):
        store.append(made.detach().clone())  # held

    def note(module, given, made):
        store.append(float(made.detach().mean()))

    handle = model[2].register_forward_hook(keep if kept == "tensors" else note)
    with watch(tell=False, live=False) as w:
        for _ in steps(40):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    handle.remove()
    held = w.notes._find_holding()
    assert (held.line if held else 0) == (line_of("# held") if kept == "tensors" else 0)


@pytest.mark.long
def test_a_training_that_asks_autograd_for_its_gradients_has_a_verdict():
    weights = [nn.Parameter(0.1 * torch.randn(8, 512)), nn.Parameter(0.1 * torch.randn(512, 1))]
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            loss = (torch.relu(X @ weights[0]) @ weights[1] - Y).square().mean()
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.sub_(gradient, alpha=0.01)
    assert w.steps > 10 and w.verdict == "DEVICE_BOUND", w.report()


@pytest.mark.long
def test_a_gradient_of_an_input_is_no_step():
    model, x = dense(), X.clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in range(30):
            (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            optimizer.zero_grad()
            inner.square().mean().backward()
            torch.autograd.grad(model(x).sum(), x)
            optimizer.step()
    assert w.steps == 30


@pytest.mark.long
@pytest.mark.parametrize("of", ["layers", "samples"])
def test_a_loop_over_layers_is_no_loop_over_samples(of):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            optimizer.zero_grad()
            y = X
            for i in range(20):
                y = model[i if of == "layers" else 0](y)
            y.square().mean().backward()
            optimizer.step()
    assert (max(calls for c in w.notes.counted for calls in c.modules.models.values()) == 1) == (of == "layers")


class Documents(nn.Module):
    """Reads documents of several lengths, one after another, or step by step in time, all together."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.reader, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1)

    def read(self, document):
        for _ in range(3):
            document = torch.tanh(document + 0.1)
        return self.reader(document).mean(0)  # one document

    def forward(self, documents):
        if isinstance(documents, list):
            return self.head(torch.stack(list(map(self.read, documents))))
        states = torch.zeros(len(documents), 8)
        for i in range(documents.shape[1]):
            states = self.reader(torch.tanh(documents[:, i] + states + 0.1))
        return self.head(states)


@pytest.mark.long
@pytest.mark.parametrize("how", ["one by one", "in time"])
def test_samples_that_a_helper_takes_from_a_list_are_told_from_steps_in_time(how):
    model = Documents()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    documents = [torch.randn(3 + i % 5, 8) for i in range(64)] if how == "one by one" else torch.randn(64, 64, 8)
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(documents), Y).backward()
            optimizer.step()
    calls, line = w.notes.add_up().one_by_one
    assert calls == (64 if how == "one by one" else 0)
    assert how == "in time" or line.line == line_of("# one document")


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = dense(512), dense(32)

    def forward(self, x):
        return nn.functional.mse_loss(self.student(x), self.teacher(x))  # inside


@pytest.mark.long
def test_a_teacher_inside_the_model_is_named_where_it_is_called():
    model = Distilled()
    optimizer = torch.optim.Adam(model.student.parameters())
    with watch(tell=False, live=False) as w:
        for _ in steps(40):
            optimizer.zero_grad()
            model(X).backward()
            optimizer.step()
    assert w.diagnosis.reason == "UNUSED_GRADIENTS", w.report()
    assert f"{HERE.name}:{line_of('# inside')}" in w.diagnosis.text


def test_a_cache_without_an_end_is_found_by_its_decorator(tmp_path):
    script = tmp_path / "cached.py"
    script.write_text(
        "import functools\n\n\n@functools.lru_cache(maxsize=None)\ndef bias(n):\n    return n\n\n\nbias(1)\n"
    )
    assert source.find_holding(str(script), 9) == 4


@pytest.mark.parametrize(
    ("text", "grows"),
    [
        ("self.queue = torch.cat([keys, self.queue], dim=0)", True),
        ("seen = np.concatenate((seen, new))", True),
        ("df = pd.concat([df, row])", True),
        ("self.queue = torch.cat([keys, self.queue])[: self.size]", False),
        ("preds = torch.cat([preds, model(x)[0]])", True),
        ("x = torch.cat([h, x_t])", False),
        ("logits = torch.cat([pos, neg], dim=1)", False),
        ("self.keys = torch.cat([self.keys, z.detach()])", True),
        ("queue = torch.cat([queue, z.detach()])[-4096:]", False),
        ("x = torch.cat((cls_token, x), dim=1)", False),
        ("x = torch.cat([skip, x], 1)", False),
    ],
)
def test_a_table_that_grows_is_told_from_one_that_is_cut(text, grows):
    assert bool(re.search(GROWING, text)) == grows


@pytest.mark.long
@pytest.mark.parametrize("most", [None, 128])
def test_a_table_that_every_step_adds_to_is_named(most):
    model, table = dense(64), X
    optimizer = torch.optim.Adam(model.parameters())
    with watch(tell=False, live=False) as w:
        for _ in steps(200):
            table = torch.cat([X, table])  # joined
            table = table[:most]
            optimizer.zero_grad()
            (model(X).mean() + (table @ table[:8].T).square().mean()).backward()
            optimizer.step()
    seen = w.notes.add_up()
    assert (seen.growing and seen.growing.line) == (None if most else line_of("# joined"))
    grown = dataclasses.replace(seen, slowing=1.5)
    assert any(cause.reason == "GROWING_TABLE" for cause in find_causes(grown)) == (most is None)


@pytest.mark.long
@pytest.mark.parametrize("how", ["graph", "number"])
def test_a_graph_that_no_pass_backward_went_through_is_seen_to_be_kept(how):
    model, mean = dense(32), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps(100):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(X), Y).backward()
            optimizer.step()
            probe = model(X[:4]).mean()  # looked at
            mean = 0.9 * mean + 0.1 * (probe if how == "graph" else probe.item())
    assert (w.verdict == "GRAPH_KEPT") == (how == "graph"), w.report()
    assert how == "number" or f"{HERE.name}:{line_of('# looked at')}" in w.diagnosis.text


@pytest.mark.parametrize(
    ("head", "in_time"),
    [
        ("for t in range(x.shape[1]):", True),
        ("for x_t in x:", True),
        ("for i in range(seq_len):", True),
        ("for x in batch.unbind(1):", True),
        ("for i in range(len(x)):", False),
        ("for document in documents:", False),
    ],
)
def test_a_loop_through_time_is_told_by_its_head(tmp_path, head, in_time):
    script = tmp_path / "loop.py"
    script.write_text(f"{head}\n    y = layer(x)\n")
    (span,) = source.find_loops(str(script), 2)
    assert _goes_through_time(span) == in_time


def test_a_loop_over_triplets_is_one_over_pairs(tmp_path):
    script = tmp_path / "triplets.py"
    script.write_text(
        "for a in range(n):\n    for p in range(n):\n        d = far(a, p)\n        for q in range(n):\n"
        "            add(d - far(a, q))\nfor a in range(n):\n    for t in range(steps):\n        x = f(a, t)\n"
    )
    assert source.find_pairs(str(script), 5).start == 1 and source.find_pairs(str(script), 8) is None


@pytest.mark.parametrize(("inner", "pairs"), [("range(32)", True), ("range(i + 1, 32)", True), ("range(8)", False)])
def test_loops_over_numbers_are_over_pairs_where_they_go_as_far(inner, pairs, tmp_path):
    script = tmp_path / "numbers.py"
    script.write_text(f"for i in range(32):\n    for j in {inner}:\n        f(i, j)\n")
    assert bool(source.find_pairs(str(script), 3)) == pairs


@pytest.mark.long
@pytest.mark.parametrize("where", ["between epochs", "after them"])
def test_what_follows_the_last_step_counts_where_the_loop_over_epochs_goes_on(where):
    model = dense(32)
    optimizer = torch.optim.Adam(model.parameters())
    with watch(tell=False, live=False) as w:
        for _ in range(1):
            for _ in steps(20):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(X), Y).backward()
                optimizer.step()
            if where == "between epochs":
                time.sleep(1.5 * SECONDS)  # between
        if where == "after them":
            time.sleep(1.5 * SECONDS)
    assert (w.verdict == "GPU_IDLE_OUTSIDE_STEPS") == (where == "between epochs"), w.report()
    assert where == "after them" or f"{HERE.name}:{line_of('# between')}" in w.diagnosis.text


def test_passes_of_one_step_are_no_recurrence():
    torch.manual_seed(0)
    model = dense(8, depth=1)
    for passes, steps in ((9, 1), (1, 9)):
        operators = Operators(Roles())
        operators.begin()
        for _ in range(passes):
            y = X
            for _ in range(steps):
                y = model[2](y if steps > 1 and y.shape[1] == 8 else model[0](X))
            y.square().mean().backward()
        assert operators.try_exit() and operators.is_recurrent == (steps == 9)


class Sessions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, sessions):
        return self.head(torch.stack([self.rnn(x[None])[1][-1, 0] for x in sessions]))  # a session each


@pytest.mark.long
def test_a_recurrent_layer_that_is_given_one_sample_after_another_is_named():
    model = Sessions()
    optimizer = torch.optim.Adam(model.parameters())
    sessions = [torch.randn(4 + i % 12, 8) for i in range(48)]
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(sessions), Y[:48]).backward()
            optimizer.step()
    assert w.verdict == "SAMPLE_BY_SAMPLE", w.report()
    assert f"{HERE.name}:{line_of('# a session each')}" in w.diagnosis.text


@pytest.mark.long
def test_a_policy_that_is_asked_before_it_learns_is_no_validation():
    torch.manual_seed(0)
    model, seen = dense(64), torch.zeros(32, 64, 8)
    optimizer = torch.optim.Adam(model.parameters())
    with watch(tell=False, live=False) as w:
        for _ in steps(3):
            for t in range(32):
                with torch.no_grad():
                    act, val = X + t, model(X)
                seen[t] = act + val
            for _ in range(4):
                for rows in torch.randperm(32).split(8):
                    optimizer.zero_grad()
                    val = model(seen[rows])
                    val.square().mean().backward()
                    optimizer.step()
    assert not w.notes.add_up().shares.get("validation"), w.report()


def test_steps_that_grow_longer_are_seen_by_how_many_come_in_the_same_time():
    notes = Notes(Roles(), None, None)
    notes.steps = 720
    notes.memory = [(steps, 0.0) for steps in (0, 0, 8, 100, 190, 280, 370, 450, 520, 580, 630, 670, 700)]
    assert notes._find_slowing() == 270 / 120
    notes.memory = [(20 + 10 * i, 0.0) for i in range(10)]
    notes.steps = 120
    assert notes._find_slowing() == 1
    steps = [*range(20, 820, 100), 720, 720, 720, 820]  # a validation
    notes.memory, notes.steps = [(at, 0.0) for at in steps], 900
    assert notes._find_slowing() == 1


def test_a_graph_that_grows_comes_before_what_it_computes():
    kept = Seen(10.0, 50, 100, {"forward": 0.02, "backward": 0.95}, kept="a.py:9  loss.backward(retain_graph=True)")
    seen = dataclasses.replace(kept, denormal=(0.6, None))
    assert [cause.verdict for cause in find_causes(seen)] == ["GRAPH_KEPT", "WASTED_WORK"]


@pytest.mark.long
def test_the_last_state_of_a_recurrent_layer_is_no_vocabulary_for_all_steps():
    torch.manual_seed(0)
    layer, head = nn.GRU(1, 48, batch_first=True), nn.Linear(48, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()])
    x = torch.randn(256, 72, 1)
    with watch(tell=False, live=False) as w:
        for _ in steps(20):
            optimizer.zero_grad()
            head(layer(x)[0][:, -1]).square().mean().backward()
            optimizer.step()
    assert w.notes.add_up().last == 0


def test_a_file_put_in_its_place_is_saving_and_one_that_is_read_is_not():
    assert find_kind("tmp.replace(self.folder / name)", "pathlib") == "saving"
    assert find_kind("text = path.read_text()", "pathlib") == "pathlib"


def test_numbers_drawn_until_they_fit_are_to_be_drawn_at_once(tmp_path):
    path = tmp_path / "negatives.py"
    path.write_text(
        "def draw(seen, k):\n    row = []\n    while len(row) < k:\n        j = random.randrange(100)\n"
        "        if j not in seen:\n            row.append(j)\n    return row\n"
    )
    line = Line(str(path), 3, "while len(row) < k:", "data", 1.0)
    assert "torch.randint" in cure_of_data(line)
