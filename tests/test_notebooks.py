"""The form of the notebooks, which `python tests/test_notebooks.py` repairs, and a run of each on a CPU."""

import ast
import configparser
import datetime as dt
import json
import os
import re
import sys
import textwrap

import pytest
from conftest import ROOT
from hub_server import serve_hub

from benchmarks.archive_server import make_rows, serving
from cpbkit import __version__
from cpbkit.views.controls import WIDGET

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg", encoding="utf-8")
ADDRESS = SETTINGS["metadata"]["url"]
LONGEST, WIDEST = 15, 100  # lines of a cell, and columns of code: more are cut off on a page of 1000 px

METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kaggle": {"accelerator": "nvidiaTeslaT4", "isGpuEnabled": True, "isInternetEnabled": True},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# What a notebook is opened and installed from: the tag of its version, once there is one. A fork changes `url`.
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
REVISION = "main" if f"## {__version__}, not yet released" in CHANGES else f"v{__version__}"
INSTALL = f"""\
# In Colab and Kaggle this installs cpbkit and keeps their torch; elsewhere it does nothing.
import importlib.util
import os

if "COLAB_RELEASE_TAG" in os.environ or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    %pip install -qq --no-build-isolation "cpbkit @ git+{ADDRESS}@{REVISION}"
    if importlib.util.find_spec("cpbkit") is None:
        raise SystemExit("No cpbkit: in Kaggle turn on Settings > Internet; then run all again.")
"""

STOPPED = (
    "Stopped? Do what the last line says; then, as after an interrupt, *Run all* again: fetched bars and trained "
    "models are found. `NameError`: a cell above this one has not run."
)
ONE_RUN = """
symbols, intervals = ("BTCUSDT", "ETHUSDT"), ("1h",)
start, end, epochs = "2025-01-01", "2025-01-24", 1
"""
# What no parameter makes small, and what other tests hold at its full size.
SMALLER = """
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS
from cpbkit.evaluation import leakage
from cpbkit.runs import plan, planted

PRESETS["bandwidth"] = vary(PRESETS["bandwidth"], width=4)
leakage.WALKS, leakage.OVERFIT_STEPS = 2, 10
planted.SICKNESSES = dict(list(planted.SICKNESSES.items())[-2:])
plan.count_cores = lambda: 1  # no process beside the kernel loads torch; in `make test-browser` some do
"""
# What a run in the tests puts after the cell `# Parameters`, and the least number of figures it must show.
SMALL = {
    "00_environment": ("verbose = True", 0),
    "01_gpu_diagnosis": ("epochs, seconds, widths, loops = 1, 2, (16, 32), 'none'", 1),
    "02_data": (
        """
        source, symbols = "synthetic", ("BTCUSDT", "ETHUSDT")
        start, end, closeup = "2025-01-01", "2025-03-31", ("2025-01-02", "2025-01-04")
        """,
        3,
    ),
    "03_smoke_test": ("end, epochs, trial_epochs, trial_steps = '2025-01-20', 2, 1, 5", 3),
    "04_sweep": (ONE_RUN, 4),
    "05_verdict": (ONE_RUN + "epochs_again, placebos, refits, seeds = 1, 2, 2, 2\n", 5),
    "06_publish": (ONE_RUN + "repo, until = 'me/forty', '2025-01-25'\n", 2),
    "07_own_data": (
        """
        rows, epochs, context, horizon = 1500, 1, 8, 2
        trace, trace_epochs, trace_steps = "link.csv", 1, 5
        """,
        4,
    ),
}
SHARED = "preset source symbols start epochs keep".split()  # what 04, 05 and 06 must agree in, to find one run


def badges(name):
    page = f"{ADDRESS.removeprefix('https://github.com/')}/blob/{REVISION}/notebooks/{name}"
    colab = f"https://colab.research.google.com/github/{page}"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{page}"
    return (
        f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab}) "
        f"[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]({kaggle})"
    )


def picture(stem, spoken):
    """Return the line that shows what a notebook gives: by an address, since Colab knows no file beside a notebook."""
    there = ADDRESS.replace("github.com", "raw.githubusercontent.com")
    return f"![{spoken}]({there}/{REVISION}/docs/gallery/{stem}.png)"


def canonical(path):
    """Return the text a notebook should have: the same words and code in the one form."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    cells = []
    for number, cell in enumerate(raw["cells"]):
        source = "".join(cell["source"]).strip("\n")
        source = "\n".join(line.rstrip() for line in source.split("\n"))
        if number == 0:
            source = re.sub(r"^\[!\[Open in .*$", badges(path.name), source, flags=re.MULTILINE)
            shown = re.compile(r"^!\[(.*)\]\(.*\)$", flags=re.MULTILINE)
            source = shown.sub(lambda line: picture(path.stem, line[1]), source)
        if number == 1:
            source = INSTALL.strip("\n")
        # papermill, and what took over its convention, put other parameters after the cell of this tag
        tags = {"tags": ["parameters"]} if source.startswith("# Parameters\n") else {}
        fresh = {"cell_type": cell["cell_type"], "id": f"cell-{number:02}", "metadata": tags}
        if cell["cell_type"] == "code":
            fresh |= {"execution_count": None, "outputs": []}
        cells.append(fresh | {"source": source.splitlines(keepends=True)})
    notebook = {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def cells_of(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def python_of(source):
    """Return a cell's code without the lines that only a notebook understands."""
    return re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)


def nodes_of(source, *kinds):
    """Return what the code of a cell holds; a cell of this opening shows what a person would bring."""
    if source.startswith("# A network of your own\n"):
        return []
    return [node for node in ast.walk(ast.parse(python_of(source))) if isinstance(node, kinds)]


each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_form_is_canonical(path):
    assert path.read_text(encoding="utf-8") == canonical(path), "repair it: python tests/test_notebooks.py"


@each_notebook
def test_cells_come_in_order(path):
    words, code = cells_of(path, "markdown"), cells_of(path, "code")
    assert re.match(rf"# {path.name[:2]} · \S", words[0]) and badges(path.name) in words[0]
    assert re.search(r"\?$", words[0], flags=re.MULTILINE), "it asks its question"
    shown, _, opening, _, stopped = words[0].splitlines()[-5:]
    assert shown == picture(path.stem, re.match(r"!\[(\S.+)\]", shown)[1]), "it shows what one gets"
    kinds = (
        rf"(minutes on a {kind} not measured|"
        rf"(under a|(about|more than) \d+) minutes? on a {kind} \(20\d\d-\d\d-\d\d, \S.+\))"
        for kind in ("T4", "CPU")
    )
    assert re.fullmatch(rf"Run all · {' · '.join(kinds)} · you get \S.+", opening), "it says what one gets"
    assert stopped == STOPPED
    assert code[0] == INSTALL.strip()
    assert all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(python_of(code[1])).body)
    assert code[2].startswith("# Parameters\n")
    assert [text.startswith("## What we saw") for text in words].index(True) == len(words) - 1
    last = json.loads(path.read_text(encoding="utf-8"))["cells"][-1]
    assert last["cell_type"] == "code" and "print(" in code[-1], "what was seen is computed, not known beforehand"


@each_notebook
def test_it_is_thin(path):
    for source in cells_of(path, "code"):
        assert source.count("\n") < LONGEST, f"more than {LONGEST} lines:\n{source}"
        wide = [line for line in source.split("\n") if len(line) > WIDEST]
        assert not wide, f"more than {WIDEST} columns:\n{wide}"
        defined = nodes_of(source, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not defined, f"what deserves a name deserves a test, so it lives in the package:\n{source}"


@each_notebook
def test_it_imports_only_at_the_top(path):
    for source in cells_of(path, "code")[2:]:
        assert not nodes_of(source, ast.Import, ast.ImportFrom), source


def test_one_run_is_found_by_the_parameters_that_made_it():
    cells = [cells_of(path, "code")[2] for path in NOTEBOOKS if path.stem[:2] in ("04", "05", "06")]
    lines = [[line for line in cell.split("\n") if line.split(" ")[0].rstrip(",") in SHARED] for cell in cells]
    assert len(lines[0]) == len(SHARED) and lines[0] == lines[1] == lines[2]


def test_the_picture_of_each_notebook_is_small():
    for path in NOTEBOOKS:
        content = (ROOT / "docs/gallery" / f"{path.stem}.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) < 60_000, path.stem


def test_names_are_a_number_and_a_noun():
    numbers = [int(path.name[:2]) for path in NOTEBOOKS]
    assert numbers == sorted(set(numbers))
    assert all(re.fullmatch(r"\d\d_[a-z_]+\.ipynb", path.name) for path in NOTEBOOKS)


def test_the_readme_lists_every_notebook_with_its_question():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in NOTEBOOKS:
        assert f"notebooks/{path.name})" in readme and badges(path.name) in readme, path.name


def test_the_repair_is_stable_and_mends(tmp_path):
    untidy = {
        "cells": [
            {
                "cell_type": "markdown",
                "metadata": {"x": 1},
                "source": "# 04 · S\n[![Open in Colab](old)](old)\n",
            },
            {"cell_type": "code", "metadata": {}, "source": ["pip"], "outputs": [{}], "execution_count": 3},
            {"cell_type": "code", "metadata": {}, "source": ["a = 1  \n", "a\n"], "outputs": [{}]},
        ],
        "metadata": {"widgets": {}},
        "nbformat": 4,
        "nbformat_minor": 2,
    }
    path = tmp_path / "04_sweep.ipynb"
    path.write_text(json.dumps(untidy), encoding="utf-8")
    path.write_text(canonical(path), encoding="utf-8")
    mended = path.read_text(encoding="utf-8")
    assert canonical(path) == mended and "widgets" not in mended and "(old)" not in mended
    assert [cell["outputs"] for cell in json.loads(mended)["cells"][1:]] == [[], []]
    assert cells_of(path, "code")[1] == "a = 1\na"


def test_the_install_cell_does_nothing_elsewhere(monkeypatch):
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    exec(re.sub(r"%pip.*", "raise AssertionError", INSTALL), {})
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    with pytest.raises(AssertionError):
        exec(re.sub(r"%pip.*", "raise AssertionError", INSTALL), {})


def test_an_install_that_failed_ends_in_one_line_with_the_switch_to_turn(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    exec(re.sub(r"%pip.*", "pass", INSTALL), {})  # it is there
    with pytest.raises(SystemExit, match=r"^[^\n]*Settings > Internet[^\n]*$"):
        exec(re.sub(r"%pip.*", "pass", INSTALL).replace('"cpbkit"', '"cpbkit_that_is_not_there"'), {})


def execute(notebook, kernel):
    import nbclient

    client = nbclient.NotebookClient(notebook, km=kernel, timeout=300)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder and a kernel, as of a person who goes from notebook to notebook; bars and a Hub on loopback.

    Of real bars the venue has three weeks, and those up to this hour: what is synthetic is not published.
    """
    import nbclient
    import nbformat
    from jupyter_client.utils import run_sync

    folder = tmp_path_factory.mktemp("desk")
    now = dt.datetime.now(dt.timezone.utc).replace(minute=0, second=0, microsecond=0)
    month, hour = (f"{now - dt.timedelta(days=days):%Y-%m-%dT%H:%M}" for days in (40, 0))
    with serving(today=f"{now:%Y-%m-%d}") as server, serve_hub() as (hub, address):
        for seed, symbol in enumerate(("BTCUSDT", "ETHUSDT")):
            rows = make_rows("1h", "2025-01-01", "2025-01-26", seed=seed)
            server.rows["spot", symbol, "1h"] = rows + make_rows("1h", month, hour, seed=seed)
            server.rows["spot", symbol.replace("USDT", "USDC"), "1h"] = rows  # of which a mirror has none of today
        settings = {"CPBKIT_ARCHIVE_URL": server.url, "CPBKIT_REST_URL": server.rest_url, "HF_ENDPOINT": address}
        settings |= {"CPBKIT_CACHE": folder / "cache", "HF_HOME": folder / "hub", "HF_HUB_DISABLE_XET": "1"}
        settings |= {"HF_TOKEN": "hf_loopback", "PYTHONWARNINGS": "error::DeprecationWarning:cpbkit"}
        env = os.environ | {name: str(value) for name, value in settings.items()}
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
        kernel = client.create_kernel_manager()
        client.start_new_kernel(env=env, cwd=str(folder))
        execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SMALLER)]), kernel)
        yield folder, kernel, hub, set()
        run_sync(kernel.shutdown_kernel)(now=True)


def with_parameters(path, parameters):
    """Read a notebook and put other parameters after the tagged cell, as papermill does."""
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ())]
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(textwrap.dedent(parameters)))
    return notebook


@pytest.mark.slow
@each_notebook
def test_it_runs_on_a_cpu(path, desk):
    import nbformat

    folder, kernel, hub, through = desk
    known = set((folder / "runs").glob("*"))
    parameters, figures = SMALL[path.stem]
    notebook = with_parameters(path, parameters)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # each runs alone: it finds no name of another
    execute(notebook, kernel)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    data = [output.get("data", {}) for output in outputs]
    shown = [one for one in data if "image/png" in one or "<svg" in one.get("text/html", "")]
    assert len(shown) >= figures
    mute = [o for o in outputs if "image/png" in o.get("data", {}) and not o.metadata.get("image/png", {}).get("alt")]
    assert not mute, "a picture without words"
    words = "".join(one.get("text/markdown", "") for one in data)
    assert not re.findall(r"!\[.*?\]\((?!https://)", words), "a picture that a saved notebook has not"
    live = [one for one in data if WIDGET in one]
    assert all("image/png" in one or not one["text/plain"] for one in live), f"no picture where no widget lives: {live}"
    assert path.stem != "04_sweep" or any("image/png" in one for one in live), (
        "the menu, as VS Code and nbconvert see it"
    )
    said = "".join([*(one.get("text/plain", "") for one in data), *(output.get("text", "") for output in outputs)])
    assert "PosixPath(" not in said and notebook.cells[-1].outputs
    if path.stem in ("05_verdict", "06_publish") and "04_sweep" in through:
        runs = {run for run in (folder / "runs").glob("*") if "-until-" not in run.name}
        assert runs == known, "one run for 04, 05 and 06"
    through.add(path.stem)
    if path.stem == "06_publish":
        assert hub.repos["model", "me/forty"]["private"] and hub.repos["dataset", "me/forty-record"]["private"]


# What the first cell of parameters offers, or a mirror may do: the cells that need more say so, and the next ones run.
ENDS_IN_2025 = """
symbols, intervals = ("BTCUSDC",), ("1h",)
start, end, epochs = "2025-01-01", "2025-01-24", 1
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem, parameters, said",
    [
        ("06_publish", ONE_RUN + "source, until = 'synthetic', ''\n", "synthetic data cannot be published"),
        ("06_publish", ENDS_IN_2025 + "until = ''\n", "0 series are forecast."),
        ("04_sweep", ENDS_IN_2025, "1 of 1 series are not available"),
    ],
)
def test_a_cell_that_cannot_do_its_part_says_so_and_the_next_ones_run(desk, stem, parameters, said):
    _, kernel, _, _ = desk
    notebook = with_parameters(ROOT / "notebooks" / f"{stem}.ipynb", parameters)
    execute(notebook, kernel)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"] and notebook.cells[-1].outputs
    assert re.search(said, "".join(output.get("text", "") for output in outputs))


if __name__ == "__main__":
    for notebook in NOTEBOOKS:
        text = canonical(notebook)
        if text != notebook.read_text(encoding="utf-8"):
            notebook.write_text(text, encoding="utf-8")
            sys.stdout.write(f"repaired {notebook.relative_to(ROOT)}\n")
