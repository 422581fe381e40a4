"""Other forecasting libraries on the same series, shape, batches and steps, each in an environment of its own."""

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cpbkit.bench.market import make_series
from cpbkit.config.experiment import Experiment
from cpbkit.hardware.environment import count_cores

LIBRARIES = {"neuralforecast": "neuralforecast", "darts": "darts[torch]"}  # what pip is asked for
# The library's network that stands beside ours. The first three are the same network, but for a small head;
# of `gru` and `lstm` only the encoder is: ours decode step by step, theirs write the whole horizon at once.
MODELS = {"gru_dense": "gru", "nlinear": "nlinear", "dlinear": "dlinear", "gru": "gru", "lstm": "lstm"}
ALIKE = ("gru_dense", "nlinear", "dlinear")
STEPS = 60
INSTALL_SECONDS = 900
FIT_SECONDS = 600
SCRIPT = Path(__file__).with_name("peer.py")


def bench_peers(rows: Sequence[dict], cases: dict[str, Experiment], say: Callable[[str], None]) -> dict:
    """Time each library on the cases that it has a model for; `missing` says what could not be measured and why."""
    found, missing = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            say(f"installing {library}")
            try:
                python, version = install(library, Path(folder) / library)
            except (subprocess.SubprocessError, OSError) as error:
                missing[library] = f"not measured, it could not be installed: {last_line(error)}"
                continue
            for row in rows:
                if row["model"] not in MODELS:
                    continue
                say(f"{library} {version}: {row['case']}")
                try:
                    timed = time_library(python, library, cases[row["case"]], Path(folder))
                except (subprocess.SubprocessError, OSError, ValueError) as error:
                    missing[f"{library}, {row['case']}"] = f"not measured: {last_line(error)}"
                    continue
                ours, theirs = row["sides"]["engine"]["steps_per_second"], 1 / timed["seconds_a_step"]
                told = {"library": library, "version": version, "case": row["case"]}
                told |= {"same_network": row["model"] in ALIKE, "unit": "steps of one model a second"}
                found.append(told | {"ours": ours, "theirs": theirs, "ratio": ours / theirs, **timed})
    return {"rows": found, "missing": missing, "steps": STEPS}


def install(library: str, folder: Path) -> tuple[Path, str]:
    """Install a library into a new environment that sees this one's packages; return its Python and the version."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], 60).strip())
    own = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "here.pth").write_text("\n".join(sorted(own)) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, LIBRARIES[library]], INSTALL_SECONDS)
    code = f"import importlib.metadata; print(importlib.metadata.version({library!r}))"
    return python, _run([python, "-c", code], 60).strip()


def time_library(python: Path, library: str, experiment: Experiment, folder: Path) -> dict:
    """Time the steps of one model of a library on the first series of the benchmark."""
    task, model, training = experiment.task, experiment.model, experiment.training
    series = make_series(task, 1)[0]
    values = (series.inputs - series.inputs.mean(0)) / series.inputs.std(0)
    np.savez(folder / "series.npz", values=values)
    spec = {
        "library": library,
        "model": MODELS[model.name],
        "values": str(folder / "series.npz"),
        "context": task.context,
        "horizon": task.horizon,
        "width": model.width,
        "layers": model.layers,
        "batch": training.batch,
        "learning_rate": training.learning_rate,
        "steps": STEPS,
        "threads": sorted({1, count_cores()}),
    }
    return json.loads(_run([python, SCRIPT], FIT_SECONDS, json.dumps(spec), folder).splitlines()[-1])


def last_line(error: Exception) -> str:
    """Return the line of a failed command that says most."""
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _run(command: Sequence, seconds: float, given: str | None = None, folder: Path | None = None) -> str:
    return subprocess.run(
        [str(part) for part in command],
        input=given,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=True,
    ).stdout
