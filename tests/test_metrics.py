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
    assert metrics.prediction_interval_score(0.3, -1, 1, 0.1) == pytest.approx(2.0)
    assert metrics.prediction_interval_score(1.3, -1, 1, 0.1) == pytest.approx(2.0 + 20 * 0.3)


def test_crps_tends_to_the_closed_form_of_a_normal():
    assert metrics.crps([0.5, -1, 2, 0], [0.3]) == pytest.approx([0.28125])  # scoringrules
    draws = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    assert metrics.crps(draws, [0.3]) == pytest.approx([0.2693329], abs=2e-5)
    assert metrics.crps(draws, [8.0]) == pytest.approx([8 - 1 / np.sqrt(np.pi)], abs=1e-4)  # in the tail too


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


def test_cosines_by_hand_and_their_variance_of_noise():
    values = np.random.default_rng(0).normal(size=(3, 200))
    mean, waves = metrics.cosines(values, 1)
    assert waves.shape == (3, metrics.degrees_of_freedom(200, 1)) == (3, 14)  # 0.41 x 200^(2/3) = 14.02
    time = (np.arange(200) + 0.5) / 200
    by_hand = np.sqrt(2 / 200) * values[1] @ np.cos(3 * np.pi * time)
    assert waves[1, 2] == pytest.approx(by_hand) and mean == pytest.approx(values.mean(axis=1))
    _, waves = metrics.cosines(2 * np.random.default_rng(1).normal(size=(4000, 60)), 1)
    assert np.mean(waves**2) == pytest.approx(4, rel=0.03)


@pytest.mark.parametrize(("count", "horizon", "degrees"), [(1000, 1, 40), (1000, 24, 6), (400, 24, 4), (12, 1, 4)])
def test_cosines_are_slower_than_a_horizon(count, horizon, degrees):
    assert metrics.degrees_of_freedom(count, horizon) == degrees


@pytest.mark.parametrize(("horizon", "count"), [(1, 40), (10, 160), (24, 400)])
def test_the_cosine_test_keeps_its_size_where_others_do_not(horizon, count):
    """Moving averages over a horizon, as overlapping windows are; with few windows Diebold-Mariano rejects far more."""
    draws = np.random.default_rng(0).normal(size=(1500, count + horizon - 1))
    differences = np.lib.stride_tricks.sliding_window_view(draws, horizon, axis=1).mean(axis=-1)
    _, p = metrics.cosine_test(differences, horizon)
    assert np.mean(p < 0.05) < 0.07 and np.mean(p < 0.01) < 0.018
    if horizon > 1:
        papers = np.array([metrics.diebold_mariano(d, 0 * d, horizon)[1] for d in differences[:300]])
        assert np.mean(papers < 0.01) > 0.02


def test_the_cosine_test_at_its_edges():
    statistic, p = metrics.cosine_test(np.stack([np.zeros(50), np.full(50, -0.1), np.full(50, 1.0)]), 1)
    assert statistic.tolist() == [0, -np.inf, np.inf] and p.tolist() == [1, 0, 0]
    difference = np.random.default_rng(0).normal(size=90)
    assert metrics.cosine_test(-difference, 4)[0] == -metrics.cosine_test(difference, 4)[0]


def test_the_interval_of_a_ratio_is_the_test_inverted():
    rng = np.random.default_rng(0)
    for count, horizon in ((40, 1), (300, 5), (60, 15)):
        baseline = rng.exponential(size=count) + 0.1
        loss = 0.8 * baseline + 0.3 * rng.exponential(size=count)
        low, high = metrics.ratio_confidence_interval(loss, baseline, horizon)
        assert low < loss.mean() / baseline.mean() < high
        for end in (low, high):
            assert metrics.cosine_test(loss - end * baseline, horizon)[1] == pytest.approx(0.05)
        wide = metrics.ratio_confidence_interval(loss, baseline, horizon, (0.005, 0.025))
        assert wide[0] < low and wide[1] == pytest.approx(high)


def test_the_interval_of_a_ratio_is_open_where_the_mean_below_may_be_zero():
    loss, baseline = np.random.default_rng(0).normal([[1.0], [0.1]], 1, (2, 40))
    assert metrics.cosine_test(baseline, 5)[1] > 0.05
    assert metrics.ratio_confidence_interval(loss, baseline, 5) == (-np.inf, np.inf)


def test_rank_correlation_and_its_interval():
    rng = np.random.default_rng(0)
    held, found = 0, []
    for _ in range(300):
        x = rng.standard_t(3, size=400)
        y = 0.3 * x + rng.standard_t(3, size=400)
        share, low, high = metrics.rank_correlation(x, y, 1)
        assert share == pytest.approx(stats.spearmanr(x, y)[0]) and low < share < high
        found.append((share, low, high))
    mean = np.mean([share for share, _, _ in found])
    held = np.mean([low < mean < high for _, low, high in found])
    assert 0.92 < held < 0.98
    assert metrics.rank_correlation(x, np.ones(400), 1) is None
    assert metrics.rank_correlation(x, 3 * x, 1) == (1, 1, 1)


def test_the_break_even_fee_by_hand():
    moves = np.tile([3.0, -1.0, 2.0, 4.0, -2.0, -5.0, 1.0, 2.0], 5)
    forecast = np.tile([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0], 5)  # always right
    position = forecast - forecast.mean()
    earned, traded = np.mean((position * moves)[1:]), 2 * (5 * 4) / 39  # four turns in each eight, none between
    assert metrics.break_even_fee(moves[:16], forecast[:16], 1) is None  # eight turns
    assert metrics.break_even_fee(moves, forecast, 1)[0] == pytest.approx(earned / traded)
    rise = np.random.default_rng(0).normal(5, 1, size=300)
    assert metrics.break_even_fee(rise, np.ones(300), 1) is None  # to hold is no timing
    fee, low, high = metrics.break_even_fee(rise, np.random.default_rng(1).normal(size=300), 1)
    assert low < 0 < high and abs(fee) < 0.3


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
