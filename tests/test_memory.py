"""Memory that stays with the process, and what a piece of work takes: counted, not timed."""

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
    memory.give_back()
    held = memory.resident()
    with memory.kept(CPU):
        assert take_and_free() > 0.9 * MEGABYTES
        with memory.kept(CPU):
            pass
        assert (memory.resident() - held) / (1 << 20) > 0.9 * MEGABYTES
    assert (memory.resident() - held) / (1 << 20) < 0.5 * MEGABYTES


def test_the_peak_counts_what_is_free_again():
    with memory.peak(CPU) as taken:
        torch.ones(MEGABYTES << 18)
    assert taken["bytes"] is None or 0.9 < taken["bytes"] / (MEGABYTES << 20) < 2
