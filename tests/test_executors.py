"""Executors: every message of every job arrives in order, wherever the jobs run; a lost worker is said."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from conftest import ROOT

from cpbkit.runs import executors


@dataclass(frozen=True)
class Count:
    name: str
    upto: int
    die_at: int = -1
    device: str = "cpu"


def count(job):
    for i in range(job.upto):
        if i == job.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield job.name, i


def whereabouts(job):
    yield os.getpid(), job.device


def sit(job):
    yield os.getpid()
    time.sleep(1000)


def fail(job):
    yield job.name, 0
    raise ValueError("the reason")


JOBS = [Count("a", 3), Count("b", 200), Count("c", 1)]


@pytest.mark.parametrize("execute", [executors.local, lambda u, w: executors.processes(u, w, ["cpu"] * 2)])
def test_all_messages_of_a_unit_arrive_in_order(execute):
    seen = {job.name: [] for job in JOBS}
    for name, i in execute(JOBS, count):
        seen[name].append(i)
    assert seen == {job.name: list(range(job.upto)) for job in JOBS}


def test_a_device_has_one_process_for_all_its_units():
    seen = list(executors.processes([Count(str(i), 1) for i in range(7)], whereabouts, ["cuda:0", "cuda:1"]))
    assert len(seen) == 7
    assert len({process for process, _ in seen}) == len(set(seen)) <= 2
    assert {device for _, device in seen} <= {"cuda:0", "cuda:1"}


def test_a_killed_worker_is_said_after_its_messages():
    seen = []
    with pytest.raises(executors.WorkerLost, match="exit code -9"):
        for message in executors.processes([Count("a", 5, die_at=3)], count, ["cpu"]):
            seen.append(message)
    assert seen == [("a", 0), ("a", 1), ("a", 2)]


def test_a_killed_worker_is_replaced_and_its_unit_goes_on_as_it_is_decided():
    asked = []

    def retry(job, why, halve):
        asked.append((job.name, why, halve))
        return ["told"], [Count("a1", 2), Count("a2", 1)]

    seen = list(executors.processes([Count("a", 5, die_at=1), Count("b", 3)], count, ["cpu"], retry))
    assert seen == [("a", 0), "told", ("a1", 0), ("a1", 1), ("a2", 0), ("b", 0), ("b", 1), ("b", 2)]
    assert asked == [("a", "ended with exit code -9, often the system taking back memory", True)]


def test_an_error_in_a_worker_comes_with_its_traceback():
    with pytest.raises(executors.WorkerLost, match=r"(?s)the job a failed:.*ValueError: the reason"):
        list(executors.processes([Count("a", 1)], fail, ["cpu"]))


def test_stopping_early_stops_the_workers():
    messages = executors.processes([Count("a", 10**9)], count, ["cpu"])
    next(messages)
    messages.close()  # must return: the worker is told to stop


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no kill -9")
def test_a_worker_does_not_outlive_its_parent():
    script = (
        "from cpbkit.runs import executors; import test_executors as t\n"
        "for worker in executors.processes([t.Count('a', 1)], t.sit, ['cpu']): print(worker, flush=True)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), str(ROOT)])}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(worker)
