"""A person's own parts given as an object: a class or function travels to the workers by its source."""

import ast
import builtins
import contextlib
import hashlib
import importlib.util
import inspect
import linecache
import math
import os
import symtable
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from cpbkit import atomic
from cpbkit.errors import CpbkitError

FOLDER = Path("parts")  # in the current folder, beside the notebook
HEAD = '"""{} and what it uses, as given to cpbkit. The file is named by its content: change the original instead."""'


def name_parts(setting: Any) -> Any:
    """Return a setting with `module:name` or `file.py:name` for each class or function in it.

    What a notebook or a script itself defines is written to a file in `parts`, together with what it uses: functions
    and classes from there, imports, plain values. Errors: CpbkitError for what cannot be written so; OSError.
    """
    if isinstance(setting, tuple):
        return tuple(map(name_parts, setting))
    return _name_part(setting) if callable(setting) else setting


def _name_part(part: Any) -> str:
    if not _is_definition(part):
        _refuse(_describe(part))
    name, module = part.__name__, sys.modules[part.__module__]
    if module.__name__ != "__main__":
        return f"{_place_of(module)}:{name}"
    lines: dict[str, str] = {}
    _add_lines(lines, name, part, name)
    imports = [line for line in lines.values() if line.startswith(("import ", "from "))]
    others = [line for line in lines.values() if line not in imports]
    content = "\n\n".join([HEAD.format(name), *["\n".join(imports)] * bool(imports), *others, ""]).encode()
    path = FOLDER / f"{name}_{hashlib.sha256(content).hexdigest()[:8]}.py"
    if not path.exists() or path.read_bytes() != content:
        FOLDER.mkdir(exist_ok=True)
        atomic.write_bytes(path, content)
    return f"{path.as_posix()}:{name}"


def _is_definition(value: Any) -> bool:
    """Say whether it is a class or function at the top of its module, by its own name."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or value.__name__ != value.__qualname__:
        return False
    return getattr(sys.modules.get(value.__module__), value.__name__, None) is value


def _place_of(module: ModuleType) -> str:
    """Return the name of a module that an import finds, or else its file."""
    top = module.__name__.partition(".")[0]
    spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    file = getattr(module, "__file__", None)  # a builtin one has none
    if file is None or (spec and spec.origin == getattr(sys.modules[top], "__file__", None)):
        return module.__name__
    return Path(os.path.relpath(file)).as_posix()


def _add_lines(lines: dict[str, str], name: str, value: Any, whose: str) -> None:
    """Add the lines that make `name` this value, after those of all that it uses. whose: who needs it, for errors."""
    own: str = getattr(value, "__name__", "")
    if name in lines:
        return
    if isinstance(value, ModuleType):
        lines[name] = f"import {own}" if own == name else f"import {own} as {name}"
    elif _is_plain(value):
        lines[name] = f"{name} = {value!r}"
    elif home := _import_place(value, own):
        lines[name] = f"from {home} import {own}" if own == name else f"from {home} import {own} as {name}"
    elif not _is_definition(value):
        _refuse(f"{whose}, {_describe(value)}")
    elif own != name:
        _add_lines(lines, own, value, whose)
        lines[name] = f"{name} = {own}"
    else:
        lines[name] = ""  # two functions may use each other
        source, around = _source_of(value, whose), vars(sys.modules["__main__"])
        for used in _names_from_around(source):
            found = around.get(used, builtins)
            if hasattr(builtins, used) and (found is builtins or _module_name(found).startswith("IPython")):
                continue  # IPython puts its own beside open, exit and quit
            if found is builtins:
                _refuse(f"{whose}, which uses {used}, which is not defined")
            _add_lines(lines, used, found, f"{whose}, which uses {used}")
            if isinstance(found, ModuleType):
                lines |= {line: line for line in _submodule_imports(source, used, found)}
        lines[name] = lines.pop(name) + source


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, str, bytes) or (type(value) is float and math.isfinite(value))


def _import_place(value: Any, name: str) -> str:
    """Return the module nearest the top that `name` can be imported from, or "" for what a notebook defined."""
    places = accumulate(_module_name(value).split("."), "{}.{}".format)
    found = (place for place in places if getattr(sys.modules.get(place), name, None) is value)
    return "" if _module_name(value) == "__main__" else next(found, "")


def _module_name(value: Any) -> str:
    return str(getattr(value, "__module__", ""))


def _source_of(part: Any, whose: str) -> str:
    """Return the lines that define it: of the file or cell of its code; a class has none, so of its methods'."""
    main = sys.modules["__main__"]
    codes = [each.__code__ for each in (part, *vars(part).values()) if inspect.isfunction(each)]
    files = [*(code.co_filename for code in codes), getattr(main, "__file__", None) or ""]
    cells = [*map("".join, map(linecache.getlines, files)), *reversed(getattr(main, "In", []))]  # In: IPython's cells
    for cell in cells:
        with contextlib.suppress(SyntaxError):
            for node in reversed(ast.parse(cell).body):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == part.__name__:
                    first = min(line.lineno for line in (node, *node.decorator_list))
                    return "\n".join(cell.split("\n")[first - 1 : node.end_lineno])
    _refuse(f"{whose}, whose source is in no file and no cell")


def _names_from_around(source: str) -> list[str]:
    """Name what a definition takes from where it stands: not what it binds itself, and no `__name__`."""
    names, tables = set(), [symtable.symtable(source, "a part", "exec")]
    for table in tables:
        tables += table.get_children()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return sorted(name for name in names if not name.startswith("__"))


def _submodule_imports(source: str, name: str, module: ModuleType) -> list[str]:
    """Return the imports of `scipy.signal` and such, which `import scipy` need not bring."""
    nodes = (ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    lines = []
    for rest in sorted({node.removeprefix(f"{name}.") for node in nodes if node.startswith(f"{name}.")}):
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(f"{module.__name__}.{rest}"):
                lines.append(f"import {module.__name__}.{rest}")
    return lines


def _describe(value: Any) -> str:
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"of type {type(value).__name__}"
    return f"{value.__qualname__}, which is not at the top of {value.__module__} (any more)"


def _refuse(what: str) -> NoReturn:
    raise CpbkitError(
        "a part of your own given as an object must be a class or a function, with its source at the top of a "
        "notebook, script or module; of a notebook or script it may use such classes and functions, imports, numbers, "
        f"texts, and tuples, lists and dicts of these; got {what}. Make or read the rest inside it, or put all into a "
        "file, in a notebook by `%%writefile mine.py` on top of a cell, and name the part 'mine.py:name'"
    )
