"""A page to look at: static files that show forecasts, candles, past forecasts and verdicts of a run, in a browser.

No bar of a venue is in a page that is to be published: its forecasts stand relative to the last close, and what
happened after past ones is told as errors of a day, from which no bar can be told.
"""

import importlib.resources
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup

from cpbkit import __version__, atomic
from cpbkit.data.klines import INTERVAL_SECONDS, Klines, validate
from cpbkit.errors import DataError, RunError
from cpbkit.evaluation import past, verdicts
from cpbkit.runs import trained
from cpbkit.runs.folder import RunFolder
from cpbkit.runs.trained import Bars, Forecast, TrainedModel
from cpbkit.views.loss import is_synthetic
from cpbkit.views.report import skill_mark, templates
from cpbkit.views.style import DARK, NAMES, label
from cpbkit.views.verdict import skill_frame

CANDLES = 180  # of the newest bars
NO_FORECAST = "No forecast of the next bars"
LIBRARY = "bokeh.min.js", "bokeh-api.min.js"  # of the installed package
BRAND = "cpbkit.page.json"  # tells a page that was written before from somebody's folder


class Site:
    """What the page of a run shows, made anew from the newest bars whenever it is asked for."""

    def __init__(self, folder: str | os.PathLike, models: Iterable[TrainedModel], public: bool = False):
        self.run, self.public = RunFolder(folder), public
        self.results = self.run.results()
        self.models = {model.series: model for model in models}
        if not self.models:
            raise RunError(f"a page needs at least one finished model; {self.run.folder} has none")
        self._meanings = verdicts.meanings(self.results)

    def forecasts(
        self, names: Iterable[str], bars: Mapping[str, Bars] | None = None, now: pd.Timestamp | None = None
    ) -> dict[str, dict]:
        """Return the documents of some series, with the forecast of their next bars.

        bars: by series, of those that are to be forecast; None fetches the newest closed ones.
        Errors: DataError, SourceError, as of a forecast.
        """
        now = now or pd.Timestamp.now("UTC")
        models = [self.models[name] for name in names if bars is None or name in bars]
        given = trained.newest_bars(models, now) if bars is None else bars
        found = trained.forecast(models, given, now)
        return {name: self.document(name, one, given[name]) for name, one in found.items()}

    def document(self, name: str, forecast: Forecast | None = None, bars: Bars | None = None, note: str = "") -> dict:
        """Return what the page shows of one series, in plain JSON types; `forecast.schema.json` says what each is.

        note: why there is no forecast.
        """
        told = None if forecast is None else _plain(forecast.to_dict())
        if told and self.public:
            told = _relative(told, self.models[name].experiment.data.source == "table")
        candles = None
        if isinstance(bars, pd.DataFrame) and {"open", "high", "low", "close"} <= set(bars):
            bars = validate(bars, name, source="given")
        if isinstance(bars, Klines) and not self.public:
            frame = bars.frame.iloc[-CANDLES:]
            candles = {side: _rounded(frame[side]) for side in ("open", "high", "low", "close")}
            candles["time"] = [stamp.value // 10**6 for stamp in frame.index]
        kept = self.run.losses(name)
        by_head = past.from_bytes(kept, name) if kept else {}
        return {
            "series": name,
            "label": label(name),
            "meaning": self._meanings.get(name, "not judged"),
            "note": note,
            "synthetic": self.models[name].synthetic,
            "step_ms": _step_ms(name, by_head),
            "forecast": told,
            "candles": candles,
            "past": {head: (_errors if self.public else _beside_truth)(one) for head, one in by_head.items()},
        }

    def index(self, live: bool = False) -> bytes:
        """Return the first file of the page: what is the same for every series, and all of them at a glance."""
        environment = templates()
        judged = verdicts.judgements(line for line in self.results if line.series in self.models)
        head, group = next(iter(judged.items()), ("", {}))
        found, frame = verdicts.verdicts(group), skill_frame(group)
        order = sorted(self.models, key=lambda name: -group[name].skill if name in group else math.inf)
        rows = [
            {
                "series": name,
                "label": label(name),
                "word": found[name].word if name in found else "",
                "kind": found[name].word.lower().replace(" ", "-") if name in found else "ties",
                "mark": Markup(skill_mark(group[name], *frame)) if name in group else "",
                "skill": f"{100 * group[name].skill:+.2f}".replace("-", "−") if name in group else "",
            }
            for name in order
        ]
        pairs = [name.rpartition("_") for name in self.models]
        experiment = self.run.experiment
        return (
            environment.get_template("site.html")
            .render(
                light={name: colour for colour, name in NAMES.items()},
                dark=DARK,
                title=f"{experiment.preset} · {len(self.models)} series",
                headline=verdicts.headline(found, head) if found else "No model is judged yet",
                synthetic=is_synthetic(self.results),
                public=self.public,
                live=live,
                rows=rows,
                first=order[0],
                coins=list(dict.fromkeys(symbol for symbol, _, _ in pairs)),
                intervals=list(dict.fromkeys(interval for _, _, interval in pairs)),
                labels={symbol: symbol.removesuffix("USDT") or symbol for symbol, _, _ in pairs},
                library=LIBRARY,
                version=__version__,
            )
            .encode()
        )

    def files(self) -> dict[str, bytes]:
        """Return the files that no series changes, by name: the script, and the library that draws."""
        script = (importlib.resources.files("cpbkit.views") / "templates" / "site.js").read_bytes()
        scripts = importlib.resources.files("bokeh") / "server" / "static" / "js"
        return {"site.js": script} | {name: (scripts / name).read_bytes() for name in LIBRARY}


def write_page(
    folder: str | os.PathLike,
    models: Iterable[TrainedModel],
    out: str | os.PathLike | None = None,
    bars: Mapping[str, Bars] | None = None,
    public: bool = False,
    now: pd.Timestamp | None = None,
) -> Path:
    """Write the page of a run as a folder of static files, and return its `index.html`.

    out: a new folder, or one that holds an earlier page; by default `page` in the run's. bars: by series; None fetches
    the newest closed ones, and where none can be had, the page says why and shows what the test split did.
    public: without the bars. Errors: RunError for a run without a model or a folder that holds something else.
    """
    site, out = Site(folder, models, public), Path(out) if out else Path(folder) / "page"
    if out.exists() and any(out.iterdir()) and not (out / BRAND).exists():
        raise RunError(f"{out} must be a new or an empty folder, or hold a page that was written before")
    note, documents = "", {}
    try:
        documents = site.forecasts(site.models, bars, now)
    except DataError as error:
        note = f"{NO_FORECAST}: {error}"
    documents = {name: documents.get(name) or site.document(name, note=note) for name in site.models}
    for name, content in {**site.files(), "index.html": site.index()}.items():
        _keep(out / name, content)
    for name, document in documents.items():
        _keep(out / "series" / f"{name}.js", f"cpbkit({to_json(document)});\n".encode())
    told = {name: document["forecast"] for name, document in documents.items()}
    _keep(out / BRAND, to_json({"cpbkit": __version__, "note": note, "forecasts": told}).encode())
    return out / "index.html"


def _keep(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(path, content)


def to_json(document: Mapping) -> str:
    return json.dumps(document, allow_nan=False, separators=(",", ":"))


def _plain(value):
    """Return JSON types in which null stands for what is no number."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    return [float(f"{value:.8g}") for value in np.asarray(values, float).tolist()]


def _step_ms(name: str, by_head: Mapping[str, past.Past]) -> int:
    kept = next((one.step_seconds for one in by_head.values()), 0)
    return round(1000 * (INTERVAL_SECONDS.get(name.rpartition("_")[2]) or kept))


def _relative(told: dict, own_unit: bool) -> dict:
    """Return a forecast relative to the last level: in basis points, or in the unit of an own table."""
    last, bars = told["last"], []
    for bar in told["bars"]:
        at = {"time": bar["time"]}
        for target, level in last.items():
            for name in (target, f"{target}_low", f"{target}_high"):
                if bar.get(name) is not None:
                    at[name] = bar[name] - level if own_unit else round(1e4 * (bar[name] / level - 1), 4)
        bars.append(at)
    return {**told, "last": None, "bars": bars, "unit": "" if own_unit else "bp"}


def _beside_truth(one: past.Past) -> dict:
    """Return past forecasts beside what happened, as levels; a list for each number of bars ahead."""
    low, high = one.edges()
    columns = {"forecast": one.levels(one.forecast), "low": low, "high": high, "truth": one.levels(one.truth)}
    return {
        "target": one.target,
        "ahead": one.ahead.tolist(),
        "time": one.bars().T.tolist(),
        **{name: [_rounded(column) for column in values.T] for name, values in columns.items()},
    }


def _errors(one: past.Past) -> dict:
    """Return the errors of past forecasts by day, beside those of the last close; from these nobody can tell a bar."""
    table, scale = one.by_day(), 1e4 if one.unit == "bp" else 1.0
    parts = [table[table["ahead"] == step] for step in one.ahead]
    return {
        "target": one.target,
        "ahead": one.ahead.tolist(),
        "unit": one.unit,
        "time": [[int(pd.Timestamp(day).value // 10**6) for day in part["day"]] for part in parts],
        "rmse": [_rounded(scale * part["rmse"]) for part in parts],
        "persistence": [_rounded(scale * part["persistence"]) for part in parts],
        "inside": [_rounded(part["inside"]) for part in parts],
    }
