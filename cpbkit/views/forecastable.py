"""The map of what can be forecast, as a picture."""

import pandas as pd
from matplotlib.colors import to_rgba

from cpbkit.evaluation.forecastable import ALL, TARGETS
from cpbkit.evaluation.verdicts import BEATS, LOSES, TOO_FEW
from cpbkit.quantities import counted, signed
from cpbkit.views.palette import FAINT, GREEN, INK, RED
from cpbkit.views.style import SMALL, WIDTH, Picture, above, label, look

ROW = 19.5  # pixels of a series
FULL = 15.0  # percent of skill that has the full colour


@look()
def map_figure(table: pd.DataFrame, synthetic: bool = False) -> Picture:
    """Draw what `forecastable` found: a row per series, a column per target and horizon, coloured where it BEATS."""
    series = [ALL, *(name for name in dict.fromkeys(table["series"]) if name != ALL)]
    horizons = sorted(table["bars"].unique())
    columns = [(target, bars) for target in TARGETS for bars in horizons]
    figure = Picture(WIDTH, 128 + ROW * len(series) + 24)
    axes = figure.panel(102, 128, WIDTH - 126, ROW * len(series))
    for row in table.itertuples():
        x, y = columns.index((row.target, row.bars)), series.index(row.series)
        skill = table.at[row.Index, "skill %"]
        text, colour = signed(skill, "+.1f"), FAINT
        if row.verdict == BEATS:
            share, colour = min(1.0, 0.15 + 0.85 * skill / FULL), INK
            axes.fill_between([x - 0.5, x + 0.5], y - 0.5, y + 0.5, color=to_rgba(GREEN, 0.8 * share), lw=0)
        elif row.verdict == LOSES:
            colour = RED
        axes.text(x, y, "?" if row.verdict == TOO_FEW else text, color=colour, size=SMALL, ha="center", va="center")
    for edge in range(len(horizons), len(columns), len(horizons)):
        axes.axvline(edge - 0.5, color=FAINT, lw=0.8)
    axes.axhline(0.5, color=FAINT, lw=0.8)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(series) - 0.5, -0.5))
    axes.set_yticks(range(len(series)), [name if name == ALL else label(name) for name in series])
    axes.set_xticks(range(len(columns)), [counted(int(bars), "bar") for _, bars in columns])
    axes.xaxis.tick_top()
    axes.spines["bottom"].set_visible(False)
    for i, target in enumerate(TARGETS):
        above(axes, (i + 0.5) * len(horizons) - 0.5, target, 22, ha="center")
    sure = table[(table["series"] == ALL) & (table["verdict"] == BEATS)]
    found = [f"{target} {', '.join(map(str, bars))}" for target, bars in sure.groupby("target", sort=False)["bars"]]
    title = f"{len(series) - 1} series at once, better than naive: "
    title += f"{'; '.join(found)} bars ahead" if found else "nothing"
    drawn = "skill against the best naive forecast, %, refitted as it goes; green BEATS, red LOSES, grey TIES, "
    figure.head(title, f"{drawn}? too few windows; words Holm-corrected over the map", synthetic)
    return figure
