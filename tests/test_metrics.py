"""Numbers by hand, closed forms, published golden values, and statsmodels as an independent oracle."""

import numpy as np
import pytest
from scipy import stats

from cpbkit.evaluation import metrics


def losses(seed=0, count=200):
    """Squared errors of two forecasts whose Diebold-Mariano statistics two packages agree upon."""
    rng = np.random.default_rng(seed)
    truth = np.cumsum(rng.normal(size=count))
    first = truth + rng.normal(size=count)
    second = truth + 1.2 * rng.normal(size=count)
    return (truth - first) ** 2, (truth - second) ** 2


def test_errors_by_hand():
    truth, forecast = [1.0, 2.0, 4.0], [1.0, 4.0, 3.0]
    assert metrics.rmse(truth, forecast) == pytest.approx(np.sqrt(5 / 3))
    assert metrics.mae(truth, forecast) == 1.0
    assert metrics.mape(truth, forecast) == pytest.approx(100 * (0 + 1 + 0.25) / 3)
    assert metrics.r2(truth, forecast) == pytest.approx(1 - 5 / (14 / 3))
    assert metrics.skill(0.9, 1.0) == pytest.approx(0.1)


def test_mase_pools_targets_so_that_one_that_hardly_moves_does_not_rule():
    truth = np.zeros((5, 2, 2))
    forecast = np.stack([np.full((5, 2), 3.0), np.full((5, 2), 100.0)], axis=-1)
    assert metrics.mase(truth, forecast, [0.0, 50.0]) == pytest.approx((3 + 100) / 50)
    with pytest.raises(ValueError, match=r"must be positive; got \[0\.0, 0\.0\]"):
        metrics.mase(truth, forecast, [0.0, 0.0])


def test_a_shape_that_would_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"one shape; got \(3, 1\) and \(3,\)"):
        metrics.rmse(np.ones((3, 1)), np.ones(3))
    with pytest.raises(ValueError, match="at least one value"):
        metrics.mae([], [])


def test_what_has_no_value_is_refused():
    with pytest.raises(ValueError, match="got 1 of 2"):
        metrics.mape([0.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="got a constant"):
        metrics.r2([2.0, 2.0], [1.0, 2.0])


def test_wilson_interval_equals_scipy():
    for hits, trials in ((0, 10), (504, 1000), (10, 10)):
        oracle = stats.binomtest(hits, trials).proportion_ci(method="wilson")
        assert metrics.wilson(hits, trials) == pytest.approx((oracle.low, oracle.high), abs=1e-12)
    with pytest.raises(ValueError, match="at least one trial; got 0"):
        metrics.wilson(0, 0)


def test_direction_leaves_out_what_has_no_sign_and_widens_with_overlap():
    truth = np.array([1.0, -1.0, 2.0, 0.0, 3.0])
    forecast = np.array([0.1, 0.1, 0.5, 1.0, 0.0])
    share, low, high = metrics.direction(truth, forecast)
    assert share == pytest.approx(2 / 3)
    assert (low, high) == pytest.approx(metrics.wilson(2, 3))
    truth = np.tile([1.0, -1.0], 500)
    narrow, wide = (metrics.direction(truth, np.ones(1000), overlap) for overlap in (1, 10))
    assert (wide[2] - wide[1]) == pytest.approx((narrow[2] - narrow[1]) * np.sqrt(10), rel=0.03)
    assert metrics.direction(truth, np.zeros(1000)) is None


def test_scores_equal_published_golden_values():
    assert metrics.pinball(0.3, -0.5, 0.1) == pytest.approx(0.08)
    assert metrics.interval_score(0.3, -1, 1, 0.1) == pytest.approx(2.0)
    assert metrics.interval_score(1.3, -1, 1, 0.1) == pytest.approx(2.0 + 20 * 0.3)


def test_crps_tends_to_the_closed_form_of_a_normal():
    levels = (np.arange(20_000) + 0.5) / 20_000
    draws = stats.norm.ppf(levels)
    assert metrics.crps_quantiles(0.3, draws, levels) == pytest.approx(0.2693329, abs=2e-5)
    batch = metrics.crps_quantiles(np.full((4, 3), 0.3), np.broadcast_to(draws, (4, 3, len(draws))), levels)
    assert batch.shape == (4, 3)


def test_pinball_is_least_at_the_quantile():
    sample = np.random.default_rng(0).normal(size=4001)
    candidates = np.linspace(-2, 2, 401)
    loss = metrics.pinball(sample, candidates[:, None], 0.2).mean(axis=1)
    assert candidates[loss.argmin()] == pytest.approx(np.quantile(sample, 0.2), abs=0.01)


def test_diebold_mariano_equals_published_golden_values():
    truth, first, second = np.array([[10, 20, 30, 40, 50], [11, 21, 29, 42, 53], [13, 26, 24, 40, 59]])
    statistic, p = metrics.diebold_mariano((truth - first) ** 2, (truth - second) ** 2, 1)
    assert statistic == pytest.approx(-2.2229922805746782, abs=1e-12)
    assert p / 2 == pytest.approx(0.04515565862099125, abs=1e-12)
    statistic, p = metrics.diebold_mariano(*losses(), 1)
    assert statistic == pytest.approx(-1.88062806613768, abs=1e-12)
    assert p == pytest.approx(0.0614832131, abs=1e-9)
    statistic, p = metrics.diebold_mariano(*losses(), 4)
    assert (statistic, p) == pytest.approx((-1.9417, 0.0536), abs=5e-5)


def test_diebold_mariano_takes_bartlett_weights_where_the_rectangular_sum_is_negative():
    """statsmodels uses the Bartlett kernel (Newey-West) throughout."""
    oracle = pytest.importorskip("statsmodels.tsa.stattools", reason="statsmodels is the oracle")
    if not hasattr(oracle, "diebold_mariano_test"):
        pytest.skip("this statsmodels has no Diebold-Mariano test; 0.15 does")
    difference = 0.3 + (-1.0) ** np.arange(60) + np.random.default_rng(0).normal(size=60) / 9  # signs alternate
    loss, other = 5 + np.maximum(difference, 0), 5 + np.maximum(-difference, 0)
    centred = loss - other - (loss - other).mean()
    assert centred @ centred + 2 * sum(centred[lag:] @ centred[:-lag] for lag in range(1, 8)) < 0
    expected = oracle.diebold_mariano_test(
        np.zeros(60), np.sqrt(loss), np.sqrt(other), horizon=8, lags=7, harvey_adj=True
    )
    statistic, p = metrics.diebold_mariano(loss, other, 8)
    assert (statistic, p) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-10)


def test_diebold_mariano_at_its_edges():
    loss, other = losses()
    assert metrics.diebold_mariano(loss, loss, 4) == (0.0, 1.0)
    assert metrics.diebold_mariano(np.zeros(9), np.ones(9), 2) == (-np.inf, 0.0)
    assert metrics.diebold_mariano(other, loss, 4)[0] == -metrics.diebold_mariano(loss, other, 4)[0]
    with pytest.raises(ValueError, match=r"than the horizon \(10\); got 10"):
        metrics.diebold_mariano(loss[:10], other[:10], 10)


def test_diebold_mariano_holds_its_size_on_overlapping_windows():
    """Of two equally good forecasts over six bars, h = 6 rejects about 5 %, h = 1 many times that."""
    rng = np.random.default_rng(0)
    kernel = np.ones(6) / 6
    differences = np.array([np.convolve(rng.normal(size=605), kernel, mode="valid") for _ in range(400)])
    naive, aware = (
        np.mean([metrics.diebold_mariano(d, 0 * d, horizon)[1] < 0.05 for d in differences]) for horizon in (1, 6)
    )
    assert aware < 0.09
    assert naive > 0.25


def test_bootstrap_interval_of_independent_losses_has_the_width_of_theory():
    rng = np.random.default_rng(0)
    loss, floor = rng.normal(size=(2, 4000)) ** 2
    low, high = metrics.block_bootstrap(loss, floor, 1)
    # Delta method: Var(sqrt(a / b)) = (Var a + Var b) / (4 N) at a = b = 1, and Var of a squared normal is 2.
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(4 / (4 * 4000)), rel=0.1)
    assert low < 1 - np.sqrt(loss.mean() / floor.mean()) < high


def test_bootstrap_interval_widens_with_blocks_where_neighbours_agree():
    rng = np.random.default_rng(1)
    loss = np.repeat(rng.exponential(size=200), 10)
    floor = np.ones(2000)
    short, long = (metrics.block_bootstrap(loss, floor, block) for block in (1, 40))
    assert (long[1] - long[0]) > 2.3 * (short[1] - short[0])
    assert metrics.block_bootstrap(loss, floor, 40) == long  # seeded
    with pytest.raises(ValueError, match=r"between 1 and the number of origins \(2000\); got 2001"):
        metrics.block_bootstrap(loss, floor, 2001)


def test_bootstrap_of_one_whole_block_is_the_skill_itself():
    loss, floor = losses()
    exact = 1 - np.sqrt(loss.mean() / floor.mean())
    assert metrics.block_bootstrap(loss, floor, len(loss)) == pytest.approx((exact, exact))


def test_holm_by_hand_and_against_statsmodels():
    assert metrics.holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    oracle = pytest.importorskip("statsmodels.stats.multitest", reason="statsmodels is the oracle")
    p = np.random.default_rng(0).uniform(size=40) ** 4
    assert metrics.holm(p) == pytest.approx(oracle.multipletests(p, method="holm")[1], abs=1e-15)
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]; got \[nan\]"):
        metrics.holm([0.1, np.nan])


def test_the_lag_of_an_echo():
    levels = np.random.default_rng(0).normal(size=900).cumsum()
    rows = np.arange(100, 890)
    for lag in (0, 5, 7):
        assert metrics.echo_lag(levels, rows, levels[rows - lag], 10) == lag
    levels[-9:] = np.inf  # what a lag before the first row would wrap around to
    early = np.arange(3, 800)
    assert metrics.echo_lag(levels, early, levels[np.maximum(early - 5, 0)], 10) == 5
