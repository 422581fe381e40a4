"""The import graph: layers, cycles, and what loads when."""

import ast
import graphlib
import subprocess
import sys

import pytest
from conftest import ROOT

LAYERS = (
    """errors experiment presets atomic capture memory precision clock indicators metrics data.klines data.venue
    data.archive models.layers gpu_check.chips gpu_check.environment gpu_check.findings gpu_check.diagnosis
    gpu_check.guard gpu_check.rnn_path gpu_check.nvml gpu_check.trace gpu_check.numbers gpu_check.ceilings""",
    """data.store data.download data.order data.binance data.yahoo data.files data.synthetic windows stack run machine
    models.naive models.linear models.recurrent models.transformer gpu_check.census gpu_check.monitor
    gpu_check.clocks gpu_check.probes gpu_check.step gpu_check.simulator gpu_check.tensors gpu_check.trials""",
    """models.zoo models.own train checkpoint plan series work progress health audit planted evaluate folds intervals
    executors gpu_check.faults gpu_check.preflight gpu_check.doctor gpu_check.claims""",
    """sweep plots dashboard report hub web bench cli __main__""",
)
TABLE = {f"cpbkit.{name}": layer for layer, names in enumerate(LAYERS) for name in names.split()}
ONLY_IMPORTER = {"matplotlib": "cpbkit.plots", "ipywidgets": "cpbkit.dashboard"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / "cpbkit").rglob("*.py"))}
MODULES = {name: path for name, path in FILES.items() if path.name != "__init__.py"}
# A package in the table stands for all modules in it.
LAYER = {name: TABLE[home] for name in MODULES for home in (name, name.rpartition(".")[0]) if home in TABLE}


def imports_of(source, package):
    """Every module that the source names in an import, at the top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*home, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in FILES else base


def graph():
    edges = {}
    for name, path in MODULES.items():
        edges[name] = set(imports_of(path.read_text(encoding="utf-8"), name.rpartition(".")[0]))
    return edges


def test_every_module_has_a_layer():
    assert not sorted(MODULES.keys() - LAYER.keys()), "add it to LAYERS where it belongs"


def test_no_import_runs_up():
    up = [
        f"{name} (L{LAYER[name]}) imports {target} (L{LAYER[target]})"
        for name, targets in graph().items()
        for target in targets
        if target in LAYER and name in LAYER and LAYER[target] > LAYER[name]
    ]
    assert not up


def test_no_import_runs_in_a_circle():
    inner = {name: targets & set(MODULES) for name, targets in graph().items()}
    try:
        graphlib.TopologicalSorter(inner).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_parser_sees_what_the_interpreter_sees():
    source = "import a.b\nfrom . import errors\ndef f():\n    from cpbkit.data.klines import Klines\n"
    found = set(imports_of(source, "cpbkit"))
    assert found == {"a.b", "cpbkit.errors", "cpbkit.data.klines"}
    assert "cpbkit.errors" in set(imports_of("from .. import errors", "cpbkit.data"))


def test_heavy_libraries_have_one_importer():
    for name, targets in graph().items():
        roots = {target.partition(".")[0] for target in targets}
        for library, owner in ONLY_IMPORTER.items():
            allowed = name == owner or name.startswith(f"{owner}.")
            assert library not in roots or allowed, f"{name} imports {library}; only {owner} may"


def test_an_init_is_a_docstring():
    for name, path in FILES.items():
        if path.name == "__init__.py":
            docstring, *rest = ast.parse(path.read_text(encoding="utf-8")).body
            assert isinstance(docstring, ast.Expr) and isinstance(docstring.value.value, str), name
            allowed = ["__version__"] if name == "cpbkit" else []
            assert [node.targets[0].id for node in rest if isinstance(node, ast.Assign)] == allowed, name
            assert len(rest) == len(allowed), name


@pytest.mark.parametrize("statement", ["import cpbkit", "import cpbkit.experiment", "import cpbkit.cli.main"])
def test_a_light_import_loads_nothing_heavy(statement):
    heavy = "{'torch', 'pandas', 'numpy', 'matplotlib', 'ipywidgets', 'requests', 'huggingface_hub'}"
    code = f"import sys; {statement}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n" and done.stderr == ""
