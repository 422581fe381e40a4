"""The run folder: one writer, one experiment, whole lines."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from cpbkit import atomic
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.errors import RunError
from cpbkit.evaluation.results import ResultLine
from cpbkit.foreign import Damaged
from cpbkit.runs.folder import LEDGER, OUT_OF_TIME, RunFolder, tell_stopped

QUICK = PRESETS["quick"]
PLAN = {"jobs": [["BTCUSDT_15m"]], "steps": 77, "epochs": 5, "patience": 2, "stacked": False, "devices": ["cpu"]}


def line(series, **more):
    return ResultLine(series, **{"status": "done"} | more)


def test_a_result_is_kept_with_its_model_and_read_back(tmp_path):
    with RunFolder(tmp_path / "run").writing(QUICK) as run:
        run.finish(line("BTCUSDT_15m"), b"weights")
    assert RunFolder(tmp_path / "run").results() == [line("BTCUSDT_15m")]
    assert RunFolder(tmp_path / "run").experiment == QUICK
    assert (tmp_path / "run/models/BTCUSDT_15m.safetensors").read_bytes() == b"weights"


def test_another_experiment_is_refused_with_the_difference(tmp_path):
    with RunFolder(tmp_path).writing(vary(QUICK, width=8)):
        pass  # nothing was begun, so the folder is nobody's yet
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("BTCUSDT_15m"), b"weights")
    with (
        pytest.raises(RunError, match=r"(?s)another experiment.*training\.epochs: 12 -> 3"),
        RunFolder(tmp_path).writing(vary(QUICK, epochs=3)),
    ):
        pass


def test_settings_are_told_as_the_plan_settled_them(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        assert run.settled == QUICK
        (tmp_path / "progress/plan.json").write_text(json.dumps(PLAN))
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


def test_half_a_line_at_the_end_of_the_ledger_is_dropped_and_said_when_the_run_goes_on(tmp_path, caplog):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("A"), None)
    with open(tmp_path / LEDGER, "ab") as ledger:
        ledger.write(b'{"series": "B", "sta')
    assert RunFolder(tmp_path).results() == [line("A")]
    assert not caplog.messages  # it may be on its way
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("C"), None)
    assert caplog.messages == [
        f"{tmp_path / LEDGER}: its last line is cut off, as a kill leaves it; that series is trained anew"
    ]
    assert [line.series for line in RunFolder(tmp_path).results()] == ["A", "C"]


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


def test_a_damaged_line_of_the_ledger_is_named_and_set_aside_and_the_others_count(tmp_path, caplog):
    with RunFolder(tmp_path).writing(QUICK) as run:
        for name in "ABC":
            run.finish(line(name), None)
    whole = (tmp_path / LEDGER).read_bytes()
    first, second, third = whole.splitlines(keepends=True)
    bad = [b"\xff" + second, b"not JSON\n", b'["B"]\n', second.replace(b'"B"', b'"../B"'), b"[" * 9999 + b"\n"]
    bad += [
        second.replace(b"{}", b"7"),
        second.replace(b'"B"', b"7"),
        second.replace(b'"epochs":0', b'"epochs":' + b"9" * 400),
    ]
    for damaged in bad:
        (tmp_path / LEDGER).write_bytes(first + damaged + third)
        caplog.clear()
        assert [one.series for one in RunFolder(tmp_path).results()] == ["A", "C"]
        (said,) = caplog.messages
        assert f"{LEDGER}, line 2, counts as lost: " in said and "\n" not in said and len(said) < 300
        assert (tmp_path / LEDGER).read_bytes() == first + damaged + third, "reading changes nothing"
        with RunFolder(tmp_path).writing(QUICK):
            assert (tmp_path / LEDGER).read_bytes() == first + third
            assert (tmp_path / "progress/results.jsonl.damaged").read_bytes() == first + damaged + third


def test_of_two_lines_of_a_series_the_later_one_counts(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        for one in (line("A", status="failed"), line("B"), line("A")):
            run.finish(one, None)
    assert RunFolder(tmp_path).results() == [line("B"), line("A")]


NOT_VITAL = (
    "progress/plan.json",
    "progress/status.json",
    "clock.json",
    "about.json",
    "monitor.parquet",
    ".holder.json",
)
DAMAGES = {
    "empty": b"",
    "torn": b'{"jobs": [["BTC',
    "binary": bytes(range(256)),
    "another type": b"[1, 2]",
    "another form": b'{"jobs": 7, "steps": "many", "stage": 7, "pid": [], "starts": 7, "training": "long"}',
    "deep": b"[" * 100_000,
    "huge number": b'{"steps": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", NOT_VITAL)
@pytest.mark.parametrize("damage", [*DAMAGES, "a folder", "a link"])
def test_what_is_not_vital_counts_as_lost_where_it_is_damaged_and_that_is_said(tmp_path, caplog, name, damage):
    run = RunFolder(tmp_path / "run")
    with run.writing(QUICK):
        run.finish(line("BTCUSDT_15m"), None)
    path = run.folder / name
    if damage == "a folder":
        path.mkdir()
    elif damage == "a link":
        (tmp_path / "other").write_text("{}")
        path.symlink_to(tmp_path / "other")
    else:
        path.write_bytes(DAMAGES[damage])
    caplog.clear()
    assert run.plan() is None and run.monitor() is None and run.settled == QUICK
    assert run.clock() == {} and run.status() == {} and run.about() == {} and "has not said" in run._describe()
    (said,) = caplog.messages
    assert said.startswith(f"{path} counts as lost: ") and "\n" not in said


def test_links_in_a_run_folder_are_not_followed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/A.safetensors").write_bytes(b"somebody else's")
    with RunFolder(tmp_path / "run").writing(QUICK) as run:
        run.finish(line("A"), None)
    for name in ("models", ".lock", "results.jsonl", "experiment.json"):
        inside = run.folder / name
        kept = inside.rename(tmp_path / "kept")
        inside.symlink_to(tmp_path / "target" if name == "models" else kept)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert run.model("A") is None and run.holder() == ""
        with pytest.raises(RunError, match=f"{name} is a link, which is not followed"), run.writing(QUICK):
            pass
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        inside.unlink()
        kept.rename(inside)
    (run.folder / LEDGER).rename(tmp_path / "kept")
    (run.folder / LEDGER).symlink_to(tmp_path / "kept")
    with pytest.raises(RunError, match=r"the results of this run: results\.jsonl is a link"):
        run.results()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_a_pipe_in_place_of_the_lock_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    assert RunFolder(tmp_path).holder() == ""


def test_to_look_at_a_run_changes_nothing_in_it(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("BTCUSDT_15m"), b"weights")
    (tmp_path / ".lock").unlink(missing_ok=True)

    def listing():
        return sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))

    before = listing()
    assert run.holder() == "" and run.status() == {} and run.results() and run.model("BTCUSDT_15m") == b"weights"
    assert listing() == before


def test_every_start_is_kept_with_its_commit(tmp_path):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.begin({"command": "first", "commit": "1a", "date": "then"})
        run.begin({"command": "second", "commit": "2b", "date": "now", "machine": {"cores": 2}})
    told = RunFolder(tmp_path).about()
    assert (told["command"], told["machine"]) == ("second", {"cores": 2})
    assert [start["commit"] for start in told["starts"]] == ["1a", "2b"]
    older = {"command": "zeroth", "commit": "0f"}  # as earlier versions wrote it
    (tmp_path / "about.json").write_text(json.dumps(older))
    run.begin({"command": "third", "commit": "3c"})
    assert [start["commit"] for start in RunFolder(tmp_path).about()["starts"]] == ["0f", "3c"]


@pytest.mark.parametrize(
    "change",
    [
        {"jobs": [["../../evil"]]},
        {"jobs": [["BTCUSDT_15m"], ["BTCUSDT_15m"]]},
        {"steps": 0},
        {"jobs": [[]]},
        {"devices": []},
    ],
)
def test_a_plan_of_something_else_counts_as_lost(tmp_path, caplog, change):
    with RunFolder(tmp_path).writing(QUICK) as run:
        (tmp_path / "progress/plan.json").write_text(json.dumps(PLAN | change))
    assert run.plan() is None and len(caplog.messages) == 1
    (tmp_path / "progress/plan.json").write_text(json.dumps(PLAN | {"of another version": 7}))
    assert run.plan()["steps"] == 77


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
    line = ResultLine("A", "done", "all 12 epochs")
    assert tell_stopped([line]) == ""
    assert tell_stopped([line, ResultLine("B", "done", OUT_OF_TIME)]).startswith("1 of 2 stopped when the time was up")


def test_a_ledger_of_any_version_is_read():
    old = b'{"series":"A","status":"done","test":{"price":{}},"intervals":{"price":{"coverage":0.9}},"new":[1]}'
    assert ResultLine.from_json(old) == ResultLine(
        "A", "done", test={"price": {}}, prediction_intervals={"price": {"coverage": 0.9}}
    )
    assert ResultLine.from_json(b'{"series":"A","status":"failed","reason":"why"}') == ResultLine("A", "failed", "why")
    for damaged in (b'{"series":"A"}', b'{"series":"A","status":"done","curve":[1]}'):
        with pytest.raises(Damaged):
            ResultLine.from_json(damaged)


def test_a_holder_that_cannot_be_removed_keeps_no_lock(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="broken") as told, RunFolder(tmp_path).writing(QUICK):
        monkeypatch.setattr(type(tmp_path), "unlink", Mock(side_effect=OSError("broken")))
    monkeypatch.undo()
    with RunFolder(tmp_path).writing(QUICK):
        assert told.tb, "its frames, which live on, held the lock"


@pytest.mark.parametrize("name", ["models", "losses", "progress"])
def test_a_file_where_a_folder_belongs_is_set_aside(tmp_path, caplog, name):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("BTCUSDT_15m"), b"weights", b"losses")
    (tmp_path / name).rename(tmp_path / "elsewhere")
    (tmp_path / name).write_text("hi")
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.finish(line("ETHUSDT_15m"), b"weights", b"losses")
    assert {one.series for one in RunFolder(tmp_path).results()} == {"BTCUSDT_15m", "ETHUSDT_15m"}
    assert [path.read_text() for path in (tmp_path / "set_aside").iterdir()] == ["hi"]
    assert [said for said in caplog.messages if f"{name} is a file, which cannot be" in said]


@pytest.mark.parametrize("name", ["models/BTCUSDT_15m.safetensors", "losses/BTCUSDT_15m.npz", ".lock", "about.json"])
def test_a_folder_where_a_file_belongs_is_set_aside(tmp_path, caplog, name):
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.begin({})
        run.finish(line("BTCUSDT_15m"), b"weights", b"losses")
    (tmp_path / name).unlink()
    (tmp_path / name / "inside").mkdir(parents=True)
    assert RunFolder(tmp_path).holder() == ""
    with RunFolder(tmp_path).writing(QUICK) as run:
        run.begin({})
        run.finish(line("BTCUSDT_15m"), b"weights", b"losses")
    assert (tmp_path / name).is_file()
    assert [path.name for path in (tmp_path / "set_aside").glob("*/*")] == ["inside"]
    assert [said for said in caplog.messages if "is a folder, which cannot be; it lies in" in said]
