"""A training script of any kind, run under the watch."""

import runpy
import sys
import traceback
from pathlib import Path

from cpbkit.errors import CpbkitError
from cpbkit.gpu_check.watch import UNSTEPPED, Watch, watch


def run_script(path: str, arguments: tuple[str, ...] = (), live: bool = True) -> tuple[Watch, str]:
    """Run a script as `python path arguments` would, and return (the watch over it, how it ended early or "").

    Ctrl-C ends the script, not the verdict on what was seen so far; a script that fails says so with its traceback.
    """
    if not Path(path).is_file():
        raise CpbkitError(f"doctor runs a training script; got {path!r}, which is no file")
    before = sys.argv[:], sys.path[:]
    sys.argv[:], sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    ended = ""
    try:
        with watch(live=live, tell=False) as watched:
            try:
                runpy.run_path(path, run_name="__main__")
            except KeyboardInterrupt:
                ended = "stopped by Ctrl-C: what follows is what was seen so far"
            except SystemExit as end:
                ended = f"the script ended with {end.code!r}" if end.code else ""
            except Exception as error:  # the person's, shown as Python would; the verdict so far is theirs too
                traceback.print_exc()
                ended = f"the script failed: {type(error).__name__}: {error}"
    finally:
        sys.argv[:], sys.path[:] = before
    if not watched.steps:
        raise CpbkitError(
            f"no step of a torch.optim optimiser was seen in {path}, nor {UNSTEPPED} passes backward; the doctor "
            "watches training in this process" + (f" ({ended})" if ended else "")
        )
    return watched, ended
