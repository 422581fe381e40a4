"""What is noted of a loop, apart from a loop."""

import itertools
import re
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from cpbkit.gpu_check.notes import PADDING
from cpbkit.gpu_check.shares import Line, cure_of_data, find_kind
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
SECONDS = 2.0


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


@pytest.mark.parametrize("state", ["carried", "detached"])
def test_a_pass_backward_that_goes_through_earlier_ones_again_is_named(state):
    torch.manual_seed(0)
    cell, x = nn.GRU(8, 64, batch_first=True), torch.randn(16, 12, 20, 8)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    with watch(tell=False, live=False) as w:
        for _ in steps(4):
            optimizer.zero_grad()
            h = torch.zeros(1, 16, 64)
            for day in range(12):
                out, h = cell(x[:, day], h if state == "carried" else h.detach())
                out.square().mean().backward(retain_graph=True)  # again
            optimizer.step()
    assert (w.verdict == "GRAPH_KEPT") == (state == "carried"), w.report()
    assert state == "detached" or f"{HERE.name}:{line_of('# again')}" in w.diagnosis.text


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
    assert (max(calls for c in w.notes.counted for calls in c.calls.values()) == 1) == (of == "layers")


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
