"""Tables as a notebook shows them: units, colours, and no column that is cut."""

import math
from collections.abc import Sequence

import pandas as pd
from markupsafe import escape

from cpbkit.quantities import figure

COLOURS = {"BEATS": "#1a7f4b", "TIES": "#7a7a7a", "LOSES": "#c0392b"}  # readable on white and on dark grey


def verdict_html(table: pd.DataFrame, headlines: Sequence[str]) -> str:
    """Show `verdict_table` with the columns a person decides by, the verdict in colour."""
    shown = pd.DataFrame(
        {
            "series": table["series"],
            "head": table["head"],
            "verdict": table["verdict"],
            "skill %": table["skill %"].map("{:+.2f}".format),
            "95 % interval": [
                "" if math.isnan(a) else f"{a:+.2f} to {b:+.2f}"
                for a, b in zip(table["low %"], table["high %"], strict=True)
            ],
            "p": table["p"].map("{:.3f}".format, na_action="ignore").fillna(""),
            "against": table["best baseline"],
            "against persistence %": table["skill against persistence %"].map("{:+.2f}".format, na_action="ignore"),
            "RMSE": [f"{figure(value, 4)} {unit}" for value, unit in zip(table["rmse"], table["unit"], strict=True)],
            "naive RMSE": table["baseline rmse"].map(lambda value: figure(value, 4)),
            "windows": table["windows"],
        }
    )
    if table["head"].nunique() == 1:
        del shown["head"]  # its room keeps the others in one line
    styler = shown.style.hide(axis="index").format(escape="html").map(_colour, subset=["verdict"])
    styler.set_properties(subset=["95 % interval", "RMSE"], **{"white-space": "nowrap"})
    return styler.to_html() + "".join(f"<p><b>{escape(line)}</b></p>" for line in headlines)


def _colour(word: str) -> str:
    return f"color: {COLOURS.get(word, '#b7791f')}; font-weight: 600; white-space: nowrap"
