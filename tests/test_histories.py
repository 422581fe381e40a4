"""Sweeps and fetches on a disk and a network that fail, or where they die, and with damaged files."""

import contextlib
import os
import random

import pytest

from benchmarks.archive_server import serving
from benchmarks.disk import Disk, Killed
from benchmarks.histories import NOW, World, _judge_screen, go_through_boundaries, play
from cpbkit import atomic

EVERY = "CPBKIT_EVERY_BOUNDARY"  # set it to go through all operations; else a few of them, others each time


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with serving(NOW[:10]) as server:
        yield World(tmp_path_factory.mktemp("world"), server)


def test_a_sweep_ends_right_after_a_failure_or_a_kill_at_any_operation(world):
    def some(count):
        return range(count) if os.environ.get(EVERY) else random.sample(range(count), 2)

    told = go_through_boundaries(world, some)
    assert set(told["operations"]) == {"write", "fsync", "replace", "unlink", "mkdir"} and not told["wrong"]


def test_random_histories_end_right(world):
    for i in range(4):
        found, happened = play(world, f"suite/{i}")
        assert not found, (found, happened)


@pytest.mark.parametrize("fate, said", [("full", "No space left"), ("failing", "Input/output error")])
def test_the_disk_fails_where_it_is_told_to(tmp_path, fate, said):
    path = tmp_path / "a"
    for at, operation in enumerate(("write", "fsync", "replace")):
        with pytest.raises(OSError, match=said) as told, Disk(tmp_path, at, fate) as disk:
            atomic.write_bytes(path, b"1234")
        assert disk.seen[at] == operation and told.value.filename == str(path) and not list(tmp_path.iterdir())
    with pytest.raises(Killed), Disk(tmp_path, 0, "killed"):
        atomic.write_bytes(path, b"1234")
    (part,) = tmp_path.iterdir()
    assert part.read_bytes() == b"12", "half is written, and nobody cleans up after a kill"


def test_a_disk_that_is_full_stays_so_and_one_that_fails_does_not(tmp_path):
    for fate, left in (("full", b"3"), ("failing", b"34")):
        path = tmp_path / fate
        with Disk(tmp_path, 0, fate), path.open("wb", buffering=0) as file:
            for content in (b"", b"34"):
                with contextlib.suppress(OSError):
                    file.write(content)
        assert path.read_bytes() == left


def test_where_the_power_fails_only_what_was_flushed_is_safe(tmp_path):
    lengths = set()
    for i in range(8):
        path = tmp_path / f"{i}"
        with pytest.raises(Killed), Disk(tmp_path, 2 + i, "torn"), path.open("wb", buffering=0) as file:
            file.write(b"safe")
            os.fsync(file.fileno())
            for _ in range(9):
                file.write(b"lost")
        content = path.read_bytes()
        assert content.startswith(b"safe")
        lengths.add(len(content.rstrip(b"\0")) - 4 * (i + 1))
    assert min(lengths) < 0, "of what was not flushed a part must have gone"


def test_a_wrong_end_is_seen(world):
    folder = world.place / "spoiled"
    with world.around(folder):
        world.sweep(folder)
    model = folder / "run/models/BTCUSDT_1h.safetensors"
    other = (folder / "run/models/SOLUSDT_1h.safetensors").read_bytes()
    assert not world.judge(folder) and world.standing(folder, set())[0] == set(world.bars)
    model.write_bytes(other)
    assert world.judge(folder) == "BTCUSDT_1h differs in its model"
    assert world.standing(folder, set())[1] == "ledger and model of BTCUSDT_1h do not agree"
    assert not world.standing(folder, {"BTCUSDT_1h"})[1]
    model.unlink()
    assert world.judge(folder) == "BTCUSDT_1h differs in its model"


def test_a_screen_that_is_not_true_is_seen():
    last, one = "[###.......]  1 of 3 done  30 %", {"A_1h"}
    assert not _judge_screen(f"[1/3] A_1h done: x\r{last}", "through", one)
    assert not _judge_screen("", "killed", one) and not _judge_screen(last, "killed", one)
    assert "the last line is" in _judge_screen(last, "RunError: x", set())
    assert "1 of 3 were told" in _judge_screen(last, "killed", set())
    assert "told as done" in _judge_screen(f"[1/3] A_1h done: x\r{last}", "killed", set())


def test_a_history_is_the_same_again(world):
    assert play(world, "same/1") == play(world, "same/1")
