"""Files of a run that a stranger made: each is refused in one line, or counts as lost, in bounded memory."""

import io
import json
import logging
import os
import subprocess
import sys
import warnings
import zipfile

import filelock
import numpy as np
import pandas as pd
import pytest
from conftest import terminal, walk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpbkit.config.experiment import Experiment
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import past, pooled
from cpbkit.evaluation.results import ResultLine
from cpbkit.evaluation.verdicts import evidence, judgements
from cpbkit.runs import folder
from cpbkit.runs.folder import RunFolder

QUICK = PRESETS["quick"]
NUMBERS = st.sampled_from([0, -1, 3, 2**63, 10**24, -1e99, 1e99, 0.5, 1e-320, True])
VALUES = NUMBERS | st.sampled_from(
    [None, "", "\x1b]0;x\x07", "a\nb", "x" * 300, [], {}, [[]], [["BTCUSDT_15m"]], {"a": {}}]
)
DOCUMENTS = {
    "about.json": (folder.ABOUT_FORM, lambda run: run.about()),
    "progress/plan.json": (folder.PLAN_FORM, lambda run: run.plan()),
    "progress/status.json": (folder.STATUS_FORM, lambda run: run.status()),
    "progress/stop.json": (folder.STOP_FORM, lambda run: run.wishes()),
    ".holder.json": (folder.HOLDER_FORM, lambda run: run.holder()),
    "clock.json": ({"load": float, "train": float}, lambda run: run.clock()),
    "audit.json": ({"BTCUSDT_15m": list}, lambda run: run.audit()),
}
ONCE = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def run(tmp_path):
    with RunFolder(tmp_path / "run").writing(QUICK) as run:
        run.finish(ResultLine("BTCUSDT_15m", "done"), None)
    return run.folder


@ONCE
@given(st.sampled_from(sorted(DOCUMENTS)), st.data())
def test_documents_of_a_run_are_used_or_count_as_lost(run, name, data):
    form, read = DOCUMENTS[name]
    told = {key.removesuffix("?"): data.draw(VALUES, key) for key in form if data.draw(st.integers(0, 3), "keep")}
    (run / name).write_text(json.dumps(told, allow_nan=True))
    with filelock.FileLock(run / ".lock"):  # as if a sweep were at work, whose word is shown
        read(RunFolder(run))
        shown = terminal("status", run)
        told = terminal("status", run, "--json")
    assert shown.exit_code == told.exit_code == 0, (shown.exception, shown.output)
    assert "\x1b" not in shown.output and json.loads(told.stdout)["total"] == 40
    (run / name).unlink()


def test_a_ledger_of_rubbish_is_told_in_one_line(run, caplog):
    with (run / folder.LEDGER).open("ab") as file:
        file.write(b"\xff\n" * 300)
    assert [line.series for line in RunFolder(run).results()] == ["BTCUSDT_15m"]
    (said,) = caplog.messages
    assert f"{folder.LEDGER}, line 2, counts as lost (and 299 more): it is no UTF-8 text" in said


def test_a_judgement_that_cannot_be_names_its_series():
    line = ResultLine("BTCUSDT_15m", "done", test={"price": {"p": -1}})
    with pytest.raises(CpbkitError, match="line of BTCUSDT_15m in the ledger, price: this run was judged by another"):
        judgements([line])


PRESET = {
    "text.json": b"hello",
    "empty.json": b"",
    "empty.toml": b"[training]\nepochs = 'many'\n",
    "binary.toml": bytes(range(256)),
    "deep.json": b"[" * 100_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "tables.toml": b"[" + b".".join([b"a"] * 5000) + b"]\n",
    "infinite.toml": b"[training]\nlearning_rate = inf\n",
    "nothing.toml": b"[training]\nlearning_rate = nan\n",
    "huge.toml": b"[training]\nepochs = " + b"9" * 400 + b"\n",
    "day.toml": b"[training]\nepochs = 2025-03-01\n",
    "names.json": json.dumps({"data": {f"k{i}": 1 for i in range(20_000)}}).encode(),
    "series.json": json.dumps({"data": {"symbols": ["../../x"]}}).encode(),
    "millions.json": json.dumps({"data": {"symbols": ["A"] * 20_000, "intervals": ["1h"] * 20_000}}).encode(),
    "code.json": json.dumps({"model": {"name": "os:system"}, "task": {"features": [7]}}).encode(),
}


@pytest.mark.parametrize("name", PRESET)
def test_a_preset_of_a_stranger_is_refused_in_one_line(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(PRESET[name])
    shown = terminal("sweep", "--preset", path, "--source", "synthetic", "--run", tmp_path)
    assert shown.exit_code in (1, 2) and not isinstance(shown.exception, RecursionError)
    said = shown.output.strip()
    assert said.startswith(("Error", "Usage", "cpbkit")) and len(said) < 1500, said[:300]
    with pytest.raises(CpbkitError):
        Experiment.from_file(path)


@ONCE
@given(
    st.binary(max_size=60) | st.text("[]{}=.\"'a1\n# -:", max_size=40).map(str.encode),
    st.sampled_from(["json", "toml"]),
)
def test_any_bytes_are_an_experiment_or_refused(tmp_path, content, kind):
    path = tmp_path / f"any.{kind}"
    path.write_bytes(content)
    try:
        assert isinstance(Experiment.from_file(path), Experiment)
    except CpbkitError as error:
        assert len(str(error)) < 1000


def test_settings_of_toml_are_read(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(
        'preset = "mine"\n[data]\nsymbols = ["BTCUSDT"]\nstart = 2025-03-01\n[training]\nlearning_rate = 1e-3\n'
    )
    found = Experiment.from_file(path)
    assert (found.data.symbols, found.data.start, found.training.learning_rate) == (("BTCUSDT",), "2025-03-01", 1e-3)


def kept():
    series, origins = walk("BTCUSDT_15m", 400), np.arange(200, 390)
    forecast = np.random.default_rng(0).normal(0, 0.01, (len(origins), 3, 1))
    part = evidence(series, origins, forecast, 150)["price"]
    shown = past.past_of(series, origins, "price", part, np.full_like(forecast, 0.02))
    return pooled.to_bytes({"price": pooled.losses_of(series, origins, part)}, {"price": shown})


KEPT = kept()


def arrays():
    return past.read_arrays(KEPT, shown=True) | past.read_arrays(KEPT, shown=False)


def packed(change):
    file = io.BytesIO()
    np.savez_compressed(file, **{name: change(name, array) for name, array in arrays().items()})
    return file.getvalue()


def member(name, content, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as box:
        box.writestr(name, content)
    return file.getvalue()


def claim(shape, kind="<f8"):
    text = str({"descr": kind, "fortran_order": False, "shape": shape}).ljust(200) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


NPZ = {
    "no zip": b"hello",
    "empty": b"",
    "zeros": member("price/times.npy", claim((1 << 28,)) + bytes(1 << 28)),
    "claims": member("price/times.npy", claim((1 << 50,))),
    "claims much": member("price/times.npy", claim((1 << 62, 1 << 62))),
    "words": member("price/times.npy", claim((1,), "<U99999999")),
    "objects": member("price/times.npy", claim((1,), "|O")),
    "code": member("price/times.npy", b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').getcwd()".ljust(32)),
    "deep": member("price/times.npy", b"\x93NUMPY\x02\x00\xff\x20\x00\x00" + b"(" * 0x20FF),
    "bzip2": member("price/times.npy", bytes(1 << 20), zipfile.ZIP_BZIP2),
    "no array": member("price/times.npy", b"hello") + b"",
    "text": member("price/past close/target.txt", b"close"),
    "flat": packed(lambda name, array: array.ravel()[:1]),
    "scalars": packed(lambda name, array: np.array(7.0)),
    "infinite": packed(lambda name, array: np.full(array.shape, 1e300) if array.dtype.kind == "f" else array),
    "far": packed(lambda name, array: array + 10**17 if "times" in name else array),
    "short": packed(lambda name, array: array[:5] if "forecast" in name or "model" in name else array),
}


@pytest.mark.parametrize("case", NPZ)
def test_losses_and_forecasts_of_a_stranger_count_as_lost(case, caplog):
    content = NPZ[case]
    assert past.from_bytes(content, "A") == {} or case == "infinite"
    assert pooled.gather(["A"], lambda name: content) == ({}, ["A"])
    assert len(caplog.messages) <= 1 and all("\n" not in said and len(said) < 400 for said in caplog.messages)


@ONCE
@given(st.randoms(use_true_random=False), st.booleans())
def test_damaged_losses_are_read_or_count_as_lost(draw, cut):
    blob = bytearray(KEPT)
    for _ in range(draw.randint(1, 8)):
        blob[draw.randrange(len(blob))] = draw.randrange(256)
    content = bytes(blob[: len(blob) // 2] if cut else blob)
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of zipfile, on names that stand there twice
            found, (by_head, missing) = past.from_bytes(content, "A"), pooled.gather(["A"], lambda name: content)
    finally:
        logging.disable(logging.NOTSET)
    assert set(found) <= {"price"} and (missing == ["A"] or list(by_head) == ["price"])


GOOD = pd.DataFrame({"time": [0.0, 1.0], "device": "cpu", "text": "", "allocated": 1.0, "reserved": 1.0, "host": 1.0})
GOOD["utilisation"] = 5.0


def parquet(frame, **more):
    file = io.BytesIO()
    frame.to_parquet(file, **more)
    return file.getvalue()


MONITORS = {
    "no table": b"PAR1 no PAR1",
    "footer": bytes(100) + (1 << 31).to_bytes(4, "little") + b"PAR1",
    "another": parquet(pd.DataFrame({"a": [1]})),
    "words": parquet(GOOD.assign(host="much")),
    "lists": parquet(GOOD.assign(time=[[1.0], [2.0]])),
    "many rows": parquet(pd.DataFrame({name: np.zeros(3_000_000, np.float32) for name in GOOD})),
    "long word": parquet(pd.concat([GOOD.assign(text="x" * 1_000_000)] * 100, ignore_index=True)),
}


@pytest.mark.parametrize("case", MONITORS)
def test_a_monitor_of_a_stranger_counts_as_lost(run, case, caplog):
    (run / "monitor.parquet").write_bytes(MONITORS[case])
    assert RunFolder(run).monitor() is None
    (said,) = caplog.messages
    assert said.startswith(f"{run / 'monitor.parquet'} counts as lost: ") and "\n" not in said and len(said) < 600


@ONCE
@given(st.randoms(use_true_random=False))
def test_a_damaged_monitor_is_read_or_counts_as_lost(run, draw):
    blob = bytearray(parquet(GOOD))
    for _ in range(draw.randint(1, 8)):
        blob[draw.randrange(len(blob))] = draw.randrange(256)
    (run / "monitor.parquet").write_bytes(blob)
    frame = RunFolder(run).monitor()
    assert frame is None or set(GOOD) <= set(frame)


DAMAGE = """
import io, sys
import pandas as pd
from cpbkit.data.tables import from_parquet

made = io.BytesIO()
pd.DataFrame({name: [1.0, 2.0] for name in ("time", "host", "gpu")}).to_parquet(made)
whole = made.getvalue()
read = 0
for value in (0, 255):
    for at in range(len(whole)):
        try:
            from_parquet(whole[:at] + bytes([value]) + whole[at + 1 :], 1 << 20)
        except Exception:
            pass
        read += 1
print(read == 2 * len(whole))
"""


@pytest.mark.slow
def test_no_byte_of_a_damaged_table_ends_the_process():
    done = subprocess.run([sys.executable, "-c", DAMAGE], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr[-500:]


READ = """
import logging, pathlib, resource, sys
from cpbkit.config.experiment import Experiment
from cpbkit.errors import CpbkitError
from cpbkit.evaluation import past, pooled
from cpbkit.runs.folder import RunFolder
import pyarrow.parquet, cpbkit.data.tables
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = used()
for run in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    here = RunFolder(run)
    content = here.losses("A")
    past.from_bytes(content, "A"), pooled.gather(["A"], lambda name: content)
    here.monitor(), here.plan(), here.status(), here.about()
    for read in (lambda: here.experiment, lambda: Experiment.from_file(run / "own.toml")):
        try:
            read()
        except FileNotFoundError:
            pass
        except CpbkitError as error:
            assert "\\n" not in str(error), error
    print(run.name, (used() - before) >> 10)
"""


def test_what_a_stranger_packed_takes_little_memory(tmp_path):
    """In a process of its own, whose peak is that of all."""
    files = [("losses/A.npz", content) for content in NPZ.values()]
    files += [("monitor.parquet", content) for content in MONITORS.values()]
    files += [("own.toml", content) for name, content in PRESET.items() if name.endswith("toml")]
    files += [(name, None) for name in ("losses/A.npz", "monitor.parquet", "own.toml", "experiment.json", "about.json")]
    for i, (name, content) in enumerate(files):
        path = tmp_path / f"{i:03d}" / name
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.write(content or b"")
            file.truncate(len(content) if content is not None else 400 << 20)  # 400 MB that take no room on the disk
    told = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert told.returncode == 0, told.stderr[-2000:]
    grown = {line.split()[0]: int(line.split()[1]) for line in told.stdout.splitlines()}
    assert len(grown) == len(files) and max(grown.values()) < 300, grown
