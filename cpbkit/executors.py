"""Where units of work run: in this process, in a process a core or device, or on a Ray cluster."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait

from cpbkit.errors import CpbkitError

Work = Callable  # unit, a dataclass with a name and a checkpoint -> iterator of messages
RETRIES = 3  # of a unit whose node is lost


class WorkerLost(CpbkitError):
    """A worker ended without finishing its unit."""


def local(units: Sequence, work: Work) -> Iterator:
    """Run the units here, one after another."""
    for unit in units:
        yield from work(unit)


def processes(units: Sequence, work: Work, workers: int) -> Iterator:
    """Run the units in up to `workers` spawned processes; the messages of one unit keep their order.

    Errors: WorkerLost with the unit's own traceback, or its exit code when it was killed.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = list(units), {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                unit = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_serve, args=(unit, work, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = (unit.name, process)
            for pipe in wait(list(running)):
                name, process = running[pipe]
                try:
                    message, error = pipe.recv()
                except EOFError:
                    process.join()
                    raise WorkerLost(
                        f"the process of unit {name} ended with exit code {process.exitcode}. Often that is the "
                        "system taking back memory; the same command goes on where it stopped"
                    ) from None
                if error:
                    raise WorkerLost(f"the unit {name} failed:\n{error}")
                if message is None:
                    process.join()
                    del running[pipe]
                else:
                    yield message
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


def _serve(unit, work: Work, pipe: Connection) -> None:
    try:
        for message in work(unit):
            pipe.send((message, ""))
        pipe.send((None, ""))
    except (KeyboardInterrupt, BrokenPipeError):
        return  # the parent was interrupted or is gone, and has spoken
    except BaseException:
        pipe.send((None, traceback.format_exc()))


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
                raise WorkerLost(f"the unit {unit.name} failed:\n{error}") from error
            except ray.exceptions.RayError as error:
                del running[stream]
                lost[unit.name] += 1
                if lost[unit.name] > RETRIES:
                    raise WorkerLost(f"the unit {unit.name} was lost {lost[unit.name]} times: {error}") from error
                start(unit)
                continue
            if (content := getattr(message, "content", None)) is not None:
                running[stream] = replace(unit, checkpoint=content)
            yield message
    finally:
        for stream in running:
            ray.cancel(stream, force=True)
