"""Workspaces: what is left of a run when its machine is gone, and where it is found again."""

import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

import cpbkit as cpb
from cpbkit import atomic
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation.results import ResultLine
from cpbkit.runs import worker
from cpbkit.runs import workspace as workspaces
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.workspace import Workspace
from cpbkit.views import live

EXPERIMENT = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-01-31", symbols=("A", "B"))
EVERY = CHECKPOINT = 0.3  # s; 10 and 30 outside the tests


def _sweep_as_a_notebook_does(machine, kept, pipe):
    """Tell at every word how far it is, and when by the processor's time: on a busy machine it passes more slowly."""
    os.chdir(machine)
    workspaces.EVERY, worker.CHECKPOINT_SECONDS, worker.PROGRESS_SECONDS = EVERY, CHECKPOINT, 0.05
    worker.CHECKPOINT_SHARE = 1  # of the time: a busy machine writes slowly
    live.live = lambda *_: lambda state: pipe.send((time.process_time(), state.share))
    settings = {"source": "synthetic", "symbols": ("BTC", "ETH"), "intervals": ("1h",), "executor": "local", "steps": 5}
    settings |= {"start": "2025-01-01", "end": "2025-01-12", "epochs": 10**6, "patience": 10**6}
    settings |= {"name": "dlinear", "features": ("close_return",), "context": 8, "horizon": 2, "batch": 16}
    cpb.sweep("quick", runs=cpb.workspace(keep=kept), **settings)


def run_machine(machine, kept, live_for):
    """Sweep on a machine of its own, destroyed so many seconds after its first step; return what it told, and when."""
    machine.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cpbkit.runs.sweep", "torch._dynamo"])  # so that a machine starts at once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_sweep_as_a_notebook_does, args=(machine, kept, theirs))
    process.start()
    theirs.close()
    told, end = [], math.inf
    while not told or told[-1][0] < end:
        told.append(ours.recv())
        if told[-1][1] > told[0][1]:
            end = min(end, told[-1][0] + live_for)
    process.kill()
    process.join()
    shutil.rmtree(machine)
    return told


def seconds_lost(before, after):
    """Return how long before its end a machine went beyond the place where the next one began."""
    return before[-1][0] - max(at for at, share in before if share <= after[0][1])


@pytest.mark.long
def test_a_machine_destroyed_at_a_random_moment_takes_little_work_with_it(tmp_path):
    lives = [random.uniform(3, 5), random.uniform(3, 5), 0]
    first, second, third = (run_machine(tmp_path / f"{i}", tmp_path / "kept", life) for i, life in enumerate(lives))
    assert first[0][1] == 0 < second[0][1] < third[0][1]
    lost = seconds_lost(first, second), seconds_lost(second, third)
    assert max(lost) < EVERY + CHECKPOINT + 1, lost  # each file takes its time


def test_another_machine_finds_the_run_at_its_end(tmp_path):
    settings = {"source": "synthetic", "symbols": ("A",), "intervals": ("1h",), "executor": "local", "steps": 2}
    settings |= {"start": "2025-01-01", "end": "2025-01-31", "epochs": 2, "quiet": True}
    places = [Workspace(tmp_path / machine / "runs", tmp_path / "kept") for machine in ("one", "other")]
    assert cpb.find_run("quick", runs=places[0], **settings) is None
    run = cpb.sweep("quick", runs=places[0], **settings)
    found = cpb.find_run("quick", runs=places[1], **settings)
    assert found.folder == tmp_path / "other" / "runs" / run.folder.name and found.results == run.results
    assert list(found) == ["A_1h"] and not list((found.folder / "progress").glob("*.safetensors"))
    for place in places:
        place.close()


@pytest.fixture
def place(tmp_path):
    place = Workspace(tmp_path / "here", tmp_path / "kept")
    yield place
    place.close()


def begin(folder, at, lines=("A_15m",), experiment=EXPERIMENT):
    """Make a run folder with a model for each line, told about at a time."""
    run = RunFolder(folder)
    with run.writing(experiment):
        for name in lines:
            run.finish(ResultLine(name, "done"), b"model of " + name.encode())
        run.keep_checkpoint("job", b"a checkpoint")
    atomic.write_bytes(folder / "progress" / "status.json", json.dumps({"at": at, "done": 1, "total": 4}).encode())
    return run


def test_what_is_kept_can_be_gone_on_from_whenever_keeping_ends(place, monkeypatch):
    """Every model of the ledger is there, and none that a checkpoint has let go of is missing in it."""
    run = begin(place.folder / "one", at=1)
    real, written = atomic.write_bytes, []

    def write(path, content):
        if "kept" in path.parts and "checkpoint" in str(content):
            monkeypatch.setattr(atomic, "write_bytes", real)
            run.finish(ResultLine("B_15m", "done"), b"model of B")  # while this is copied
            monkeypatch.setattr(atomic, "write_bytes", write)
        real(path, content)
        written.append(path.name)
        kept = RunFolder(place.kept / "one")
        assert all(kept.model(line.series) for line in kept.results())
        assert kept.checkpoint("job") is None or len(kept.results()) >= 1

    monkeypatch.setattr(atomic, "write_bytes", write)
    place.keep()
    assert written.index("results.jsonl") < written.index("job.safetensors")
    assert RunFolder(place.kept / "one").results() == run.results() and len(run.results()) == 2


def test_only_what_changed_is_kept_again_by_another_process_too(place):
    run = begin(place.folder / "one", at=1)
    place.keep()
    first = place.bytes
    assert first > 1000 and not place.trouble
    place.keep()
    run.keep_checkpoint("job", b"another")
    place.keep()
    assert place.bytes == first + len(b"another")
    again = Workspace(place.folder, place.kept)
    run.keep_checkpoint("job", None)
    again.keep()
    place.keep()
    assert again.bytes == 0 and RunFolder(place.kept / "one").checkpoint("job") is None
    again.close()


def test_a_run_is_brought_from_where_its_newest_state_is(place, tmp_path):
    local, kept, other = (home / "one" for home in (place.folder, place.kept, tmp_path / "input"))
    place._sources.insert(0, other.parent)
    assert place.find("one") == local and not local.exists()
    begin(other, at=5)
    (other / "link").symlink_to("/etc/passwd")
    assert len(RunFolder(place.find("one")).results()) == 1 and not (local / "link").exists()
    begin(kept, at=7, lines=("A_15m", "B_15m"))
    assert repr(place).endswith("The newest of 1 is one, 1 of 4 done.")
    with RunFolder(local).writing(EXPERIMENT):
        assert len(RunFolder(place.find("one")).results()) == 1  # it is being worked on
    assert len(RunFolder(place.find("one")).results()) == 2
    place.keep()
    assert place.bytes == 0  # it was there
    begin(other, at=6)
    assert len(RunFolder(place.find("one")).results()) == 2


def test_a_folder_that_cannot_be_written_is_told_once(place, caplog):
    begin(place.folder / "one", at=1)
    place.kept.write_text("a file where the folder should be")
    place.keep()
    place.keep()
    assert len(caplog.records) == 1 and "Not kept in" in caplog.text and place.trouble in repr(place)
    place.kept.unlink()
    place.keep()
    assert not place.trouble and RunFolder(place.kept / "one").results()


@pytest.mark.parametrize("refused", [False, True])
def test_colab_keeps_runs_on_drive_where_it_may(monkeypatch, tmp_path, refused):
    asked = []

    def mount(path):
        asked.append(path)
        if refused:
            raise ValueError("mount failed")
        (tmp_path / "drive" / "MyDrive").mkdir(parents=True)

    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mount)
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    monkeypatch.setattr(workspaces, "DRIVE", tmp_path / "drive")
    place = cpb.workspace(runs=tmp_path / "runs")
    assert place.kept == (None if refused else tmp_path / "drive" / "MyDrive" / "cpbkit" / "runs")
    assert ("Drive is not mounted (ValueError: mount failed)" in repr(place)) == refused
    assert cpb.workspace(runs=tmp_path / "runs") is place  # the cell may be run again
    assert asked == [str(tmp_path / "drive")] * (1 + refused), "once, and again only where it was refused"
    place.close()


def test_kaggle_finds_what_is_attached(monkeypatch, tmp_path):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(workspaces, "INPUTS", tmp_path)
    begin(tmp_path / "notebooks" / "me" / "04-sweep" / "runs" / "one", at=1)
    begin(tmp_path / "forty" / "runs" / "two", at=2)
    place = cpb.workspace(runs=tmp_path / "working" / "runs")
    assert "The newest of 2 is two, 1 of 4 done. Save Version keeps them" in repr(place)
    assert RunFolder(place.find("one")).results() and place.kept is None
