"""Where jobs run: in this process, in a process per core or device, or on a Ray cluster."""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from cpbkit.errors import TERMINATED, CpbkitError, Terminated
from cpbkit.runs import stopping

Work = Callable  # job, a dataclass with a name, a device and a checkpoint -> iterator of messages
# A lost job, why, whether it needs less memory -> what to say, and the jobs to run instead.
Retry = Callable[[Any, str, bool], tuple[list, list]]
RETRIES = 3  # of a job whose node is lost
TICK = 0.5  # s between two looks whether the sweep is asked to end


@dataclass(frozen=True)
class Ray:
    """A Ray cluster to run stacks on: `cpb.sweep(..., executor=cpb.Ray("FIRST:6379", gpus=0.5))`."""

    address: str = ""  # as `ray.init` takes it; empty takes RAY_ADDRESS, else this machine
    gpus: float = 1.0  # that a stack takes, where the cluster has any; may be a part of one


class WorkerLost(CpbkitError):
    """A worker ended without finishing its job."""


def local(jobs: Sequence, work: Work) -> Iterator:
    """Run the jobs here, one after another; the process has its threads and random state back afterwards."""
    import torch

    from cpbkit.hardware.device import on_threads

    with on_threads(), torch.random.fork_rng(devices=[]):
        for job in jobs:
            if _is_wanted(job):
                yield from work(job)


def _is_wanted(job) -> bool:
    """Say whether a job that waits is to begin: not where all its models are to end with their running epoch."""
    leaving = stopping.leaving()
    return not leaving or any(series.name not in leaving for series in job.series)


def processes(jobs: Sequence, work: Work, devices: Sequence[str], retry: Retry | None = None) -> Iterator:
    """Run the jobs in spawned processes, one for each of `devices`; the messages of one job keep their order.

    A process lives for all its jobs, since starting one costs seconds. retry: for a job whose process is killed.
    Errors: WorkerLost with the job's own traceback, or its exit code when it was killed and there is no retry.
    """
    context, waiting = multiprocessing.get_context("spawn"), deque(jobs)
    workers: dict[Connection, tuple[BaseProcess, str]] = {}
    running: dict[Connection, Any] = {}  # jobs
    told = False  # the workers that they are to end
    left: frozenset[str] = frozenset()  # models of which the workers know that they are to end

    def give() -> None:
        """Give the jobs that wait to the workers that are free, and to a new one where a device has none."""
        for job in [job for job in waiting if not _is_wanted(job)]:
            waiting.remove(job)
        free = [pipe for pipe in workers if pipe not in running]
        vacant = Counter(devices) - Counter(device for _, device in workers.values())
        with _nothing_to_run():
            for device in list(vacant.elements())[: max(0, len(waiting) - len(free))]:
                pipe, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, theirs), daemon=True)
                with stopping.deaf():
                    process.start()
                theirs.close()
                workers[pipe] = process, device
                free.append(pipe)
        for pipe in free[: len(waiting)]:
            running[pipe] = replace(waiting.popleft(), device=workers[pipe][1])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone, which a reading tells
                pipe.send(stopping.leaving())
                pipe.send(running[pipe])

    try:
        give()
        while running:
            if stopping.is_asked() and not told:
                told = True
                for process, _ in workers.values():
                    stopping.pass_on(process)
            if stopping.leaving() != left:
                left = stopping.leaving()
                for pipe in running:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        pipe.send(left)
            for pipe in (pipe for pipe in wait(list(running), TICK) if isinstance(pipe, Connection)):
                code: int | None = None  # with which the process has ended
                try:
                    message, error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    message, error = None, ""
                    process, _ = workers.pop(pipe)
                    process.join()
                    code = process.exitcode
                if message is not None:
                    yield message
                    continue
                job = running.pop(pipe)
                if code is not None:
                    if told := told or stopping.is_asked():
                        continue
                    was_killed = code < 0  # by a signal, such as the kernel's when memory is short
                    end = f"ended with exit code {code}"
                    if code == -9:
                        end += ", often the system taking back memory"
                    if retry is None or not (was_killed or code == TERMINATED):  # or asked by a SIGTERM of its own
                        why = f"the process of job {job.name} {end}. The same command goes on where it stopped"
                        raise WorkerLost(why)
                    messages, again = retry(job, end, was_killed)
                    yield from messages
                    waiting.extendleft(reversed(again))
                elif isinstance(error, CpbkitError):
                    raise error
                elif error:
                    raise WorkerLost(f"the job {job.name} failed:\n{error}")
                if not told:
                    give()
        if told:
            raise Terminated
    finally:
        for process, _ in workers.values():
            process.kill()  # they hold nothing that is not here
        for process, _ in workers.values():
            process.join()


@contextlib.contextmanager
def _nothing_to_run() -> Iterator[None]:
    """Hide the caller's script from processes that start now: they would run it again, and sweep again in it."""
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _serve(work: Work, pipe: Connection) -> None:
    threading.Thread(target=_leave_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    try:
        with stopping.listening(in_worker=True):
            while True:
                if isinstance(job := pipe.recv(), frozenset):
                    stopping.wish(leaving=job)
                    continue
                with stopping.patiently():
                    for message in work(job):
                        pipe.send((message, ""))
                        while pipe.poll():
                            stopping.wish(leaving=pipe.recv())
                pipe.send((None, ""))
    except Terminated:
        pipe.close()
        os._exit(TERMINATED)
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        return  # the parent was interrupted or is gone, and has spoken
    except CpbkitError as error:
        pipe.send((None, error))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def _leave_with(parent: BaseProcess) -> None:
    """End this process when its parent is gone, even in the middle of a step: its run may go on elsewhere."""
    parent.join()
    os._exit(1)


def connect(address: str = "") -> dict[str, float]:
    """Join a Ray cluster, or start one on this machine; return what it has: {"CPU": 8.0, "GPU": 1.0, ...}.

    address: as `ray.init` takes it; empty takes RAY_ADDRESS, else this machine.
    Errors: CpbkitError without ray, or when the cluster is not to be reached.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise CpbkitError("running on a cluster needs ray; install it with `pip install cpbkit[ray]`") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address or None, log_to_driver=False, logging_level=logging.WARNING)
        except Exception as error:  # where a node does not come up, ray raises just this
            raise CpbkitError(f"no Ray cluster answers at {address or 'RAY_ADDRESS'}: {error}") from error
    return ray.cluster_resources()


def call_on_ray(function: Callable, *args, gpus: float):
    """Return function(*args), computed on a node of the cluster that `connect` joined."""
    import ray

    return ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(function).remote(*args))


def on_ray(jobs: Sequence, work: Work, gpus: float, retry: Retry) -> Iterator:
    """Run the jobs on the Ray cluster that `connect` joined, one CPU each and `gpus` of a GPU, which may be a part.

    Messages stream back as they come. A job whose node is lost starts again elsewhere from its last checkpoint.
    retry: for a job whose process is killed on a node that lives, or that is lost more than RETRIES times.
    Errors: WorkerLost with the job's own traceback.
    """
    import ray

    @ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, num_returns="streaming")
    def serve(job):
        yield ray.get_runtime_context().get_node_id()
        yield from work(job)

    def start(job):
        running[serve.remote(job)] = job

    running: dict = {}
    places: dict = {}  # nodes, by the stream of what runs there
    lost: Counter[str] = Counter()  # how often, by job
    for job in jobs:
        start(job)
    try:
        while running:
            stream: Any  # a generator of references, which ray's types do not know
            ready, _ = ray.wait(list(running), num_returns=1, timeout=TICK)
            if stopping.is_asked():
                raise Terminated
            if not ready:
                continue
            (stream,) = ready
            job = running[stream]
            try:
                message: Any = ray.get(next(stream))
            except StopIteration:
                del running[stream]
                continue
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, CpbkitError):
                    raise error.cause from None
                raise WorkerLost(f"the job {job.name} failed:\n{error}") from error
            except ray.exceptions.RayError as error:
                del running[stream]
                lost[job.name] += 1
                alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
                short = isinstance(error, ray.exceptions.OutOfMemoryError | ray.exceptions.WorkerCrashedError)
                killed = short and places.get(stream) in alive  # else it has gone with its node, and is not at fault
                if killed or lost[job.name] > RETRIES:
                    messages, again = retry(job, f"lost its worker: {str(error).splitlines()[0]}", short)
                    yield from messages
                    for one in again:
                        start(one)
                else:
                    start(job)
                continue
            if stream not in places:
                places[stream] = message
                continue
            # A job that was halved speaks for its halves too; it would go on as a whole.
            content = getattr(message, "content", None)
            if content is not None and message.job == job.name:
                running[stream] = replace(job, checkpoint=content)
            yield message
    finally:
        for stream in running:
            ray.cancel(stream, force=True)
