"""Tables as a notebook shows them: units, colours, and no column that is cut."""

from collections.abc import Sequence

import pandas as pd
from markupsafe import escape
from pandas.io.formats.style import Styler

from cpbkit.evaluation.verdicts import CORRECTED, say_table
from cpbkit.quantities import figure

GOOD, BAD, BETWEEN = "#1a7f4b", "#c0392b", "#b7791f"  # readable on white and on dark grey
COLOURS = {"BEATS": GOOD, "TIES": "#7a7a7a", "LOSES": BAD}
CHECKS = {"OK": GOOD, "FAIL": BAD, "SICK": BAD}


def styled(table: pd.DataFrame, digits: int = 4) -> Styler:
    """Show a table for people: texts from the left, verdicts in colour, numbers in so many digits that count."""
    texts = [name for name, column in table.items() if column.map(lambda cell: isinstance(cell, str)).any()]
    numbers = [name for name in table.select_dtypes("number") if name not in texts]
    styler = _left(table.style.hide(axis="index"), texts).format(escape="html")
    styler.format(lambda value: figure(value, digits), subset=numbers, na_rep="")
    return styler.map(_colour, subset=[name for name in texts if name in ("verdict", "health")])


def _left(styler: Styler, names: Sequence[str]) -> Styler:
    rule = [{"selector": "", "props": "text-align: left"}]  # of the column's head and cells
    return styler.set_table_styles(dict.fromkeys(names, rule), overwrite=False)


def verdict_html(table: pd.DataFrame, headlines: Sequence[str]) -> str:
    """Show `verdict_table` with the columns a person decides by, the verdict in colour."""
    shown = say_table(table).drop(columns=["direction %", "IC", "fee bp"])
    shown = shown.rename(columns={"persistence %": "against persistence %"})
    if table["head"].nunique() == 1:
        del shown["head"]  # its room keeps the others in one line
    styler = shown.style.hide(axis="index").format(escape="html").map(_colour, subset=["verdict"])
    _left(styler, [name for name in ("series", "head", "verdict", "against") if name in shown])
    styler.set_properties(subset=["95 % interval", "p", "RMSE"], **{"white-space": "nowrap"})
    said = "".join(f"<p><b>{escape(line)}</b></p>" for line in headlines)
    return f"{styler.to_html()}<p>{CORRECTED}.</p>{said}"


def _colour(word: str) -> str:
    return f"color: {(COLOURS | CHECKS).get(word, BETWEEN)}; font-weight: 600; white-space: nowrap"
