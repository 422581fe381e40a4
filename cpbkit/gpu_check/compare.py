"""Two reports of the same loop, before and after a change: did it help?"""

import json
from pathlib import Path

from cpbkit.errors import CpbkitError

NEEDED = ("verdict", "steps a second", "shares", "lines")


def load_report(path: str) -> dict:
    """Read what `cpbkit doctor --json SCRIPT` printed."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CpbkitError(f"a report is what `cpbkit doctor --json train.py` prints; {path} is none: {error}") from None
    missing = [name for name in NEEDED if not isinstance(report, dict) or name not in report]
    if missing:
        raise CpbkitError(f"a report of a loop has {', '.join(NEEDED)}; {path} lacks {', '.join(missing)}")
    return report


def compare_reports(before: dict, after: dict) -> dict:
    """Return the gain in steps a second, and ms a step by account and by line, before and after."""
    rates = before["steps a second"], after["steps a second"]
    if not min(rates) > 0:
        raise CpbkitError(f"both reports must hold steps; got {rates[0]:.3g} and {rates[1]:.3g} a second")
    each = [1e3 / rate for rate in rates]
    names = list(dict.fromkeys([*before["shares"], *after["shares"]]))
    shares = {n: [r["shares"].get(n, 0.0) * ms for r, ms in zip((before, after), each, strict=True)] for n in names}
    texts: list[dict[str, float]] = [{}, {}]
    for found, report, ms in zip(texts, (before, after), each, strict=True):
        for line in report["lines"]:  # by text: a change moves the numbers of lines
            found[line["text"]] = found.get(line["text"], 0.0) + line["share"] * ms
    lines = {text: [found.get(text, 0.0) for found in texts] for text in dict.fromkeys([*texts[0], *texts[1]])}
    return {
        "gain": rates[1] / rates[0],
        "ms a step": each,
        "verdicts": [before["verdict"], after["verdict"]],
        "accounts": shares,
        "lines": lines,
    }


def render_comparison(found: dict) -> str:
    """Write a comparison, the largest changes first."""
    before, after = found["ms a step"]
    word = "faster" if found["gain"] > 1 else "slower"
    times = max(found["gain"], 1 / found["gain"])
    head = f"{times:.2f}x {word}: {before:.3g} ms a step before, {after:.3g} after"
    if abs(found["gain"] - 1) < 0.05:
        head = f"no difference that one run each can tell: {before:.3g} ms a step before, {after:.3g} after"
    old, new = (verdict.replace("_", "-") for verdict in found["verdicts"])
    lines = [head, f"{old} before, {new} after", ""]
    for group in ("accounts", "lines"):
        changed = sorted(found[group].items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        lines += [f"  {name[:60]:<60} {old:8.3g} ms {new:8.3g} ms" for name, (old, new) in changed[:8]]
        lines.append("")
    return "\n".join(lines[:-1])
