"""Where units of work run: in this process, in a process a core or device, or on a Ray cluster."""

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from cpbkit.errors import CpbkitError

Work = Callable  # unit, a dataclass with a name, a device and a checkpoint -> iterator of messages
RETRIES = 3  # of a unit whose node is lost


class WorkerLost(CpbkitError):
    """A worker ended without finishing its unit."""


def local(units: Sequence, work: Work) -> Iterator:
    """Run the units here, one after another; the process has its threads and random state back afterwards."""
    import torch

    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            for unit in units:
                yield from work(unit)
    finally:
        torch.set_num_threads(threads)


def processes(units: Sequence, work: Work, devices: Sequence[str]) -> Iterator:
    """Run the units in spawned processes, one for each of `devices`; the messages of one unit keep their order.

    A process lives for all its units, since starting one costs seconds.
    Errors: WorkerLost with the unit's own traceback, or its exit code when it was killed.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(units)
    workers: dict[Connection, tuple[BaseProcess, str]] = {}
    running: dict[Connection, str] = {}  # names of units

    def give(pipe: Connection) -> None:
        unit = replace(waiting.popleft(), device=workers[pipe][1])
        running[pipe] = unit.name
        with contextlib.suppress(BrokenPipeError):  # it is gone, which the next reading tells
            pipe.send(unit)

    try:
        with _nothing_to_run():
            for device in devices[: len(waiting)]:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(work, theirs), daemon=True)
                process.start()
                theirs.close()
                workers[ours] = process, device
        for pipe in workers:
            give(pipe)
        while running:
            for pipe in wait(list(running)):
                try:
                    message, error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = workers[pipe][0]
                    process.join()
                    why = "Often that is the system taking back memory; the" if process.exitcode == -9 else "The"
                    raise WorkerLost(
                        f"the process of unit {running[pipe]} ended with exit code {process.exitcode}. {why} same "
                        "command goes on where it stopped"
                    ) from None
                if isinstance(error, CpbkitError):
                    raise error
                if error:
                    raise WorkerLost(f"the unit {running[pipe]} failed:\n{error}")
                if message is not None:
                    yield message
                    continue
                del running[pipe]
                if waiting:
                    give(pipe)
    finally:
        for process, _ in workers.values():
            process.terminate()
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
        while True:
            for message in work(pipe.recv()):
                pipe.send((message, ""))
            pipe.send((None, ""))
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
            ray.init(address=address or None, log_to_driver=False, logging_level="warning")
        except (ConnectionError, ValueError) as error:
            raise CpbkitError(f"no Ray cluster answers at {address or 'RAY_ADDRESS'}: {error}") from error
    return ray.cluster_resources()


def call_on_ray(function: Callable, *args, gpus: float = 0.0):
    """Return function(*args), computed on a node of the cluster that `connect` joined."""
    import ray

    return ray.get(ray.remote(num_cpus=1, num_gpus=gpus)(function).remote(*args))


def on_ray(units: Sequence, work: Work, gpus: float = 0.0) -> Iterator:
    """Run the units on the Ray cluster that `connect` joined, one CPU each and `gpus` of a GPU, which may be a part.

    Messages stream back as they come. A unit whose node is lost starts again elsewhere from its last checkpoint.
    Errors: WorkerLost when a unit is lost more than RETRIES times; an error inside a unit with its own traceback.
    """
    import ray

    @ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0, num_returns="streaming")
    def serve(unit):
        yield from work(unit)

    def start(unit):
        running[serve.remote(unit)] = unit

    running: dict = {}
    lost = dict.fromkeys((unit.name for unit in units), 0)
    for unit in units:
        start(unit)
    try:
        while running:
            (stream, *_), _ = ray.wait(list(running), num_returns=1)
            unit = running[stream]
            try:
                message = ray.get(next(stream))
            except StopIteration:
                del running[stream]
                continue
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, CpbkitError):
                    raise error.cause from None
                raise WorkerLost(f"the unit {unit.name} failed:\n{error}") from error
            except ray.exceptions.RayError as error:
                del running[stream]
                lost[unit.name] += 1
                if lost[unit.name] > RETRIES:
                    raise WorkerLost(f"the unit {unit.name} was lost {lost[unit.name]} times: {error}") from error
                start(unit)
                continue
            # A unit that was halved speaks for its halves too; it would go on as a whole.
            content = getattr(message, "content", None)
            if content is not None and message.unit == unit.name:
                running[stream] = replace(unit, checkpoint=content)
            yield message
    finally:
        for stream in running:
            ray.cancel(stream, force=True)
