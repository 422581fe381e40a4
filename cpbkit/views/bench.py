"""The benchmark of the sweep as a picture: both sides of each ratio, and how time grows with the models."""

from collections.abc import Mapping

from matplotlib.ticker import LogLocator, NullLocator

from cpbkit.quantities import amount
from cpbkit.views.palette import BLUE, FAINT, INK, MUTED, PALE_BLUE, RULE
from cpbkit.views.style import WIDTH, Picture, beside, look, name_ends

SIDES = {"loop": FAINT, "loop done well": PALE_BLUE, "engine": BLUE}
ROW = 30  # pixels
LEFT, GROWTH = 150, 330  # pixels: of the names of the cases, of the second panel


@look()
def bench_figure(document: Mapping) -> Picture:
    """Draw a document of `bench sweep`: a row per case with the pace of each side, and beside it the growth."""
    cases, growth, machine = document["cases"], document["growth"], document["machine"]
    height = ROW * max(len(cases), 6)
    figure = Picture(WIDTH, height + 165)
    least = min(case["ratios"]["engine / loop"]["ratio"] for case in cases)
    most = max(case["ratios"]["engine / loop"]["ratio"] for case in cases)
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}"
    figure.head(
        f"{document['models']} models train {least:.1f} to {most:.1f} times as fast as in the loop in circulation",
        f"{where}; torch {document['versions']['torch']}, {document['date']}, commit {document['commit'] or 'unknown'}",
    )
    axes = figure.panel(24 + LEFT, 122, WIDTH - LEFT - GROWTH - 270, height)
    for y, case in enumerate(reversed(cases)):
        paces = {side: case["sides"][side]["steps_per_second"] for side in SIDES}
        axes.plot([min(paces.values()), max(paces.values())], [y, y], color=RULE, lw=3, zorder=1)
        for side, pace in paces.items():
            axes.plot(pace, y, "o", color=SIDES[side], ms=8, label=side if y == 0 else None)
        beside(axes, y, f"{case['ratios']['engine / loop']['ratio']:.1f}x the loop", INK, size=9.5)
    axes.set(xscale="log", ylim=(-0.6, len(cases) - 0.4))
    axes.set_title("Steps of one model a second", pad=30)
    axes.set_yticks(range(len(cases)), [case["case"] for case in reversed(cases)])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda x, _: amount(x) if x >= 1 else f"{x:g}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, labelcolor=MUTED, borderaxespad=0.2)
    axes.spines["bottom"].set_visible(False)
    axes.grid(axis="x")

    rows = growth["rows"]
    axes = figure.panel(WIDTH - GROWTH - 24, 122, GROWTH - 70, height)
    counts = [row["models"] for row in rows]
    for side in ("loop", "engine"):
        axes.plot(counts, [row[side] for row in rows], "o-", color=SIDES[side], lw=1.8, ms=4)
    axes.set(xscale="log", ylim=(0, None))
    axes.set_title(f"Seconds for {growth['steps']} steps of so many models, {growth['case']}", pad=30, loc="right")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y")
    axes.spines["left"].set_visible(True)
    name_ends(axes, [(rows[-1][side], side, SIDES[side] if side == "engine" else MUTED) for side in ("loop", "engine")])
    return figure
