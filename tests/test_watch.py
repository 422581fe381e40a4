"""A person's own loop under the watch: the line that costs the time, named; and nothing of the loop changed."""

import contextlib
import dataclasses
import gc
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset

from cpbkit.cli.machine import doctor
from cpbkit.errors import CpbkitError
from cpbkit.gpu_check import source
from cpbkit.gpu_check.call_stacks import WORDS_OF_VALIDATION, CallStack, Roles, find_role
from cpbkit.gpu_check.compare import compare_reports, load_report, render_comparison
from cpbkit.gpu_check.diagnosis import VERDICTS
from cpbkit.gpu_check.inject import HEALTHY, OWN_LOOPS, inject, inject_all, render_faults
from cpbkit.gpu_check.judge import judge_loop
from cpbkit.gpu_check.operators import Operators, _has_denormals, _usual_seconds
from cpbkit.gpu_check.script import run_script
from cpbkit.gpu_check.seen import Seen, Taken
from cpbkit.gpu_check.shares import WAITING, Line, attribute, cure_of_data, find_kind
from cpbkit.gpu_check.soundness import Unsound
from cpbkit.gpu_check.watch import Watch, watch

HERE = Path(__file__)


def make(width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    return model, torch.optim.Adam(model.parameters()), [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(40)]


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def lasting(items, seconds=2.0):
    """Go through items once, and again until so much time is over: a verdict needs looks, whatever the machine."""
    end, items = time.perf_counter() + seconds, list(items)
    while items:
        yield from items
        if time.perf_counter() > end:
            return


ROW = torch.randn(64).tolist()


def line_of(text):
    """The number of the line of this file that holds a text."""
    return next(i for i, line in enumerate(HERE.read_text().splitlines(), 1) if text in line)


# The pure part.

LINE = Line("/home/me/train.py", 57, "df.rolling(5).mean()", "rest", 4.1, "pandas")
TRAINING = {"data": 0.05, "forward": 0.3, "backward": 0.4, "optimiser": 0.2, "rest": 0.05}


def seen(**changes):
    shares = TRAINING | changes.pop("shares", {})
    total = sum(shares.values())
    base = Seen(10.0, 100, 1000, {name: share / total for name, share in shares.items()})
    return dataclasses.replace(base, **changes)


CASES = {
    "DEVICE_BOUND": seen(),
    "INCONCLUSIVE": seen(steps=2),
    "NO_WORK_ON_GPU": seen(gpu_there=True),
    "DEBUG_MODE_ON": seen(modes=("anomaly detection is on",), shares={"data": 5}),
    "GPU_IDLE_OUTSIDE_STEPS": seen(shares={"outside": 0.8}),
    "VALIDATION_IN_STEP": seen(shares={"validation": 0.9}, inside=0.45),
    "DATA_STARVED": seen(shares={"data": 1.0}),
    "PYTHON_OR_IO_IN_STEP": seen(python=(LINE,), shares={"rest": 0.8}),
    "SAMPLE_BY_SAMPLE": seen(taken=Taken(LINE, 32, 0.4)),
    "GRAPH_KEPT": seen(kept="train.py:60  total += loss"),
    "FLOAT64": seen(float64=0.99),
    "MEMORY_GROWTH": seen(growth=5e5, held=dataclasses.replace(LINE, text="preds.append(out.detach())")),
    "DENSE_EMBEDDING": seen(dense=(200_000, (512, 6_400_000)), shares={"optimiser": 2.0}),
    "FEW_THREADS": seen(threads=0.5, threads_line=LINE, starting=0.1),
    "SYNC_BOUND": seen(gpu_there=True, on_gpu=True, busy=0.3, waits=1, wait_lines=(LINE,)),
    "HOST_BOUND": seen(operators=3000, starting=0.95),
    "TOO_MANY_THREADS": seen(threads=24, threads_line=LINE),
    "WASTED_WORK": seen(unused=0.9),
    "UNSOUND_TRAINING": seen(unsound=((Unsound("EVAL_MODE", "It is in eval mode", "model.train()", ""), LINE),)),
}


@pytest.mark.parametrize("verdict", CASES)
def test_each_verdict_of_a_watch_is_reached(verdict):
    found = judge_loop(CASES[verdict])
    assert found.verdict == verdict and verdict in VERDICTS and found.text.endswith(".")


def test_a_watch_that_saw_no_step_says_so():
    assert judge_loop(seen(steps=0)).text.startswith("No step of an optimiser")


def test_the_largest_share_is_the_verdict_and_the_rest_is_beside():
    found = judge_loop(seen(python=(LINE,), shares={"data": 2.0, "rest": 0.8}))
    assert found.verdict == "DATA_STARVED"
    assert any(text.startswith("PYTHON_OR_IO_IN_STEP") and "train.py:57" in text for text in found.beside)


def test_the_verdict_shows_the_line_its_share_and_a_ceiling():
    found = judge_loop(CASES["PYTHON_OR_IO_IN_STEP"])
    assert "train.py:57  df.rolling(5).mean()" in found.text and "41%" in found.text
    assert found.fixes[0].ceiling == pytest.approx(1 / (1 - 0.41))


def test_a_host_that_only_waits_for_a_busy_device_is_not_to_blame():
    found = judge_loop(seen(python=(LINE,), shares={"rest": 2}, gpu_there=True, on_gpu=True, busy=0.97))
    assert found.verdict == "DEVICE_BOUND"
    behind = judge_loop(seen(shares={"data": 2}, gpu_there=True, on_gpu=True, behind=0.9))
    assert behind.verdict == "DEVICE_BOUND"


def test_a_fused_optimiser_is_advised_for_measured_time_alone():
    slow = judge_loop(seen(shares={"optimiser": 0.8}))
    assert [fix.name for fix in slow.fixes] == ["fused optimiser"]
    assert not judge_loop(seen(operators=500)).fixes
    assert not judge_loop(seen(shares={"optimiser": 0.8}, fused=False)).fixes, "LBFGS has no such option"


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_whether_an_optimiser_can_be_fused_is_read_from_its_constructor(kind):
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = kind([weight], lr=0.1)

    def close():
        weight.grad = torch.ones(4, 2).to_sparse(1) if kind is torch.optim.SparseAdam else torch.ones(4, 2)
        return 0.0

    with watch(tell=False) as w:
        for _ in range(5):
            close()
            optimizer.step(close)
    assert w.steps == 5 and w.notes.add_up().fused == (kind is torch.optim.Adam)


def test_threads_that_nobody_set_and_embeddings_that_are_read_whole_are_no_fault():
    assert judge_loop(seen(threads=0.5, starting=0.1)).verdict == "DEVICE_BOUND", "a core may have two threads"
    assert judge_loop(seen(dense=(1000, (512, 6_400_000)), shares={"optimiser": 2.0})).verdict == "DEVICE_BOUND"


def test_workers_that_are_started_again_are_told_from_slow_ones():
    slow = judge_loop(seen(shares={"data": 3.0}, workers=2, starts=1))
    again = judge_loop(seen(shares={"data": 3.0}, workers=2, starts=20, starts_line=LINE))
    assert (slow.reason, again.reason) == ("WORKERS", "WORKERS_STARTED_AGAIN")
    assert "every 5 steps" in again.text and "train.py:57" in again.text and "persistent" in again.fixes[0].note


def test_a_ceiling_too_good_to_be_true_says_so():
    found = judge_loop(seen(shares={"data": 100.0}))
    assert found.fixes[0].ceiling > 50 and "suspicious" in found.fixes[0].note


def test_whose_code_it_is():
    assert find_role(str(HERE), "test") == "own"
    assert find_role("/tmp/ipykernel_7/123.py", "<module>") == "own"
    assert find_role(nn.Linear.forward.__code__.co_filename.replace("linear", "module"), "_call_impl") == "forward"
    assert find_role(DataLoader.__iter__.__code__.co_filename, "__next__") == "data"
    assert find_role(pytest.__file__, "x") == "pytest"
    assert find_role(time.__spec__.origin or "<frozen time>", "x") != "forward"


def test_a_cell_of_a_notebook_is_named_as_one():
    places = ["/tmp/ipykernel_7/4087645332.py", "/tmp/ipython-input-5-4087645332.py", r"C:\Temp\ipykernel_7\40.py"]
    assert [Line(file, 8, "x", "rest", 1.0).place for file in places] == ["cell:8"] * 3
    assert Line(r"C:\mine\train.py", 8, "x", "rest", 1.0).place == Line("/mine/train.py", 8, "x", "rest", 1.0).place
    assert Line("/mine/train.py", 8, "x", "rest", 1.0).place == "train.py:8"


def test_the_source_around_a_line(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "for epoch in range(3):\n"  # 1
        "    for x, y in zip(a,\n"  # 2
        "                    b):\n"  # 3
        "        loss = f(x)\n"  # 4
        "        loss.backward()\n"  # 5
        "        total += loss\n"  # 6
        "        shown += loss.item()\n"  # 7
        "    with torch.no_grad():\n"  # 8
        "        v = f(a)\n"  # 9
        "    meter.log(seen=n, mean=v)\n"  # 10
    )
    name = str(file)
    assert source.find_loops(name, 5) == [source.Span(name, 1, 10, 1), source.Span(name, 2, 7, 3)]
    assert source.find_no_grad(name, 9) and not source.find_no_grad(name, 4)
    assert source.find_keeping(name, 5, "loss") == 6
    assert source.find_keeping(name, 9, "v") == 10
    summed = tmp_path / "summed.py"
    summed.write_text("for x in a:\n    loss = loss + f(x)\n    loss.backward()\n    total = total + loss\n")
    assert source.find_keeping(str(summed), 3, "loss") == 4  # the sum within a step keeps nothing
    alone = tmp_path / "alone.py"
    alone.write_text("for x in a:\n    loss = loss + f(x)\n    loss.backward(retain_graph=True)\n")
    assert source.find_keeping(str(alone), 3, "loss") == 2
    assert source.counts_only(source.find_loops(name, 9)[-1]) and not source.counts_only(source.find_loops(name, 5)[-1])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("data = np.load(self.files[i])", "__init__"),
        ("spec = data['spec'][i]", "__init__"),
        ("states, rewards = map(np.array, zip(*self.mem))", "numbers of the rows"),
        ("words = re.split(r' ', line)", "tokenise once"),
        ("x, y = next(iter(loader))", "iterator once"),
        ("window = frame.iloc[i : i + 60]", "windows once"),
        ("x, y = x[rows], y[rows]", "windows once"),
        ("x = (self.feats[index] - self.mean) / self.std", "windows once"),
        ("x = self.augment(self.images[i])", "keep the result"),
        ("u, v = random.randrange(n), random.randrange(n)", "a whole batch at once"),
        ("rows = np.random.choice(n, 64, p=weights)", "draw for many batches"),
        ("image = make(i).resize((32, 32))", "keep the result"),
        ("pool = [i for i, y in enumerate(labels) if y == c]", "keep the result"),
    ],
)
def test_the_cure_of_slow_data_is_that_of_its_line(tmp_path, text, word):
    file = tmp_path / "train.py"
    opens = "data = np.load(file)" if "data[" in text else "pass"
    file.write_text(f"def __getitem__(self, i):\n    {opens}\n    {text}\n")
    assert word in cure_of_data(Line(str(file), 3, text, "data", 1.0, find_kind(text, "")))


def test_a_table_that_grows_is_told_from_one_that_is_made():
    grown = "log = pd.concat([log, row])", "a = np.append(a, loss.item())", "kept = torch.cat((kept, x))"
    assert {find_kind(text, library) for text, library in zip(grown, ("pandas", "numpy", "torch"), strict=True)} == {
        "growing a table"
    }
    assert find_kind("table.to_csv(path)", "pandas") == "saving" and find_kind("df.rolling(5)", "pandas") == "pandas"
    assert find_kind("x = torch.cat([a, b])", "torch") == "" and find_kind("x = np.stack(rows)", "numpy") == "NumPy"


def test_what_unpacks_a_map_is_named_though_it_is_seen_at_the_next_call(tmp_path):
    file = tmp_path / "train.py"
    lines = ["def sample(n):", "    a, b = map(np.array, zip(*mem))", "    i = np.random.choice(n)", "    return a[i]"]
    file.write_text("\n".join(lines))
    code = compile(file.read_text(), str(file), "exec").co_consts[0]
    for at, found in ((3, {2: 1.25}), (4, {2: 0.25, 4: 1.0})):
        seen = {CallStack("data", "", 0, False, ((0, line),)): time for line, time in ((2, 0.25), (at, 1.0))}
        assert {line.line: line.seconds for line in attribute(seen, [code], ()).lines} == found


# Real loops.


def test_the_line_that_sleeps_is_named_and_hooks_are_gone():
    model, optimizer, batches = make()
    before = torch.autograd.backward, DataLoader.__iter__, sys.getswitchinterval()
    with watch(model, optimizer, tell=False) as w:
        for x, y in batches * 2:
            step(model, optimizer, x, y)
            time.sleep(0.02)  # the line to name
    assert w.verdict == "PYTHON_OR_IO_IN_STEP"
    assert f"{HERE.name}:{line_of('# the line to ' + 'name')}" in w.diagnosis.text
    assert (torch.autograd.backward, DataLoader.__iter__, sys.getswitchinterval()) == before
    assert not _global_optimizer_post_hooks


def test_a_watched_training_ends_with_the_same_weights_to_the_bit():
    ends = []
    for watched in (False, True):
        model, optimizer, batches = make()
        loop = watch(batches, model, optimizer, tell=False) if watched else batches
        for x, y in loop:
            step(model, optimizer, nn.functional.dropout(x, 0.5), y)
        ends.append([p.detach().clone() for p in model.parameters()] + [torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_kept_graphs_are_found_by_their_being_alive(monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.watch.MARKS", 0.0)
    for keep in (True, False):
        model, optimizer, batches = make()
        total = 0.0
        with watch(model, optimizer, tell=False) as w:
            for x, y in batches * 20:
                loss = step(model, optimizer, x, y)
                total += loss if keep else loss.item()
        assert bool(w.notes.add_up().kept) == keep


def test_a_loop_that_ends_early_leaves_nothing_behind():
    model, optimizer, batches = make()
    before = torch.autograd.backward
    for i, (x, y) in enumerate(watch(batches, tell=False)):
        step(model, optimizer, x, y)
        if i == 5:
            break
    assert torch.autograd.backward is before
    with pytest.raises(ZeroDivisionError), watch(tell=False) as w:
        step(model, optimizer, *batches[0])
        raise ZeroDivisionError
    assert w.verdict == "INCONCLUSIVE" and torch.autograd.backward is before


def test_what_was_looked_at_is_freed_without_a_collection_of_garbage():
    model, optimizer, batches = make()
    seen = []
    gc.collect()
    gc.disable()
    try:
        with watch(model, optimizer, live=False, tell=False) as w:
            end = time.perf_counter() + 1.5
            while time.perf_counter() < end:
                x = torch.randn(16, 8)
                seen.append(weakref.ref(x))
                step(model, optimizer, x, batches[0][1])
    finally:
        gc.enable()
    assert w.notes.add_up().looks > 30 and sum(ref() is not None for ref in seen) < 5


def test_a_kept_forecast_is_found_though_its_loss_is_not_kept(monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.watch.MARKS", 0.0)
    model, optimizer, batches = make()
    kept = []
    with watch(tell=False) as w:
        for x, y in batches * 20:
            forecast = model(x)
            loss = (forecast - y).square().mean()
            loss.backward()
            optimizer.step()
            kept.append(forecast)  # the line that keeps
    found = w.notes.add_up().kept
    assert "float(" in judge_loop(seen(kept=found)).fixes[0].note, "without its graph a forecast is as large"
    assert found.startswith(f"{HERE.name}:{line_of('# the line that ' + 'keeps')}")


def test_losses_that_a_function_kept_are_found_after_it_has_returned(monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.watch.MARKS", 0.0)
    monkeypatch.setattr("cpbkit.gpu_check.watch.MOST_MARKS", 60)
    model, optimizer, batches = make()

    def train():
        losses = []
        for x, y in batches * 20:
            losses.append(step(model, optimizer, x, y))

    with watch(tell=False) as w:
        train()
    assert w.notes.add_up().kept and len(w.notes.marks) < 70


def test_weights_that_are_moved_by_hand_make_steps_too(monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.watch.UNSTEPPED", 3)
    model, _, batches = make()
    with watch(tell=False) as w:
        for x, y in batches:
            nn.functional.mse_loss(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    assert w.steps == len(batches) - 3 and w.notes.add_up().passes == 1


@pytest.mark.long
def test_the_time_of_python_is_not_put_on_the_short_call_after_it():
    def features():
        ranks = [sum(1 for v in ROW if v < u) for u in ROW]  # in pure Python
        return torch.tensor(ranks)  # next to nothing

    model, optimizer, _ = make()
    with watch(live=False, tell=False) as w:
        for _ in lasting(range(400)):
            step(model, optimizer, torch.stack([features()[:8] / 64 for _ in range(16)]), torch.zeros(16, 1))
    seconds = {line.line: line.seconds for line in w.notes.add_up().lines}
    slow, short = (seconds.get(line_of(f"# {mark}"), 0.0) for mark in ("in pure " + "Python", "next to " + "nothing"))
    assert slow > 2 * short, w.report()


def test_a_watch_within_another_sees_as_much_and_leaves_nothing_behind():
    model, optimizer, batches = make()
    original, watches = torch.autograd.backward, [watch(live=False, tell=False) for _ in range(2)]
    for within in (True, False):  # by turns, each lets passes backward go by while nothing is to be noted
        with watches[0] if within else contextlib.nullcontext(), watches[1] if within else contextlib.nullcontext():
            for x, y in lasting(batches, seconds=1.0):
                step(model, optimizer, x, y)
            steps = [w.steps for w in watches]
    assert min(steps) == max(steps) >= len(batches) and steps == [w.steps for w in watches]
    assert {w.notes.add_up().passes for w in watches} == {1.0}
    assert min(len(w.notes.marks) for w in watches) > 10 and torch.autograd.backward is original


def test_a_pass_is_noted_once_though_somebody_stands_in_for_it_too(monkeypatch):
    calls, passes, original = [], Watch._pass, torch.autograd.backward
    monkeypatch.setattr(Watch, "_pass", lambda self, *given, **more: calls.append(1) or passes(self, *given, **more))
    model, optimizer, batches = make()
    try:
        with watch(live=False, tell=False):
            stand_in = torch.autograd.backward
            torch.autograd.backward = lambda *args, **kwargs: stand_in(*args, **kwargs)
            for x, y in lasting(batches, seconds=1.0):
                before = len(calls)
                step(model, optimizer, x, y)
                assert len(calls) - before <= 1
    finally:
        torch.autograd.backward = original
    assert len(calls) > 20


def test_a_mode_that_is_entered_while_operators_are_counted_leaves_no_count_behind():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    model, optimizer, batches = make()
    mode = Mode()
    with watch(live=False, tell=False) as w:
        for i, (x, y) in enumerate(batches):
            if i == 3:  # it is counted
                mode.__enter__()
            if i == 10:
                mode.__exit__(None, None, None)
            step(model, optimizer, x, y)
    assert _get_current_dispatch_mode() is None and w.steps == len(batches) and not w.notes.problems


def test_the_data_of_a_loader_that_is_gone_is_gone():
    model, optimizer, _ = make()
    alive = weakref.WeakSet()
    with watch(live=False, tell=False) as w:
        for _ in range(5):
            data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
            alive.add(data)
            for x, y in DataLoader(data, 16, shuffle=True):
                step(model, optimizer, x, y)
        del data
        gc.collect()
        assert not alive and w.notes.loaders


def test_a_value_that_lies_on_the_host_is_not_waited_for():
    def note(device):
        function = torch.ops.aten._local_scalar_dense
        counted._note(function.default, function, (torch.zeros((), device=device),), 0.0, 0.0)

    counted = Operators(Roles())
    for device, waits in (("cpu", 0), ("meta", 1)):
        (lambda device=device: note(device))()
        assert len(counted.waits) == waits


def test_a_loop_trained_in_another_thread_by_two_optimisers_is_one_loop(monkeypatch):
    monkeypatch.setattr("cpbkit.gpu_check.watch.MARKS", 0.0)
    model, _, batches = make()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    kept = []

    def train_step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.005)
        return loss

    def train():
        for x, y in batches:
            kept.append(train_step(x, y))  # the call whose result is kept

    with watch(tell=False) as w:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert w.steps == len(batches) and w.notes.add_up().shares.get("outside", 0) == 0
    found = attribute(dict(w.notes.sampler.seen), w.notes.roles.codes, w.notes.step, (), w.notes.backward)
    assert found.loop.start == line_of("# the call whose " + "result is kept") - 1
    assert w.notes.add_up().kept.startswith(f"{HERE.name}:{line_of('# the call whose ' + 'result is kept')}")


def test_gradients_that_no_optimiser_uses_are_counted():
    model, _, batches = make(width=32)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # the head: 33 numbers of 33 + 288
    for frozen in (False, True):
        model[0].requires_grad_(not frozen)
        with watch(tell=False) as w:
            for x, y in batches * 20:
                step(model, optimizer, x, y)
        assert w.notes.add_up().unused == pytest.approx(0 if frozen else 288 / 321)


@pytest.mark.long
@pytest.mark.parametrize("turns", [1, 5])
@pytest.mark.parametrize("cut", ["off", "not"])
def test_gradients_of_a_generator_that_are_made_for_its_critics_step_are_named(cut, turns):
    torch.manual_seed(0)
    generator, critic = (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2))
    of_generator, of_critic = (torch.optim.SGD(model.parameters(), lr=1e-4) for model in (generator, critic))
    with watch(live=False, tell=False) as w:
        for i in lasting(range(100)):
            fake = generator(torch.randn(256, 64))
            fake = fake.detach() if cut == "off" else fake
            loss = critic(fake).mean() - critic(torch.randn(256, 64)).mean()
            of_critic.zero_grad()
            loss.backward()  # of the critic
            of_critic.step()
            if i % turns:
                continue
            loss = -critic(generator(torch.randn(256, 64))).mean()  # goes through the critic, as it must
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
    assert (w.diagnosis.reason == "THROWN") == (cut == "not"), w.report()
    if cut == "not":
        assert f":{line_of('# of the ' + 'critic')}  " in w.diagnosis.text
        # Half of one pass backward: of two that are seen as often, or of one that is seen most.
        assert w.notes.add_up().thrown == pytest.approx(1 / 4, abs=0.1)


class Graph(nn.Module):
    def __init__(self, nodes, once):
        super().__init__()
        self.layer, self.once = nn.Linear(32, 32), once
        self.register_buffer("links", (torch.rand(nodes, nodes) < 0.02).float() + torch.eye(nodes))
        self.register_buffer("norm", self.normalise())

    def normalise(self):
        scale = torch.diag(self.links.sum(1).pow(-0.5))
        return scale @ self.links @ scale  # at every step

    def forward(self, x):
        return (self.norm if self.once else self.normalise()) @ self.layer(x)


@pytest.mark.long
@pytest.mark.parametrize("once", [True, False])
def test_what_is_computed_anew_from_the_same_numbers_is_named(once):
    torch.manual_seed(0)
    model, x = Graph(400, once), torch.randn(400, 32)
    optimizer = torch.optim.Adam(model.parameters())
    with watch(model, optimizer, live=False, tell=False) as w:
        for _ in lasting(range(300 if once else 120)):
            step(model, optimizer, x, x)
    assert (w.diagnosis.reason == "REPEATED") != once, w.report()
    if not once:
        assert f":{line_of('# at every ' + 'step')}  " in w.diagnosis.text


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 1024), nn.Linear(1024, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


@pytest.mark.long
@pytest.mark.parametrize("again", [True, False])
def test_a_model_that_is_called_twice_for_one_batch_is_named_with_the_second_call(again):
    torch.manual_seed(0)
    model, x, y = Wide(), torch.randn(512, 64), torch.randint(0, 10, (512,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    right = 0
    with watch(model, optimizer, live=False, tell=False) as w:
        for _ in lasting(range(100)):
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            out = model(x) if again else out  # for the metric
            right += int((out.argmax(1) == y).sum())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert (w.diagnosis.reason == "REPEATED") == again, w.report()
    assert not again or f":{line_of('# for the ' + 'metric')}  " in w.diagnosis.text


class ByHand:
    def __init__(self, model):
        self.weights = list(model.parameters())
        self.mean = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, also=0):
        norm = torch.stack([weight.grad.norm() for weight in self.weights]).norm()
        for weight, mean in zip(self.weights, self.mean, strict=True):
            mean.mul_(0.9).add_(weight.grad / norm.clamp(min=1))  # moves
            weight.sub_(0.01 * mean)  # it moves
            for _ in range(also):
                weight.grad[:64].square().sort()  # looks on


@pytest.mark.long
@pytest.mark.parametrize("also", [0, 3])
def test_an_optimiser_written_by_hand_is_told_from_what_else_is_done_with_gradients(also):
    torch.manual_seed(0)
    model, x, y = Wide(), torch.randn(16, 64), torch.randint(0, 10, (16,))
    optimizer = ByHand(model)
    with watch(live=False, tell=False) as w:
        for _ in lasting(range(120 if also else 500)):
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step(also)
    accounts = {line.line: line.account for line in w.notes.add_up().lines}
    moving = [accounts.get(line_of(f"# {mark}")) for mark in ("mov" + "es", "it mov" + "es")]  # a line may go unseen
    assert "optimiser" in moving and {*moving} <= {"optimiser", None}, w.report()
    assert not also or accounts[line_of("# looks" + " on")] == "rest"
    assert (w.verdict == "PYTHON_OR_IO_IN_STEP") == bool(also), w.report()


@pytest.mark.parametrize("turn", ["counts", "asks", "gets", "sleeps"])
def test_another_thread_that_keeps_the_interpreter_is_told_from_one_that_waits(turn):
    def count():
        total = 0
        while not done.is_set():
            for i in range(100_000):
                total += i * i  # counts

    def ask():
        while not done.is_set():
            with contextlib.suppress(queue.Empty):  # asks
                inbox.get_nowait()  # asks on

    def get():
        while not done.is_set():
            with contextlib.suppress(queue.Empty):
                inbox.get(timeout=0.01)

    def sleep():
        while not done.is_set():
            time.sleep(0.01)

    turns = {"counts": count, "asks": ask, "gets": get, "sleeps": sleep}
    busy, inbox = turn in ("counts", "asks"), queue.Queue()
    model, optimizer, batches = make()
    done = threading.Event()
    thread = threading.Thread(target=turns[turn])
    thread.start()
    try:
        with watch(model, optimizer, live=False, tell=False) as w:
            end = time.perf_counter() + 2
            while time.perf_counter() < end:
                for x, y in batches:
                    step(model, optimizer, x, y)
    finally:
        done.set()
        thread.join()
    assert (w.diagnosis.reason == "thread") == busy, w.report()
    texts = ["# cou" + "nts", "range(100_" + "000)"] if turn == "counts" else ["# as" + "ks", "# asks " + "on"]
    assert not busy or any(f":{line_of(text)}  " in w.diagnosis.text for text in texts), w.report()


@pytest.mark.long
@pytest.mark.parametrize("small", [1e-39, 1e-20])
def test_numbers_next_to_zero_are_named_with_the_line_that_makes_them(small, monkeypatch):
    # Some processors are as quick on them, and some on all of it.
    monkeypatch.setattr("cpbkit.gpu_check.operators.SLOW_POINTS", math.inf)
    monkeypatch.setattr("cpbkit.gpu_check.operators.SLOW", 0.0)
    torch.manual_seed(0)
    model, x = Wide(), torch.randn(512, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    y = torch.randint(0, 10, (512,))
    with watch(model, optimizer, live=False, tell=False) as w:
        for _ in lasting(range(100)):
            faded = x.repeat(1, 16) * small  # fades
            loss = nn.functional.cross_entropy(model(x) + faded.relu().sum(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    share, line = w.notes.add_up().denormal
    assert (line is not None) == (small < 1e-38), w.report()
    assert line is None or (line.line == line_of("# fad" + "es") and share > 0)


class Molecule(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


@pytest.mark.long
@pytest.mark.parametrize("over", ["samples", "time"])
def test_a_model_that_is_called_for_each_sample_is_told_from_one_called_for_each_step_in_time(over):
    torch.manual_seed(0)
    model, samples = Molecule(), [torch.randn(5 + i % 3, 8) for i in range(32)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer, live=False, tell=False) as w:
        for _ in lasting(range(120)):
            made = []
            if over == "samples":
                for sample in samples:
                    made.append(model(sample))  # called
            else:
                for t in range(len(samples)):
                    made.append(model(samples[t]))
            optimizer.zero_grad()
            torch.stack(made).square().mean().backward()
            optimizer.step()
    assert (w.diagnosis.reason == "CALLS") == (over == "samples"), w.report()
    assert over == "time" or f":{line_of('# cal' + 'led')}  " in w.diagnosis.text


class Probe(nn.Module):
    """A part of it is frozen, as of a model that is fine-tuned."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(400, 1500), nn.Linear(1500, 1)

    def forward(self, x):
        with torch.no_grad():
            x = self.frozen(x)
        return self.head(x)


def test_a_frozen_part_of_the_model_is_no_validation():
    model, x = Probe(), torch.ones(256, 400)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with watch(tell=False) as w:
        for _ in range(40):
            step(model, optimizer, x, torch.ones(256, 1))
    assert w.notes.add_up().shares.get("validation", 0) == 0 and w.notes.add_up().shares["forward"] > 0.4


def fit(model, optimizer, x, steps, teacher=None):
    for _ in range(steps):
        x, y = x.roll(1, 0), torch.zeros(len(x), 64)
        if teacher:
            with torch.no_grad():
                y = teacher(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_that_was_trained_before_in_the_same_loop_is_no_validation(frozen):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    student, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(512, 64)
    with watch(tell=False) as w:
        fit(teacher, torch.optim.SGD(teacher.parameters(), lr=0.1), x, 40)
        teacher.eval().requires_grad_(not frozen)
        fit(student, torch.optim.SGD(student.parameters(), lr=0.1), x, 200, teacher)
    assert w.notes.add_up().shares.get("validation", 0) == 0, w.report()
    assert w.verdict == "DEVICE_BOUND"


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_for_teachers_that_were_trained_one_after_another_are_told(kept):
    torch.manual_seed(0)
    teachers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
    student, x, optimizers = nn.Linear(64, 64), torch.randn(64, 64), []
    with watch(tell=False) as w:
        for teacher in teachers:
            optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
            fit(teacher, optimizer, x, 20)
            optimizers += [optimizer] * kept
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(300):
            optimizer.zero_grad()
            guide = sum(teacher(x) for teacher in teachers)
            nn.functional.mse_loss(student(x), guide).backward()
            optimizer.step()
    assert w.notes.main is optimizer and w.notes.add_up().unused == pytest.approx(0.75)
    assert "guide = sum(" in w.notes.add_up().unused_line.text


@pytest.mark.long
@pytest.mark.parametrize("asks", [True, False])
def test_data_that_a_policy_makes_is_not_to_be_made_before_training(asks):
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with watch(tell=False) as w:
        for _ in lasting(range(100)):
            state, states, action = torch.randn(64, 2), [], torch.zeros(64)
            with torch.no_grad():
                for _ in range(80):
                    if asks:
                        action = torch.distributions.Categorical(logits=policy(state)).sample()
                    noise = torch.randn(64, 2) + action[:, None]
                    state = (state + 0.1 * noise.sin() * noise.cos().exp()).clamp(-1, 1)
                    states.append(state)
            loss = policy(states[-1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert w.notes.add_up().shares["data"] > 0.3, w.report()
    assert w.verdict == ("DEVICE_BOUND" if asks else "DATA_STARVED"), w.report()
    assert ("asked" in w.diagnosis.text) == asks


def test_a_policy_whose_steps_sleep_is_told_where():
    asleep = dataclasses.replace(LINE, text="time.sleep(frame_dt)", seconds=8.0, account="data", kind=WAITING)
    found = judge_loop(seen(asked=True, lines=(asleep,), shares={"data": 8.0}))
    assert (found.verdict, found.reason) == ("PYTHON_OR_IO_IN_STEP", WAITING), found
    assert found.text.startswith("Waiting takes 80% of the time: ") and "train.py:57" in found.text
    at_work = dataclasses.replace(asleep, text="env.step(action)", kind="")
    assert judge_loop(seen(asked=True, lines=(at_work,), shares={"data": 8.0})).verdict == "DEVICE_BOUND"


def test_a_function_whose_lines_are_many_is_named_as_one():
    lines = [
        dataclasses.replace(LINE, line=i, seconds=0.8, kind="", caller=90, caller_file="/home/me/train.py")
        for i in range(10, 16)
    ]
    lone = dataclasses.replace(LINE, seconds=1.1, kind="")
    found = judge_loop(seen(python=(lone, *lines), shares={"rest": 2}))
    assert found.verdict == "PYTHON_OR_IO_IN_STEP" and "train.py:10" in found.text and "at train.py:90" in found.text
    assert "48%" in found.text, "six lines of 0.8 s in 10 s"


def test_a_profiler_left_on_and_a_batch_of_one_are_seen():
    model, optimizer, batches = make()
    with watch(tell=False) as w, torch.autograd.profiler.profile():
        for x, y in batches:
            step(model, optimizer, x[:1], y[:1])
    assert w.notes.add_up().modes == ("a profiler of torch's is recording",)
    assert w.notes._find_small_batch(attribute({}, (), ()), w.notes.counted[0]) == (1, None)  # without a line to show
    assert w.notes.add_up().mode_line.line == line_of("torch.autograd.profiler.profile()" + ":")
    assert {c.rows for c in w.notes.counted} == {1}


def test_a_loader_of_single_samples_and_a_huge_embedding_are_named():
    table, head = nn.Embedding(3000, 4), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()])
    ones = DataLoader(TensorDataset(torch.arange(20)), batch_size=1, num_workers=0)
    with watch(tell=False) as w:
        for (x,) in ones:  # one by one
            optimizer.zero_grad()
            head(table(x)).square().mean().backward()
            optimizer.step()
    found = attribute({}, w.notes.roles.codes, w.notes.step)
    rows, line = w.notes._find_small_batch(found, w.notes.counted[0])
    assert rows == 1 and "batch_size=1" in line.text
    assert w.notes.add_up().dense == (3000, (1, 12000))


@pytest.mark.long
def test_a_model_without_a_module_is_no_loading_of_data():
    x, weights = torch.randn(4000, 60), torch.randn(60, 400, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.1)
    with watch(tell=False) as w:
        for _ in lasting(range(60)):
            forecast = (torch.relu(x[torch.randint(0, 4000, (1000,))] @ weights)).square()  # a batch, and a model
            forecast.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.notes.add_up().shares.get("data", 0) < 0.1 < w.notes.add_up().shares["forward"]


def test_a_line_that_calls_layers_of_torchs_is_no_python_however_busy_the_machine():
    model, optimizer, batches = make(width=400)
    with watch(tell=False) as w:
        for x, y in batches:
            step(model, optimizer, x, y)
    counted = w.notes.counted[0]
    for calls in counted.lines.values():
        calls.seconds = 0.0  # as where other programs take nearly all of the time
    w.notes.cpu = w.notes.seconds  # a processor that this machine did not lend meanwhile would decide here
    lines = [dataclasses.replace(LINE, account="forward", kind="", by_torch=by_torch) for by_torch in (True, False)]
    found = dataclasses.replace(attribute({}, (), ()), lines=tuple(lines), seconds={"forward": 8.2})
    assert w.notes._find_python(found, counted, 0.1) == (lines[1],)


@pytest.mark.parametrize("layer", [nn.GRU, nn.GRUCell])
def test_how_torch_writes_a_layer_out_is_no_fault_of_the_loop(layer):
    torch.manual_seed(0)
    recurrent, head = layer(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*recurrent.parameters(), *head.parameters()], lr=0.1)
    with watch(tell=False) as w:
        for x in torch.randn(12, 30, 16, 4):
            if layer is nn.GRU:
                state = recurrent(x)[0][-1]
            else:
                state = None
                for now in x:
                    state = recurrent(now, state)
            optimizer.zero_grad()
            head(state).square().mean().backward()
            optimizer.step()
    counted = w.notes.counted[0]
    assert counted.count > 200 and (counted.own_count < 0.1 * counted.count) == (layer is nn.GRU)


@pytest.mark.long
@pytest.mark.parametrize("over", ["pairs", "layers and time"])
def test_a_loop_over_the_pairs_of_a_batch_is_told_from_one_over_layers_and_time(over):
    torch.manual_seed(0)
    x, layers, n = torch.randn(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(16)), 16
    optimizer = torch.optim.SGD((layers[0] if over == "pairs" else layers).parameters(), lr=0.01)
    with watch(tell=False) as w:
        for _ in lasting(range(100)):
            found, losses = layers[0](x), []
            if over == "pairs":
                for i in range(n):  # each pair
                    for j in range(i + 1, n):
                        losses.append((found[i] - found[j]).square().sum().sqrt())
            else:
                for layer in layers:
                    for row in x:
                        losses.append(layer(row).square().sum().sqrt())
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    assert (w.notes.add_up().pairs is not None) == (over == "pairs")
    if over == "pairs":
        assert w.diagnosis.reason == "PAIRS" and f":{line_of('# each ' + 'pair')}  " in w.diagnosis.text, w.report()
        assert "x[:, None] - x[None]" in w.diagnosis.fixes[0].note


def test_a_validation_goes_by_its_name_where_gradients_were_forgotten():
    assert WORDS_OF_VALIDATION.search("error = model(x_val)") and WORDS_OF_VALIDATION.search("def evaluate")
    assert not WORDS_OF_VALIDATION.search("value = interval(latest)")


@pytest.mark.long
def test_a_validation_with_its_loader_is_one_thing():
    model, optimizer, batches = make()
    held = DataLoader(TensorDataset(torch.randn(256, 8), torch.randn(256, 1)), batch_size=16)
    with watch(tell=False) as w:
        for x, y in lasting(batches * 10):
            step(model, optimizer, x, y)
            with torch.no_grad():
                for a, b in held:
                    nn.functional.mse_loss(model(a), b)
    assert w.verdict == "VALIDATION_IN_STEP"
    assert w.notes.add_up().shares["validation"] > 0.5 > w.notes.add_up().shares.get("data", 0)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["told", "chosen from"])
def test_many_rows_without_gradients_are_a_validation_where_their_error_is_told(kind):
    model, optimizer, _ = make(256)
    x, y, errors = torch.randn(8000, 8), torch.randn(8000, 1), []
    with watch(tell=False) as w:
        for _ in lasting(range(40)):
            rows = torch.randint(0, len(x), (64,))
            if kind == "chosen from":
                with torch.no_grad():
                    rows = (model(x) - y).square()[:, 0].topk(64).indices
            step(model, optimizer, x[rows], y[rows])
            if kind == "told":
                with torch.no_grad():
                    errors.append(nn.functional.mse_loss(model(x), y).item())
    assert (w.verdict == "VALIDATION_IN_STEP") == (kind == "told")
    if kind == "told":
        assert f"{HERE.name}:{line_of('errors.append(' + 'nn.functional')}" in w.diagnosis.text


@pytest.mark.long
@pytest.mark.parametrize("of", ["a layer", "a weight", "a layer, now and then", "a layer, taken off"])
def test_hooks_that_pile_up_are_named_and_one_that_is_taken_off_is_not(of):
    model, optimizer, batches = make()
    with watch(tell=False) as w:
        for at, (x, y) in enumerate(lasting(batches * 30)):
            if of == "a weight":
                model[0].weight.register_hook(lambda _: None)
            elif at % 7 == 0 or of != "a layer, now and then":
                handle = model[0].register_forward_hook(lambda *_: None)
            step(model, optimizer, x, y)
            if of == "a layer, taken off":
                handle.remove()
    assert (w.notes.add_up().hooks > 0.1) == (of != "a layer, taken off")
    if of != "a layer, taken off":
        line = line_of("model[0].weight." + "register_hook")
        assert w.diagnosis.reason == "hooks" and f"{HERE.name}:{line}" in w.diagnosis.text


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, ids, lengths=None):
        x = self.table(ids)  # the ids
        if lengths is not None:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layer(x)[1][0])


class Many(nn.Module):
    """Models of a kind beside each other, or one cell over time."""

    def __init__(self, over_time):
        super().__init__()
        self.over_time = over_time
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(1 if over_time else 40))

    def forward(self, x):
        if not self.over_time:
            return sum(torch.tanh(layer(torch.tanh(layer(x)))) for layer in self.layers)
        for _ in range(80):
            x = torch.tanh(self.layers[0](x))
        return x


@pytest.mark.long
@pytest.mark.parametrize("over_time", [True, False])
def test_one_cell_over_time_is_told_from_many_models(over_time):
    model = Many(over_time)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(tell=False, live=False) as w:
        for _ in lasting(range(60)):
            step(model, optimizer, torch.ones(4, 8), torch.ones(4, 8))
    assert (w.notes.add_up().gates >= 40) == over_time


@pytest.mark.long
@pytest.mark.parametrize("kind", ["padded", "short", "packed"])
def test_a_batch_that_is_mostly_padding_is_named(kind):
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters())
    lengths = torch.randint(8, 20, (16,))
    ids = torch.randint(1, 50, (16, 20 if kind == "short" else 80))
    ids[torch.arange(ids.shape[1]) >= lengths[:, None]] = 0
    with watch(tell=False) as w:
        for _ in lasting(range(60)):
            optimizer.zero_grad()
            model(ids, lengths if kind == "packed" else None).square().mean().backward()
            optimizer.step()
    padded = 1 - lengths.sum().item() / ids.numel()
    assert w.notes.add_up().padding[0] == pytest.approx(padded if kind != "packed" else 0)
    assert (w.diagnosis.reason == "PADDING") == (kind == "padded"), w.report()
    if kind == "padded":
        assert f"{padded:.0%}" in w.diagnosis.text and f"{HERE.name}:{line_of('# the ' + 'ids')}" in w.diagnosis.text


@pytest.mark.long
@pytest.mark.parametrize("kind", ["last", "before", "all", "narrow"])
def test_a_vocabulary_computed_for_all_steps_of_which_one_is_used_is_named(kind):
    torch.manual_seed(0)
    layer, head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 20 if kind == "narrow" else 4000)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
    x = torch.randn(16, 16, 8)
    with watch(tell=False) as w:
        for _ in lasting(range(50)):
            found = layer(x)[0]
            if kind == "before":
                found = found.select(1, -1)
            logits = head(found)
            if kind in ("last", "narrow"):
                logits = logits[:, -1]  # one of sixteen
            optimizer.zero_grad()
            logits.square().mean().backward()
            optimizer.step()
    assert w.notes.add_up().last == (16 if kind == "last" else 0)
    if kind == "last":
        line = line_of("# one of " + "sixteen")
        assert w.diagnosis.reason == "LAST_STEP" and f":{line}  " in w.diagnosis.text, w.report()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["graph", "no graph", "attack"])
def test_a_validation_with_gradients_is_told_from_one_without_and_from_one_that_needs_them(kind):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(256, 64)

    def evaluate():
        model.eval()
        total = 0.0
        for part in (x, x, x):
            part = part.clone().requires_grad_(kind == "attack")
            loss = model(part).square().mean()  # validates
            if kind == "attack":
                loss.backward()
            total += loss.item()
        model.train()

    with watch(tell=False) as w:
        for _ in lasting(range(200)):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if kind == "no graph":
                with torch.no_grad():
                    evaluate()
            else:
                evaluate()
    assert w.notes.add_up().graphs == (kind == "graph"), w.report()
    if kind == "graph":
        assert w.diagnosis.reason == "VALIDATION_GRAPHS" and "no_grad" in w.diagnosis.fixes[0].note
        assert f"{HERE.name}:{line_of('# vali' + 'dates')}" in w.diagnosis.text


class Rows(nn.Module):
    """Above the loop that calls it, as models mostly are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return torch.stack([self.layer(row) for row in x])  # row by row


@pytest.mark.long
def test_a_model_that_takes_its_batch_apart_is_named():
    model = Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, tell=False) as w:
        for _ in lasting(range(150)):
            step(model, optimizer, torch.ones(64, 8), torch.ones(64, 1))
    assert w.verdict == "SAMPLE_BY_SAMPLE" and f"{HERE.name}:{line_of('# row by ' + 'row')}" in w.diagnosis.text


def test_the_live_line_says_how_fast_and_where(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")  # a narrower terminal cuts it
    monkeypatch.setattr("cpbkit.gpu_check.watch._can_draw", lambda: True)
    monkeypatch.setattr("cpbkit.gpu_check.watch.LIVE", 0.0)
    monkeypatch.setattr("cpbkit.gpu_check.watch.TICK", 0.1)
    model, optimizer, batches = make()
    with watch(model, optimizer) as w:
        for x, y in batches:
            step(model, optimizer, x, y)
            time.sleep(0.02)
    said = capsys.readouterr().err
    assert re.search(r"\r\d+\.\d steps/s · .*rest \d+% · \d\.\d\d GB", said)
    assert said.endswith(w.report() + "\n") and said.startswith("\r")
    assert {len(line) for line in said.split("\r")[1:-1]} == {119}, "it stays in its line"


def test_a_notebook_shows_the_live_line_in_one_place_and_nothing_in_red(monkeypatch, capsys):
    shown = []

    class Slot:
        def __init__(self, data):
            shown.append(data["text/plain"])

        def update(self, data, raw):
            shown.append(data["text/plain"])

    monkeypatch.setattr("cpbkit.gpu_check.watch.in_notebook", lambda: True)
    monkeypatch.setattr("cpbkit.gpu_check.watch.LIVE", 0.0)
    monkeypatch.setattr("cpbkit.gpu_check.watch.TICK", 0.1)
    monkeypatch.setattr("IPython.display.display", lambda data, raw, display_id: Slot(data))
    for tell in (False, True):
        model, optimizer, batches = make()
        with watch(model, optimizer, tell=tell) as w:
            for x, y in batches:
                step(model, optimizer, x, y)
                time.sleep(0.02)
        *live, last = shown
        assert " steps/s · " in live[0] and last == (w.report() if tell else "")
    assert capsys.readouterr().err == ""


def test_a_mistake_of_the_watch_costs_no_training(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("mine")

    model, optimizer, batches = make()
    monkeypatch.setattr("cpbkit.gpu_check.watch.attribute", broken)
    monkeypatch.setattr("cpbkit.gpu_check.operators.Operators._note", broken)
    monkeypatch.setattr("cpbkit.gpu_check.watch.Watch._note_loss", broken)
    with watch(model, optimizer, tell=False) as w:
        for x, y in batches:
            step(model, optimizer, x, y)
    assert w.steps == len(batches) and w.verdict == "INCONCLUSIVE" and "ZeroDivisionError: mine" in w.report()
    monkeypatch.undo()
    assert "ZeroDivisionError" in "".join(w.notes.add_up().problems)


def test_what_a_watch_cannot_take():
    with pytest.raises(TypeError, match="a loader, a model and an optimiser; got int"):
        watch(3)
    with pytest.raises(TypeError, match="give it what to go through"):
        next(iter(watch(tell=False)))


SCRIPT = """
import sys, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("training")
for i in range(120):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
    if sys.argv[1:] == ["--stop"] and i == 100:
        raise KeyboardInterrupt
"""


KEPT = """
import itertools, time, torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), []
{before}
end = time.perf_counter() + 3
for i in itertools.count():
    optimizer.zero_grad()
    loss = model(torch.ones(32, 8)).square().mean()
    {backward}
    optimizer.step()
    if time.perf_counter() > end:
        break
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "backward", "reason", "line"),
    [
        ("", "loss.backward(create_graph=True)", "CREATE_GRAPH", 11),
        ("penalty = lambda: torch.autograd.grad(loss, [])", "loss.backward(create_graph=True)", "", 0),
        ("model[0].register_forward_hook(lambda m, i, o: kept.append(o))", "loss.backward()", "GRAPH_KEPT", 6),
    ],
    ids=["a second graph", "one that is used", "a hook that keeps"],
)
def test_what_keeps_graphs_without_a_list_in_the_loop_is_named(tmp_path, before, backward, reason, line):
    path = tmp_path / "train.py"
    path.write_text(KEPT.format(before=before, backward=backward))
    # In a process of its own, for the text of all that runs is looked through, and this file's is no part of the loop.
    done = subprocess.run([sys.executable, "-m", "cpbkit", "doctor", "--json", str(path)], capture_output=True)
    found = json.loads(done.stdout)
    assert reason in (found["reason"], found["verdict"]), found
    assert not reason or f"train.py:{line}  " in found["text"]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("kept.append((i, out.detach()))", 3),
        ("kept += [out.numpy()]", 3),
        ("kept.append((i, loss.item(), float(out.mean())))", 0),
        ("names.add(f'{i} of {n}')", 0),
        ("total += out.sum().item()", 0),
        ("x = next(batches)", 1),  # of a cycle
        ("x = read(i, cache={})", 0),
    ],
)
def test_a_line_that_holds_on_to_tensors_is_told_from_one_that_keeps_numbers(tmp_path, text, held):
    file = tmp_path / "train.py"
    begin = "batches = itertools.cycle(loader)" if held == 1 else "batches = iter(loader)"
    file.write_text(f"{begin}\nfor i in range(n):\n    {text}\n    loss.backward()\n")
    assert source.find_holding(str(file), 4) == held


NUMBER = "NUM" + "_THREADS"  # in two parts, for the text of this file is looked through


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "threads"),
    [
        (f"os.environ['OMP_{NUMBER}'] = '1'\nimport torch", 1),
        (f"os.environ.setdefault('MKL_{NUMBER}', '1')\nimport torch", 1),
        (f"for name in ('OMP', 'MKL'):\n    os.environ[name + '_{NUMBER}'] = '1'\nimport torch", 1),
        (f"import torch\nos.environ['OMP_{NUMBER}'] = '1'", None),
    ],
)
def test_threads_that_a_script_sets_before_it_imports_torch_count_in_the_doctor_too(tmp_path, first, threads):
    path = tmp_path / "train.py"
    path.write_text(
        f"import os\n{first}\nprint('threads:', torch.get_num_threads())\n{SCRIPT}".replace("(120)", "(20)")
    )
    without = {name: value for name, value in os.environ.items() if NUMBER not in name}
    command = [sys.executable, "-m", "cpbkit", "doctor", "--json", str(path)]
    alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=without).stdout
    watched = subprocess.run(command, capture_output=True, text=True, env=without)
    told = re.search(r"threads: (\d+)", alone)[1]
    assert f"threads: {told}\n" in watched.stderr and int(told) == (threads or int(told))


@pytest.mark.parametrize(("text", "held"), [("self.points.append(z.numpy())", 3), ("self.losses.append(z.item())", 0)])
def test_what_a_step_of_its_own_function_holds_on_to_is_found(tmp_path, text, held):
    file = tmp_path / "train.py"
    file.write_text(f"def update(self, x):\n    z = self.net(x)\n    {text}\n    z.sum().backward()\n")
    assert source.find_holding(str(file), 4) == held


def test_outside_the_loop_the_larger_part_is_named_with_a_cure_of_its_own():
    line = dataclasses.replace(LINE, account="outside", kind="making lists of tensors, or back")
    validating = dataclasses.replace(LINE, account="validation", line=60, kind="")
    made = judge_loop(seen(lines=(line, validating), shares={"outside": 2.0, "validation": 0.1}))
    judged = judge_loop(seen(lines=(line, validating), shares={"outside": 0.1, "validation": 2.0}))
    assert ":57 " in made.text and made.fixes[0].note.startswith("do it once, before the first epoch")
    assert ":60 " in judged.text and judged.fixes[0].note.startswith("validate more rarely")


def test_growth_without_a_line_is_told_where_it_is_more_than_an_allocator_keeps():
    told = [judge_loop(seen(growth=growth)).beside for growth in (1e6, 6e6)]
    assert [any("MEMORY_GROWTH" in text for text in texts) for texts in told] == [False, True]


def test_denormals_of_a_few_columns_are_found_and_a_quick_operator_on_them_costs_nothing():
    x = torch.ones(256, 1024)
    x[:, 48:] = 1e-39
    assert _has_denormals(x) and not _has_denormals(torch.ones(256, 1024))
    product = torch.ops.aten.mm.default, torch.ops.aten.mm, (x, torch.ones(1024, 128)), torch.ones(256, 128)
    assert _usual_seconds(*product) == 2 * 256 * 1024 * 128 / 2e10
    assert _usual_seconds(torch.ops.aten.sort.default, torch.ops.aten.sort, (x,), x) == math.inf


def test_a_script_is_run_with_its_arguments_and_named_by_line(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = CliRunner().invoke(doctor, ["--json", str(path), "--stop"], catch_exceptions=False)
    assert done.exit_code == 0
    report = json.loads(done.stdout)  # what the script prints goes elsewhere
    assert report["verdict"] == "PYTHON_OR_IO_IN_STEP" and "train.py:10  time.sleep(0.02)" in report["text"]
    assert "stopped by Ctrl-C" in report["ended"] and "training" in done.stderr


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_error_that_an_interrupt_brings_about_is_no_failure_of_the_script(tmp_path, capsys, interrupted):
    lost = "os.kill(os.getpid(), signal.SIGINT)" if interrupted else "pass"
    # As where a loader's workers end by the same Ctrl-C, and its own error comes in place of the interrupt.
    raising = f"try:\n    import os, signal\n    {lost}\n    time.sleep(0.1)\nexcept KeyboardInterrupt:\n    pass\n"
    path = tmp_path / "train.py"
    path.write_text(f"{SCRIPT}\n{raising}raise RuntimeError('a worker exited')\n")
    before = signal.getsignal(signal.SIGINT)
    _, ended = run_script(str(path), live=False)
    assert ended.startswith("stopped by Ctrl-C" if interrupted else "the script failed: RuntimeError: a worker exited")
    assert ("Traceback" in capsys.readouterr().err) != interrupted
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_python_drops_ends_the_script_all_the_same(tmp_path):
    dropping = """
import os, signal
class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
last = Last()
del last
time.sleep(20)
"""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT + dropping)
    began = time.perf_counter()
    _, ended = run_script(str(path), live=False)
    assert ended.startswith("stopped by Ctrl-C") and time.perf_counter() - began < 15


def test_a_script_that_trains_nothing_says_so(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("x = 1\n")
    with pytest.raises(CpbkitError, match=r"no step of a torch\.optim optimiser was seen"):
        run_script(str(path), live=False)
    with pytest.raises(CpbkitError, match="no file"):
        run_script(str(tmp_path / "missing.py"))


# The score, and the comparison.


@pytest.mark.long
def test_a_folder_of_loops_is_scored_by_word_and_line(tmp_path):
    (tmp_path / "sleeping.py").write_text("# expect: PYTHON_OR_IO_IN_STEP\n" + SCRIPT.replace("0.02)", "0.02)  # here"))
    (tmp_path / "needing.py").write_text("# expect: SYNC_BOUND\n# needs: gpu\nraise SystemExit(3)\n")
    said = []
    rows = inject_all(tmp_path, said.append)
    assert said[1] == "sleeping: PYTHON_OR_IO_IN_STEP"
    by = {row["loop"]: row for row in rows}
    assert by["sleeping"]["found"] == "PYTHON_OR_IO_IN_STEP" and by["sleeping"]["named"], by["sleeping"]
    if not torch.cuda.is_available():
        assert by["needing"]["note"] == "not run: needs an NVIDIA GPU"
    rows.append(by["sleeping"] | {"loop": "wrong", "expected": HEALTHY, "named": None})
    text = render_faults(rows)
    assert re.search(r"^DEVICE_BOUND +1$", text, re.MULTILINE), "the matrix: one healthy loop was found guilty"
    assert "1 of 1 faults named, 1 with their line; 1 false alarms in 1 healthy loops; 1 not run" in text


def test_a_loop_says_what_it_expects(tmp_path):
    with pytest.raises(CpbkitError, match="a folder of loops must hold scripts"):
        inject_all(tmp_path)
    (tmp_path / "a.py").write_text("import torch\n")
    with pytest.raises(CpbkitError, match="must be `# expect: WORD`; got 'import torch'"):
        inject_all(tmp_path)


def test_the_loops_of_the_kit_say_what_they_expect_and_where():
    for path in OWN_LOOPS.glob("*.py"):
        text = path.read_text()
        word = text.partition("\n")[0].removeprefix("# expect: ")
        assert path.name == "__init__.py" or word in VERDICTS, path
        assert word in (HEALTHY, "NO_WORK_ON_GPU") or path.name == "__init__.py" or text.count("# here") == 1, path


@pytest.mark.long
@pytest.mark.parametrize("name", ["frames", "kept", "samples", "validating", "double", "healthy_dense"])
def test_a_loop_of_the_kit_gets_its_verdict(name):
    row = inject(OWN_LOOPS / f"{name}.py")
    assert (row["found"], row["named"]) == (row["expected"], None if row["expected"] == HEALTHY else True), row


def test_two_reports_say_whether_a_change_helped(tmp_path):
    slow = {"verdict": "DATA_STARVED", "steps a second": 10.0, "shares": {"data": 0.8, "forward": 0.2},
            "lines": [{"text": "frame.iloc[i]", "share": 0.8}]}  # fmt: skip
    fast = {"verdict": "DEVICE_BOUND", "steps a second": 40.0, "shares": {"data": 0.2, "forward": 0.8}, "lines": []}
    for name, report in (("before", slow), ("after", fast)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report, indent=2))
    files = [str(tmp_path / f"{name}.json") for name in ("before", "after")]
    found = compare_reports(*map(load_report, files))
    assert found["gain"] == 4 and found["accounts"] == {"data": [80, 5], "forward": [20, 20]}
    assert found["lines"] == {"frame.iloc[i]": [80, 0]}
    done = CliRunner().invoke(doctor, ["--compare", *files])
    assert done.exit_code == 0 and done.output.startswith("4.00x faster: 100 ms a step before, 25 after")
    assert "no difference" in render_comparison(compare_reports(slow, slow))
    (tmp_path / "no.json").write_text("hello")
    with pytest.raises(CpbkitError, match="is none"):
        load_report(str(tmp_path / "no.json"))
    assert CliRunner().invoke(doctor, ["--compare", files[0]]).exit_code == 2
    assert CliRunner().invoke(doctor, ["--inject", "--preset", "quick"]).exit_code == 2
