"""`cpbkit bench doctor`: how often the diagnosis is right, on a simulated host and device."""

from collections.abc import Callable

from cpbkit.gpu_check.simulator import score_verdicts
from cpbkit.hardware import provenance

LOOPS, QUICK_LOOPS = 40, 8  # of each scenario
JITTER = 0.05  # relative error of every measured time
SEED = 0


def bench_doctor(*, quick: bool = False, say: Callable[[str], None] = lambda text: None) -> dict:
    """Diagnose simulated loops whose truth is known; return the document that `render` shows."""
    loops = QUICK_LOOPS if quick else LOOPS
    say(f"{loops} loops of each scenario, {JITTER:.0%} jitter")
    score = score_verdicts(loops, JITTER, SEED).to_dict()
    return {
        "bench": "doctor",
        **provenance.describe(),
        "jitter": JITTER,
        "seed": SEED,
        "simulated": True,
        "score": score,
    }
