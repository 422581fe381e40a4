"""What a figure was got on: date, machine, versions and commit, for every run and every benchmark."""

import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

from cpbkit import __version__
from cpbkit.hardware.environment import count_cores, host_memory

LIBRARIES = ("numpy", "pandas", "scipy", "TA-Lib", "neuralforecast", "darts")


def describe() -> dict:
    """Return machine, date, versions and commit, as every document of a benchmark carries them."""
    versions = {"cpbkit": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": cpu_name(),
            "cores": count_cores(),
            "memory": host_memory(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        },
        "versions": versions,
        "commit": commit(Path(__file__).parent),
    }


def cpu_name() -> str:
    """Return the processor's name, or what the platform says of it."""
    return cpu_fact("model name") or platform.processor() or platform.machine()


def cpu_fact(name: str) -> str:
    """Return what Linux says of the first processor under a name of /proc/cpuinfo; "" elsewhere."""
    try:
        found = re.search(rf"^{name}\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1).strip() if found else ""


def commit(folder: Path) -> str:
    """Return the short hash of the code's commit, with + where files have changed; empty without git.

    A package that is only installed inside somebody's checkout is no part of it, and has none.
    """
    # A checkout may name a program of its own to watch its files, which looking for changes would run.
    git = ["git", "-c", "core.fsmonitor=false", "-C", str(folder)]
    try:
        # The first fails for a package that the checkout does not hold.
        for words in ("ls-files --error-unmatch .", "describe --always --abbrev=10 --exclude=* --dirty=+"):
            done = subprocess.run([*git, *words.split()], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
