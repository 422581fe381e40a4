"""A class or function given as an object: what it is named, what is written of it, and what is refused."""

import linecache
import re
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT

from cpbkit.config import own
from cpbkit.config.experiment import Model, vary
from cpbkit.config.given_parts import name_parts
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError

SCRIPT = """
import xml.etree.ElementTree
from fractions import Fraction as Part
from json import dumps as write
import math as m

frame = object()
width, names = 3, {"a": [1, 2.5, None], "b": ("x", b"y")}

def marked(kind):
    kind.mark = width
    return kind

class Base:
    scale = width

@marked
class Net(Base):
    def __init__(self, frame=width):  # its own `frame`, not the one above
        self.text = write([frame for frame in names["a"]])
        self.part = Part(self.scale, 2) + other(m.floor(2.5)) + assist(1)
        self.root = xml.etree.ElementTree.fromstring("<a/>").tag

def other(depth):
    return depth and helper(depth - 1) + 1

def helper(depth):
    return other(depth)

assist = helper
"""


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run a text as a script would be, in an empty folder; returns what its last line names."""
    monkeypatch.chdir(tmp_path)

    def run(text):
        path = tmp_path / "script.py"
        path.write_text("from cpbkit.config.given_parts import name_parts\n" + text)
        linecache.checkcache(str(path))
        return runpy.run_path(str(path), run_name="__main__").get("named")

    yield run
    sys.path[:] = [place for place in sys.path if place != str(tmp_path)]
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_a_class_of_a_script_becomes_a_file_with_all_that_it_uses(main, tmp_path):
    named = main(SCRIPT + "named = name_parts(Net)\n")
    assert re.fullmatch(r"parts/Net_[0-9a-f]{8}\.py:Net", named)
    code = (
        "import sys; sys.path = [p for p in sys.path if p]\n"
        f"from cpbkit.config import own; net = own.find({named!r}, 'a network')()\n"
        "print(net.text, net.part, net.root, net.mark)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "[1, 2.5, null] 9/2 a 3\n", done.stderr  # 3/2 + 2 + 1
    assert own.source(named).read_text().count("def helper") == 1


def test_a_file_is_named_by_its_content(main, tmp_path):
    first = main(SCRIPT + "named = name_parts(Net)\n")
    assert main(SCRIPT.replace("frame = object()", "frame = None") + "print('x')\nnamed = name_parts(Net)\n") == first
    assert main(SCRIPT.replace("width, names = 3", "width, names = 4") + "named = name_parts(Net)\n") != first
    assert len(list((tmp_path / "parts").iterdir())) == 2
    (tmp_path / first.partition(":")[0]).write_text("changed")
    assert main(SCRIPT + "named = name_parts(Net)\n") == first and "class Net" in own.source(first).read_text()


def test_names_and_settings_stay_as_they_are(main):
    text = (
        SCRIPT + "named = name_parts(('close', other)), name_parts('mse'), name_parts(0.5), name_parts((('a', 1.0),))\n"
    )
    (close, function), *rest = main(text)
    assert close == "close" and own.find(function, "a feature")(2) == 2
    assert rest == ["mse", 0.5, (("a", 1.0),)]


def test_what_a_module_or_a_file_defines_has_its_name_there(main, tmp_path, monkeypatch):
    (tmp_path / "mine_here.py").write_text("class Net: pass\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/mine_below.py").write_text("class Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import mine_here

    assert name_parts(mine_here.Net) == "mine_here:Net" and name_parts(vary) == "cpbkit.config.experiment:vary"
    name = "below/mine_below.py:Net"
    assert name_parts(own.find(name, "a network")) == name
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("name_parts(lambda x: x)", r"<lambda>, which is not at the top of __main__"),
        ("name_parts(max)", "type builtin_function_or_method"),
        ("class Called:\n    def __call__(self):\n        pass\nname_parts(Called())", "of type Called"),
        (
            "def use():\n    return helps()\ndef helps():\n    return frame\nname_parts(use)",
            "use, which uses helps, which uses frame, of type object",
        ),
        ("def use():\n    return nothing\nname_parts(use)", "use, which uses nothing, which is not defined"),
        ("f = lambda: 1\ndef use():\n    return f()\nname_parts(use)", "which uses f, <lambda>, which is not"),
        (
            "def make(n):\n    def net():\n        return n\n    return net\nnet = make(3)\nname_parts(net)",
            r"make\.<locals>\.net, which is not",
        ),
        ("old = other\ndef other():\n    return 2\nname_parts(old)", "other, which is not at the top of __main__"),
        ("exec('class Gone: pass')\nname_parts(Gone)", "Gone, whose source is in no file"),
    ],
)
def test_what_cannot_travel_is_refused_with_its_name_and_what_to_do(main, tmp_path, lines, what):
    with pytest.raises(CpbkitError, match=rf"numbers, texts.*; got .*{what}.*%%writefile mine\.py"):
        main(SCRIPT + lines + "\n")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("name", [Model, "__main__:Net", 3])
def test_an_experiment_itself_holds_names(name):
    with pytest.raises(CpbkitError, match=r"named module:name or file\.py:name in an experiment; got .* Give `sweep`"):
        Model(name=name)
    assert vary(PRESETS["quick"], name=Model).model.name == "cpbkit.config.experiment:Model"


PARTS = """
import torch
import cpbkit as cpb
from cpbkit.data.synthetic import make_market

class Huber:
    delta = 1.0

def huber(forecast, truth):
    return torch.nn.functional.huber_loss(forecast, truth, reduction="none", delta=Huber.delta).mean((-1, -2))

@cpb.feature
def distance(bars):
    return bars["close"] / bars["close"].rolling(8).mean() - 1
"""
SETTINGS = """
place = {"source": "synthetic", "symbols": ("BTCUSDT", "ETHUSDT"), "intervals": ("1h",), "quiet": True}
place |= {"start": "2025-01-01", "end": "2025-01-20", "executor": "processes", "workers": 2}
small = {"context": 8, "horizon": 2, "epochs": 1, "steps": 5, "loss": huber, "features": ("close_return", distance)}
"""
USE = """
bars = make_market(["ETHUSDT"], ["1h"], "2025-01-01", "2025-01-20")
print(run.folder, len(run.results), run.experiment.own_parts)
print(run["ETHUSDT_1h"].forecast(bars["ETHUSDT_1h"]).frame.to_string())
"""


@pytest.mark.long
def test_the_parts_of_a_notebook_train_in_workers_and_are_found_by_a_new_kernel(tmp_path):
    """The example of docs/bring-your-own.md, with a class, a loss and a feature of the notebook beside it."""
    import nbclient
    import nbformat

    page = (ROOT / "docs/bring-your-own.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"## From a notebook\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    cells = [PARTS, SETTINGS, example.replace("...", "**place, **small"), USE]
    said = []
    for _ in range(2):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
        said.append("".join(output["text"] for output in notebook.cells[-1].outputs))
    (ledger,) = tmp_path.glob("runs/*/results.jsonl")
    assert said[0] == said[1] and len(ledger.read_text().splitlines()) == 2, "the second trains nothing"
    assert re.findall(r"parts/(net|huber|distance)_[0-9a-f]{8}\.py:(\w+)", said[0]) == [
        (name, name) for name in ("net", "huber", "distance")
    ]
    assert sorted(tmp_path.glob("parts/*")) and len(list(ledger.parent.glob("own/*"))) == 3
