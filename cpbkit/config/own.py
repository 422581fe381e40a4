"""A person's own parts, named `module:name` or `file.py:name`: found from the current folder, known by their source."""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from cpbkit.errors import NO_MEMORY, CpbkitError


def is_own(name: str) -> bool:
    """Say whether a name in an experiment is that of a person's own part.

    Errors: CpbkitError for anything else than a name, and for one that only this process would find.
    """
    if not isinstance(name, str) or name.startswith("__main__:"):
        raise CpbkitError(
            f"a part of your own is named module:name or file.py:name in an experiment; got {name!r}. Give `sweep` "
            "the class or function itself, and it gets such a name"
        )
    return ":" in name


def find(name: str, kind: str) -> Callable:
    """Return what `module:name` or `file.py:name` names; this runs the module.

    Modules are looked for in the current folder too. Errors: CpbkitError where there is no such thing.
    """
    place, _, attribute = name.rpartition(":")
    try:
        found = getattr(_load(place), attribute)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise CpbkitError(
            f"{kind} of your own is named module:name or file.py:name, found from the current folder {os.getcwd()}; "
            f"got {name!r} ({error})"
        ) from None
    if not callable(found):
        raise CpbkitError(
            f"{kind} of your own is a class or a function; {name} is {type(found).__name__} {found!r:.40}"
        )
    return found


def _load(place: str):
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    try:
        return _import(place)
    except (ImportError, CpbkitError):
        raise
    except Exception as error:  # of the person's own lines
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if Path(at.filename).stem == stem]
        if isinstance(error, SyntaxError) and Path(error.filename or "").stem == stem:
            lines.append(error.lineno)
        if not lines and isinstance(error, OSError | ValueError):  # of the name itself
            raise
        line = lines[-1] if lines else None
        raise CpbkitError(f"{place}{f', line {line}' if line else ''}: {type(error).__name__}: {error}") from error


def _import(place: str):
    if os.getcwd() not in sys.path:  # `python -m` has it there, an installed command and a worker have not
        sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve(strict=True)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # under its plain name, so that its classes can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(path.stem, None)
        if known is not None:
            sys.modules[path.stem] = known
        raise
    return module


def forget(names: Iterable[str]) -> None:
    """Let the files of own parts be run anew when they are next asked for, and forget what they remembered."""
    for place in {name.rpartition(":")[0] for name in names if is_own(name)}:
        sys.modules.pop(Path(place).stem if place.endswith(".py") else place, None)


def members(place: str, is_wanted: Callable[[object], bool], kind: str) -> tuple[str, ...]:
    """Name what a file or module holds that is wanted, in its order. Errors: CpbkitError where there is none."""
    try:
        module = _load(place)
    except (ImportError, OSError, ValueError) as error:
        raise CpbkitError(f"{kind} of your own stand in a file such as mine.py; got {place!r} ({error})") from None
    found = tuple(f"{place}:{name}" for name, value in vars(module).items() if is_wanted(value))
    if not found:
        raise CpbkitError(f"{place} must hold {kind} of your own; it has none. Mark each with @cpbkit.feature")
    return found


@contextlib.contextmanager
def running(name: str, wanted: str) -> Iterator[None]:
    """Let a fault in an own part end in a sentence that names its line. wanted: what such a part is, in a sentence.

    Errors: CpbkitError; memory that is short is no fault of the part, and stays what it is.
    """
    try:
        yield
    except CpbkitError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        if isinstance(error, MemoryError) or any(words in said for words in NO_MEMORY):
            raise
        path = str(source(name))
        lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == path]
        at = f", line {lines[-1]}" if lines else ""
        raise CpbkitError(f"{name}{at}: {type(error).__name__}: {said}. {wanted}") from error


def source(name: str) -> Path:
    """Return the file that holds an own part. Errors: CpbkitError as `find`."""
    found = inspect.getsourcefile(inspect.unwrap(find(name, "a part")))
    if found is None:
        raise CpbkitError(f"a part of your own must have a file with its source; {name} has none")
    return Path(found)


def fingerprint(name: str) -> str:
    """Return the SHA-256 of the source that holds an own part. Errors: CpbkitError as `find`."""
    return hashlib.sha256(source(name).read_bytes()).hexdigest()


def require_consent(names: Iterable[str], trust_code: bool, whose: str, pretrained: str = "") -> None:
    """Refuse code, and a foundation model, that a run or model of somebody else may name, unless the person says so.

    Errors: CpbkitError, with what to say.
    """
    code = ", ".join(sorted(set(filter(is_own, names))))
    wanted = [f"code on this machine: {code}"] if code else []
    wanted += [f"the foundation model {pretrained}, from a folder or the Hub"] if pretrained else []
    if wanted and not trust_code:
        raise CpbkitError(
            f"{whose} asks for {'; and for '.join(wanted)}. Where you know that, allow it by trust_code=True, in the "
            "terminal --trust-code"
        )
