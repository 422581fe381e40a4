"""A sweep on a disk that fails or at which it dies, at one operation after another, and with damaged files."""

import os
import random

import pytest

from benchmarks.disk import Disk, Killed
from benchmarks.histories import World, go_through_boundaries, play
from cpbkit import atomic

EVERY = "CPBKIT_EVERY_BOUNDARY"  # set it to go through all operations; else a few of them, others each time


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def test_a_sweep_ends_right_after_a_failure_or_a_kill_at_any_operation(world):
    def some(count):
        return range(count) if os.environ.get(EVERY) else random.sample(range(count), 4)

    told = go_through_boundaries(world, some)
    assert set(told["operations"]) == {"write", "fsync", "replace", "unlink", "mkdir"} and not told["wrong"]


def test_random_histories_end_right(world):
    for i in range(4):
        found, happened = play(world, f"suite/{i}")
        assert not found, (found, happened)


def test_the_disk_fails_where_it_is_told_to(tmp_path):
    path = tmp_path / "a"
    for at, operation in enumerate(("write", "fsync", "replace")):
        with pytest.raises(OSError, match="No space left") as told, Disk(tmp_path, at) as disk:
            atomic.write_bytes(path, b"1234")
        assert disk.seen[at] == operation and told.value.filename == str(path) and not list(tmp_path.iterdir())
    with pytest.raises(Killed), Disk(tmp_path, 0, deadly=True):
        atomic.write_bytes(path, b"1234")
    (part,) = tmp_path.iterdir()
    assert part.read_bytes() == b"12", "half is written, and nobody cleans up after a kill"


def test_a_wrong_end_is_seen(world):
    world.sweep(world.place / "spoiled")
    (world.place / "spoiled/models/BTCUSDT_1h.safetensors").unlink()
    assert world.judge(world.place / "spoiled") == "the model of BTCUSDT_1h differs"
