"""The promises of the verdicts hold in a few cells, and a test that breaks them is seen."""

import numpy as np
import pytest
from scipy import stats

from cpbkit.evaluation import calibration, leakage, metrics


def test_verdicts_keep_their_promises_in_a_few_cells():
    cells = list(calibration.calibrate(("GARCH-t", "stochastic volatility"), (1, 10), (100, 300), runs=10))
    found = leakage.check_promises(cells)
    assert [f.verdict for f in found] == ["OK", "OK", "NOTE", "OK"] * 2, found
    assert found[2].evidence.startswith("TOO FEW TO TELL") and found[0].check == "GARCH-t, 1 ahead, 100 windows"
    assert cells[1].found_pooled == 1 > cells[1].found > 0  # power: of forty at once, and of each alone


def test_a_test_that_forgets_that_windows_overlap_is_seen(monkeypatch):
    def of_independent_windows(difference, horizon):
        found = stats.ttest_1samp(difference, 0, axis=-1)
        return found.statistic, found.pvalue

    monkeypatch.setattr(metrics, "cosine_test", of_independent_windows)
    (cell,) = calibration.calibrate(("iid",), (10,), (300,), runs=10)
    (found,) = leakage.check_promises([cell])
    assert found.verdict == "FAIL" and "95 % interval holds" in found.evidence


@pytest.mark.parametrize(
    ("market", "tails", "memory"), [("iid", 0, 0), ("GARCH-t", 1, 1), ("stochastic volatility", 1, 1)]
)
def test_markets_are_what_they_say(market, tails, memory):
    returns = calibration.simulate(market, 2000, 50, np.random.default_rng(0))
    squares = (returns / returns.std(axis=0)) ** 2
    follows = np.mean([np.corrcoef(s[1:], s[:-1])[0, 1] for s in squares.T])
    assert (np.mean(squares**2) > 4) == bool(tails) and (follows > 0.1) == bool(memory)
    assert abs(np.mean(returns[1:] * returns[:-1])) < 0.02 * returns.var() * (1 + 3 * tails)
