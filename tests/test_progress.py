"""The time left: what is known of the pace and of early stops, in closed form."""

import pytest

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import DataError, RunError, Terminated
from cpbkit.evaluation.results import ResultLine, Running
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.progress import Pace, State
from cpbkit.runs.sweep import sweep
from cpbkit.runs.worker import Progress


def word(job, seconds, **shares):
    return Progress(
        job, "training", {name: Running({}, {}, share) for name, share in shares.items()}, 10, {"epochs": seconds}
    )


def test_no_time_is_told_before_something_was_trained():
    pace = Pace(workers=2, epochs=10)
    pace.hear(word("one", 60.0, a=0.0))
    assert pace.seconds_left(["a", "b"], []) is None
    assert pace.seconds_left([], [3, 3]) == 0


def test_the_first_word_of_a_worker_does_not_count():
    pace = Pace(workers=2, epochs=10)
    pace.hear(word("one", 60.0, a=0.5))  # built its stack for a minute, and went on from a checkpoint
    pace.hear(word("one", 4.0, a=0.7))  # 20 s for a whole model
    assert pace.seconds_left(["a", "b"], []) == pytest.approx(20 * (0.3 + 1) / 2)
    assert pace.samples == 10


def test_models_that_stopped_early_shorten_what_is_expected_of_the_others():
    pace = Pace(workers=1, epochs=10)
    for share in (0.0, 0.5):
        pace.hear(word("one", 5.0, a=share))  # 10 s for a whole model
    # b will go as far as the mean of 4 and 8 epochs; a has passed the one that stopped at 4.
    assert pace.seconds_left(["a", "b"], [4, 8]) == pytest.approx(10 * ((0.8 - 0.5) + 0.6))
    assert pace.seconds_left(["a"], [4]) == pytest.approx(10 * 0.5)


def test_a_model_is_not_through_where_others_have_just_ended():
    pace = Pace(workers=1, epochs=10)
    for share in (0.0, 0.49):
        pace.hear(word("one", 4.9, a=share))
    assert pace.seconds_left(["a"], [5, 5]) == pytest.approx(10 * 0.1)  # an epoch
    pace.hear(word("one", 5.1, a=1.0))
    assert pace.seconds_left(["a"], [5, 5]) == pytest.approx(10 * 0.1)  # to be judged


@pytest.mark.parametrize("patience, lines, bound", [(5, [], True), (5, [3], False), (10, [], False)])
def test_the_time_left_is_a_bound_until_a_model_has_shown_how_far_it_goes(patience, lines, bound):
    state = State(vary(PRESETS["quick"], intervals=("1h",)), 20, pace=Pace(epochs=10, patience=patience))
    state.add(ResultLine("SOLUSDT_1h", "failed"))
    for epochs in lines:
        state.add(ResultLine("BTCUSDT_1h", "done", epochs=epochs))
    assert state.standing().at_most is bound


def test_a_series_that_is_through_and_trained_once_more_counts_once():
    state = State(vary(PRESETS["quick"], symbols=("BTC", "ETH"), intervals=("1h",)), 2)
    state.add(ResultLine("BTCUSDT_1h", "done", epochs=3))
    state.hear(word("one", 5.0, BTCUSDT_1h=0.5, ETHUSDT_1h=0.5))
    assert state.share == 0.75 and list(state.running) == ["ETHUSDT_1h"]


def refuse(error, before=lambda: None):
    def load(*_):
        before()
        raise error

    return load


def test_a_sweep_that_ends_in_an_error_before_any_training_leaves_no_folder(tmp_path):
    one = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31")
    with pytest.raises(DataError, match="no such coin"):
        sweep(one, tmp_path / "runs/new", klines=refuse(DataError("no such coin")))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError):
        sweep(one, tmp_path / "there", klines=refuse(DataError("no such coin")))
    assert (tmp_path / "there/experiment.json").exists(), "it was there before"


def test_what_an_interrupt_or_a_wish_stops_before_any_training_stays(tmp_path):
    one = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31")
    with pytest.raises(KeyboardInterrupt):
        sweep(one, tmp_path / "interrupted", klines=refuse(KeyboardInterrupt()))
    with pytest.raises(RunError, match="stopped by hand with 0 of 40"):
        stop = RunFolder(tmp_path / "stopped").stop
        sweep(one, tmp_path / "stopped", klines=refuse(Terminated(), before=stop))
    assert len(list(tmp_path.glob("*/experiment.json"))) == 2


@pytest.mark.parametrize("kept", ["results.jsonl", "models/BTCUSDT_1h.safetensors", "progress/job.safetensors"])
def test_a_folder_that_holds_anything_trained_stays(tmp_path, kept):
    one = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31")
    folder = tmp_path / "new"
    with pytest.raises(DataError):
        sweep(one, folder, klines=refuse(DataError("no host"), before=(folder / kept).touch))
    assert (folder / kept).exists()
