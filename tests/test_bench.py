"""The benchmark measures what it says: the same model on every side, and both sides of each ratio."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import walk

from benchmarks import cells, data, indicators, stacks, watch
from benchmarks.mirror import serve
from cpbkit.bench import gauges, market, peers, presets, report, sweep
from cpbkit.bench.engine import Here, Job, Workers, engine
from cpbkit.bench.kinds import find_kind
from cpbkit.bench.loops import loop_done_well, loop_in_circulation
from cpbkit.bench.sweep import Effort, bench_sweep, choose_cases, count_flops
from cpbkit.bench.twins import TWINS
from cpbkit.config.experiment import OHLC, Task, vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError, UnknownName
from cpbkit.hardware import provenance
from cpbkit.indicators import INDICATORS, compute
from cpbkit.runs.plan import Plan

CPU = torch.device("cpu")
TASK = Task(context=30, horizon=4, targets=OHLC, target_weights=(1.0, 0.5, 0.25, 2.0))
ABOUT = {"date", "machine", "versions", "commit", "bench"}


EMPTY_SWEEP = {"bench": "sweep", **provenance.describe(), "models": 8, "cases": [], "matmul": {}, "left_out": {}}
EMPTY_SWEEP |= dict.fromkeys(("growth", "search"))


def experiment(model="gru", **settings):
    few = {"name": model, "width": 16, "heads": 2, "layers": 2, "dropout": 0.0, "batch": 4, "teacher_forcing": 0.5}
    return vary(replace(PRESETS["gru"], task=TASK), **(few | settings))


def engine_losses(job, steps):
    sums = [stack.table["loss_sum"].tolist() for stack in islice(engine(job), steps)]
    return np.diff(np.array(sums), axis=0, prepend=0.0)


@pytest.mark.parametrize("model, optimizer", [*((model, "adamw") for model in TWINS), ("gru", "adam")])
def test_both_loops_and_the_engine_train_the_same_model(model, optimizer):
    e = experiment(model, optimizer=optimizer, weight_decay=0.01, clip_value=0.01, precision="float64")
    series = (walk("A", 400, horizon_targets=4), walk("B", 500, horizon_targets=4))
    ours = engine_losses(Job(e, series, steps=200), 5)  # (steps, models)
    for m, one in enumerate(series):
        circulating = list(islice(loop_in_circulation(e, one, CPU), 5))
        well = [loss.item() for loss in islice(loop_done_well(e, one, CPU), 5)]
        assert circulating == pytest.approx(ours[:, m], rel=1e-6)
        assert well == pytest.approx(ours[:, m], rel=1e-6)
        assert abs(circulating[4] - circulating[0]) > 1e-3  # they moved


def test_they_train_the_same_model_in_float32_too():
    e, series = experiment(), (walk("A", 400, horizon_targets=4),)
    ours = engine_losses(Job(e, series, steps=200), 8)[:, 0]
    assert list(islice(loop_in_circulation(e, series[0], CPU), 8)) == pytest.approx(ours, abs=1e-4)


def test_operations_are_counted_as_by_hand():
    e = experiment("nlinear")
    products = e.training.batch * len(OHLC) * TASK.context * TASK.horizon
    assert count_flops(e) == 2 * 2 * products  # forward, and the gradient of the weights; inputs need none


def test_every_preset_is_measured_or_named():
    cases, left_out = choose_cases(None, quick=False)
    assert set(PRESETS) <= set(cases) | set(left_out)
    assert "v8_aligned" in left_out and "same work as v7_classic" in left_out["v8_aligned"]
    assert {e.model.width for e in cases.values()} >= {8, 16}
    with pytest.raises(UnknownName, match="quick"):
        choose_cases(["quik"], quick=True)


@pytest.fixture
def one_core(monkeypatch):
    """Stay in this process, and measure next to nothing: the figures are not what is tested."""

    def one_stack(experiment, series, *_, **__):
        epochs = experiment.training.epochs
        return Plan([list(series)], 9, epochs, epochs, ["cpu"], 0.1 * epochs, "one stack", bytes=1 << 20)

    monkeypatch.setattr(sweep, "count_cores", lambda: 1)
    for module in (sweep, presets):
        monkeypatch.setattr(module, "make_plan", one_stack)
    monkeypatch.setattr(gauges, "MATMUL", 64)
    monkeypatch.setattr(gauges, "MATMUL_SECONDS", 0.01)
    monkeypatch.setattr(market, "BARS", 1000)
    monkeypatch.setattr(sweep, "QUICK", Effort(0.0, 2, (1, 2)))


@pytest.mark.long
def test_the_sweep_tells_both_sides_of_each_ratio(one_core, tmp_path):
    said = []
    document = bench_sweep(["quick"], quick=True, models=2, say=said.append)
    report.save(document, tmp_path / "new" / "bench.json")
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert set(document) > ABOUT and document["versions"]["torch"] == torch.__version__
    assert document["machine"]["cores"] >= 1 and document["machine"]["cpu"]
    assert [case["case"] for case in document["cases"]] == ["gru_dense, width 8", "gru, width 8", "quick"] and len(
        said
    ) == 6
    for case in document["cases"]:
        assert set(case["ratios"]) == {"engine / loop", "engine / loop done well"}
        for ratio in case["ratios"].values():
            assert ratio["ours"] > 0 and ratio["theirs"] > 0 and ratio["unit"]
            assert ratio["lowest"] <= ratio["ratio"] <= ratio["highest"]
        assert all(side["samples_per_second"] == 64 * side["steps_per_second"] for side in case["sides"].values())
        kinds = case["sides"]["engine"]["kinds"]
        assert sum(kinds.values()) == pytest.approx(1) and kinds["products"] > 0 and kinds["activations"] > 0
        assert case["sides"]["engine"]["models_at_once"] == 2 and case["sides"]["loop"]["models_at_once"] == 1
    search = document["search"]
    assert search["settings"] == 3 and search["ratio"] > 0
    assert [row["models"] for row in document["growth"]["rows"]] == [1, 2] and document["growth"]["scaled"] == ["loop"]
    text = report.render(document)
    assert ("Not measured on a GPU" in text) == (not torch.cuda.is_available())
    assert "quick" in text and document["date"] in text and document["machine"]["cpu"] in text


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::addmm_", "products"),
        ("aten::bmm", "products"),
        ("mkldnn::_linear_pointwise", "products"),
        ("aten::sigmoid_backward", "activations"),
        ("aten::mkldnn_rnn_layer_backward", "torch's LSTM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::copy_", "copies"),
        ("aten::mul", "element by element"),
        ("aten::multinomial", "rest"),
        ("autograd::engine::evaluate_function: MulBackward0", "rest"),
    ],
)
def test_an_operator_has_its_kind(operator, kind):
    assert find_kind(operator) == kind


def test_a_preset_tells_what_was_trained_and_what_was_extrapolated(one_core, monkeypatch):
    monkeypatch.setattr(presets, "SERIES", 2)
    # An epoch of one model takes 0.1 s, says the plan, so one of two models takes 0.2 s.
    rows = [json.loads(json.dumps(presets.measure(name, 1, 1.0, 0.5))) for name in ("quick", "bandwidth")]
    quick, bandwidth = rows
    assert quick["seconds_for_all"] == pytest.approx(12 * quick["seconds_an_epoch"]) and quick["memory"] == 1 << 20
    assert quick["trained_epochs"] == 2 and -1 < quick["skill"]["predictable"] < 1
    assert 0 < quick["skill"]["limit"] < 1 and bandwidth["skill"]["limit"] is None
    assert bandwidth["skill"]["head"] == "bandwidth" and bandwidth["skill"]["predictable"] is None
    short = presets.measure("quick", 1, 1.0, 0.1)  # not one epoch
    assert short["trained_epochs"] == 0 and short["skill"]["predictable"] is None and short["seconds_for_all"] > 0


def test_a_preset_is_held_to_the_stated_peak_of_its_chip(monkeypatch):
    experiment = vary(PRESETS["gru"], batch=64)
    flops = count_flops(experiment) * 1000
    assert presets.roofline(experiment, 1000, 10.0, "cpu") == {"roofline_seconds": None, "mfu": None}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "Tesla T4")
    found = presets.roofline(experiment, 1000, 10.0, "cuda:0")
    assert found["roofline_seconds"] == pytest.approx(flops / 8.1e12) and found["mfu"] == pytest.approx(flops / 8.1e13)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda place: "NVIDIA H200")
    tf32 = presets.roofline(vary(experiment, precision="tf32"), 1000, 10.0, "cuda:0")
    assert tf32["roofline_seconds"] == pytest.approx(flops / 494.5e12), "the sheet states 989 with sparsity"
    assert presets.roofline(vary(experiment, precision="float64"), 1000, 10.0, "cuda:0")["mfu"] is None


@pytest.mark.long
def test_presets_are_measured_beside_each_other_and_told_in_order(monkeypatch):
    monkeypatch.setattr(presets, "QUICK_TRAINING", 0.01)
    said = []
    document = presets.bench_presets(["gru_dense", "quick"], quick=True, models=1, say=said.append)
    assert [row["preset"] for row in document["rows"]] == ["gru_dense", "quick"]
    assert said[0].startswith("2 presets") and said[-1].startswith("[2/2] ")
    text = report.render(document)
    assert "extrapolated" in text and "None is shown" in text


@pytest.mark.long
def test_workers_step_at_the_same_time_and_tell_what_went_wrong():
    e, series = experiment(), walk("A", 400, horizon_targets=4)
    with Workers(2) as workers:
        workers.start([Job(e, (series,), steps=200), Job(e, (series,), steps=200)])
        wall, cpu = workers.run(2)
        assert workers.rows == 2 and wall > 0 and cpu > 0
        with pytest.raises(CpbkitError, match="the train split needs"):
            workers.start([Job(e, (walk("A", 30, horizon_targets=4),))])
        workers.start([Job(e, (series,), steps=200)])  # and goes on
        assert workers.rows == 1 and workers.run(1)[0] > 0


class FakeWorkers:
    """Two processes that need 6 ms a step, and 1 ms more for each model."""

    memory = None

    def start(self, jobs):
        self.rows, self.pace = sum(job.rows for job in jobs), 0.006 + 0.001 * len(jobs[0].series)

    def run(self, steps):
        return steps * self.pace, 2 * steps * self.pace

    def call(self, function, *arguments):
        return function(*arguments)


def test_the_planned_way_is_held_against_the_others(monkeypatch):
    monkeypatch.setattr(market, "BARS", 500)
    monkeypatch.setattr(stacks, "WIDTHS", (4,))
    monkeypatch.setattr(stacks, "LIMIT", 0.0)  # the stacks in this process take too long, but the plan is timed
    monkeypatch.setattr(stacks, "make_plan", lambda e, s: Plan([["a"] * 2] * 2, 9, 9, 9, ["cpu"] * 2))
    (row,) = stacks.measure_stacks(8, 2, FakeWorkers(), lambda text: None)
    assert [way["stack"] for way in row["ways"]] == [1, 2]
    assert [way["seconds"] for way in row["ways"]] == pytest.approx([0.007 / 2, 0.008 / 4])
    assert row["planned_over_best"] == 1 and [way["planned"] for way in row["ways"]] == [False, True]
    assert "2.00*" in "\n".join(stacks.render([row]))


def test_a_way_that_cannot_run_is_told_with_its_reason():
    ways = [
        {"way": "scan", "seconds": 0.001, "error": 0.0},
        {"way": "fused cell", "reason": "NotImplementedError: CPU"},
    ]
    text = "\n".join(cells.render([{"preset": "gru", "width": 128, "precision": "float32", "ways": ways}]))
    assert "fused cell: NotImplementedError" in text
    (line,) = (line.split() for line in text.splitlines() if line.startswith("gru, width 128"))
    assert line == ["gru,", "width", "128,", "float32", "1.000"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_every_way_to_compute_a_recurrent_layer_gives_the_same(monkeypatch):
    monkeypatch.setattr(cells, "SHAPES", ("quick",))
    for row in cells.measure_cells(2, lambda text: None):
        assert all(way["error"] < 0.02 for way in row["ways"] if "error" in way) and "seconds" in row["ways"][0]


def test_here_counts_the_memory_that_a_side_takes():
    def allocate():
        kept = torch.ones(64 << 18)  # 64 MiB
        while True:
            yield kept

    here = Here(allocate, "cpu")
    assert here.memory is None or 60 << 20 < here.memory < 100 << 20


def test_the_machine_is_described_without_git_too(tmp_path):
    assert provenance.commit(tmp_path) == ""
    checkout, installed = tmp_path / "checkout", tmp_path / "checkout/installed"
    installed.mkdir(parents=True)
    (checkout / "own.py").touch()
    (installed / "package.py").touch()
    user = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "own.py"), (*user, "commit", "-qm", "One")):
        subprocess.run(["git", "-C", checkout, *words], check=True)
    assert len(provenance.commit(checkout)) == 10 and provenance.commit(installed) == ""
    assert gauges.matmul_rate(CPU, "float64") > 1e6


def test_data_fetches_what_the_mirror_has_and_measures_both_ways(monkeypatch):
    monkeypatch.setattr(data, "SYMBOLS", ("BTCUSDT", "PEPEUSDT"))
    monkeypatch.setattr(data, "INTERVALS", ("1h",))
    monkeypatch.setattr(data, "ROUNDS", 1)
    document = json.loads(json.dumps(data.bench_data(quick=True)))
    assert set(document) > ABOUT and document["files"] == 2 and document["bars"] > 1400
    assert document["ratio"]["ours"] > 0 and document["ratio"]["theirs"] > 0
    assert document["memory"]["ours"] <= 1.2 * document["memory"]["bars"] < document["memory"]["theirs"]
    assert "2 archive files" in "\n".join(data.render(document))


def test_the_mirror_says_404_for_what_it_has_not():
    import requests

    with serve({"/a.zip": b"abc"}) as url:
        assert requests.get(f"{url}/a.zip", timeout=5).content == b"abc"
        assert requests.get(f"{url}/b.zip", timeout=5).status_code == 404


def test_indicators_are_compared_on_the_same_columns(monkeypatch):
    talib = pytest.importorskip("talib")
    assert talib
    frame = next(iter(market.make_bars(1, 1500).values())).frame
    theirs = indicators.ta_lib_set(frame)()
    assert set(theirs) < set(INDICATORS) and len(theirs) == 25
    ours = compute(frame, theirs)
    for name, values in theirs.items():
        late = ours[name].to_numpy()[600:]
        scale = np.abs(values[600:]).max()
        assert np.nanmean(np.abs(late - values[600:]) < 1e-6 * scale) > 0.9, name  # ties and idle bars aside
    monkeypatch.setattr(indicators, "QUICK_ROUNDS", 1)
    document = indicators.bench_indicators(quick=True)
    assert document["ratio"]["ours"] > 0 and document["ratio"]["theirs"] > 0
    assert "that TA-Lib has too" in "\n".join(indicators.render(document))


def test_indicators_without_ta_lib_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "talib", None)
    monkeypatch.setattr(indicators, "QUICK_ROUNDS", 1)
    document = indicators.bench_indicators(quick=True)
    assert "ratio" not in document and "Not compared: TA-Lib is not installed" in "\n".join(indicators.render(document))


def test_the_watch_is_timed_beside_the_same_loop_without(monkeypatch):
    monkeypatch.setattr(watch, "BLOCK", 0.02)
    monkeypatch.setattr(watch, "QUICK_PAIRS", 2)
    text = "\n".join(watch.render(watch.bench_watch(quick=True)))
    assert "A training step under the watch" in text and "2 pairs of" in text


def peer_rows(preset="quick"):
    sides = {"engine": {"steps_per_second": 50.0}}
    return [{"case": preset, "model": PRESETS[preset].model.name, "sides": sides}]


def test_a_peer_that_cannot_be_installed_is_named(monkeypatch):
    def refuse(*_):
        raise subprocess.CalledProcessError(1, "pip", stderr="noise\nERROR: No matching distribution found\n")

    monkeypatch.setattr(peers, "install", refuse)
    found = peers.bench_peers(peer_rows(), PRESETS, lambda text: None)
    assert found["rows"] == [] and set(found["missing"]) == set(peers.LIBRARIES)
    assert "could not be installed: ERROR: No matching" in found["missing"]["darts"]


def test_a_peer_is_timed_in_its_own_python(monkeypatch, tmp_path):
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, sys; spec = json.load(sys.stdin)\n"
        "assert spec['context'] == 32 and spec['width'] == 16 and spec['steps'] == 60\n"
        "print('a library that talks')\n"
        "print(json.dumps({'seconds_a_step': 0.1, 'seconds_besides': 1.0, 'threads': 1}))\n"
    )
    monkeypatch.setattr(peers, "SCRIPT", fake)
    monkeypatch.setattr(peers, "install", lambda library, folder: (sys.executable, "9.9"))
    found = peers.bench_peers(peer_rows(), PRESETS, lambda text: None)
    row = found["rows"][0]
    assert (row["ours"], row["theirs"], row["ratio"]) == (50.0, 10.0, 5.0) and not found["missing"]
    assert not row["same_network"] and "ours decodes" in report.render(EMPTY_SWEEP | {"peers": found})
    fake.write_text("import sys; sys.exit('it has no such model')")
    found = peers.bench_peers(peer_rows(), PRESETS, lambda text: None)
    assert found["missing"]["darts, quick"] == "not measured: it has no such model"


def test_the_dense_network_is_held_against_the_same_network(monkeypatch, tmp_path):
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import json, sys; spec = json.load(sys.stdin)\n"
        "assert (spec['model'], spec['width'], spec['layers'], spec['horizon']) == ('gru', 128, 2, 10)\n"
        "print(json.dumps({'seconds_a_step': 0.1, 'seconds_besides': 1.0, 'threads': 1}))\n"
    )
    monkeypatch.setattr(peers, "SCRIPT", fake)
    monkeypatch.setattr(peers, "install", lambda library, folder: (sys.executable, "9.9"))
    found = peers.bench_peers(peer_rows("gru_dense"), PRESETS, lambda text: None)
    assert len(found["rows"]) == 2 and all(row["same_network"] for row in found["rows"]), found["missing"]
