"""The run folder: one writer, one experiment, whole lines."""

import json
import os
import subprocess
import sys

import pytest

from cpbkit import atomic
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import RunError
from cpbkit.runs.folder import LEDGER, OUT_OF_TIME, RunFolder, tell_stopped

QUICK = PRESETS["quick"]


def test_a_result_is_kept_with_its_model_and_read_back(tmp_path):
    with RunFolder(tmp_path / "run").writing(QUICK) as run:
        run.finish({"series": "BTCUSDT_15m", "status": "done"}, b"weights")
    assert RunFolder(tmp_path / "run").results() == [{"series": "BTCUSDT_15m", "status": "done"}]
    assert RunFolder(tmp_path / "run").experiment == QUICK
    assert (tmp_path / "run/models/BTCUSDT_15m.safetensors").read_bytes() == b"weights"


def test_another_experiment_is_refused_with_the_difference(tmp_path):
    with RunFolder(tmp_path).writing(vary(QUICK, width=8)):
        pass  # nothing was begun, so the folder is nobody's yet
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish({"series": "BTCUSDT_15m", "status": "done"}, b"weights")
    with (
        pytest.raises(RunError, match=r"(?s)another experiment.*training\.epochs: 12 -> 3"),
        RunFolder(tmp_path).writing(vary(QUICK, epochs=3)),
    ):
        pass


def test_settings_are_told_as_the_plan_settled_them(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        assert run.settled == QUICK
        plan = {"steps": 77, "epochs": 5, "patience": 2, "stacked": False, "devices": ["cpu"]}
        (tmp_path / "progress/plan.json").write_text(json.dumps(plan))
        assert run.settled == vary(QUICK, steps=77, epochs=5, patience=2) and run.experiment == QUICK


def test_a_second_sweep_is_refused_and_told_who_the_first_is(tmp_path):
    child = (
        "import sys; from cpbkit.runs.folder import RunFolder; from cpbkit.config.presets import PRESETS\n"
        "try:\n    RunFolder(sys.argv[1]).writing(PRESETS['quick']).__enter__()\n"
        "except Exception as e: print(e)\nelse: print('took it')"
    )
    command = [sys.executable, "-c", child, str(tmp_path)]
    with RunFolder(tmp_path).writing(QUICK):
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"process {os.getpid()} on " in told and "since 20" in told
        assert f"process {os.getpid()}" in RunFolder(tmp_path).holder()
    assert "took it" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # That process is gone without letting go: its lock is stale and counts for nothing.
    assert RunFolder(tmp_path).holder() == ""
    with RunFolder(tmp_path).writing(QUICK):
        pass


def test_half_a_line_at_the_end_of_the_ledger_is_dropped(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish({"series": "A"}, None)
    with open(tmp_path / LEDGER, "ab") as ledger:
        ledger.write(b'{"series": "B", "sta')
    assert RunFolder(tmp_path).results() == [{"series": "A"}]
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish({"series": "C"}, None)
    assert [line["series"] for line in RunFolder(tmp_path).results()] == ["A", "C"]


def test_files_that_a_kill_left_without_a_name_are_dropped(tmp_path):
    with RunFolder(tmp_path).writing(QUICK):
        pass
    (tmp_path / "models/.A.safetensors.1f.part").write_bytes(b"half")
    with RunFolder(tmp_path).writing(QUICK):
        assert not list(tmp_path.rglob("*.part"))


def test_no_run_folder_and_damaged_settings_are_said(tmp_path):
    with pytest.raises(RunError, match=r"no run folder: it has no experiment\.json"):
        _ = RunFolder(tmp_path).experiment
    (tmp_path / "experiment.json").write_text('{"preset": "quick"')
    with pytest.raises(RunError, match="cannot be read as settings"):
        _ = RunFolder(tmp_path).experiment


def test_clock_adds_up_over_sessions(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.add_clock({"training": 2.0})
        assert run.add_clock({"training": 3.0, "bars": 1.0}) == {"training": 5.0, "bars": 1.0}


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    atomic.write_bytes(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_bytes(path, json.dumps({"new": 1}).encode())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_a_budget_stopped_is_told():
    line = {"series": "A", "reason": "all 12 epochs"}
    assert tell_stopped([line]) == ""
    assert tell_stopped([line, {"series": "B", "reason": OUT_OF_TIME}]).startswith(
        "1 of 2 stopped when the time was up"
    )
