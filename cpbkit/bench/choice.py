"""Which preset to take: what each is, and what was measured of it on this machine."""

import torch

from cpbkit.bench.report import duration, size, table
from cpbkit.config.presets import ABOUT, PRESETS
from cpbkit.models import zoo

PATIENT = 3600.0  # seconds for forty models that a person may wait for


def describe_presets(timed: dict | None) -> dict:
    """Return a row per preset and which one to take; timed: what `bench_presets` returned here, or None."""
    measured = {row["preset"]: row for row in timed["rows"]} if timed else {}
    rows = []
    for name, preset in PRESETS.items():
        what, source = ABOUT[name]
        net = zoo.build(1, preset.task, preset.model)
        rows.append(
            {"preset": name, "what": what, "source": source, "context": preset.task.context}
            | {"horizon": preset.task.horizon, "parameters": sum(p.numel() for p in net.parameters())}
            | {"measured": measured.get(name)}
        )
    take, why = choose(measured)
    return {"take": take, "why": why, "date": timed["date"] if timed else "", "presets": rows}


def choose(measured: dict[str, dict]) -> tuple[str, str]:
    """Return the preset to take here and why: of those that are through in time, the one that has shown most skill."""
    if not measured:
        why = "nothing is timed here yet; `cpbkit bench presets --quick` does. It is the one made for a few CPU cores"
        return "quick", why + (", and a GPU trains it soonest" if torch.cuda.is_available() else "")
    soon = {name: row for name, row in measured.items() if row["seconds_for_all"] <= PATIENT}
    shown = {name: row["skill"]["predictable"] for name, row in soon.items() if row["skill"]["predictable"] is not None}
    if not shown:
        name = min(measured, key=lambda name: measured[name]["seconds_for_all"])
        return name, f"the soonest: forty models in {duration(measured[name]['seconds_for_all'])}, all epochs"
    name = max(shown, key=shown.__getitem__)
    seconds = duration(soon[name]["seconds_for_all"])
    return name, f"skill {100 * shown[name]:+.1f} % where there is some to find, forty models in {seconds}, all epochs"


def render_presets(found: dict) -> str:
    """Show what `describe_presets` found as a table and a sentence."""
    head = ["preset", "what it is", "bars", "parameters"]
    timed = any(row["measured"] for row in found["presets"])
    head += ["an epoch of 40", "memory", "skill"] if timed else []
    rows = []
    for row in found["presets"]:
        cells = [row["preset"], row["what"], f"{row['context']} to {row['horizon']}", f"{row['parameters']:,}"]
        if timed:
            one = row["measured"]
            skill = one["skill"]["predictable"] if one else None
            cells += [duration(one["seconds_an_epoch"]), size(one["memory"])] if one else ["", ""]
            cells.append("" if skill is None else f"{100 * skill:+.1f} %")
        rows.append([*cells, row["source"]])
    lines = table([*head, "source"], rows)
    if timed:
        lines.append(f"Measured here on {found['date'][:10]}; skill: where some can be found, after short training.")
    return "\n".join([*lines, f"Take {found['take']}: {found['why']}.", "docs/presets.md says what differs and why."])
