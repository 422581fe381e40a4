"""The time left: what is known of the pace and of early stops, in closed form."""

import pytest

from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation.results import ResultLine, Running
from cpbkit.runs.progress import Pace, State
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
