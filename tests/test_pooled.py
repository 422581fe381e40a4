"""One verdict over many series, and over several runs: what it finds, and what it must not find."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
from conftest import terminal

import cpbkit as cpb
from cpbkit.config.experiment import to_json, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import metrics, pooled, verdicts
from cpbkit.evaluation.pooled import Losses
from cpbkit.runs.folder import RunFolder
from cpbkit.windows.series import from_table


def losses(gain=0.0, windows=300, seed=0, common=None, step=3600, horizon=1, begin=0):
    """Losses of a model that explains a share of what persistence cannot, and of a drift that explains nothing."""
    rng = np.random.default_rng(seed)
    known, unknown, noise = rng.normal(size=(3, windows))
    unknown = unknown if common is None else unknown + common
    truth = gain * known + unknown
    baselines = {"persistence": truth**2, "drift": (truth - 0.3) ** 2}
    model = (unknown + 0.3 * noise * (gain == 0)) ** 2  # without a gain it is persistence and noise of its own
    return Losses(begin + step * np.arange(windows), step, horizon, np.ones(windows), model, baselines)


def test_what_no_series_shows_alone_is_found_over_all():
    group = {str(seed): losses(0.12, seed=seed) for seed in range(40)}
    alone = [float(metrics.cosine_test(one.model - one.baselines["persistence"], 1)[1]) for one in group.values()]
    found = pooled.pool(group)
    assert found.verdict.word == "BEATS" and metrics.holm(alone).min() > 0.05
    assert (found.series, found.times, found.baseline) == (40, 300, "persistence")
    assert 0 < found.skill_low < found.skill < found.skill_high and found.skill == pytest.approx(0.0072, abs=0.002)
    assert 0.5 < found.win_rate <= 1
    assert found.sentence().startswith("all 40 series at once: BEATS, skill +0.")


def test_series_that_move_together_are_one_piece_of_evidence():
    """Forty copies say no more than one; and nothing is found where nothing is."""
    one = losses(0.12)
    assert pooled.pool({str(i): one for i in range(40)}).statistic == pytest.approx(pooled.pool({"0": one}).statistic)
    words = []
    for seed in range(25):
        common = 2 * np.random.default_rng(900 + seed).normal(size=300)
        group = {str(i): losses(0.0, seed=40 * seed + i, common=common) for i in range(40)}
        even = {n: dataclasses.replace(g, baselines={"persistence": np.roll(g.model, 1)}) for n, g in group.items()}
        words.append(pooled.pool(even).verdict.word)
    assert words.count("TIES") >= 22


def test_the_pool_by_hand_over_intervals_and_times_that_differ():
    """Two quarters of an hour count as half an hour, a series alone at a time stands for all."""
    quarter = Losses(900 * np.arange(4), 900, 4, np.array([1, 1, 2, 2.0]), np.array([1, 3, 2, 6.0]), {})
    half = Losses(1800 * np.arange(1, 3), 1800, 2, np.ones(2), np.array([2, 4.0]), {})
    parts = {
        "quarter": dataclasses.replace(quarter, baselines={"drift": np.array([2, 2, 4, 4.0])}),
        "half": dataclasses.replace(half, baselines={"drift": np.array([4.0, 4.0])}),
    }
    table, horizon = pooled._means(parts, [{name: one.model for name, one in parts.items()}])
    assert horizon == 2
    assert table.tolist() == [pytest.approx([1.0, (0.5 + 1.5 + 0.5) / 3, 1.0]), pytest.approx([1, 1, 1])]
    found = pooled.pool(parts)
    assert found.verdict.word == "TOO FEW TO TELL" and "3 times of 2 bars, a word takes 32" in found.sentence()
    assert found.skill == pytest.approx(1 - np.sqrt((1 + 2.5 / 3 + 1) / 3))


def test_to_lose_takes_as_much_more_as_there_are_baselines():
    group = {str(seed): losses(0.0, seed=seed) for seed in range(8)}
    found = pooled.pool(group)
    table, _ = pooled._means(group, [{name: one.model for name, one in group.items()}])
    statistic, p = metrics.cosine_test(table[0] - table[1], 1)
    assert found.statistic == statistic > 0 and found.verdict.p == pytest.approx(2 * p)


def test_losses_survive_their_file_and_a_damaged_one_is_named():
    one = losses(0.1)
    back = pooled.from_bytes(pooled.to_bytes({"price": one, "bands": one}))
    assert list(back) == ["price", "bands"]
    for name in ("times", "model", "variance"):
        assert np.array_equal(getattr(back["bands"], name), getattr(one, name))
    assert back["price"].baselines.keys() == one.baselines.keys() and back["price"].horizon == 1
    perfect = dataclasses.replace(one, baselines={"persistence": 0 * one.model})
    stored = {
        "good": pooled.to_bytes({"price": one}),
        "perfect": pooled.to_bytes({"price": perfect}),
        "cut": pooled.to_bytes({"price": one})[:-30],
        "foreign": b"what is this",
    }
    found, missing = pooled.gather([*stored, "gone"], stored.get)
    assert list(found["price"]) == ["good"] and missing == ["cut", "foreign", "gone"]


def runs_of_nothing(seed, runs=8, windows=200):
    """Runs that are all as good as persistence, and err alike to a part."""
    rng = np.random.default_rng(seed)
    baseline, shared = rng.exponential(size=(2, windows))
    first = Losses(3600 * np.arange(windows), 3600, 1, np.ones(windows), baseline, {"persistence": baseline})
    own = 0.2 * shared + 0.8 * rng.exponential(size=(runs, windows))
    return {str(i): {"BTC": dataclasses.replace(first, model=model)} for i, model in enumerate(own)}


def test_the_best_of_eight_runs_is_corrected_for_the_choice(monkeypatch):
    monkeypatch.setattr(pooled, "DRAWS", 2000)
    found, plain = [], []
    for seed in range(120):
        runs = runs_of_nothing(seed)
        table = pooled.compare_runs(runs)
        found.append((table["verdict"] == "BEATS").any())
        p = [metrics.cosine_test(r["BTC"].model - r["BTC"].baselines["persistence"], 1) for r in runs.values()]
        plain.append(any(q < 0.05 and t < 0 for t, q in p))
    assert np.mean(found) <= 0.05 and np.mean(plain) > 2 * np.mean(found)


def test_a_run_that_is_better_is_still_found_and_copies_cost_nothing():
    runs = runs_of_nothing(3)
    good = runs["0"]["BTC"]
    runs["good"] = {"BTC": dataclasses.replace(good, model=0.7 * good.baselines["persistence"])}
    table, pairs = pooled.compare_runs(runs), pooled.compare_pairs(runs)
    assert len(pairs) == 36 and set(pairs["run"][:8]) == {"good"}
    assert (pairs["low %"] <= pairs["skill %"]).all() and (table["skill %"] <= table["high %"]).all()
    assert table.loc[0, ["run", "verdict"]].tolist() == ["good", "BEATS"] and table["p"][0] < 0.01
    assert table["skill %"][0] == pytest.approx(100 * (1 - 0.7**0.5))
    alone = pooled.compare_runs({"a": runs["1"]})["p"][0]
    copies = {name: runs["1"] for name in "abc"}
    pairs, copies = pooled.compare_pairs(copies), pooled.compare_runs(copies)["p"]
    assert pairs["verdict"].tolist() == ["TIES"] * 3 and pairs["p"].tolist() == [1.0] * 3
    assert alone == pytest.approx(
        metrics.cosine_test(runs["1"]["BTC"].model - runs["1"]["BTC"].baselines["persistence"], 1)[1], abs=0.01
    )
    assert copies.tolist() == pytest.approx([alone] * 3, abs=0.01)


def test_runs_on_other_windows_are_not_compared():
    one = losses(0.1)
    for other in (losses(0.1, horizon=2), losses(0.1, begin=3600 * 150)):
        with pytest.raises(CpbkitError, match="must be judged on the same windows; those of BTC are 300 of 1 bars"):
            pooled.compare_runs({"a": {"BTC": one}, "b": {"BTC": other}})
    other = dataclasses.replace(one, baselines={"persistence": 2 * one.baselines["persistence"]})
    with pytest.raises(CpbkitError, match="must be judged on the same bars; those of BTC move otherwise"):
        pooled.compare_runs({"a": {"BTC": one}, "b": {"BTC": other}})
    with pytest.raises(CpbkitError, match="a series in common"):
        pooled.compare_runs({"a": {"BTC": one}, "b": {"ETH": one}})


def test_a_minute_belongs_to_its_own_day():
    ones = np.ones(2)
    minute = Losses(np.array([86_340, 86_400]), 60, 1, ones, np.array([1.0, 3.0]), {"drift": 2 * ones})
    day = Losses(np.array([0, 86_400]), 86_400, 1, ones, np.array([1.0, 3.0]), {"drift": 2 * ones})
    table, _ = pooled._means({"minute": minute, "day": day}, [{"minute": minute.model, "day": day.model}])
    assert table[0].tolist() == [0.5, 1.5]


def test_runs_of_bars_shorter_than_a_second_are_compared():
    begin = 1_735_689_600.0  # such times have fractions of a second, which are not exact
    good = losses(0.4, step=0.2, horizon=3, begin=begin)
    poor = dataclasses.replace(good, model=good.baselines["persistence"])
    good, poor = (pooled.from_bytes(pooled.to_bytes({"link": one}))["link"] for one in (good, poor))
    table = pooled.compare_runs({"a": {"link": good}, "b": {"link": poor}})
    assert list(table["times"]) == [300, 300]
    frame = pd.DataFrame({"rate": np.arange(200.0)}, pd.date_range("2025-01-01", periods=200, freq="200ms"))
    part = dict.fromkeys(("truth", "forecast"), np.ones((200, 1, 1))) | {"variance": np.ones(200), "baselines": {}}
    found = pooled.losses_of(from_table("link", frame, ("rate",), ("rate",)), np.arange(200), part)
    assert len(np.unique(found.times)) == 200


def test_no_pair_of_eight_alike_differs_but_by_chance(monkeypatch):
    monkeypatch.setattr(pooled, "DRAWS", 1000)
    found = [(pooled.compare_pairs(runs_of_nothing(seed, 5))["verdict"] == "BEATS").any() for seed in range(40)]
    assert np.mean(found) <= 0.1  # 10 pairs each; two-sided, 5 % of the runs are expected


def write_run(folder, share, validation, **settings):
    """Write a finished run of one series that loses a share of what persistence does."""
    (folder / "losses").mkdir(parents=True)
    experiment = vary(PRESETS["quick"], symbols=("BTCUSDT",), intervals=("1h",), **settings)
    (folder / "experiment.json").write_text(to_json(experiment))
    one = losses()
    one = dataclasses.replace(one, model=share * one.baselines["persistence"])
    truth = np.sqrt(one.baselines["persistence"])[:, None, None]
    baselines = {"persistence": 0 * truth}
    test = verdicts.judge(truth, (1 - share**0.5) * truth, baselines, "bp")
    line = {"series": "BTCUSDT_1h", "status": "done", "test": {"price": test.to_dict()}}
    line |= {"curve": {"validation": [0.9, validation, None]}, "persistence": {"validation": 0.5}}
    (folder / "results.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "losses" / "BTCUSDT_1h.npz").write_bytes(pooled.to_bytes({"price": one}))
    return folder


def test_a_failed_audit_is_told_with_the_verdicts(tmp_path):
    run = cpb.open_run(write_run(tmp_path / "run", 0.7, 0.4))
    assert not any("audit" in line for line in run.verdicts().trouble)
    finding = {"check": "the making of features knows no future", "verdict": "FAIL", "evidence": "`leak` changes"}
    RunFolder(run.folder).keep_audit({"BTCUSDT_1h": [finding]})
    assert "do not believe these: BTCUSDT_1h: the making of features knows no future" in str(run.verdicts())


def test_runs_side_by_side_and_validation_chooses_even_the_worse(tmp_path):
    good, bad = write_run(tmp_path / "good", 0.7, 0.4), write_run(tmp_path / "bad", 1.2, 0.3, width=9)
    found = cpb.compare(good, bad)
    assert found.runs["run"].tolist() == ["good", "bad"] and found.runs["verdict"][0] == "BEATS"
    assert found.pairs[["run", "other", "verdict"]].values.tolist() == [["good", "bad", "BEATS"]]
    (best,) = found.best.to_dict("records")
    assert (best["run"], best["validation"]) == ("bad", 0.6) and best["skill %"] < 0, "chosen by validation, not test"
    assert "Each pair of runs" in str(found) and "< 0.001" in str(found)
    assert "By validation: 0 of 1 beat" in str(found) and found.plot().png().startswith(b"\x89PNG")
    shown = terminal("compare", good, bad, "--json", "--plot", tmp_path / "a.png")
    assert json.loads(shown.stdout) == found.to_dict() and (tmp_path / "a.png").exists()
    other = write_run(tmp_path / "other", 0.9, 0.1, loss="mae")
    told = cpb.compare(good, other)
    assert told.best.empty and "validated otherwise (task.loss)" in str(told)
    with pytest.raises(CpbkitError, match="two runs or more"):
        cpb.compare(good)


def test_a_file_without_losses_counts_as_one_that_cannot_be_read():
    assert pooled.gather(["A"], lambda name: pooled.to_bytes({})) == ({}, ["A"])
