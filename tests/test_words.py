"""One word, one meaning: public names against the table of docs/glossary.md."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| ([a-z ]+) \| [^|]+ \| ([a-z_ ]*)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
ROOMS = {tuple(word.split()): set(rooms.split()) for word, rooms in ROWS if word != "word"}


def words_of(name):
    """`judge_PredictionIntervals` holds judge, prediction, interval: lower case, one of several."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [word.lower() if word.lower() == "series" else word.lower().removesuffix("s") for word in found]


def misuses(name, room):
    """Name the entries that a name of a room holds and should not; of those at one place the longest counts."""
    words, at = words_of(name), 0
    while at < len(words):
        here = [entry for entry in ROOMS if tuple(words[at : at + len(entry)]) in (entry, entry[::-1])]
        entry = max(here, key=len, default=())
        if entry and not {room, "any"} & ROOMS[entry]:
            yield " ".join(entry)
        at += len(entry) or 1


def public_names(body):
    """Functions with their parameters, classes with their fields, and constants."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
            if isinstance(node, ast.ClassDef):
                yield from public_names(node.body)
            else:
                yield from (each.arg for each in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            yield from (name for name in names if not name.startswith("_"))


def test_no_word_of_the_glossary_names_two_things():
    wrong = []
    for path in sorted((ROOT / "cpbkit").rglob("*.py")):
        inside = path.relative_to(ROOT / "cpbkit")
        room = inside.parts[0].removesuffix(".py")
        for name in (path.stem, *public_names(ast.parse(path.read_text()).body)):
            wrong += [f"{inside}: {name} says {word!r}" for word in misuses(name, room)]
    assert not sorted(set(wrong)), "name it otherwise, or add the meaning to docs/glossary.md"


@pytest.mark.parametrize(
    ("name", "room", "said"),
    [
        ("floor_rmse", "evaluation", ["floor"]),
        ("INTERVALS", "evaluation", ["interval"]),
        ("PredictionIntervals", "evaluation", []),
        ("prediction_intervals", "data", ["prediction interval"]),
        ("draw_forcing", "training", []),
        ("Stack", "gpu_check", ["stack"]),
        ("call_stacks", "gpu_check", []),
    ],
)
def test_a_word_is_told_from_the_longer_one_that_holds_it(name, room, said):
    assert list(misuses(name, room)) == said
