"""What a sweep looks like: a panel per model with its curves and its verdict, and the machine's strips below."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd

from cpbkit.evaluation import verdicts
from cpbkit.evaluation.results import ResultLine, Running, is_synthetic, relative
from cpbkit.quantities import signed
from cpbkit.views.loss import lowest
from cpbkit.views.page import Html, page
from cpbkit.views.strip import strips
from cpbkit.views.style import label, stamped

SPLITS = ("train", "validation")
PANEL_X, PANEL_Y = 1420, 800  # units of a panel's SVG: tenths of a pixel, so that whole numbers are fine enough
VIEW = "-40 -40 1500 880"  # the panel, and room for a dot on its edge
WAITING = Running({}, {})  # a series of which nothing is heard yet
POINTS = 150  # drawn of one curve: about one a pixel


class SweepPicture:
    """The sweep as a piece of a web page: HTML around small SVGs, all of it text.

    Text is drawn ten times as fast as a PNG of matplotlib, follows the page's theme, and its columns follow the
    width of a screen. It needs no script and loads nothing.
    """

    def __init__(self, series: Sequence[str], title: str, epochs: int, synthetic: bool = False):
        self.series, self.epochs = tuple(series), epochs
        self.title = stamped(title, synthetic)
        self._said: dict[str, list[tuple[str, float]]] = {}  # series -> (verdict, skill) of each head
        self._heads: list[str] = []
        self._judged = 0  # lines of the ledger that `_said` knows
        self._kept: dict[str, tuple] = {}  # series -> what its panel was drawn from (entry, frame, verdicts), and it

    def html(
        self,
        results: Sequence[ResultLine],
        running: Mapping[str, Running] | None = None,
        monitor: pd.DataFrame | None = None,
        seconds_left: float | None = None,
    ) -> Html:
        """Draw the present: `results` are lines of the ledger, `running` what trains now."""
        finished = {result.series: result for result in results}
        training = {name: entry for name, entry in (running or {}).items() if name not in finished}
        if len(results) != self._judged:  # they are corrected for each other: every new one may change the others
            self._judge(results)
        entries = {name: finished.get(name) or training.get(name) or WAITING for name in self.series}
        curves = {name: [relative(entry, split) for split in SPLITS] for name, entry in entries.items()}
        frame = Frame.around([curve for pair in curves.values() for curve in pair], self.epochs)
        panels = []
        for name in self.series:
            entry, said = entries[name], self._said.get(name)
            old = self._kept.get(name)
            if old is None or old[0] is not entry or old[1:3] != (frame, said):
                self._kept[name] = old = entry, frame, said, self._panel(name, entry, curves[name], frame)
            panels.append(old[3])
        counts = tally(results, len(training), len(self.series))
        at_right = "verdict on the test bars"
        if len(self._heads) > 1:
            at_right += f" ({', '.join(self._heads)})"
        note = (
            f"loss relative to persistence, {frame.low:.3g} to {frame.high:.3g}, over {frame.last} epochs  ·  "
            f"at right: {at_right}, or the epoch"
        )
        legend = "".join(f'<span class="cpb-{kind}">{kind}</span>' for kind in (*SPLITS, "persistence"))
        return page(
            f'<div class="cpb-head"><b>{escape(self.title)}</b><span>{counts}</span></div>'
            f'<div class="cpb-legend">{legend}<span>{escape(note)}</span></div>'
            f'<div class="cpb-panels">{"".join(panels)}</div>'
            f'<div class="cpb-strips">{"".join(strips(monitor, seconds_left))}</div>',
            f"{self.title}: {counts}",
        )

    def _judge(self, results: Sequence[ResultLine]) -> None:
        judged = verdicts.judgements(results).items()
        by_head = {head: group for head, group in judged if not head.endswith(verdicts.OLD)}  # a panel is a new model's
        self._said, self._heads, self._judged = {}, list(by_head), len(results)
        for group in by_head.values():
            for name, verdict in verdicts.verdicts(group).items():
                self._said.setdefault(name, []).append((verdict.word, 100 * group[name].skill))

    def _panel(self, name: str, entry: ResultLine | Running, curves: Sequence[np.ndarray], frame: "Frame") -> str:
        train, validation = curves
        words, kind, mark = self._state(name, entry, validation)
        reason = escape(entry.reason) if isinstance(entry, ResultLine) and kind == "sick" else ""
        # A picture of their own cuts off what leaves the panel; the outer one has room for a mark on the edge.
        drawn = f'<svg style="width:{PANEL_X}px;height:{PANEL_Y}px">'
        drawn += frame.line(train, "train") + frame.line(validation, "validation") + "</svg>"
        side = "cpb-low"  # where the reason stands: in the half that the cross is not in
        if mark is not None:
            drawn += frame.mark(mark, validation[mark], kind)
            side = "cpb-low" if validation[mark] > (frame.low + frame.high) / 2 else "cpb-high"
        best = lowest(validation)
        told = [re.sub("<.*?>", "", words), reason]
        if best is not None:
            told.append(f"lowest validation loss {validation[best]:.3g} of persistence's at epoch {best + 1}")
        spoken = escape(f"{label(name)}: ") + ", ".join(filter(None, told))
        waits = " cpb-waiting" if entry is WAITING else ""
        return (
            f'<div class="cpb-panel{waits}"><div><b>{escape(label(name))}</b>{words}</div>'
            f'<div><svg viewBox="{VIEW}" role="img" aria-label="{spoken}">{frame.rules}{drawn}</svg>'
            f'<small class="{side}">{reason}</small></div></div>'
        )

    def _state(self, name: str, entry: ResultLine | Running, curve: np.ndarray) -> tuple[str, str, int | None]:
        """Return a panel's words, the class of its mark, and at which epoch the mark stands."""
        best = lowest(curve)
        status = entry.status if isinstance(entry, ResultLine) else "waiting" if entry is WAITING else "training"
        if status in ("sick", "failed"):
            seen = np.flatnonzero(np.isfinite(curve))
            text = f"{status} at {len(curve)}" if len(curve) else status
            return _word(text, "sick"), "sick", int(seen[-1]) if len(seen) else None
        if status == "training":
            return _word(f"epoch {len(curve)}", "training"), "training", None
        if name not in self._said:
            return _word("waiting" if entry is WAITING else "not judged", "muted"), "muted", best
        said = self._said[name]
        kinds = [word.lower() if word in ("BEATS", "LOSES") else "muted" for word, _ in said]
        texts = [word.removesuffix(" TO TELL") for word, _ in said]
        if len(said) == 1 and math.isfinite(said[0][1]) and said[0][0] != verdicts.TOO_FEW:  # whose skill is chance
            texts[0] += f" {signed(said[0][1] + 0.0, '+.1f')} %"
        return "".join(map(_word, texts, kinds)), kinds[0], best


def _word(text: str, kind: str) -> str:
    return f'<span class="cpb-{kind}">{escape(text)}</span>'


@dataclass(frozen=True)
class Frame:
    """The extent that all panels share: epochs 1 to `last`, losses from `low` to `high`."""

    last: int
    low: float
    high: float

    @classmethod
    def around(cls, curves: Sequence[np.ndarray], epochs: int) -> "Frame":
        """Return the extent that shows the curves, `epochs` at most."""
        longest = max(map(len, curves), default=0)
        last = max(2, longest, min(epochs, 10 * math.ceil(longest / 10)))
        best = [curve[epoch] for curve in curves[1::2] if (epoch := lowest(curve)) is not None]  # of validation
        seen = np.concatenate([*curves, [0.995, 1.005]])
        # What overfits or explodes leaves its panel, so that the others can be told from persistence.
        low, high = np.percentile(seen[np.isfinite(seen)], [4, 94])
        low, high = min(low, 0.995, *best), min(max(high, 1.005), 3.0)
        low, high = low - 0.06 * (high - low), high + 0.06 * (high - low)
        low = max(0.0, low) if np.nanmin(seen) >= 0 else low  # a loss is not below 0, except some of quantiles
        step = 10.0 ** math.floor(math.log10(high - low)) / 20  # round ends move seldom: panels can be kept
        return cls(last, step * math.floor(low / step), step * math.ceil(high / step))

    def place(self, epochs: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return (x, y) in whole units of a panel's SVG; what leaves the panel is brought near its edge."""
        x = PANEL_X * (epochs - 1) / (self.last - 1)
        y = PANEL_Y * (self.high - values) / (self.high - self.low)
        return np.column_stack([x, np.clip(y, -PANEL_Y, 2 * PANEL_Y)]).round().astype(int)

    def line(self, curve: np.ndarray, kind: str) -> str:
        """Draw a curve from its finite values, at most POINTS of them."""
        epochs = np.flatnonzero(np.isfinite(curve))
        if len(epochs) == 0:
            return ""
        if len(epochs) > POINTS:
            epochs = epochs[np.linspace(0, len(epochs) - 1, POINTS).round().astype(int)]
        points = " ".join(map(str, self.place(epochs + 1, curve[epochs]).ravel().tolist()))
        return f'<polyline class="cpb-{kind}" points="{points}"/>'

    def mark(self, epoch: int, value: float, kind: str) -> str:
        """Draw a dot at an epoch, counted from 0, or a cross where the model is sick."""
        x, y = self.place(np.array([epoch + 1]), np.array([value]))[0]
        y = min(max(y, 0), PANEL_Y)
        if kind == "sick":
            return f'<path class="cpb-sick" d="M{x - 40} {y - 40}l80 80m0 -80l-80 80"/>'
        return f'<circle class="cpb-{kind}" cx="{x}" cy="{y}" r="34"/>'

    @property
    def rules(self) -> str:
        """The edges of a panel and the height of persistence."""
        y = self.place(np.array([1]), np.array([1.0]))[0, 1]
        return (
            f'<path class="cpb-rule" d="M0 {PANEL_Y}V0H{PANEL_X}"/><path class="cpb-persistence" d="M0 {y}H{PANEL_X}"/>'
        )


def tally(results: Sequence[ResultLine], training: int, total: int) -> str:
    """Say how many models are where: `27 done  ·  11 training  ·  1 sick  ·  1 waiting`."""
    counts = Counter(result.status for result in results)
    told = {"done": counts["done"], "training": training, "sick": counts["sick"], "failed": counts["failed"]}
    told["waiting"] = total - len(results) - training
    return "  ·  ".join(f"{n} {word}" for word, n in told.items() if n or word == "done")


def sweep_html(results: Sequence[ResultLine], monitor: pd.DataFrame | None = None, series: Sequence[str] = ()) -> Html:
    """Draw a sweep from its ledger for a page; `series` also names those without a result yet."""
    names = list(dict.fromkeys([*series, *(result.series for result in results)]))
    longest = max((len(relative(result, "validation")) for result in results), default=1)
    preset = next((result.preset for result in results if result.preset), "sweep")
    picture = SweepPicture(names, f"{preset}  ·  {len(names)} series", longest, is_synthetic(results))
    return picture.html(results, monitor=monitor)
