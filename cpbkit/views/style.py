"""One look for every figure: type sizes, places, and names as people read them."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D

from cpbkit.views.palette import INK, MUTED, PAPER, RULE

DPI = 100  # one unit of a figure's paper is one pixel at this resolution
WIDTH = 1280  # pixels; about the width of an output cell
SMALL = 10  # points of what stands at rows and ticks: on a page of 1000 px a figure has two thirds of its size
LOOK: Any = {
    "font.size": 10.5,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "normal",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,  # a reason may hold a dollar sign
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": PAPER + "e0",  # a dark page shows through, so that a saved picture does not glare on it
    "figure.edgecolor": PAPER,
    "figure.dpi": DPI,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
}


@contextlib.contextmanager
def look() -> Iterator[None]:
    """Build and draw in the kit's look, whatever style the notebook has set; also a decorator."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        yield


class Picture(Figure):
    """A figure of fixed size that notebooks show by itself, without pyplot."""

    def __init__(self, width: float = WIDTH, height: float = 400, **settings):
        super().__init__(figsize=(width / DPI, height / DPI), dpi=DPI, **settings)
        FigureCanvasAgg(self)
        self.spoken = ""  # what stands where a picture cannot be seen
        self.paper = Affine2D().scale(1 / DPI) + self.dpi_scale_trans  # pixels from the lower left corner

    def __repr__(self) -> str:
        return self.spoken or super().__repr__()

    def draw(self, renderer) -> None:
        """Draw everything; ticks are born only here, so the look is needed here too."""
        with look():
            super().draw(renderer)

    def panel(self, left: float, top: float, width: float, height: float, sharex: Axes | None = None) -> Axes:
        """Add axes at pixels counted from the upper left corner."""
        full_width, full_height = self.get_size_inches() * DPI
        place = left / full_width, 1 - (top + height) / full_height, width / full_width, height / full_height
        return self.add_axes(place, sharex=sharex)

    def write(self, left: float, top: float, text: str, **look):
        """Put text at pixels from the upper left corner and return it."""
        height = self.get_size_inches()[1] * DPI
        return self.text(left, height - top, text, transform=self.paper, **{"va": "baseline", **look})

    def head(self, title: str, subtitle: str = "", synthetic: bool = False):
        """Write the sentence that the picture shows, and under it what is drawn and how it was got."""
        self.spoken = f"{stamped(title, synthetic)}. {subtitle}"
        self.write(24, 34, stamped(title, synthetic), size=14, weight="bold")
        self.write(24, 56, subtitle, color=MUTED)

    def png(self, scale: float = 1) -> bytes:
        """Return the picture as PNG; `scale` 2 for sharp screens."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=DPI * scale)
        return buffer.getvalue()

    def _repr_png_(self):
        width, height = self.get_size_inches() * DPI
        return self.png(scale=2), {"width": int(width), "height": int(height), "alt": self.spoken}


def beside(axes: Axes, y: float, text: str, colour: str, size: float = SMALL) -> None:
    """Write text to the right of the axes at a height of its data."""
    place = axes.get_yaxis_transform()
    axes.annotate(
        text, (1, y), (8, 0), color=colour, size=size, va="center", xycoords=place, textcoords="offset points"
    )


def above(axes: Axes, x: float, text: str, rise: float, **look) -> None:
    """Write text over the axes, or below their upper edge, at an x of its data; `rise` is in points."""
    axes.annotate(text, (x, 1), (0, rise), xycoords=axes.get_xaxis_transform(), textcoords="offset points", **look)


def name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], share: float = 0.055) -> None:
    """Write the names of curves beside where they end: (height, name, colour), `share` of the axes apart."""
    low, high = axes.get_ylim()
    free = low
    for y, text, colour in sorted(ends):
        free = max(y, free)
        beside(axes, free, text, colour, size=10.5)
        free += share * (high - low)


def stamped(title: str, synthetic: bool) -> str:
    """Mark a title so that no picture of made-up bars passes for a market."""
    return f"SYNTHETIC · {title}" if synthetic else title


def label(series: str) -> str:
    """Shorten a series' name for a person: `BTCUSDT_15m` -> `BTC 15m`."""
    symbol, _, interval = series.rpartition("_")
    return f"{symbol.removesuffix('USDT') or symbol} {interval}" if symbol else series
