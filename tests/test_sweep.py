"""The sweep: each series once, resumed to the bit after any kill, and right about what can be forecast."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy
from conftest import walk

from cpbkit.config.experiment import SYMBOLS, to_json, vary
from cpbkit.config.presets import PRESETS
from cpbkit.data import binance, synthetic
from cpbkit.errors import RunError, Terminated, UnknownName
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.verdicts import judgements, verdicts
from cpbkit.runs import stopping, worker
from cpbkit.runs import sweep as module
from cpbkit.runs.executors import Ray
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.plan import Plan, job_name
from cpbkit.runs.progress import State
from cpbkit.runs.sweep import sweep
from cpbkit.training import checkpoint

TINY = vary(
    PRESETS["quick"],
    source="synthetic",
    symbols=SYMBOLS[:4],
    intervals=("1h",),
    start="2024-01-01",
    end="2024-01-31",
    width=4,
    epochs=4,
    batch=32,
    patience=2,
)


def lines(folder):
    """The ledger by series, without what the clock wrote."""
    found = RunFolder(folder).results()
    assert len({line.series for line in found}) == len(found), "a series stands in the ledger twice"
    return {line.series: replace(line, seconds=0.0) for line in found}


def models(folder):
    return {path.name: safetensors.numpy.load_file(path) for path in sorted((folder / "models").iterdir())}


def assert_same_run(a, b):
    assert lines(a) == lines(b)
    ours, theirs = models(a), models(b)
    assert ours.keys() == theirs.keys()
    for name, tensors in ours.items():
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, theirs[name][key], err_msg=f"{name} {key}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "undisturbed"
    sweep(TINY, folder, workers=1, command="cpbkit sweep")
    return folder


def test_a_sweep_leaves_a_whole_run_folder(undisturbed):
    found = lines(undisturbed)
    assert found.keys() == set(TINY.series)
    assert {path.stem for path in (undisturbed / "models").iterdir()} == set(TINY.series)
    for line in found.values():
        assert line.status == "done" and line.synthetic and line.passport["synthetic"]
        assert len(line.curve["train"]) == len(line.curve["validation"]) == line.epochs
        assert line.test["price"]["windows"] == line.windows["test"]
    clock = json.loads((undisturbed / "clock.json").read_text())
    assert {"bars", "features", "training"} <= clock.keys()
    assert not list((undisturbed / "progress").glob("*.safetensors")), "checkpoints of finished jobs stay behind"
    assert json.loads((undisturbed / "about.json").read_text())["command"] == "cpbkit sweep"


def test_a_second_run_trains_nothing(undisturbed, monkeypatch):
    monkeypatch.setattr(module, "work", None)
    assert {line.series for line in sweep(TINY, undisturbed, klines=None)} == set(TINY.series)


@pytest.mark.long
def test_processes_end_with_what_one_process_ends_with(tmp_path):
    sweep(TINY, tmp_path / "two", executor="processes", workers=2)
    plan = json.loads((tmp_path / "two/progress/plan.json").read_text())
    assert sorted(name for job in plan["jobs"] for name in job) == sorted(TINY.series)
    (tmp_path / "one/progress").mkdir(parents=True)
    # A plan of another machine: its devices are not here, and this one has its own idea of workers.
    foreign = plan | {"devices": ["cuda:0", "cuda:1"]}
    (tmp_path / "one/progress/plan.json").write_text(json.dumps(foreign))
    sweep(TINY, tmp_path / "one", executor="local")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
def test_a_script_needs_no_guard(tmp_path):
    """Processes that start must not run the caller's script again: it would sweep in each of them."""
    script = tmp_path / "script.py"
    script.write_text(
        "from cpbkit.config.experiment import from_json\nfrom cpbkit.runs.sweep import sweep\n"
        "print('begun')\n"
        f"experiment = from_json(open({str(tmp_path / 'experiment.json')!r}).read())\n"
        f"print(len(sweep(experiment, {str(tmp_path / 'run')!r}, executor='processes', workers=2)))\n"
    )
    (tmp_path / "experiment.json").write_text(to_json(TINY))
    shown = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["begun", "4"]


def test_a_checkpoint_of_other_bars_is_not_gone_on_from(monkeypatch):
    monkeypatch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
    experiment = vary(TINY, steps=9)
    (old, *_) = (m for m in worker.work(job("A", 400, experiment)) if isinstance(m, worker.Checkpoint))
    same, other = job("A", 400, experiment), job("A", 500, experiment)
    ways = [list(worker.work(replace(one, checkpoint=old.content))) for one in (same, other)]
    ends = [next(m for m in messages if isinstance(m, worker.Result)).model for messages in ways]
    alone = next(m for m in worker.work(other) if isinstance(m, worker.Result)).model
    assert ends[1] == alone and ends[0] != ends[1]
    notes = [[m.text for m in messages if isinstance(m, worker.Note)] for messages in ways]
    other_bars = "A+0 begins anew, not from its checkpoint: it is of other bars or settings than are there now"
    assert notes == [[], [other_bars]]


def test_a_damaged_or_foreign_checkpoint_begins_anew_and_says_so(monkeypatch):
    monkeypatch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
    same = job("A", 400, vary(TINY, steps=9))
    (good, *_) = (m for m in worker.work(same) if isinstance(m, worker.Checkpoint))
    alone = next(m for m in worker.work(same) if isinstance(m, worker.Result)).model
    flipped = bytearray(good.content)
    for at in range(len(flipped) // 2, len(flipped) // 2 + 200):
        flipped[at] ^= 1
    tensors, about = checkpoint.load(good.content)
    foreign = checkpoint.save({name: tensor for name, tensor in tensors.items() if name != "table.stale"}, about)
    for content, why in ((bytes(flipped), "its checksum does not hold"), (b"", "no model"), (foreign, "version")):
        messages = list(worker.work(replace(same, checkpoint=content or b"x")))
        (note,) = (m.text for m in messages if isinstance(m, worker.Note))
        assert note.startswith("A+0 begins anew, not from its checkpoint: ") and why in note
        assert next(m for m in messages if isinstance(m, worker.Result)).model == alone


def test_a_series_that_ended_on_other_bars_is_kept_and_said(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    first, *_ = found = RunFolder(undisturbed).results()
    changed = [line.to_json() for line in (replace(first, data_sha256="0" * 64), *found[1:-1])]
    (tmp_path / "run/results.jsonl").write_text("".join(line + "\n" for line in changed))
    said = []
    sweep(TINY, tmp_path / "run", workers=1, on_progress=lambda state: said.append(state.stage))
    monitor = pd.read_parquet(tmp_path / "run/monitor.parquet")
    (note,) = (text for text in monitor["text"] if "other bars" in text)
    assert note.startswith(first.series) and note in said
    assert lines(tmp_path / "run") == lines(undisturbed) | {
        first.series: replace(lines(undisturbed)[first.series], data_sha256="0" * 64)
    }


def job(name, bars, experiment=TINY):
    return worker.Job(f"{name}+0", experiment, (walk(name, bars),))


def test_a_forecast_that_is_not_finite_is_sick_and_stops_nobody(monkeypatch):
    honest = worker.forecast
    monkeypatch.setattr(worker, "forecast", lambda *given: [honest(*given)[0] * np.nan])
    (end,) = (m for m in worker.work(job("A", 400, vary(TINY, steps=9))) if isinstance(m, worker.Result))
    assert end.line.status == "sick" and "not finite" in end.line.reason and end.model is None


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
@pytest.mark.parametrize("asked", ["by a SIGTERM", "by Ctrl-C", "alone by an interrupt"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_sweep_that_is_asked_to_end_keeps_a_checkpoint_and_ends_within_seconds(tmp_path, workers, asked):
    longer = {"epochs": "100000", "patience": "100000"}
    wish = "sweep --source synthetic --symbols BTC,ETH --intervals 1h --start 2025-01-01 --end 2025-02-01".split()
    settings = [part for name, value in longer.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "cpbkit", *wish, *settings, "--run", tmp_path / "r", "--workers", str(workers)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while "training" not in (seen := process.stderr.readline()):
            assert seen, "it ended before it trained"
        while not RunFolder(tmp_path / "r").status().get("share"):
            time.sleep(0.1)
        begun = time.monotonic()
        if asked == "by Ctrl-C":  # a terminal sends it to the workers too
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM if asked == "by a SIGTERM" else signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert time.monotonic() - begun < 20  # 5 s, on a machine that has nothing else to do
    assert process.returncode == (143 if asked == "by a SIGTERM" else 1), said
    assert "the same command goes on" in said and "Traceback" not in said
    assert list((tmp_path / "r/progress").glob("*.safetensors")) and (tmp_path / "r/clock.json").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_ctrl_c_while_the_workers_start_is_heard(tmp_path, seconds):
    wish = "sweep --source synthetic --symbols BTC,ETH --intervals 1h --start 2025-01-01 --end 2025-02-01".split()
    wish += "--set epochs=100000 --set patience=100000 --workers 2".split()
    command = [sys.executable, "-m", "cpbkit", *wish, "--run", tmp_path / "r"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not (tmp_path / "r/progress/plan.json").exists():
            assert process.poll() is None, "it ended before it trained"
            time.sleep(0.05)
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "the same command goes on" in said and "Traceback" not in said, said
    assert (tmp_path / "r").exists()


def test_an_interrupt_that_is_ignored_stays_so_and_a_reminder_ends_with_its_sweep():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of what a shell starts in the background
    try:
        with stopping.listening():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt), stopping.listening(), stopping.patiently():
        signal.raise_signal(signal.SIGINT)
        assert stopping.is_asked() and [timer for timer in threading.enumerate() if isinstance(timer, threading.Timer)]
        raise Terminated
    assert not stopping.is_asked() and signal.getsignal(signal.SIGINT) is before
    for timer in [timer for timer in threading.enumerate() if isinstance(timer, threading.Timer)]:
        timer.join(5)  # at once, not after half a minute
        assert not timer.is_alive()


@pytest.mark.slow
def test_a_model_and_then_the_sweep_are_stopped_from_elsewhere(tmp_path):
    experiment = vary(TINY, symbols=SYMBOLS[:2], epochs=100_000, patience=100_000)
    run, (first, other) = RunFolder(tmp_path / "r"), experiment.series

    def ask():
        while not run.status().get("share"):
            time.sleep(0.1)
        with pytest.raises(UnknownName, match="got 'LTC_1h'"):
            run.stop(["LTC_1h"])
        run.stop([first])
        while not run.results():
            time.sleep(0.1)
        run.stop()

    person = threading.Thread(target=ask, daemon=True)
    person.start()
    with pytest.raises(RunError, match="stopped by hand with 1 of 2 done; the same call goes on"):
        sweep(experiment, run.folder, workers=2)
    person.join()
    (line,) = run.results()
    assert (line.series, line.status, line.reason) == (first, "done", "stopped by hand")
    assert list((run.folder / "progress").glob("*.safetensors")) and run.model(first) and not run.model(other)
    with pytest.raises(RunError, match="nobody works on"):
        run.stop()
    with pytest.raises(RunError, match="nope"):
        RunFolder(run.folder / "nope").stop()
    assert run.wishes() == {"end": True, "series": [first]}
    with run.writing(experiment):
        assert run.wishes() == {"end": False, "series": []}  # they were meant for the sweep before
        run.begin({"executor": "ray"})
        with pytest.raises(RunError, match="alone stops the whole sweep"):
            run.stop([first])
        run.stop()
        assert run.wishes()["end"]


def _run_with_many_checkpoints(folder):
    worker.CHECKPOINT_SECONDS, worker.CHECKPOINT_SHARE = 0.0, 1.0
    sweep(TINY, folder, workers=1, command="cpbkit sweep")


@pytest.mark.long
def test_a_sweep_killed_at_random_moments_ends_bit_equal(undisturbed, tmp_path):
    kills, rng = 0, random.Random(0)
    (tmp_path / "killed/progress").mkdir(parents=True)  # the same plan: another stack rounds in another way
    shutil.copy(undisturbed / "progress/plan.json", tmp_path / "killed/progress")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cpbkit.runs.sweep", "torch._dynamo"])  # so that a child starts at once
    for i in range(45):  # lives that grow, so that both a quick and a slow machine are interrupted often
        child = context.Process(target=_run_with_many_checkpoints, args=(tmp_path / "killed",))
        child.start()
        child.join(0.1 * 1.15**i * rng.uniform(0.5, 1.5))
        if child.exitcode is None:
            child.kill()
            kills += 1
        child.join()
        if child.exitcode == 0:
            break
    assert kills > 2
    assert_same_run(tmp_path / "killed", undisturbed)


def test_a_series_that_is_too_short_fails_alone_and_says_why(tmp_path):
    def bars(experiment, tell):
        market = module.load_klines(experiment)
        short = market[TINY.series[1]]
        market[TINY.series[1]] = type(short)(short.frame[:60], short.passport)
        return market

    found = {line.series: line for line in sweep(TINY, tmp_path, klines=bars, workers=1)}
    assert found[TINY.series[1]].status == "failed"
    assert "windows" in found[TINY.series[1]].reason
    assert [line.status for line in found.values()].count("done") == 3


def test_a_series_that_cannot_be_had_now_is_trained_when_it_can(tmp_path, undisturbed):
    late = TINY.series[2]

    def most(experiment, tell):
        market = module.load_klines(experiment)
        market.pop(late)
        raise binance.Incomplete("one is not available", market, {late: "HTTP 503"})

    with pytest.raises(binance.Incomplete, match="one is not available"):
        sweep(TINY, tmp_path, klines=most, executor="local")
    assert lines(tmp_path).keys() == set(TINY.series) - {late}
    assert lines(tmp_path).keys() | {late} == {line.series for line in sweep(TINY, tmp_path, executor="local")}


def test_files_of_ones_own_are_swept(tmp_path):
    for name, each in module.load_klines(TINY).items():
        each.frame.to_csv(tmp_path / f"{name}.csv")
    experiment = vary(TINY, source="files", files=str(tmp_path), symbols=TINY.data.symbols[:2], epochs=1)
    results = sweep(experiment, tmp_path / "run", executor="local")
    assert [line.status for line in results] == ["done", "done"]
    assert not any(line.synthetic for line in results)


def test_progress_tells_stages_shares_and_a_time_left(tmp_path):
    stages, lefts = [], []

    def hear(state):
        if not stages or stages[-1] != state.stage:
            stages.append(state.stage)
        lefts.append(state.standing().seconds_left)
        assert state.done + len(state.running) <= state.total

    begun = time.monotonic()
    sweep(TINY, tmp_path, workers=1, on_progress=hear)
    assert stages[0] == "getting bars" and "computing features" in stages and stages[-1].startswith("training, ")
    assert lefts[-1] == pytest.approx(0, abs=0.2 * (time.monotonic() - begun))
    last = RunFolder(tmp_path).status()
    assert (last["done"], last["share"], last["seconds_left"]) == (4, 1.0, 0.0) and last["samples_per_second"] > 0


def test_a_sweep_that_was_stopped_begins_with_the_share_of_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "CHECKPOINT_SHARE", math.inf)
    monkeypatch.setattr(worker, "PROGRESS_SECONDS", 0.0)

    def stop(state):
        shares.append(state.share)
        if state.share > 0.3:
            raise KeyboardInterrupt

    shares = []
    with pytest.raises(KeyboardInterrupt):
        sweep(vary(TINY, patience=4), tmp_path, workers=1, on_progress=stop)
    assert shares[0] == 0 and shares[-1] < 0.5
    again = []
    sweep(vary(TINY, patience=4), tmp_path, workers=1, on_progress=lambda state: again.append(state.share))
    assert again[0] == pytest.approx(shares[-1]) and again == sorted(again) and again[-1] == 1


@pytest.mark.long
def test_the_planted_share_is_found_in_nearly_all_that_have_it_and_nowhere_else(tmp_path):
    experiment = vary(
        PRESETS["quick"],
        source="synthetic",
        symbols=SYMBOLS[:8],
        intervals=("1h",),
        start="2024-01-01",
        end="2024-06-30",
    )
    results = sweep(experiment, tmp_path, workers=1)
    planted = synthetic.predictable_series(experiment.data.symbols, ("1h",), experiment.data.seed)
    assert 0 < len(planted) < 8
    judged = verdicts(judgements(results)["price"])
    found = {name for name, verdict in judged.items() if verdict.word == "BEATS"}
    assert found <= planted and len(found) >= len(planted) - 1  # half a year of 1h bars need not show every one


def test_a_stack_that_does_not_fit_is_halved_and_the_plan_remembers(tmp_path, monkeypatch):
    assemble, notes = worker.assemble, []

    def small(experiment, series, device):
        if len(series) > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return assemble(experiment, series, device)

    monkeypatch.setattr(worker, "assemble", small)
    plan = Plan([list(TINY.series)], steps=9, epochs=2, patience=2, devices=["cpu"])
    monkeypatch.setattr(module, "make_plan", lambda *_: plan)
    results = sweep(TINY, tmp_path, workers=1, on_progress=lambda state: notes.append(state.stage))
    assert {line.series for line in results} == set(TINY.series)
    assert any("CUDA out of memory" in note and note.endswith("goes on as 2 smaller stacks") for note in notes)
    kept = json.loads((tmp_path / "progress/plan.json").read_text())["jobs"]
    assert sorted(map(len, kept)) == [2, 2]
    assert not list((tmp_path / "progress").glob("*.safetensors"))


def test_one_model_that_does_not_fit_has_failed_and_the_ledger_says_what_was_tried(monkeypatch):
    def none(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(worker, "assemble", none)
    two = worker.Job("A+1", TINY, (walk("A", 300), walk("B", 300)))
    ends = [message.line for message in worker.work(two) if isinstance(message, worker.Result)]
    assert [(line.series, line.status) for line in ends] == [("A", "failed"), ("B", "failed")]
    assert ends[1].reason.startswith("alone it did not fit into the memory of cpu: CUDA out of memory")
    assert [text.partition(" ")[0] for text in ends[1].tried] == ["A+1", "B+0"]


def test_a_series_that_failed_is_tried_again_and_one_without_its_model_too(tmp_path, undisturbed, caplog):
    shutil.copytree(undisturbed, tmp_path / "run")
    run, (first, second, *_) = RunFolder(tmp_path / "run"), TINY.series
    run.finish(ResultLine(first, "failed", "the host was down"), None)
    path = run.folder / "models" / f"{second}.safetensors"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    stages = []
    sweep(TINY, run.folder, executor="local", on_progress=lambda state: stages.append(state.stage))
    (said,) = caplog.messages
    assert said.startswith(f"the model of {second} is trained anew: ") and "checksum" in said
    assert {line.series: line.status for line in run.results()} == dict.fromkeys(TINY.series, "done")
    assert len((run.folder / "results.jsonl").read_bytes().splitlines()) == 4 + 1 + 2
    ours, theirs = models(run.folder), models(undisturbed)
    for name in ours:
        for key, tensor in ours[name].items():
            np.testing.assert_array_equal(tensor, theirs[name][key])


def test_a_series_that_fails_again_for_the_same_reason_has_one_line(tmp_path):
    def bars(experiment, tell):
        market = module.load_klines(experiment)
        short = market[TINY.series[1]]
        return {TINY.series[1]: type(short)(short.frame[:60], short.passport), TINY.series[0]: market[TINY.series[0]]}

    for _ in range(2):
        sweep(TINY, tmp_path, klines=bars, executor="local")
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 2


def test_a_unit_whose_worker_is_lost_is_halved_and_a_single_series_tried_once_more(tmp_path):
    run, state = RunFolder(tmp_path), State(TINY, 4)
    retry, series = module._retry(run, state), tuple(walk(name, 300) for name in "ABC")
    state.ended = {"B"}
    (said,), halves = retry(worker.Job("A+2", TINY, series), "was killed", True)
    assert isinstance(said, worker.Shrunk) and said.jobs == [["A"], ["C"]]
    assert [half.tried for half in halves] == [("A+2 was killed",)] * 2
    (note,), (same,) = retry(halves[0], "was killed", True)
    assert isinstance(note, worker.Note) and same.series == halves[0].series
    (end,), rest = retry(same, "was killed", True)
    assert end.line.status == "failed" and not rest
    assert end.line.tried == ["A+2 was killed", "A+0 was killed", "A+0 was killed"]


def test_a_job_that_shrinks_leaves_each_series_once_in_the_plan(tmp_path, monkeypatch):
    """Also where it is not the job that was planned: one without a series that is not there, or half of one."""
    plan = Plan([list(TINY.series[:3]), [TINY.series[3]]], steps=9, epochs=4, patience=2, devices=["cpu"])
    bars = {name: one for name, one in module.load_klines(TINY).items() if name != TINY.series[2]}

    def begin(experiment, tell):
        raise binance.Incomplete("one is not there", bars, {})

    def shrink_twice(jobs, work):
        first = next(job for job in jobs if len(job.series) > 1)
        (said,), halves = worker.shrink(first, set(), "was killed")
        yield said
        yield said  # its node was lost too, and the whole of it shrunk once more
        for job in (*halves, *(job for job in jobs if job is not first)):
            yield from work(job)

    monkeypatch.setattr(module.executors, "local", shrink_twice)
    with RunFolder(tmp_path).writing(TINY) as run:
        run.keep_plan(vars(plan))
    with pytest.raises(binance.Incomplete):
        sweep(TINY, tmp_path, klines=begin, executor="local")
    planned = RunFolder(tmp_path).plan()["jobs"]
    assert sorted(name for names in planned for name in names) == sorted(TINY.series)
    # What is through is not timed anew.
    monkeypatch.undo()
    timed = []
    monkeypatch.setattr(module, "make_plan", lambda experiment, series, *_: timed.append(set(series)))
    sweep(TINY, tmp_path, executor="local")
    assert not timed and {line.status for line in lines(tmp_path).values()} == {"done"}


def test_one_model_for_all_series_is_not_trained_on_some(tmp_path):
    pooled = vary(TINY, pooled=True)
    bars = module.load_klines(TINY)
    some = {name: bars[name] for name in TINY.series[:3]}

    def lacking(experiment, tell):
        raise binance.Incomplete("one is not there", some, {})

    with pytest.raises(binance.Incomplete):
        sweep(pooled, tmp_path, klines=lacking, executor="local")
    assert not RunFolder(tmp_path).results()
    short = bars[TINY.series[3]]
    short = some | {TINY.series[3]: type(short)(short.frame[:60], short.passport)}
    sweep(pooled, tmp_path, klines=lambda *_: short, executor="local")
    assert [line.status for line in RunFolder(tmp_path).results()].count("done") == 3
    with pytest.raises(RunError, match=f"trained without {TINY.series[3]}"):
        sweep(pooled, tmp_path, klines=lambda *_: bars, executor="local")


def test_a_budget_is_kept_and_every_model_still_has_a_verdict(tmp_path):
    experiment = vary(TINY, epochs=100_000, patience=100_000)
    plan = Plan([list(TINY.series)], steps=9, epochs=100_000, patience=100_000, devices=["cpu"])
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress/plan.json").write_text(json.dumps(plan.__dict__))
    begun = time.monotonic()
    results = sweep(experiment, tmp_path, minutes=0.1, workers=1)
    assert time.monotonic() - begun < 60
    assert {line.reason for line in results} == {"the time is up"}
    assert all(line.test["price"]["windows"] for line in results)


class Hurrying:
    """A clock on which every look takes 10 ms."""

    def __init__(self):
        self.now = 1e9

    def monotonic(self):
        self.now += 0.01
        return self.now

    time = monotonic


def test_a_unit_takes_its_share_of_the_time_that_is_left(monkeypatch):
    clock = Hurrying()
    monkeypatch.setattr(worker, "time", clock)
    begun = clock.now
    experiment = vary(TINY, epochs=100_000, patience=100_000, steps=9)
    job = worker.Job("BTCUSDT_1h+0", experiment, (walk("BTCUSDT_1h", 500),), deadline=begun + 6, turns=3)
    ends = [message for message in worker.work(job) if isinstance(message, worker.Result)]
    assert [end.line.reason for end in ends] == ["the time is up"]
    assert clock.now - begun == pytest.approx(2, rel=0.1)


def start_ray(make):
    """Ray gives up on a node after 30 s, fixed in its code, which a machine with other work on it may need."""
    for _ in range(3):
        try:
            return make()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    raise TimeoutError("Ray did not come up in three tries")


@pytest.mark.slow
@pytest.mark.alone  # Ray gives a node 30 s to start
def test_a_ray_cluster_that_loses_a_node_ends_with_the_local_result(tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install cpbkit[ray]")
    from ray.cluster_utils import Cluster

    def warm():
        from cpbkit.runs import worker  # noqa: F401  so that both nodes begin at once

    experiment = vary(TINY, epochs=100, patience=100)  # seconds of work for a job
    cluster = start_ray(lambda: Cluster(initialize_head=True, head_node_args={"num_cpus": 1}))
    try:
        second = start_ray(lambda: cluster.add_node(num_cpus=1))
        before, done, fell = {}, [], set()  # shares when the node goes, results by then, and who began again after it

        def hear(state):
            shares = {name: one.share for name, one in state.running.items()}
            if before:
                fell.update(name for name, share in shares.items() if share < before[name])
            elif shares.keys() == set(TINY.series) and min(shares.values()) > 0.1:
                assert not ray.available_resources().get("CPU", 0), "both nodes must be at work"
                before.update(shares)
                done.append(state.done)
                cluster.remove_node(second)

        ray.init(cluster.address, log_to_driver=False, logging_level="warning")
        ray.get([ray.remote(num_cpus=1)(warm).remote() for _ in range(2)])
        sweep(experiment, tmp_path / "ray", executor=Ray(cluster.address), on_progress=hear)
        plan = (tmp_path / "ray/progress/plan.json").read_text()
        jobs = json.loads(plan)["jobs"]
        assert done == [0], "the node must go while jobs are at work"
        assert len(jobs) == 2 and sorted(fell) in map(sorted, jobs), "one job must have been lost with it"
        (tmp_path / "local/progress").mkdir(parents=True)
        (tmp_path / "local/progress/plan.json").write_text(plan)
        sweep(experiment, tmp_path / "local", executor="local")
        assert_same_run(tmp_path / "ray", tmp_path / "local")
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_killed_on_ray_has_its_unit_tried_again_with_half_the_stack(tmp_path):
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install cpbkit[ray]")
    experiment, killed = vary(TINY, symbols=SYMBOLS[:2], epochs=25, patience=25), []

    def hear(state):
        if not killed and state.running and min(one.share for one in state.running.values()) > 0.1:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    title = path.read_bytes()
                    if title.startswith(b"ray::") and b"serve" in title:
                        killed.append(int(path.parent.name))
            os.kill(*killed, signal.SIGKILL)

    def plan_of(folder, jobs):
        plan = Plan(jobs, steps=9, epochs=25, patience=25, devices=["cpu"])
        (folder / "progress").mkdir(parents=True)
        (folder / "progress/plan.json").write_text(json.dumps(asdict(plan)))
        return folder

    try:
        start_ray(lambda: ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=30))
        run = plan_of(tmp_path / "ray", [list(experiment.series)])
        sweep(experiment, run, executor="ray", on_progress=hear)
    finally:
        ray.shutdown()
    halves = [[name] for name in experiment.series]
    assert json.loads((run / "progress/plan.json").read_text())["jobs"] == halves
    found = lines(run)
    for line in found.values():
        (tried,) = line.tried
        assert tried.startswith("BTCUSDT_1h+1 lost its worker: The worker died")
    sweep(experiment, plan_of(tmp_path / "local", halves), executor="local")
    assert {name: replace(line, tried=[]) for name, line in found.items()} == lines(tmp_path / "local")


def test_the_ledger_and_the_plan_hold_ten_thousand_series(tmp_path):
    symbols = tuple(f"COIN{i}USDT" for i in range(10_000))
    many = vary(TINY, symbols=symbols)
    with RunFolder(tmp_path).writing(many) as run:
        for name in many.series[:200]:
            run.finish(ResultLine(name, "done"), None)
    line = (tmp_path / "results.jsonl").read_bytes().splitlines()[0]
    (tmp_path / "results.jsonl").write_bytes(
        b"".join(line.replace(b"COIN0USDT", symbol.encode()) + b"\n" for symbol in symbols[:9_999])
    )
    state = State(many, len(many.series))
    for one in RunFolder(tmp_path).results():
        state.add(one)
    assert state.missing == [many.series[-1]] and state.done == 9_999
    plan = Plan([list(many.series[i::250]) for i in range(250)], steps=9, epochs=2, patience=2, devices=["cpu"] * 8)
    assert len({job_name(names) for names in plan.jobs}) == 250
