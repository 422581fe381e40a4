"""What may be said of the models: verdicts, forecasts beside the truth, the health of the training, coverage."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import date2num
from matplotlib.ticker import MaxNLocator

from cpbkit.evaluation import metrics, verdicts
from cpbkit.evaluation.results import ResultLine, group_heads, is_synthetic
from cpbkit.evaluation.verdicts import Judgement, Verdict
from cpbkit.quantities import counted, signed
from cpbkit.texts import cut
from cpbkit.views.loss import DASHES
from cpbkit.views.market import calendar
from cpbkit.views.palette import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PALE_BLUE, RED
from cpbkit.views.style import SMALL, WIDTH, Picture, beside, label, look, name_ends

if TYPE_CHECKING:  # two of them load torch, which drawing does not need
    import pandas as pd

    from cpbkit.evaluation.training_checks import Check
    from cpbkit.windows.series import Series

COLOURS = {"BEATS": GREEN, "TIES": FAINT, "LOSES": RED, "TOO FEW TO TELL": FAINT}
SIGNS = {"OK": (GREEN, "o", 5.5), "NOTE": (ORANGE, "D", 5.5), "SICK": (RED, "X", 7.5)}
ROW = 19.5  # pixels of a series
ACROSS = 3  # heads that stand side by side
NAMES, WORD, BELOW = 78, 150, 76  # pixels: of the names at the left, of the longest word, and of ticks and a title


@look()
def verdict_figure(results: Sequence[ResultLine]) -> Picture:
    """Draw the skill of every model with its interval, a panel per head, the best first."""
    by_head = verdicts.judgements(results)
    rows = max((len(group) for group in by_head.values()), default=1)
    across, down = min(ACROSS, max(1, len(by_head))), max(1, -(-len(by_head) // ACROSS))
    figure = Picture(WIDTH, 108 + down * (ROW * rows + BELOW) - BELOW + 34)
    share = (WIDTH - 24) / across
    titles = []
    for i, (head, group) in enumerate(by_head.items()):
        found = verdicts.verdicts(group)
        titles.append(verdicts.headline(found, head, unjudged=len(results) - len(group)))
        left, top = 24 + i % ACROSS * share + NAMES, 108 + i // ACROSS * (ROW * rows + BELOW)
        axes = figure.panel(left, top, share - NAMES - WORD, ROW * rows)
        _skills(axes, head, group, found, rows)
    drawn = f"skill = 1 − √(loss / loss of the best naive forecast){_tested(results)}, 95 % interval, "
    drawn += f"words Holm-corrected over {rows}" if by_head else "none yet"
    figure.head(titles[0] if titles else "No model is judged yet", drawn, is_synthetic(results))
    return figure


def _tested(results: Sequence[ResultLine]) -> str:
    spans = [line.dates["test"] for line in results if "test" in line.dates]
    if not spans:
        return ""
    return f", test {min(first for first, _ in spans)[:10]} to {max(last for _, last in spans)[:10]}"


def skill_frame(group: Mapping[str, Judgement]) -> tuple[float, float]:
    """Return from where to where the skills of one head are drawn, as shares of 1."""
    ends = [
        (
            j.skill_low if j.is_enough and j.skill_low > verdicts.WORST_SKILL else j.skill,
            j.skill_high if j.is_enough and j.skill_high < 1 else j.skill,
        )
        for j in group.values()
    ] or [(0, 0)]
    # One model that is far off, or has too few windows for an interval, must not flatten all others.
    low, high = np.percentile(ends, [10, 90])
    reach = 1.5 * (high - low) or 0.01
    return min(0.0, max(np.min(ends), low - reach)), max(0.0, min(np.max(ends), high + reach))


def _skills(axes: Axes, head: str, group: Mapping[str, Judgement], found: Mapping[str, Verdict], rows: int) -> None:
    order = sorted(group, key=lambda name: -group[name].skill)
    low, high = (100 * end for end in skill_frame(group))
    pad = 0.03 * (high - low) or 0.1
    axes.axvline(0, color=INK, lw=1.2)
    for y, name in enumerate(order):
        word, j = found[name].word, group[name]
        skill = 100 * j.skill
        if j.is_enough:
            axes.plot([100 * j.skill_low, 100 * j.skill_high], [y, y], color=COLOURS[word], lw=2, solid_capstyle="butt")
        beyond = skill < low - pad or skill > high + pad
        marker = "o" if not beyond else "<" if skill < low else ">"
        axes.plot(np.clip(skill, low - pad, high + pad), y, marker, color=COLOURS[word], ms=6, clip_on=False)
        if word != "TIES":
            beside(axes, y, word, COLOURS[word])
    axes.set(xlim=(low - pad, high + pad), ylim=(rows - 0.4, -0.6))
    axes.set_yticks(range(len(order)), [label(name) for name in order])
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(min(8, int(axes.bbox.width / 45))))  # labels of 45 pixels at most
    axes.xaxis.set_major_formatter("{x:g}")
    ahead = {j.horizon for j in group.values()}
    baselines = {j.best_baseline for j in group.values()}
    bars = counted(ahead.pop(), "bar") if len(ahead) == 1 else "several bars"
    against = baselines.pop() if len(baselines) == 1 else "the best naive forecast"
    axes.set_title(f"{head}, {bars} ahead  ·  skill against {against}, %", x=-NAMES / axes.bbox.width, pad=10)


@look()
def comparison_figure(runs: "pd.DataFrame", pairs: "pd.DataFrame") -> Picture:
    """Draw the skill of each run with its interval, and beside it by how much it beats each other one, a row a head."""
    heads = list(dict.fromkeys(runs["head"])) if len(runs) else []
    rows = max((len(runs[runs["head"] == head]) for head in heads), default=1)
    height = 26 * rows
    figure = Picture(WIDTH, 76 + max(1, len(heads)) * (height + 84))
    for i, head in enumerate(heads):
        table, top = runs[runs["head"] == head], 116 + i * (height + 84)
        names = list(table["run"])
        skills = figure.panel(190, top, 420, height)
        skills.axvline(0, color=INK, lw=1.2)
        for y, row in enumerate(table.to_dict("records")):
            colour = COLOURS[row["verdict"]]
            skills.plot([row["low %"], row["high %"]], [y, y], color=colour, lw=2, solid_capstyle="butt")
            skills.plot(row["skill %"], y, "o", color=colour, ms=6)
        skills.set(ylim=(rows - 0.4, -0.6))
        skills.set_yticks(range(len(names)), [cut(name, 22) for name in names])
        skills.grid(axis="x")
        skills.set_title(f"{head}: skill against {table['against'].iloc[0]}, %", pad=10)
        matrix = figure.panel(690, top, 520, height)
        for row in pairs[pairs["head"] == head].to_dict("records"):
            at, colour = (names.index(row["other"]), names.index(row["run"])), COLOURS[row["verdict"]]
            weight = "bold" if row["verdict"] == "BEATS" else "normal"
            said = signed(row["skill %"], "+.2f")
            matrix.text(*at, said, color=colour, weight=weight, ha="center", va="center", size=SMALL)
        matrix.set(xlim=(-0.5, len(names) - 0.5), ylim=(rows - 0.4, -0.6))
        matrix.set_yticks([])
        matrix.set_xticks(range(len(names)), [cut(name, 14) for name in names])
        matrix.spines["bottom"].set_visible(False)
        matrix.set_title("skill of the run of the row against that of the column, %; green: BEATS", pad=10)
    differ = int((pairs["verdict"] == "BEATS").sum()) if len(pairs) else 0
    beat = int((runs["verdict"] == "BEATS").sum()) if len(runs) else 0
    title = f"{beat} of {counted(len(runs), 'run')} beat the best naive forecast; {differ} of {len(pairs)} pairs differ"
    figure.head(title, "over all series, 95 % intervals; words corrected for all runs, and for all pairs")
    return figure


@look()
def forecast_figure(
    series: "Series", origins: np.ndarray, forecast: np.ndarray, ahead: int = 0, windows: int = 160
) -> Picture:
    """Draw forecasts of the close, or else of the last target, beside the truth and persistence, and their worth.

    origins (W,) rows of the last context bars, a bar apart; forecast (W, H, K) y as `train.forecast` returns it.
    ahead: bars, 0 for the horizon. windows: the last ones shown.
    """
    horizon = forecast.shape[1]
    ahead = ahead or horizon
    k = series.targets.index("close") if "close" in series.targets else -1
    change = series.truth(origins, horizon)[:, ahead - 1, k]
    told = forecast[:, ahead - 1, k]
    scale, unit, back = (1e4, "basis points", np.exp) if series.unit == "bp" else (1.0, series.unit, np.asarray)
    anchor = series.anchors[origins, k]
    shown = slice(-windows, None)
    times = date2num(series.times[origins[shown] + ahead])

    figure = Picture(WIDTH, 520)
    level = figure.panel(70, 88, WIDTH - 190, 210)
    moves = figure.panel(70, 340, WIDTH - 190, 130, sharex=level)
    truth, guess, last = (back(anchor[shown] + y[shown]) for y in (change, told, 0 * told))
    level.plot(times, truth, color=INK, lw=1.6)
    level.plot(times, last, color=ORANGE, lw=1.2, ls=DASHES)
    level.plot(times, guess, color=BLUE, lw=1.6)
    moves.axhline(0, color=ORANGE, lw=1.2, ls=DASHES)
    moves.plot(times, scale * change[shown], color=INK, lw=1.2)
    moves.plot(times, scale * told[shown], color=BLUE, lw=1.6)
    ends = [(truth[-1], "truth", INK), (last[-1], "persistence", ORANGE), (guess[-1], "forecast", BLUE)]
    name_ends(level, ends, share=0.085)
    for axes, title in (
        (level, series.targets[k] + (" price" if series.heads[k] == "price" else "")),
        (moves, f"change over {counted(ahead, 'bar')}" + (f", {unit}" if unit else "")),
    ):
        axes.set_title(title, size=SMALL, color=MUTED, pad=6)
        axes.grid(axis="y")
        axes.set_xlim(times[0], times[-1])
        axes.yaxis.set_major_formatter("{x:,.10g}")
    moves.yaxis.set_major_locator(MaxNLocator(4))
    level.tick_params(labelbottom=False)
    calendar(moves)
    signs = metrics.direction(change, told, overlap=ahead)
    title = f"{label(series.name)}, {counted(ahead, 'bar')} ahead: "
    if signs:
        share, low, high = (100 * s for s in signs)
        title += f"the direction is right {share:.1f} % of the time ({low:.1f} to {high:.1f})"
    else:
        title += "the forecast names no direction"
    lag = metrics.echo_lag(series.levels[:, k], origins + ahead, anchor + told, 2 * ahead)
    echo = f"it lies nearest to the truth of {counted(lag, 'bar')} before" if lag else "it does not lag the truth"
    echo += ", which is persistence" if lag == ahead else ""
    figure.head(title, f"{len(origins):,} test windows, the last {len(times)} shown  ·  {echo}", series.synthetic)
    return figure


@look()
def health_figure(checks: Sequence["Check"], synthetic: bool = False) -> Picture:
    """Draw the health table: a row per series, a column per check, and what is wrong in words."""
    names = list(dict.fromkeys(check.series for check in checks))
    kinds = list(dict.fromkeys(check.check for check in checks))
    height = ROW * max(1, len(names))
    figure = Picture(WIDTH, 112 + height + 24)
    step = 92
    room = int((WIDTH - 126 - step * max(1, len(kinds))) / 7.6)  # characters of a reason
    axes = figure.panel(102, 112, step * max(1, len(kinds)), height)
    for verdict, (colour, marker, size) in SIGNS.items():
        at = [(kinds.index(c.check), names.index(c.series)) for c in checks if c.verdict == verdict]
        axes.plot(*np.reshape(at, (-1, 2)).T, marker, color=colour, ms=size, ls="none")
    axes.set(xlim=(-0.5, len(kinds) - 0.5), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set_xticks(range(len(kinds)), kinds)
    axes.xaxis.tick_top()
    axes.grid(axis="y")
    axes.spines["bottom"].set_visible(False)
    for name in names:
        wrong = [c for c in checks if c.series == name and c.verdict != "OK"]
        worst = next((c for c in wrong if c.verdict == "SICK"), wrong[0] if wrong else None)
        if worst:
            text = f"{worst.check}: {worst.evidence}"
            beside(axes, names.index(name), textwrap.shorten(text, room, placeholder=" …"), SIGNS[worst.verdict][0])
    sick = {c.series for c in checks if c.verdict == "SICK"}
    noted = {c.series for c in checks if c.verdict == "NOTE"} - sick
    title = f"{len(names) - len(sick)} of {counted(len(names), 'model')} trained soundly"
    title += f", {len(noted)} of them with a note" if noted else ""
    figure.head(title + (f"; {len(sick)} sick" if sick else ""), "● sound   ◆ worth a look   ✖ sick", synthetic)
    return figure


@look()
def coverage_figure(results: Sequence[ResultLine]) -> Picture:
    """Draw the share of truths inside each model's prediction intervals over the test split: a panel per head."""
    by_head = group_heads(line.coverage() for line in results)
    figure = Picture(WIDTH, 340)
    share = (WIDTH - 24) / max(1, len(by_head))
    for i, (head, group) in enumerate(by_head.items()):
        axes = figure.panel(24 + i * share + 40, 108, share - 40 - 126, 180)
        promised = 100 * group[0]["nominal"]
        axes.axhline(promised, color=ORANGE, lw=1.2, ls=DASHES)
        times = [date2num(np.array(told["dates"], "datetime64[m]")) for told in group]
        shares = [100 * np.array(told["over_time"]) for told in group]
        for x, y in zip(times, shares, strict=True):
            axes.plot(x, y, color=PALE_BLUE, lw=0.8, alpha=0.6)
        grid = np.linspace(min(x[0] for x in times), max(x[-1] for x in times), max(map(len, times)))
        middle = np.mean([np.interp(grid, x, y) for x, y in zip(times, shares, strict=True)], axis=0)
        axes.plot(grid, middle, color=BLUE, lw=2)
        least = min(y.min() for y in shares)
        axes.set(xlim=(grid[0], max(grid[-1], grid[0] + 1e-3)), ylim=(min(least, promised) - 3, 100.5))
        name_ends(axes, [(promised, f"promised {promised:g} %", ORANGE), (middle[-1], "mean", BLUE)], share=0.09)
        axes.set_title(f"{head}: inside, %", size=SMALL, color=MUTED, pad=6)
        axes.grid(axis="y")
        calendar(axes)
    first = next(iter(by_head.values()), [])
    held, wild = (np.mean([100 * told[name] for told in first] or [0]) for name in ("coverage", "coverage_wild"))
    title = "No model has prediction intervals yet"
    if first:
        title = f"The {100 * first[0]['nominal']:g} % intervals of {counted(len(first), 'model')} held {held:.1f} %"
        title += f" of the {next(iter(by_head))}, {wild:.1f} % after the wildest tenth of bars"
    drawn = "adaptive conformal prediction intervals, calibrated on validation; a pale line per model"
    figure.head(title, drawn, is_synthetic(results))
    return figure


@look()
def calibration_figure(results: Sequence[ResultLine]) -> Picture:
    """Draw the share of truths below each quantile against its level, a panel per head, persistence's beside."""
    by_head = group_heads(line.quantiles for line in results)
    figure = Picture(WIDTH, 480)
    share = (WIDTH - 24) / max(1, len(by_head))
    for i, (head, group) in enumerate(by_head.items()):
        axes = figure.panel(24 + i * share + 40, 108, min(share - 140, 320), 320)
        levels = 100 * np.array(group[0]["levels"])
        axes.plot([0, 100], [0, 100], color=FAINT, lw=0.8)
        for told in group:
            axes.plot(levels, 100 * np.array(told["below"]), color=PALE_BLUE, lw=0.8, alpha=0.6)
        mean, naive = (100 * np.mean([told[n] for told in group], axis=0) for n in ("below", "below_persistence"))
        axes.plot(levels, naive, color=ORANGE, lw=1.2, ls=DASHES)
        axes.plot(levels, mean, "o-", color=BLUE, lw=2, ms=4)
        axes.set(xlim=(0, 100), ylim=(0, 100), xlabel="level of the quantile, %")
        name_ends(axes, [(mean[-1], "models", BLUE), (naive[-1], "persistence", ORANGE)], share=0.25)
        axes.set_title(f"{head}: truths below, %", size=SMALL, color=MUTED, pad=6)
        axes.grid()
        axes.spines["left"].set_visible(True)
    count = sum(map(len, by_head.values()))
    title = "No model of this run forecasts quantiles"
    if count:
        off = max(np.abs(np.array(t["below"]) - t["levels"]).max() for group in by_head.values() for t in group)
        title = f"The quantiles of {counted(count, 'forecast')} are off their level by {100 * off:.0f} points at most"
    drawn = "on the test split; a pale line per model, dashed persistence between conformal prediction intervals"
    figure.head(title, drawn, is_synthetic(results))
    return figure
