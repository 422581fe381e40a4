"""What a person brings: found by name from the current folder, known by its source, run by consent alone."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, terminal

import cpbkit as cpb
from cpbkit.config import own
from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.presets import PRESETS, find_preset
from cpbkit.data.synthetic import make_market
from cpbkit.errors import CpbkitError, RunError, UnknownName

PARTS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, task, settings):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(task.context, task.horizon))

    def forward(self, x):
        return self.layers(x[..., :1])[..., None]

def huber(forecast, truth):
    return torch.nn.functional.huber_loss(forecast, truth, reduction="none").mean((-1, -2))

def flat(forecast, truth):
    return (forecast - truth).square().mean()
"""
SMALL = {"context": 8, "horizon": 2, "width": 4, "epochs": 1, "steps": 5, "executor": "local", "quiet": True}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts_here.py").write_text(PARTS)
    yield tmp_path
    sys.modules.pop("parts_here", None)
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]


@pytest.fixture
def bars():
    return make_market(["BTCUSDT"], ["1h"], "2025-01-01", "2025-01-20")


@pytest.mark.parametrize("place", ["parts_here", "parts_here.py", "./parts_here.py"])
def test_parts_are_found_from_the_current_folder(here, place):
    loss = own.find(f"{place}:huber", "a loss")
    assert loss(torch.zeros(2, 3, 4, 1), torch.ones(2, 3, 4, 1)).shape == (2, 3)
    assert own.fingerprint(f"{place}:huber") == own.fingerprint(f"{place}:Net")


@pytest.mark.parametrize("name", ["nowhere:f", "nowhere.py:f", "parts_here:nothing", "parts_here:", ":f"])
def test_parts_that_are_not_there_say_where_they_were_looked_for(here, name):
    with pytest.raises(CpbkitError, match="found from the current folder"):
        own.find(name, "a loss")


def test_a_run_with_own_network_and_loss_trains_and_is_used_by_consent(here, bars):
    run = cpb.sweep("quick", data=bars, name="parts_here:Net", loss="parts_here.py:huber", folder="run", **SMALL)
    assert run.results[0].status == "done"
    given = bars["BTCUSDT_1h"]
    first = run["BTCUSDT_1h"].forecast(given)
    with pytest.raises(CpbkitError, match=r"asks for code on this machine: parts_here\.py:huber, parts_here:Net"):
        cpb.open_run("run")["BTCUSDT_1h"]
    with pytest.raises(CpbkitError, match="asks for code on this machine"):
        cpb.open_run("run").retrain("BTCUSDT_1h", data={name: klines.frame for name, klines in bars.items()})
    again = cpb.open_run("run", trust_code=True)["BTCUSDT_1h"].forecast(given)
    assert again.frame.equals(first.frame)
    (here / "parts_here.py").write_text(PARTS + "\n# another source\n")
    with pytest.raises(RunError, match="is not that of the training any more"):
        cpb.open_run("run", trust_code=True)["BTCUSDT_1h"]


def test_the_terminal_asks_for_consent_before_it_runs_what_a_run_names(here, bars):
    given = bars["BTCUSDT_1h"].frame
    given.to_csv("BTCUSDT_1h.csv")
    cpb.sweep("quick", data=bars, name="parts_here:Net", folder="run", **SMALL)
    words = ["forecast", "run", "--bars", "BTCUSDT_1h.csv"]
    shown = terminal(*words)
    assert shown.exit_code == 1 and "--trust-code" in shown.output
    assert terminal(*words, "--trust-code").exit_code == 0
    shown = terminal("audit", "run")
    assert shown.exit_code == 1 and "--trust-code" in shown.output


def test_an_own_loss_of_another_shape_is_refused_with_the_rule(here, bars):
    with pytest.raises(CpbkitError, match="one number for each window"):
        cpb.sweep("quick", data=bars, loss="parts_here:flat", folder="run", **SMALL)


FAULTY = """
import numpy, torch

class Pair(torch.nn.Module):
    def __init__(self, task, settings):
        super().__init__()
        self.layer = torch.nn.Linear(task.context, task.horizon)

    def forward(self, x):
        return self.layer(x[..., 0]), x  # line 10

class Logs(Pair):
    def forward(self, x):
        return self.layer(x[..., 0].log())[..., None]

class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()

class Loss(torch.nn.Module):
    pass

def numbers(forecast, truth):
    return numpy.abs((forecast - truth).detach().numpy()).mean((-1, -2))

def three(forecast, truth, weight):
    return weight

def signs(forecast, truth):
    return (forecast * truth).sign().mean((-1, -2))

def gone(forecast, truth):
    return (forecast * 0 + truth).abs().mean((-1, -2))

def typo(bars):
    return bars["closee"]  # line 36

def smape(forecast, truth):
    return ((forecast - truth).abs() / (forecast.abs() + truth.abs())).mean((-1, -2))

def words(bars):
    return ["down"] * len(bars)
"""


@pytest.mark.parametrize(
    ("setting", "name", "said"),
    [
        ("name", "Pair", r"faulty\.py:Pair: TypeError: .*tuple.* maps \(batch, context, features\)"),
        ("name", "Logs", "must be finite; those of Logs are not"),
        ("name", "Bare", r"faulty\.py:Bare: TypeError: .*A network is made from \(task, model\)"),
        ("loss", "numbers", "faulty.py:numbers"),
        ("loss", "three", "faulty.py:three: TypeError: .*weight.*A loss is a function of"),
        ("loss", "Loss", "faulty.py:Loss: TypeError: .*A loss is a function of"),
        ("loss", "signs", "signs has no gradient"),
        ("loss", "gone", "gone has no gradient"),
        ("loss", "smape", "smape must be finite for any forecast and truth, where both are 0 too"),
        (
            "features",
            "typo",
            r"faulty\.py:typo, line 36: KeyError: 'closee'\. A feature gets .* open, high, low",
        ),
        ("features", "words", "faulty.py:words: ValueError: could not convert string to float"),
    ],
)
def test_a_fault_in_an_own_part_is_told_in_a_sentence_that_names_it(here, bars, setting, name, said):
    (here / "faulty.py").write_text(FAULTY)
    value = f"faulty.py:{name}"
    given = {setting: ("close_return", value) if setting == "features" else value}
    try:
        with pytest.raises(CpbkitError, match=said) as told:
            cpb.sweep("quick", data=bars, folder="run", **given, **SMALL)
        assert "\n" not in str(told.value)
    finally:
        sys.modules.pop("faulty", None)


@pytest.mark.parametrize(
    "text, said",
    [
        ("class Net(:\n    pass\n", r"odd\.py, line 1: SyntaxError: invalid syntax"),
        ("import torch\nNet = undefined\n", r"odd\.py, line 2: NameError: name 'undefined' is not defined"),
        ("Net = 3\n", r"a class or a function; odd\.py:Net is int 3"),
    ],
)
def test_a_file_of_own_parts_that_cannot_be_run_is_told_with_its_line(here, bars, text, said):
    (here / "odd.py").write_text(text)
    for _ in range(2):  # nothing half done is left of it
        with pytest.raises(CpbkitError, match=said):
            cpb.sweep("quick", data=bars, name="odd.py:Net", folder="run", **SMALL)
    assert "odd" not in sys.modules or text == "Net = 3\n"
    sys.modules.pop("odd", None)


def test_memory_that_is_short_is_no_fault_of_a_part(here):
    with pytest.raises(RuntimeError, match="out of memory"), own.running("parts_here.py:huber", ""):
        raise RuntimeError("CUDA out of memory")


def test_a_setting_in_the_wrong_place_of_a_preset_is_sent_to_its_own(tmp_path):
    for text, said in (('{"training": {"loss": "mae"}}', "loss is a setting of task, not of training"),
                       ('{"learning_rate": 1}', "learning_rate is a setting of training")):  # fmt: skip
        (tmp_path / "mine.json").write_text(text)
        with pytest.raises(UnknownName, match=said):
            find_preset(str(tmp_path / "mine.json"))


def test_another_loss_trains_other_weights(here, bars):
    made = {}
    for loss in ("mse", "mae", "parts_here:huber"):
        run = cpb.sweep("quick", data=bars, loss=loss, folder=loss.replace(":", "-"), **SMALL)
        made[loss] = torch.cat([tensor.flatten() for tensor in run["BTCUSDT_1h"].weights.values()])
    assert not torch.equal(made["mse"], made["mae"]) and not torch.equal(made["mse"], made["parts_here:huber"])
    with pytest.raises(UnknownName, match="nearest: mse"):
        vary(PRESETS["quick"], loss="msee")


def test_rows_without_a_finite_feature_are_counted_aloud(here, bars, caplog):
    """Those of its warm-up are no news, those in the midst are: fewer windows are left."""
    code = "\ndef spread(bars):\n    return (bars.close / bars.open).shift(5).where(bars.index.hour != 3)\n"
    (here / "parts_here.py").write_text(PARTS + code)
    cpb.sweep("quick", data=bars, features=["close_return", "parts_here.py:spread"], folder="run", **SMALL)
    (said,) = [record.message for record in caplog.records if "left out" in record.message]
    assert said.startswith("BTCUSDT_1h: 19 of 478 rows left out, in which a feature or target is no finite number")
    caplog.clear()
    cpb.sweep("quick", data=bars, features=["close_return", "rsi(20)"], folder="another", **SMALL)
    assert "left out" not in caplog.text


def test_a_worker_process_finds_what_this_one_finds(here, bars):
    """As an installed command, whose path does not hold the current folder."""
    bars["BTCUSDT_1h"].frame.to_csv("BTCUSDT_1h.csv")
    code = "import sys; sys.path = [p for p in sys.path if p]; from cpbkit.cli.main import cpbkit; cpbkit(sys.argv[1:])"
    settings = ("context=8", "horizon=2", "steps=5", "name=parts_here:Net", "loss=parts_here:huber")
    words = ["sweep", "--files", ".", "--symbols", "BTC", "--intervals", "1h", "--epochs", "1", "--run", "run"]
    words += [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p and p != str(here))}
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_an_own_preset_is_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"preset": "mine", "model": {"name": "gru", "width": 6}, "task": {"context": 8}}')
    mine = find_preset(path)
    assert (mine.preset, mine.model.width, mine.task.context, mine.task.horizon) == ("mine", 6, 8, 10)
    mine.to_file(path)
    assert Experiment.from_file(path) == mine
    for text, words in (("{", "must be an experiment as JSON"), ('{"modell": {}}', "nearest: model")):
        path.write_text(text)
        with pytest.raises(CpbkitError, match=words):
            find_preset(path)
    with pytest.raises(UnknownName, match="nearest: quick"):
        find_preset("quik")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_a_preset_may_be_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'preset = "mine"\n[task]\nhorizon = 12\nranges = [["close", 0, 1.5]]\n[training]\nlearning_rate = 1e-2\n'
    )
    found = Experiment.from_file(path)
    assert (found.preset, found.task.horizon, found.training.learning_rate) == ("mine", 12, 1e-2)
    assert found.task.ranges == (("close", 0, 1.5),)
    path.write_text("[task]\nhorizn = 12\n")
    with pytest.raises(CpbkitError, match=r"setting of task must be a known name; got 'horizn' \(nearest: horizon"):
        Experiment.from_file(path)
    path.write_text("[task\n")
    with pytest.raises(CpbkitError, match=r"mine\.toml must be an experiment as JSON or TOML"):
        Experiment.from_file(path)


def test_the_page_on_own_parts_holds_what_works(here, bars):
    """The feature, the network, the loss and the preset of docs/bring-your-own.md, as they stand there."""
    text = (ROOT / "docs/bring-your-own.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(# mine\.py.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3
    (here / "mine.py").write_text("import torch\n\nimport cpbkit as cpb\n\n" + "\n".join(blocks))
    (preset,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    (here / "mine.json").write_text(preset)
    parts = {"features": ("close_return", "mine.py:distance"), "name": "mine.py:Net", "loss": "mine.py:huber"}
    run = cpb.sweep("mine.json", data=bars, folder="run", **(SMALL | parts))
    assert run.results[0].status == "done" and run.experiment.preset == "mine"
    options = set(re.findall(r"`(?:cpbkit sweep )?(--[\w-]+)", text))
    shown = terminal("sweep", "--help").output + terminal("forecast", "--help").output
    assert options and all(option in shown for option in options)
    sys.modules.pop("mine", None)
