"""Settings as another axis of the stack: each row trains as it would alone, and validation chooses."""

import dataclasses

import pytest
import torch
from test_loop import STEPS, TRAINING, assert_same, run, some_series, start

from cpbkit.config.experiment import Training, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError, UnknownName
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.sweep import sweep
from cpbkit.training import checkpoint
from cpbkit.training.loop import fit

GRID = (("learning_rate", (3e-3, 1e-3)), ("weight_decay", (0.0, 0.1)))
SEARCH = dataclasses.replace(TRAINING, search=GRID)
WILD = dataclasses.replace(TRAINING, clip_norm=0.0, search=(("learning_rate", (1e-3, 1e30)),))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step", "plateau"])
def test_each_trial_ends_as_it_would_alone_and_the_best_by_validation_stays(schedule):
    training = dataclasses.replace(SEARCH, schedule=schedule)
    found = run(some_series(2), training)
    assert len(found) == 2
    for series in some_series(2):
        alone = [run([series], trial)[series.name] for trial in training.trials]
        best = min(alone, key=lambda f: min(f.curve["validation"]))
        chosen = found[series.name]
        assert chosen.training == best.training and chosen.training.search == ()
        assert_same(chosen, best, 1e-10)
        assert [t["validation"] for t in chosen.tried] == pytest.approx([min(f.curve["validation"]) for f in alone])
        assert [(t["learning_rate"], t["weight_decay"]) for t in chosen.tried] == [
            (3e-3, 0.0),
            (3e-3, 0.1),
            (1e-3, 0.0),
            (1e-3, 0.1),
        ]


def test_a_trial_that_diverges_leaves_the_others_as_they_are():
    (found,) = run(some_series(1), WILD).values()
    assert found.status == "done" and found.training.learning_rate == 1e-3
    assert found.tried[1]["validation"] is None
    assert_same(found, run(some_series(1), WILD.trials[0])[found.name], 1e-10)


@pytest.mark.parametrize("stop_at", [2, 9])
@pytest.mark.parametrize("training", [SEARCH, WILD])
def test_a_resumed_search_ends_bit_equal(training, stop_at):
    """With a patience of one epoch some trials have ended, or are sick, and wait for the others, when it stops."""
    training = dataclasses.replace(training, patience=1, epochs=4)
    series, whole, ended = some_series(2), {}, {}
    windows, state = start(series, training, dtype=torch.float32)
    for now in fit(state, windows, training, STEPS):
        whole |= {f.name: f for f in now.finished if not now.step}
    windows, state = start(series, training, dtype=torch.float32)
    for i, now in enumerate(fit(state, windows, training, STEPS), start=1):
        ended |= {f.name: f for f in now.finished if not now.step}
        if i == stop_at:
            saved = checkpoint.save_fit(now, {})
            assert training.search == SEARCH.search or stop_at == 2 or "sick" in [end[0] for end in now.ended.values()]
            break
    windows, other = start(series, training, dtype=torch.float32)
    state = checkpoint.load_fit(other.stack, saved, {})
    for now in fit(state, windows, training, STEPS):
        ended |= {f.name: f for f in now.finished if not now.step}
    assert ended.keys() == whole.keys()
    for name in whole:
        assert_same(ended[name], whole[name], 0.0)
        assert ended[name].tried == whole[name].tried


def test_a_sweep_says_what_was_tried_and_keeps_what_was_chosen(tmp_path):
    small = {"symbols": ("BTCUSDT",), "intervals": ("1h",), "epochs": 2, "steps": 10, "width": 4}
    experiment = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31", **small)
    experiment = vary(experiment, search=(("learning_rate", (1e-2, 1e-4)),))
    (line,) = sweep(experiment, tmp_path, executor="local")
    assert [t["learning_rate"] for t in line.search] == [1e-2, 1e-4]
    best = min(line.search, key=lambda t: t["validation"])
    _, about = checkpoint.load((tmp_path / "models" / "BTCUSDT_1h.safetensors").read_bytes())
    assert about["experiment"]["training"]["learning_rate"] == best["learning_rate"]
    assert RunFolder(tmp_path).experiment == experiment, "the search survives the trip through the file"


def test_a_search_that_cannot_be_is_refused():
    with pytest.raises(UnknownName, match="setting to search"):
        Training(search=(("width", (8, 16)),))
    for values in ((1e-3,), (1e-3, -1e-3), (1e-3, 0.0)):
        with pytest.raises(CpbkitError, match=r"two values of learning_rate|learning_rate must be positive"):
            Training(search=(("learning_rate", values),))


def test_a_search_is_read_without_making_its_grid(monkeypatch):
    monkeypatch.setattr(Training, "trials", lambda self: pytest.fail("a file of 30 KB can ask for 1e9 of them"))
    values = tuple(1e-3 * i for i in range(1, 1001))
    Training(search=tuple((name, values) for name in ("learning_rate", "weight_decay", "clip_norm")))
