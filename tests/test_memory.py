"""Memory that stays with the process, and what a piece of work takes: counted, not timed."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from cpbkit.hardware import memory

CPU = torch.device("cpu")
MEGABYTES = 40  # more than glibc ever keeps by itself


def take_and_free():
    """Return the megabytes that stay with the process after a tensor was filled and freed."""
    before = memory.resident()
    torch.ones(MEGABYTES << 18)
    return (memory.resident() - before) / (1 << 20)


@pytest.mark.skipif(not memory._glibc(), reason="another allocator than glibc")
def test_freed_memory_is_kept_inside_and_given_back_after_the_last_one():
    first, after_another, given_back = in_a_fresh_process(keep)
    assert first > 0.9 * MEGABYTES
    assert after_another > 0.9 * MEGABYTES
    assert given_back < 0.5 * MEGABYTES


def in_a_fresh_process(function):
    """Return what a function gives where no tests before left memory free: a tensor takes that first."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(function).result(timeout=120)


def keep():
    """Return the megabytes held inside, inside after another one inside it, and after both."""
    memory.give_back()
    held = memory.resident()
    with memory.kept(CPU):
        first = take_and_free()
        with memory.kept(CPU):
            pass
        after_another = (memory.resident() - held) / (1 << 20)
    return first, after_another, (memory.resident() - held) / (1 << 20)


def test_the_peak_counts_what_is_free_again():
    taken = in_a_fresh_process(measure_peak)
    assert taken is None or 0.9 < taken / (MEGABYTES << 20) < 2


def measure_peak():
    with memory.peak(CPU) as taken:
        torch.ones(MEGABYTES << 18)
    return taken["bytes"]
