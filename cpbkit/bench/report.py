"""A benchmark's document as text and as a file."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cpbkit import atomic
from cpbkit.bench.kinds import KINDS, REST
from cpbkit.quantities import amount, figure

NO_GPU = "Not measured on a GPU: there is none here, and no figure below says anything about one."
BUSY = 0.5  # load a core, before the start, from which the machine was not idle


def save(document: dict, path: str | os.PathLike) -> None:
    """Write a document as JSON; that of the sweep also as a picture, PNG beside it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, (json.dumps(document, indent=2) + "\n").encode())
    if document["bench"] == "sweep":
        from cpbkit.views.bench import bench_figure

        atomic.write_bytes(path.with_suffix(".png"), bench_figure(document).png(scale=2))


def render(document: dict) -> str:
    """Show a document of any of the benchmarks as text for a terminal."""
    return "\n".join([*about(document), "", *SHOWN[document["bench"]](document)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out rows under a head: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return [line(head), line(["-" * width for width in widths]), *map(line, rows)]


def size(count: int | None) -> str:
    """Write bytes as people read them."""
    return "?" if count is None else f"{amount(count)}B"


def duration(seconds: float) -> str:
    """Write seconds as people read them."""
    if seconds < 100:
        return f"{figure(seconds, 3)} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def ratio(row: dict) -> str:
    """Write a ratio with the range it had over the rounds."""
    return f"{row['ratio']:.2f}x ({row['lowest']:.2f}-{row['highest']:.2f})"


def about(document: dict) -> list[str]:
    """Say on what a document was measured."""
    machine = document["machine"]
    memory = f", {size(machine['memory'])}" if machine["memory"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores{memory}, {machine['gpu'] or 'no GPU'}, {machine['system']}",
        f"{document['date']}, {versions}" + (f", commit {document['commit']}" if document["commit"] else ""),
    ]
    if machine["load"] is not None and machine["load"] > BUSY * machine["cores"]:
        lines.append(
            f"The machine was busy with other work (load {machine['load']}): times are longer than they would be."
        )
    return lines


def _sweep(document: dict) -> list[str]:
    lines = [] if document["machine"]["gpu"] else [NO_GPU, ""]
    lines += [
        f"{document['models']} models. Steps of one model a second, medians of rounds in which all sides took turns:",
        "loop: as it circulates, a model after another; done well: data on the device, no waits, a fused optimiser.",
        "",
    ]
    rows = []
    for case in document["cases"]:
        sides, against = case["sides"], case["ratios"]
        rows.append(
            [
                case["case"],
                *(figure(sides[side]["steps_per_second"], 3) for side in sides),
                figure(sides["engine"]["samples_per_second"], 3),
                *(ratio(against[f"engine / {other}"]) for other in ("loop", "loop done well")),
                *(figure(1e3 * sides[side]["cpu_seconds_per_step"], 3) for side in ("loop", "engine")),
                f"{sides['engine']['share_of_roofline']:.0%}",
                size(sides["loop"]["memory"]),
                size(sides["engine"]["memory"]),
            ]
        )
    head = "model|loop|done well|engine|samples/s|engine / loop|engine / done well"
    head += "|loop's CPU ms|engine's|of roofline|loop's memory|engine's"
    lines += table(head.split("|"), rows)
    ceilings = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in document["matmul"].items())
    lines += [
        "",
        "CPU ms: of all processes, a step of one model; the work of others on this machine hardly touches it.",
        f"Roofline: the products of a step at the best rate measured here, {ceilings}.",
    ]
    lines += [f"{case['case']}: {case['sides']['engine']['plan']}" for case in document["cases"]]
    kinds = [*KINDS, REST]
    lines += ["", "Where the engine's step goes, by torch's profiler, which makes small operators seem longer:"]
    lines += table(
        ["model", *kinds],
        [
            [case["case"], *(f"{case['sides']['engine']['kinds'][kind]:.0%}" for kind in kinds)]
            for case in document["cases"]
        ],
    )
    if growth := document["growth"]:
        lines += [
            "",
            f"Seconds for {growth['steps']} steps of every model, {growth['case']}; the loop's scaled from one:",
        ]
        lines += table(
            ["models", "loop", "engine"],
            [[str(row["models"]), figure(row["loop"], 3), figure(row["engine"], 3)] for row in growth["rows"]],
        )
    if search := document["search"]:
        lines += [
            "",
            f"A search of {search['settings']} settings, {search['case']}: {figure(search['ours'], 3)} steps of one "
            f"model a second; one sweep after another: {figure(search['theirs'], 3)}; {ratio(search)}.",
        ]
    if document["left_out"]:
        lines += ["", "Left out: " + "; ".join(f"{name} ({why})" for name, why in document["left_out"].items())]
    if "peers" in document:
        lines += ["", *_peers(document["peers"])]
    return lines


def _peers(peers: dict) -> list[str]:
    rows = [
        [
            row["library"],
            row["version"],
            row["case"],
            "same" if row["same_network"] else "ours decodes, its is dense",
            figure(row["theirs"], 3),
            figure(row["ours"], 3),
            f"{row['ratio']:.2f}x",
            duration(row["seconds_besides"]),
        ]
        for row in peers["rows"]
    ]
    head = "library|version|model|network|its steps/s|engine's|engine / library|a fit besides steps".split("|")
    lines = ["Peers, one model a series, steps of one model a second:", *(table(head, rows) if rows else ["none"])]
    return lines + [f"{library}: {why}" for library, why in peers["missing"].items()]


def _presets(document: dict) -> list[str]:
    lines = [] if document["machine"]["gpu"] else [NO_GPU, ""]
    count = document["models"]
    lines += [
        f"Time for {count} models is extrapolated from timed steps: all epochs, no early stop.",
        f"Skill: 1 - RMSE over that of the best naive forecast, after {document['training_seconds']:.0f} s of training",
        "or all epochs, on a few seeded series: those that can be forecast a little (limit: what any forecast of the",
        "close could reach), and others. None is shown where not one epoch fits into that time.",
        "Roofline: the arithmetic of an epoch's steps at the peak the GPU's maker states; MFU: its share of an epoch.",
        "",
    ]
    rows = []
    for row in document["rows"]:
        skill = row["skill"]
        shares = [
            f"{100 * x:+.1f} %" if x is not None else ""
            for x in (skill["predictable"], skill["limit"], skill["others"])
        ]
        rows.append(
            [
                row["preset"],
                f"{row['model']} {row['width']}",
                duration(row["seconds_an_epoch"]),
                f"{row['roofline_seconds']:.2g} s" if row["roofline_seconds"] else "",
                f"{row['mfu']:.1%}" if row["mfu"] else "",
                str(row["epochs"]),
                duration(row["seconds_for_all"]),
                size(row["memory"]),
                str(row["trained_epochs"]),
                *shares,
            ]
        )
    head = f"preset|model|an epoch of {count}|roofline|MFU|epochs|all epochs|memory|trained|skill|limit|others"
    return lines + table(head.split("|"), rows)


SHOWN: dict[str, Callable[[dict], list[str]]] = {"sweep": _sweep, "presets": _presets}
