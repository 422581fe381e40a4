"""What a stranger wrote: read when it has the known form, else refused in one line, whatever it is."""

import json
import os
import tracemalloc
from dataclasses import dataclass, field
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpbkit import foreign
from cpbkit.config.experiment import Experiment, from_json, to_json
from cpbkit.config.presets import PRESETS
from cpbkit.errors import CpbkitError

FORM = {"name": str, "size?": float, "rows?": [[int]], "pairs?": [(str, float)], "made?": bool}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


def test_a_known_form_is_read():
    told = {"name": "A", "size": 3, "rows": [[1], []], "pairs": [["a", 1.5]], "made": True, "more": None}
    assert foreign.parse(json.dumps(told), FORM) == told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "'name' is missing"),
        ('{"name": 7}', "'name' must be a text; got 7"),
        ('{"name": "A", "size": true}', "'size' must be a number; got True"),
        ('{"name": "A", "rows": [[1], [2.5]]}', "must be a whole number; got 2.5"),
        ('{"name": "A", "pairs": [["a"]]}', "must be a list of 2"),
        ("[" * 40 + "]" * 40, "nested deeper than 32"),
        ("[" * 100_000, "nested deeper than 32"),
        ("9" * 400, "a whole number of 400 digits"),
        ('{"name": "A", "size": NaN}', "the number NaN"),
        ('{"name": "A", "size": -Infinity}', "the number -Infinity"),
        ('{"name": "A", "size": 1e999}', "the number 1e999"),
        ('{"name": "A", "size": 1e101}', "the number 1e101"),
        ("[" + " " * foreign.SIZE, "more than 8,388,608 bytes"),
        ('{"name"', "it is no JSON"),
        (b"\xff\xfe{", "it is no UTF-8 text"),
    ],
)
def test_anything_else_is_refused_in_one_line(text, said):
    with pytest.raises(foreign.Damaged) as told:
        foreign.parse(text, FORM)
    assert said in str(told.value) and "\n" not in str(told.value) and len(str(told.value)) < 200


@dataclass(frozen=True)
class Told:
    name: str
    share: float | None = None
    ends: tuple[str, ...] = ()
    sizes: dict[str, float] = field(default_factory=dict)
    inner: "tuple[dict, ...]" = ()


def test_the_form_of_a_dataclass_is_that_of_its_json():
    assert foreign.form_of(list[Told])[0]["name"] is str
    form = {name: kind for name, kind in foreign.form_of(Told).items() if name != "inner?"}
    foreign.check({"name": "A", "share": None, "ends": ["x"], "sizes": {"a": 1}, "more": object}, form)
    foreign.check({"name": "A"}, form)
    for wrong in ({}, {"name": None}, {"share": "1"}, {"ends": [1]}, {"ends": "x"}, {"sizes": {"a": None}}):
        with pytest.raises(foreign.Damaged):
            foreign.check({**({"name": "A"} if wrong else {}), **wrong}, form)


@pytest.mark.parametrize(
    "text", ["", "2025-02-30T00:00", "20250201", "2025-W01-1T00:00", "2025-02-01T00:00+01:00", 5, None]
)
def test_a_time_is_one_that_numpy_reads_too(text):
    foreign.check("2025-02-28T23:59", datetime)
    with pytest.raises(foreign.Damaged, match="must be a time"):
        foreign.check(text, datetime)


def test_a_hostile_document_takes_bounded_memory():
    limit = 1 << 17  # a part of what is allowed: to watch every allocation takes long
    text = "[" + "[]," * ((limit - 3) // 3) + "7]"
    tracemalloc.start()
    try:
        with pytest.raises(foreign.Damaged):
            foreign.parse(text, FORM, limit)
        assert tracemalloc.get_traced_memory()[1] / limit < 300e6 / foreign.SIZE
    finally:
        tracemalloc.stop()


@settings(deadline=None)
@given(JSON, st.sampled_from(["data", "task", "model", "training", "preset"]), st.data())
def test_settings_that_somebody_wrote_are_an_experiment_or_refused(value, part, data):
    raw = json.loads(to_json(PRESETS["quick"]))
    if part == "preset" or data.draw(st.booleans()):
        raw[part] = value
    else:
        raw[part][data.draw(st.sampled_from(sorted(raw[part])))] = value
    try:
        assert isinstance(from_json(json.dumps(raw)), Experiment)
    except CpbkitError as error:
        assert str(error)


def test_settings_of_the_first_runs_are_read():
    raw = json.loads(to_json(PRESETS["quick"]))
    raw["data"]["folder"] = raw["data"].pop("files")
    del raw["data"]["venue"], raw["data"]["series"], raw["training"]["search"]
    assert from_json(json.dumps(raw)) == PRESETS["quick"]


def test_links_pipes_and_folders_are_no_files(tmp_path):
    (tmp_path / "real").write_bytes(b"7")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "inside").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert foreign.read_bytes(tmp_path, "real") == b"7" and foreign.read_bytes(tmp_path, "none") is None
    for name, said in (("link", "is a link"), ("inside", "cannot be read"), ("pipe", "is no file")):
        with pytest.raises(foreign.Damaged, match=said):
            foreign.read_bytes(tmp_path, name)
    with pytest.raises(foreign.Damaged, match="more than 0 bytes"):
        foreign.read_bytes(tmp_path, "real", limit=0)
