"""Where units of work run: in this process, or in a process a core or device."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from cpbkit.errors import CpbkitError

Work = Callable  # unit -> iterator of messages


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
