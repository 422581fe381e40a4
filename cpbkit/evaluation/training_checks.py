"""Is the training sound? The first tensor that is not finite, and a table of checks over finished models."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cpbkit.evaluation.results import ResultLine
from cpbkit.quantities import counted

SCALE = 0.01, 100.0  # between which the root mean square of scaled targets should lie
FIRST_LOSS = 10.0  # times the loss of persistence or the mean above which a first loss, or an error, is off
SKIPPED = 0.02  # share of steps without a finite gradient above which a number format is too small
CLIPPED = 0.9  # share of clipped steps above which the gradient is out of hand
STUCK = 0.999  # share of its first train loss above which a model has learned nothing
COLLAPSED = 0.02  # deviation of forecasts over that of the truth below which they say nothing
DEAD = 1e-6  # and below which they are all the same


@dataclass(frozen=True)
class Check:
    """One line of the health table."""

    series: str
    check: str
    verdict: str  # OK | NOTE | SICK
    evidence: str


def check_results(results: Iterable[ResultLine]) -> list[Check]:
    """Examine each line of a ledger: are its targets and first loss of the right order, has it learned anything?"""
    return [Check(line.series, *found) for line in results for found in _check(line)]


def tell_unsound(results: Iterable[ResultLine]) -> str:
    """Say which models that have a verdict were not trained soundly; empty where all were."""
    done = [line for line in results if line.status == "done"]
    sick = [check for check in check_results(done) if check.verdict == "SICK"]
    if not sick:
        return ""
    count = len({check.series for check in sick})
    said = f"{sick[0].series}: {sick[0].check}: {sick[0].evidence}"
    return f"Not trained soundly: {count} of {counted(len(done), 'model')} ({said}); the report says which, and why"


def _check(line: ResultLine) -> Iterable[tuple[str, str, str]]:
    """Yield the check, its verdict and the evidence."""
    if line.status == "failed":
        yield "data", "SICK", line.reason
        return
    if line.status == "sick":
        yield "finite", "SICK", line.reason
    else:
        yield "finite", "OK", f"every loss of {line.epochs} epochs"
    if "could not be captured" in line.mode:
        yield "step", "NOTE", line.mode
    naive = line.persistence.get("train", 0.0)
    if naive >= 0:  # an own loss may be below, which says nothing of the targets
        size = math.sqrt(naive)
        verdict = "OK" if SCALE[0] <= size <= SCALE[1] else "NOTE" if size < SCALE[0] else "SICK"
        why = "" if verdict == "OK" else ", far from 1: a step of the usual size is too large or too small; scale them"
        yield "target scale", verdict, f"scaled targets are {size:.3g} on average{why}"
    curve = {name: [value for value in values if value is not None] for name, values in line.curve.items()}
    if curve.get("train") and line.persistence:
        spreads = {head: judged.get("spread", 0.0) for head, judged in line.test.items()}
        baselines = {"persistence": line.persistence} | ({"mean": line.mean} if line.mean else {})
        yield from _check_losses(curve, baselines, has_scale=naive > 0)
        yield from _check_gradient(curve, spreads)
        for head, spread in spreads.items():
            if spread <= DEAD:
                yield f"output {head}", "SICK", f"every forecast of {head} is the same"
            else:
                verdict = "OK" if spread > COLLAPSED else "NOTE"
                yield f"output {head}", verdict, f"forecasts of {head} vary {spread:.2%} as much as the truth"
        for head, judged in line.test.items():  # an own loss may fall while the error rises
            worst = max(judged.get("baselines", {}).values(), default=0.0)
            if judged.get("rmse", 0.0) ** 2 > FIRST_LOSS * worst**2 > 0:
                times = (judged["rmse"] / worst) ** 2
                why = "is the learning rate too high, or the sign of an own loss wrong?"
                yield f"error {head}", "SICK", f"its MSE is {times:.3g} times that of the worst naive forecast: {why}"


def _check_losses(
    curve: dict[str, list], baselines: dict[str, dict], has_scale: bool
) -> Iterable[tuple[str, str, str]]:
    train, validation = curve["train"], curve.get("validation", [])
    beside = ", ".join(f"{kind} {losses.get('train', math.nan):.3g}" for kind, losses in baselines.items())
    usual = not has_scale or train[0] < FIRST_LOSS * max(losses.get("train", 0.0) for losses in baselines.values())
    why = "" if usual else ": is the learning rate too high, or a column not scaled?"
    yield "first loss", "OK" if usual else "SICK", f"{train[0]:.3g} in the first epoch; {beside}{why}"
    falls = train[0] - min(train) > (1 - STUCK) * abs(train[0])
    yield "learns", "OK" if falls else "NOTE", f"train loss {train[0]:.4g} to {min(train):.4g}"
    if validation:
        best = min(validation)
        least, kind = min((losses.get("validation", math.inf), kind) for kind, losses in baselines.items())
        verdict = "OK" if best < least else "NOTE"
        yield "holds", verdict, f"best validation loss {best:.4g}, that of {kind} {least:.4g}"


def _check_gradient(curve: dict[str, list], spreads: dict[str, float]) -> Iterable[tuple[str, str, str]]:
    norms, clipped = curve.get("gradient_norm", []), curve.get("clipped", [])
    if not (norms and clipped):
        return
    if max(norms):
        share = sum(clipped) / len(clipped)
        text = f"norm before clipping {norms[0]:.3g} to {norms[-1]:.3g}, {share:.0%} of steps clipped"
        skipped = sum(curve.get("skipped", ())) / len(norms)
        text += f", {skipped:.0%} skipped for a gradient that was not finite" if skipped else ""
        yield "gradient", "OK" if share < CLIPPED and skipped < SKIPPED else "NOTE", text
    elif any(spread > DEAD for spread in spreads.values()):
        yield "gradient", "OK", "solved, or trained elsewhere"
    else:
        yield "gradient", "SICK", "no gradient reaches the weights"
