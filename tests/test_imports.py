"""The import graph: layers, cycles, and what loads when."""

import ast
import graphlib
import subprocess
import sys

import pytest
from conftest import ROOT

# The rooms, from the ground up: a module imports from its own room and from those that stand before it, never after.
GROUND = "texts errors atomic foreign quantities".split()  # what every room may use
ROOMS = (
    *GROUND,
    *"hardware config data indicators windows models training evaluation gpu_check runs views hub bench".split(),
    *"api serve cli __main__".split(),
)
ONLY_IMPORTER = {"matplotlib": "cpbkit.views", "ipywidgets": "cpbkit.views"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted((ROOT / "cpbkit").rglob("*.py"))}
MODULES = {name: path for name, path in FILES.items() if path.name != "__init__.py"}


def room_of(name):
    """`cpbkit.data.klines` is in the room `data`; a module at the top is a room of its own."""
    return name.split(".")[1]


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


def test_every_room_is_in_the_table():
    assert not sorted({room_of(name) for name in MODULES} - set(ROOMS)), "add it to ROOMS where it belongs"


def test_no_import_runs_up():
    up = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets & set(MODULES)
        if ROOMS.index(room_of(target)) > ROOMS.index(room_of(name))
    ]
    assert not up


def test_no_import_runs_in_a_circle():
    inner = {name: targets & set(MODULES) for name, targets in graph().items()}
    try:
        graphlib.TopologicalSorter(inner).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_reader_has_few_rooms_to_know_and_few_ways_between_them():
    ways = {name: set() for name in ROOMS if name not in (*GROUND, "__main__")}  # which is the door to `cli`
    for name, targets in graph().items():
        for target in targets & set(MODULES):
            here, there = room_of(name), room_of(target)
            if here != there and {here, there} <= set(ways):
                ways[here].add(there)
    floors = {}
    for name in graphlib.TopologicalSorter(ways).static_order():
        floors[name] = 1 + max((floors[below] for below in ways[name]), default=0)
    assert len(ways) <= 20 and max(floors.values()) <= 11 and sum(map(len, ways.values())) <= 80


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
        if path.name == "__init__.py" and name != "cpbkit":  # the front door, which loads what it is asked for
            (docstring,) = ast.parse(path.read_text(encoding="utf-8")).body
            assert isinstance(docstring, ast.Expr) and isinstance(docstring.value.value, str), name


@pytest.mark.parametrize("statement", ["import cpbkit", "import cpbkit.config.experiment", "import cpbkit.cli.main"])
def test_a_light_import_loads_nothing_heavy(statement):
    heavy = "{'torch', 'pandas', 'numpy', 'matplotlib', 'ipywidgets', 'requests', 'huggingface_hub'}"
    code = f"import sys; {statement}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n" and done.stderr == ""
