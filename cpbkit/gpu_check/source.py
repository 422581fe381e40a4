"""The person's source around a line: its text, its loops, and whether gradients are off there."""

import ast
import functools
import linecache
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

LOOPS = (ast.For, ast.AsyncFor, ast.While)
INNER_LOOPS = (*LOOPS, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
CALLED = {"range", "len", "enumerate", "zip"}  # in the head of a loop
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
WITHOUT_GRADIENTS = ("no_grad", "inference_mode")
ONLY_PASSES = re.compile(r"\.backward\(|\.step\(|zero_grad|clip_grad")  # lines that start torch's own work alone
ADDING = ("append", "appendleft", "add", "extend", "insert", "update")
NUMBERS = re.compile(r"\.item\(|\b(float|int|len|str|round)\(|^\w*(epoch|step|loss|idx|acc|time|i|t)\w*$|^f?[\"']")
KEEPING = re.compile(r"itertools\.cycle\(|(?i:cache|memo)\w*\[.*\] = |@(functools\.)?(lru_cache\(|cache\b)")
CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|ipython-input-")  # where kernels say that a cell's source is


class Span(NamedTuple):
    """Lines of a file; `head` is the last line of what a loop says before its body."""

    file: str
    start: int
    end: int
    head: int

    def holds(self, file: str, line: int) -> bool:
        return file == self.file and self.start <= line <= self.end


def name_file(file: str) -> str:
    """Return a file's name without its folders; "cell" for a notebook's, whose file nobody can open."""
    return "cell" if CELL.search(file) else re.split(r"[/\\]", file)[-1]


def read_line(file: str, line: int) -> str:
    """Return the text of a line, stripped; "" where there is no source."""
    return linecache.getline(file, line).strip()


@functools.lru_cache(maxsize=256)
def _parse(file: str, size: int) -> tuple[Any, ...]:
    """Return the nodes of a file that have lines, in order; size: of the file, for a notebook's cell may change.

    No type of ast tells those that have lines.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # a cell with magics, a file that is no Python: its loops are not known
        return ()
    nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.stmt, *INNER_LOOPS)))
    return tuple(sorted(nodes, key=lambda node: (node.lineno, -node.end_lineno)))


@functools.lru_cache(maxsize=4096)
def find_path(file: str, line: int) -> tuple[Any, ...]:
    """Return the statements and comprehensions around a line, from its function inwards."""
    nodes = _parse(file, len(linecache.getlines(file)))
    path = [node for node in nodes if node.lineno <= line <= node.end_lineno]
    scopes = [i for i, node in enumerate(path) if isinstance(node, SCOPES)]
    return tuple(path[scopes[-1] :] if scopes else path)


def to_span(file: str, node: Any) -> Span:
    """Return the lines of a statement or comprehension."""
    head = node.lineno
    if isinstance(node, (ast.For, ast.AsyncFor)):
        head = node.iter.end_lineno
    elif isinstance(node, ast.While):
        head = node.test.end_lineno
    return Span(file, node.lineno, node.end_lineno, head)


def read_function(file: str, line: int) -> str:
    """Return the text of the function around a line; "" outside functions."""
    path = find_path(file, line)
    if not path or not isinstance(path[0], (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    return read_span(to_span(file, path[0]))


def read_span(span: Span) -> str:
    """Return the text of some lines."""
    return "\n".join(read_line(span.file, at) for at in range(span.start, span.end + 1))


@functools.lru_cache(maxsize=4096)
def find_unpacking(file: str, line: int) -> int:
    """Return the line of the statement just before, where it unpacks `a, b = map(...)` or zip(...); else 0."""
    path = find_path(file, line)
    start = path[-1].lineno if path else line
    for node in _parse(file, len(linecache.getlines(file))):
        if start - 2 < to_span(file, node).end < start and isinstance(node, ast.Assign):
            called = getattr(getattr(node.value, "func", None), "id", "")
            return node.lineno if isinstance(node.targets[0], ast.Tuple) and called in ("map", "zip") else 0
    return 0


def find_loops(file: str, line: int) -> list[Span]:
    """Return each `for` and `while` around a line, in its function, the innermost last."""
    return [to_span(file, node) for node in find_path(file, line) if isinstance(node, LOOPS)]


def find_pairs(file: str, line: int) -> Span | None:
    """Return the outer of two loops around a line that go over the same things, as over all pairs of a batch."""
    loops = [node for node in find_path(file, line) if isinstance(node, ast.For)]
    for around in reversed(loops[:-1]):  # a third may be between them, as of triplets
        inner = loops[-1]
        targets = [_names(node.target) for node in (around, inner)]
        one, two = ((_names(node.iter) | _sizes(node.iter)) - targets[0] - CALLED for node in (around, inner))
        used = set().union(*map(_names, inner.body))
        if one == two and all(used & names for names in targets):
            return to_span(file, around)
    return None


def _sizes(node: Any) -> set[int]:
    """Return the numbers in a loop's head that say how far it goes: not an axis, nor where it starts."""
    numbers = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return {number for number in numbers if isinstance(number, int) and number > 1}


def _names(node: Any) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def counts_only(loop: Span) -> bool:
    """Say whether a loop goes over numbers, or without an end: then what it trains on is made in its body."""
    node = next((n for n in find_path(loop.file, loop.start) if isinstance(n, LOOPS) and n.lineno == loop.start), None)
    if isinstance(node, ast.While):
        return True
    called = getattr(node, "iter", None)
    while isinstance(called, ast.Call) and called.args and getattr(called.func, "id", "") != "range":
        called = called.args[0]  # tqdm(range(n)), enumerate(range(n))
    return isinstance(called, ast.Call) and getattr(called.func, "id", "") in ("range", "count")


def find_no_grad(file: str, line: int) -> int:
    """Return the line of the `torch.no_grad()` or `inference_mode()`, with or decorator, that holds a line; else 0."""
    for node in find_path(file, line):
        asked = [item.context_expr for item in getattr(node, "items", [])] + getattr(node, "decorator_list", [])
        for each in asked:
            called = each.func if isinstance(each, ast.Call) else each
            if getattr(called, "attr", getattr(called, "id", "")) in WITHOUT_GRADIENTS:
                return each.lineno
    return 0


def find_keeping(file: str, line: int, loss: str) -> int:
    """Return the line that adds a loss, with its graph, to something that outlives the step; 0 where none is found.

    Looks in the function around a line, then for what is done with the function's own result. loss: "" takes whatever
    is added.
    """
    path, whole = find_path(file, line), _parse(file, len(linecache.getlines(file)))
    within = path[0] if path and isinstance(path[0], SCOPES) else None
    found = _find_adding(ast.walk(within) if within else whole, (loss,))
    if within and not found:
        found = _find_adding(whole, (within.name, f"self.{within.name}"))
    return found


def find_holding(file: str, line: int) -> int:
    """Return the line that adds more than numbers to a collection, in the loops or else the function around a line.

    Else that of a cache, or of an `itertools.cycle`, which keeps every batch; else 0.
    """
    whole = _parse(file, len(linecache.getlines(file)))
    path = find_path(file, line)
    around = [node for node in path if isinstance(node, LOOPS)] or path[:1]
    parts: Iterable[Any] = (part for node in around for part in ast.walk(node))
    for node in parts:
        if _holds(node):
            return node.lineno
    lines = (one.lineno for node in whole for one in (node, *getattr(node, "decorator_list", ())))
    return next((each for each in lines if KEEPING.search(read_line(file, each))), 0)


def is_holding(file: str, line: int) -> bool:
    """Say whether a line adds more than numbers to a collection."""
    return any(map(_holds, find_path(file, line)))


def _holds(node: Any) -> bool:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        given = node.value.args if getattr(node.value.func, "attr", "") in ADDING else []
    else:
        given = [node.value] if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.List) else []
    items = [x for each in given for x in (each.elts if isinstance(each, (ast.Tuple, ast.List)) else [each])]
    return any(ast.unparse(item).strip("0123456789.") and not NUMBERS.search(ast.unparse(item)) for item in items)


def _find_adding(nodes: Iterable[Any], names: tuple[str, ...]) -> int:
    """Return the line that adds one of the names to something, at last to itself: a loss is a sum of parts too."""
    to_itself = 0
    for node in nodes:
        added, target = None, ""
        if isinstance(node, ast.AugAssign):
            added = node.value  # total += loss
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            target = ast.unparse(node.targets[0])
            added = node.value if target in map(ast.unparse, ast.walk(node.value)) else None  # total = total + loss
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            added = node.value  # losses[i] = loss
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            method = getattr(node.value.func, "attr", "")
            values = [*node.value.args, *(keyword.value for keyword in node.value.keywords)]
            given = set(map(ast.unparse, values))
            if method in ADDING or (method and given.intersection(names)):
                added = node.value  # losses.append(loss), meter.note(loss)
        if added is not None and any(_carries(added, name) for name in names):
            if target not in names:
                return node.lineno
            to_itself = to_itself or node.lineno
    return to_itself


def _carries(expression: ast.AST, name: str) -> bool:
    """Say whether an expression holds a variable, and nothing that frees it of its graph."""
    parts = [ast.unparse(node) for node in ast.walk(expression) if isinstance(node, (ast.Name, ast.Attribute))]
    freed = re.search(r"\.(item|detach|data|numpy|tolist)\b|\bfloat\(", ast.unparse(expression))
    return (name in parts or not name) and not freed
