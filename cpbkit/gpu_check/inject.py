"""Loops with a known fault, run as a person would: does the doctor say the word, and name the line?

A loop is a script whose first line is `# expect: WORD`; its guilty line ends in `# here`; `# needs: gpu` is in the
second line of one that only a GPU shows.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from cpbkit.errors import CpbkitError, stoppable

OWN_LOOPS = Path(__file__).parent / "loops"
HEALTHY = "DEVICE_BOUND"
LONGEST = 300  # s a loop


def inject_all(folder: str | Path = OWN_LOOPS, say: Callable[[str], None] = lambda text: None) -> list[dict]:
    """Run each loop of a folder through `cpbkit doctor SCRIPT`; return a row of each. say: hears what was found."""
    loops = sorted(path for path in Path(folder).glob("*.py") if path.name != "__init__.py")
    if not loops:
        raise CpbkitError(f"a folder of loops must hold scripts, each with `# expect: WORD` first; got {str(folder)!r}")
    rows = []
    for path in loops:
        rows.append(row := inject(path))
        say(f"{row['loop']}: {row['found'] or row['note']}")
    return rows


@stoppable()
def inject(path: Path) -> dict:
    """Run one loop from a copy in an empty folder; return what was expected and what was said."""
    lines = path.read_text(encoding="utf-8").splitlines()
    match = re.fullmatch(r"#\s*expect:\s*(\w+)\s*", lines[0] if lines else "")
    if not match:
        raise CpbkitError(f"the first line of a loop must be `# expect: WORD`; got {(lines or [''])[0]!r} in {path}")
    row = {"loop": path.stem, "expected": match[1], "found": "", "named": None, "note": "", "text": ""}
    if lines[1:2] and re.match(r"#\s*needs:\s*gpu", lines[1]) and not torch.cuda.is_available():
        return row | {"note": "not run: needs an NVIDIA GPU"}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        command = [sys.executable, "-m", "cpbkit", "doctor", "--json", path.name]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return row | {"note": f"not diagnosed within {LONGEST} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return row | {"note": f"not diagnosed: {last}"}
    found = json.loads(done.stdout)
    here = [i for i, line in enumerate(lines, 1) if line.rstrip().endswith("# here")]
    named = any(re.search(rf"{re.escape(path.name)}:{i}\b", found["text"]) for i in here) if here else None
    return row | {"found": found["verdict"], "named": named, "text": found["text"]}


def render_faults(rows: list[dict]) -> str:
    """Write what was said of each loop, the confusion matrix, and the score."""
    lines = [f"  {'loop':<24}{'expected':<24}{'found':<24}line"]
    for row in rows:
        said = {True: "named", False: "not named", None: ""}[row["named"]]
        mark = "" if row["found"] in ("", row["expected"]) else "   <- wrong"
        lines.append(f"  {row['loop']:<24}{row['expected']:<24}{row['found'] or row['note']:<24}{said}{mark}")
    faults = [row for row in rows if row["expected"] != HEALTHY and not row["note"].startswith("not run")]
    healthy = [row for row in rows if row["expected"] == HEALTHY]
    right = [row for row in faults if row["found"] == row["expected"]]
    alarms = [row for row in healthy if row["found"] not in ("", HEALTHY, "INCONCLUSIVE")]
    tried = pd.DataFrame([row for row in rows if row["found"]])
    if len(tried):
        lines += ["", pd.crosstab(tried.expected, tried.found).to_string()]
    score = f"{len(right)} of {len(faults)} faults named, {sum(row['named'] is not False for row in right)} with their "
    score += f"line; {len(alarms)} false alarms in {len(healthy)} healthy loops; "
    return "\n".join([*lines, "", f"{score}{len(rows) - len(faults) - len(healthy)} not run"])
