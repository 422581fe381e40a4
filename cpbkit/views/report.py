"""One self-contained HTML file of a run: the verdicts, how they came about, and on what bars."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup

from cpbkit import atomic
from cpbkit.config.experiment import PARTS, Experiment
from cpbkit.data.klines import Passport, passport_table
from cpbkit.errors import RunError
from cpbkit.evaluation import pooled, verdicts
from cpbkit.evaluation.training_checks import check_results
from cpbkit.quantities import counted, duration
from cpbkit.runs.folder import REPORT, RunFolder, tell_stopped
from cpbkit.views.loss import is_synthetic
from cpbkit.views.market import passport_figure
from cpbkit.views.panels import sweep_html
from cpbkit.views.style import DARK, NAMES, label
from cpbkit.views.verdict import coverage_figure, verdict_figure

VERDICT_COLUMNS = (
    *("series", "verdict", "skill %", "95 % interval", "p", "against", "against persistence %", "RMSE skill %"),
    *("RMSE", "naive RMSE", "MAE", "direction %", "95 % interval", "IC", "95 % interval", "fee, bp", "95 % interval"),
    *("R²", "MAPE %", "windows"),
)
INTERVAL_COLUMNS = (
    *("series", "head", "inside %", "after wild bars %", "worst step %", "mean width", "score", "naive score"),
    *("CRPS", "naive CRPS"),
)


def write_report(folder: str | Path, out: str | Path | None = None, with_command: bool = False) -> Path:
    """Write the report of a run, finished or not, and return its path: `out`, or `report.html` in the folder.

    with_command: also show the command line of the run, which may hold paths of this machine.
    The page opens without a network and is whole or absent. Errors: RunError for a folder that holds no result.
    """
    run = RunFolder(folder)
    experiment, results = run.experiment, run.results()
    if not results:
        raise RunError(
            f"a report needs at least one finished series; {run.folder} has none of {len(experiment.series)}"
        )
    order = {name: i for i, name in enumerate(experiment.series)}
    results.sort(key=lambda line: order.get(line["series"], len(order)))
    monitor = run.monitor()
    clock, about = run.clock(), run.about()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cpbkit.views"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html").render(
        light={name: colour for colour, name in NAMES.items()},
        dark=DARK,
        synthetic=is_synthetic(results),
        **_header(run.folder, experiment, results),
        **_verdicts(run, results),
        **_intervals(results),
        **_training(experiment, results, monitor),
        **_bars(results),
        clock=_clock(clock),
        splits=_splits(results),
        purge=counted(max(experiment.task.purge, experiment.task.horizon), "bar"),
        settings=_settings(run.settled),
        **_origin(about, with_command),
    )
    target = Path(out) if out else run.folder / REPORT
    atomic.write_bytes(target, page.encode())
    return target


def _header(folder: Path, experiment: Experiment, results: Sequence[Mapping]) -> dict:
    finished = {line["series"] for line in results}
    names = list(dict.fromkeys([*experiment.series, *finished]))
    missing = [label(name) for name in names if name not in finished]
    data, task = experiment.data, experiment.task
    sizes = sorted({line["parameters"] for line in results if "parameters" in line})
    facts = [
        f"{counted(task.context, 'bar')} in, {counted(task.horizon, 'bar')} out",
        {"synthetic": "the seeded market", "files": "own files"}.get(data.source, f"{data.source} {data.market}"),
        f"{data.start or '…'} to {data.end or '…'}",
        *(f"{size:,} parameters a model" for size in sizes),
    ]
    unfinished = [f"Not finished yet: {', '.join(missing)}"] if missing else []
    unfinished.append(tell_stopped(results))
    return {
        "title": f"{experiment.preset} · {len(names)} series · {folder.resolve().name}",
        "facts": " · ".join(facts),
        "unfinished": ". ".join(filter(None, unfinished)),
    }


def _verdicts(run: RunFolder, results: Sequence[Mapping]) -> dict:
    heads = []
    losses, _ = pooled.gather([line["series"] for line in results if line["test"]], run.losses)
    for head, group in verdicts.judgements(results).items():
        found = verdicts.verdicts(group)
        best_first = sorted(group, key=lambda name: -group[name].skill)
        heads.append(
            {
                "headline": verdicts.headline(found, head, unjudged=len(results) - len(group)),
                "together": pooled.pool(losses[head]).sentence() if head in losses else "",
                "worth": _worth(group, found, best_first),
                "rows": [_verdict_row(name, group[name], found[name]) for name in best_first],
            }
        )
    figure = Markup(verdict_figure(results).svg("verdicts")) if heads else ""
    return {"heads": heads, "verdict_columns": VERDICT_COLUMNS, "verdict_figure": figure}


def _worth(group: Mapping[str, verdicts.Judgement], found: Mapping[str, verdicts.Verdict], order: Sequence[str]) -> str:
    """Say what the first model of the order that names a price's direction would be worth."""
    said = ((name, verdicts.say_worth(group[name], found[name].word)) for name in order)
    return next((f"{label(name)}: {worth}" for name, worth in said if worth), "")


def _verdict_row(name: str, j: verdicts.Judgement, verdict: verdicts.Verdict) -> list:
    return [
        label(name),
        (verdict.word, verdict.word.lower().replace(" ", "-")),
        _number(100 * j.skill, "+.2f"),
        _span(100, j.skill_low, j.skill_high, "+.2f") if j.is_enough else "",
        "" if not j.is_enough else f"{verdict.p:.2g}" if verdict.p >= 1e-4 else "< 0.0001",
        j.best_baseline,
        "" if j.persistence_skill is None else _number(100 * j.persistence_skill, "+.2f"),
        _number(100 * j.rmse_skill, "+.2f"),
        f"{_digits(j.rmse)} {j.unit}".strip(),
        _digits(j.baselines[j.best_baseline]),
        _digits(j.mae),
        "" if j.direction is None else f"{100 * j.direction:.1f}",
        "" if j.direction is None else f"{100 * j.direction_low:.1f} to {100 * j.direction_high:.1f}",
        "" if j.ic is None else _number(j.ic, "+.3f"),
        "" if j.ic is None else _span(1, j.ic_low, j.ic_high, "+.3f"),
        "" if j.fee is None else _number(j.fee, ".1f"),
        "" if j.fee is None else _span(1, j.fee_low, j.fee_high, ".1f"),
        ("" if j.r2 is None else f"{_number(j.r2, '.4f')} / {_number(j.r2_persistence, '.4f')}", "grey"),
        ("" if j.mape is None else f"{j.mape:.3f} / {j.mape_persistence:.3f}", "grey"),
        f"{j.windows:,}",
    ]


def _intervals(results: Sequence[Mapping]) -> dict:
    rows = [
        [
            label(line["series"]),
            head,
            *(f"{100 * told[name]:.1f}" for name in ("coverage", "coverage_wild", "coverage_worst_step")),
            f"{_digits(told['width'])} {told['unit']}".strip(),
            *(_digits(told[name]) for name in ("score", "score_persistence", "crps", "crps_persistence")),
        ]
        for line in results
        for head, told in line.get("intervals", {}).items()
    ]
    figure = Markup(coverage_figure(results).svg("coverage")) if rows else ""
    return {"intervals": rows, "interval_columns": INTERVAL_COLUMNS, "coverage_figure": figure}


def _training(experiment: Experiment, results: Sequence[Mapping], monitor: pd.DataFrame | None) -> dict:
    checks = check_results(results)
    wrong = [check for check in checks if check.verdict != "OK"]
    sick = {check.series for check in wrong if check.verdict == "SICK"}
    spent = sum(line.get("epochs", 0) for line in results)
    return {
        "sweep": Markup(sweep_html(results, monitor, series=experiment.series)),
        "soundness": f"{len(results) - len(sick)} of {counted(len(results), 'model')} trained soundly, "
        f"{counted(spent, 'epoch')} in all.",
        "health": [
            [label(c.series), c.check, (c.verdict, c.verdict.lower()), c.evidence]
            for c in sorted(wrong, key=lambda check: check.verdict != "SICK")
        ],
    }


def _clock(seconds: Mapping[str, float]) -> list[dict]:
    inside = {name.removeprefix("worker: "): s for name, s in seconds.items() if name.startswith("worker: ")}
    whole = {name: s for name, s in seconds.items() if not name.startswith("worker: ")}
    parts = []
    for title, stages in (
        (f"{duration(sum(whole.values()))} in all", whole),
        (f"inside training, all workers added up: {duration(sum(inside.values()))}", inside),
    ):
        total = sum(stages.values())
        rows = [
            (name, f"{spent:,.1f} s", f"{100 * spent / total:.1f}")
            for name, spent in sorted(stages.items(), key=lambda item: -item[1])
            if total
        ]
        parts += [{"title": title, "rows": rows}] if rows else []
    return parts


def _bars(results: Sequence[Mapping]) -> dict:
    passports = [Passport.from_dict(line["passport"]) for line in results if line.get("passport")]
    table = passport_table(passports).drop(columns=["source", "notes", "missing"])
    rows = []
    for name, row in zip(table.index, table.itertuples(index=False), strict=True):
        cells = [f"{cell:,}" if isinstance(cell, int) else str(cell).replace("T", " ") for cell in row]
        rows.append([label(name), *cells])
    gaps = (
        (p.series, (gap.start.replace("T", " "), gap.end.replace("T", " "), f"{gap.bars:,}", gap.name or "unknown"))
        for p in passports
        for gap in p.gaps
    )
    return {
        "sources": ", ".join(dict.fromkeys(f"{p.source} {p.market}".strip() for p in passports)),
        "passports": rows,
        "passport_columns": ["series", *(str(name).replace("_", " ") for name in table.columns)],
        "passport_figure": Markup(passport_figure(passports).svg("passports")) if passports else "",
        "gaps": _alike(gaps),
        "notes": _alike((p.series, (note,)) for p in passports for note in p.notes),
        "files": [[label(p.series), file.name, file.sha256] for p in passports for file in p.files],
    }


def _splits(results: Iterable[Mapping]) -> list[list[str]]:
    parts, rows = ("train", "validation", "test"), []
    for line in results:
        if line.get("dates"):
            spans = [" to ".join(line["dates"][part]).replace("T", " ") for part in parts]
            rows.append((line["series"], (*spans, " / ".join(f"{line['windows'][part]:,}" for part in parts))))
    return _alike(rows)


def _alike(rows: Iterable[tuple[str, tuple]]) -> list[list[str]]:
    """Put the series of which the same is said into one row, at its end."""
    names: dict[tuple, list[str]] = {}
    for name, said in rows:
        names.setdefault(said, []).append(label(name).replace(" ", "\N{NO-BREAK SPACE}"))
    return [[*said, ", ".join(who)] for said, who in names.items()]


def _settings(experiment: Experiment) -> dict[str, list]:
    found = {}
    for part in PARTS:
        values = dataclasses.asdict(getattr(experiment, part))
        found[part] = [
            [name, (", ".join(map(str, value)) if isinstance(value, tuple) else str(value), "words")]
            for name, value in values.items()
        ]
    return found


def _origin(about: Mapping, with_command: bool) -> dict:
    origin = about | about.get("machine", {}) | about.get("versions", {})
    shown = ("date", "system", "cpu", "cores", "gpu", "commit", *about.get("versions", {}))
    return {
        "command": about.get("command", "") if with_command else "",
        "origin": [[name, str(origin[name])] for name in shown if origin.get(name)],
    }


def _number(value: float, form: str) -> str:
    return f"{value:{form}}".replace("-", "−")


def _span(times: float, low: float, high: float, form: str) -> str:
    return f"{_number(times * low, form)} to {_number(times * high, form)}"


def _digits(value: float) -> str:
    return f"{value:#.4g}".rstrip(".")
