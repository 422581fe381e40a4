"""One self-contained HTML file of a run: the verdicts, how they came about, and on what bars."""

import base64
import dataclasses
import errno
import hashlib
import importlib.resources
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from cpbkit import atomic
from cpbkit.config.experiment import PARTS, Data, Experiment
from cpbkit.data.klines import Passport, passport_table, say_doubts
from cpbkit.errors import RunError, check_name
from cpbkit.evaluation import past, pooled, verdicts
from cpbkit.evaluation.results import ResultLine, is_synthetic, relative
from cpbkit.evaluation.training_checks import check_results
from cpbkit.quantities import counted, duration, signed
from cpbkit.runs.folder import REPORT, RunFolder, tell_stopped
from cpbkit.views.chart import chart
from cpbkit.views.loss import lowest
from cpbkit.views.page import STYLE
from cpbkit.views.palette import DARK, LIGHT
from cpbkit.views.panels import sweep_html
from cpbkit.views.style import label, stamped
from cpbkit.views.verdict import skill_frame

SKILL = (
    "Skill is 1 − √(loss / loss of the best naive forecast), where a loss is the squared error over the variance known "
    "when the forecast was made."
)
OWN = {"synthetic": "the seeded market", "files": "own files", "given": "own bars", "table": "own tables"}
PARTS_AT_MOST = 200  # series that have a part of their own; 10,000 would make a page that no browser opens
SHOWN = 160  # windows of a chart of forecasts
# What a phone has room for comes first; the columns after it leave a narrow screen, and stand in the series' part.
VERDICT_COLUMNS = (
    *("series", "verdict", "", "skill %", "95 % interval", "p", "against", "RMSE", "naive RMSE", "direction %", "IC"),
    *("fee, bp", "windows"),
)  # that without a name holds a picture, and is named after its frame
BARS_COLUMNS = (
    *("series", "there", "files", "first", "last", "expected", "got", "gaps", "unexplained", "zero volume", "flat"),
    "dropped",
)


def write_report(
    folder: str | os.PathLike,
    out: str | os.PathLike | None = None,
    with_command: bool = False,
    series: Sequence[str] | None = None,
) -> Path:
    """Write the report of a run, finished or not, and return its path: `out`, or `report.html` in the folder.

    with_command: also show the command line of the run, which may hold paths of this machine.
    series: those that get a part of their own; by default all, or the best and the worst of more than PARTS_AT_MOST.
    The page opens without a network and is whole or absent. Errors: RunError for a folder that holds no result.
    """
    run = RunFolder(folder)
    experiment, results = run.experiment, run.results()
    if not results:
        raise RunError(
            f"a report needs at least one finished series; {run.folder} has none of {len(experiment.series)}"
        )
    order = {name: i for i, name in enumerate(experiment.series)}
    results.sort(key=lambda line: order.get(line.series, len(order)))
    about = run.about()
    script = (importlib.resources.files("cpbkit.views") / "templates" / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    judged = verdicts.judgements(results)
    # Of each series, on the first head that it is judged on.
    skills = {name: j.skill for group in reversed([*judged.values()]) for name, j in group.items()}
    chosen, left_out = _chosen([line.series for line in results], skills, series)
    few = [line for line in results if line.series in chosen]
    template = templates().get_template("report.html")
    page = template.render(
        synthetic=is_synthetic(results),
        script=Markup(script),
        script_sha256=digest,
        style=Markup(STYLE),
        left_out=left_out,
        parts=_parts(run, few, judged, skills),
        **_header(run, results, judged, about.get("parent", "")),
        **_verdicts(run, results, judged),
        intervals=_intervals(few),
        **_training(experiment, results, few, run.monitor(), left_out),
        **_bars(few),
        clock=_clock(run.clock()),
        splits=_splits(few),
        purge=counted(max(experiment.task.purge, experiment.task.horizon), "bar"),
        settings=_settings(run.settled),
        **_origin(about, with_command),
    )
    target = Path(out) if out else run.folder / REPORT
    try:
        atomic.write_bytes(target, page.encode())
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise RunError(
            f"{target} cannot be written ({error.strerror}); give another place for it: --out, or out="
        ) from None
    return target


def templates() -> jinja2.Environment:
    """Return what makes pages of the kit's templates; every value is escaped."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("cpbkit.views"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.globals |= {"light": LIGHT, "dark": DARK}
    return made


def say_source(data: Data) -> str:
    """Say whose bars they are; a market is one of a venue's."""
    return OWN.get(data.source, f"{data.source} {data.market}")


def sentences(run: RunFolder, results: Sequence[ResultLine], judged: Mapping) -> dict[str, list[str]]:
    """Return what the verdicts of a run say, by head, the headline first. judged: the `judgements` of the results."""
    losses, _ = pooled.gather([line.series for line in results if line.test], run.losses)
    said = pooled.say_all(results, judged, losses, {head: pooled.pool(parts) for head, parts in losses.items()})
    return {head: [said[head + kind] for kind in pooled.KINDS if head + kind in said] for head in judged}


def _chosen(names: Sequence[str], skills: Mapping[str, float], series: Sequence[str] | None) -> tuple[set[str], str]:
    """Return the series that get a part, and what is to be said of those that get none."""
    if series:
        chosen = {check_name("series", name, names) for name in series}
    elif len(names) <= PARTS_AT_MOST:
        chosen = set(names)
    else:
        order, half = sorted(skills, key=lambda name: -skills[name]), PARTS_AT_MOST // 2
        chosen = {*order[:half], *order[-half:]}
    if len(chosen) == len(names):
        return chosen, ""
    which = "those chosen" if series else f"the {PARTS_AT_MOST // 2} best and the {PARTS_AT_MOST // 2} worst"
    return chosen, (
        f"Parts, intervals, training and bars are of {len(chosen)} of {len(names):,} series, {which}; "
        "`cpbkit report RUN --series NAME,... --out FILE` writes those of any others."
    )


def _header(run: RunFolder, results: Sequence[ResultLine], judged: Mapping, parent: str) -> dict:
    experiment = run.experiment
    finished = {line.series for line in results}
    names = list(dict.fromkeys([*experiment.series, *finished]))
    missing = [label(name) for name in names if name not in finished]
    more = f" and {len(missing) - 40:,} more" if len(missing) > 40 else ""
    data, task = experiment.data, experiment.task
    sizes = sorted({line.parameters for line in results if line.parameters})
    facts = [
        f"{counted(task.context, 'bar')} in, {counted(task.horizon, 'bar')} out",
        say_source(data),
        *([f"{data.start or '…'} to {data.end or '…'}"] if data.start or data.end else []),
        *(f"{size:,} parameters a model" for size in sizes),
    ]
    if parent:
        begun = "from its weights" if experiment.training.warm_start else "from drawn weights"
        facts.append(f"a refit of {Path(parent).name}, begun {begun}")
    trouble = [f"Not finished yet: {', '.join(missing[:40])}{more}"] if missing else []
    passports = [Passport.from_dict(line.passport) for line in results if line.passport]
    trouble += [tell_stopped(results), verdicts.tell_unbelievable(results, judged), say_doubts(passports)]
    trouble.append(verdicts.tell_unaudited(run.unaudited_features(), judged))
    return {
        "title": f"{experiment.preset} · {len(names)} series · {run.folder.resolve().name}",
        "facts": " · ".join(facts),
        "trouble": ". ".join(filter(None, trouble)),
    }


def _verdicts(run: RunFolder, results: Sequence[ResultLine], judged: Mapping) -> dict:
    heads, all_said = [], sentences(run, results, judged)
    for head, group in judged.items():
        found = verdicts.verdicts(group)
        best_first = sorted(group, key=lambda name: -group[name].skill)
        said = ((name, verdicts.say_worth(group[name], found[name].word)) for name in best_first)
        frame = skill_frame(group)
        rows = [_verdict_row(name, group[name], found[name], *frame) for name in best_first]
        told = [any(_text(cell) for cell in column) for column in zip(*rows, strict=True)]  # or it has an empty column
        heads.append(
            {
                "headline": all_said[head][0],
                "more": all_said[head][1:],
                # Of the first model that names a price's direction.
                "worth": next((f"{label(name)}: {worth}" for name, worth in said if worth), ""),
                "columns": [*itertools.compress(VERDICT_COLUMNS, told)],
                "rows": [[*itertools.compress(row, told)] for row in rows],
                "frame": [f"{_number(100 * end, '+.2g')} %" for end in frame],
            }
        )
    labels = {name: label(name) for group in judged.values() for name in group}
    columns = {name for head in heads for name in head["columns"]}
    return {"heads": heads, "labels": labels, "columns": columns, "skill": SKILL}


def _text(cell: str | tuple[str, str]) -> str:
    """Return what a cell says, beside which its class may stand."""
    return cell if isinstance(cell, str) else cell[0]


def _verdict_row(name: str, j: verdicts.Judgement, verdict: verdicts.Verdict, low: float, high: float) -> list:
    return [
        name,
        (verdict.word, verdict.word.lower().replace(" ", "-")),
        Markup(skill_mark(j, low, high)),
        _number(100 * j.skill, "+.2f"),
        _skill_span(j.skill_low, j.skill_high) if j.is_enough else "",
        "" if not j.is_enough else f"{verdict.p:.2g}" if verdict.p >= 1e-4 else "< 0.0001",
        (j.best_baseline, "against"),
        f"{_digits(j.rmse)} {j.unit}".strip(),
        _digits(j.baselines[j.best_baseline]),
        "" if j.direction is None else f"{100 * j.direction:.1f}",
        _number(j.ic, "+.3f"),
        _number(j.fee, ".1f"),
        f"{j.windows:,}",
    ]


def skill_mark(j: verdicts.Judgement, low: float, high: float) -> str:
    """Draw a skill with its interval from `low` to `high`; the numbers stand beside it."""
    zero, middle, begin, end = (
        round(100 * min(max((x - low) / (high - low or 1), 0), 1)) for x in (0, j.skill, j.skill_low, j.skill_high)
    )
    line = f"M{begin} 5H{end}" if j.is_enough else ""
    return (
        f'<svg viewBox="-4 0 108 10" aria-hidden="true"><path d="M{zero} 0V10"/><path d="{line}"/>'
        f'<circle cx="{middle}" cy="5" r="3"/></svg>'
    )


def _parts(run: RunFolder, few: Sequence[ResultLine], judged: Mapping, skills: Mapping[str, float]) -> list[dict]:
    """Say of each series all that is known of it, in the order of the verdicts."""
    found = {head: verdicts.verdicts(group) for head, group in judged.items()}
    parts = []
    for line in sorted(few, key=lambda line: -skills.get(line.series, -np.inf)):
        name = line.series
        said = [(head, group[name], found[head][name]) for head, group in judged.items() if name in group]
        checks = check_results([line])
        passport = Passport.from_dict(line.passport) if line.passport else None
        parts.append(
            {
                "name": name,
                "label": label(name),
                "word": said[0][2].word if said else line.status.upper(),
                "kind": (said[0][2].word if said else "sick").lower().replace(" ", "-"),
                "reasons": [f"{head}: {verdict.word}, {verdict.reason}" for head, _, verdict in said] or [line.reason],
                "worth": " ".join(filter(None, (verdicts.say_worth(j, verdict.word) for _, j, verdict in said))),
                "charts": Markup("".join(_charts(run, line))),
                "numbers": [[*([head] if len(said) > 1 else []), *row] for head, j, _ in said for row in _numbers(j)],
                "health": [[c.check, (c.verdict, c.verdict.lower()), c.evidence] for c in checks],
                "passport": [] if passport is None else _passport_rows(passport),
            }
        )
    return parts


def _charts(run: RunFolder, line: ResultLine) -> list[str]:
    """Draw the losses, the last forecasts beside what happened, and what the intervals held."""
    curves = {name: relative(line, name) for name in ("train", "validation")}
    drawn, name = [], stamped(label(line.series), is_synthetic([line]))
    longest = max(map(len, curves.values()))
    if longest and np.isfinite(np.concatenate([*curves.values()])).any():
        lines = {kind: np.r_[curve, np.full(longest - len(curve), np.nan)] for kind, curve in curves.items()}
        best = lowest(curves["validation"])
        spoken = "" if best is None else f"Lowest on validation {curves['validation'][best]:.3g} at epoch {best + 1}"
        lines["persistence"] = np.ones(longest)
        title = f"{name}, loss relative to persistence, by epoch"
        drawn.append(chart(title, np.arange(1, longest + 1), lines, None, spoken))
    kept = run.losses(line.series)
    for head, by_target in past.from_bytes(kept, name).items() if kept else ():
        one = next(iter(by_target.values()))
        rows, last = slice(-SHOWN, None), one.ahead[-1]
        levels = {kind: one.levels(y)[rows, -1] for kind, y in (("truth", one.truth), ("forecast", one.forecast))}
        times = one.bars()[rows, -1].astype("datetime64[ms]")
        low, high = (edge[rows, -1] for edge in one.edges())
        error = one.truth[rows, -1] - one.forecast[rows, -1]
        inside = (np.abs(error) <= one.half[rows, -1]).mean()
        title = f"{name}, {one.target} of {head}: forecast {counted(int(last), 'bar')} before, and truth"
        spoken = f"{100 * inside:.0f} % of the truth lies inside the interval"
        drawn.append(chart(title, times, levels, (low, high), spoken))
    for head, told in line.coverage().items():
        if len(told["dates"]) > 1:
            times = np.array(told["dates"], "datetime64[m]")
            lines = {
                "inside": 100 * np.array(told["over_time"]),
                "promised": np.full(len(times), 100 * told["nominal"]),
            }
            title = f"{name}, calibration of the {head}: truth inside the interval, %"
            drawn.append(chart(title, times, lines, None, f"{100 * told['coverage']:.1f} % in all"))
    return drawn


def _numbers(j: verdicts.Judgement) -> list[list]:
    """List what the table of verdicts has no room for."""
    pairs = {
        "skill against persistence %": (100, "persistence_skill", "+.2f"),
        "RMSE skill %": (100, "rmse_skill", "+.2f"),
        "direction %": (100, "direction", ".1f"),
        "IC": (1, "ic", "+.3f"),
        "break-even fee, bp": (1, "fee", ".1f"),
    }
    rows: list[list] = []
    for name, (times, field, form) in pairs.items():
        value, low, high = (getattr(j, field + end) for end in ("", "_low", "_high"))
        if value is not None:
            span = _skill_span(low, high) if "skill" in name else _span(times, low, high, form)
            rows.append([name, f"{_number(times * value, form)}, {span}"])
    errors = ", ".join(f"{baseline} {_digits(rmse)}" for baseline, rmse in j.baselines.items())
    rows += [["MAE", f"{_digits(j.mae)} {j.unit}".strip()], ["RMSE of the naive forecasts", errors]]
    for name, own, naive in (("R²", j.r2, j.r2_persistence), ("MAPE %", j.mape, j.mape_persistence)):
        if own is not None:  # grey, since any copy of the last price scores as well
            rows.append([name, (f"{_number(own, '.4f')}, that of persistence {_number(naive, '.4f')}", "grey")])
    return rows


def _passport_rows(passport: Passport) -> list[list]:
    table = passport_table([passport]).drop(columns=["notes"])
    rows = [[str(name).replace("_", " "), _cell(value)] for name, value in table.iloc[0].items() if value]
    gaps = [f"{gap.start} to {gap.end}, {counted(gap.bars, 'bar')}: {gap.name or 'unknown'}" for gap in passport.gaps]
    rows += [["gap", gap.replace("T", " ")] for gap in gaps[:20]]
    rows += [["gaps", f"and {len(gaps) - 20:,} more"]] if len(gaps) > 20 else []
    return rows + [["note", note] for note in passport.notes]


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value).replace("T", " ")


def _intervals(results: Sequence[ResultLine]) -> list[list[str]]:
    return [
        [
            label(line.series),
            head,
            *(_percent(told.get(name)) for name in ("coverage", "coverage_wild", "coverage_worst_step")),
            f"{_digits(told['width'])} {told['unit']}".strip(),
            *(_digits(told.get(name, np.nan)) for name in ("score", "score_persistence", "crps", "crps_persistence")),
        ]
        for line in results
        for head, told in line.coverage().items()
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _training(
    experiment: Experiment,
    results: Sequence[ResultLine],
    few: Sequence[ResultLine],
    monitor: pd.DataFrame | None,
    left_out: str,
) -> dict:
    checks = check_results(results)
    wrong = [check for check in checks if check.verdict != "OK"]
    sick = {check.series for check in wrong if check.verdict == "SICK"}
    spent = sum(line.epochs for line in results)
    return {
        "sweep": Markup(sweep_html(few, monitor, series=() if left_out else experiment.series)),
        "soundness": f"{len(results) - len(sick)} of {counted(len(results), 'model')} trained soundly, "
        f"{counted(spent, 'epoch')} in all.",
        "health": [
            [label(c.series), c.check, (c.verdict, c.verdict.lower()), c.evidence]
            for c in sorted(wrong, key=lambda check: check.verdict != "SICK")[: 5 * PARTS_AT_MOST]
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


def _bars(results: Sequence[ResultLine]) -> dict:
    passports = [Passport.from_dict(line.passport) for line in results if line.passport]
    table = passport_table(passports).rename(columns=lambda name: name.replace("_", " "))
    shown = table[[name for name in BARS_COLUMNS if name in table]]
    rows = [
        [label(p.series), Markup(_strip(p)), *map(_cell, row)]
        for p, row in zip(passports, shown.itertuples(index=False), strict=True)
    ]
    gaps = (
        (p.series, (gap.start.replace("T", " "), gap.end.replace("T", " "), f"{gap.bars:,}", gap.name or "unknown"))
        for p in passports
        for gap in p.gaps
    )
    return {
        "sources": ", ".join(dict.fromkeys(f"{p.source} {p.market}".strip() for p in passports)),
        "passports": rows,
        "passport_columns": BARS_COLUMNS,
        "gaps": _alike(gaps),
        "notes": _alike((p.series, (note,)) for p in passports for note in p.notes),
        "files": [[label(p.series), file.name, file.sha256] for p in passports for file in p.files],
    }


def _strip(passport: Passport) -> str:
    """Draw from the first bar to the last what is missing: grey where a halt of the venue explains it."""
    if not passport.got:
        return ""
    first, last = (pd.Timestamp(end) for end in (passport.first, passport.last))
    span = (last - first).total_seconds() or 1.0
    marks = ""
    for gap in sorted(passport.gaps, key=lambda gap: -gap.bars)[:20]:
        at = 100 * (pd.Timestamp(gap.start) - first).total_seconds() / span
        wide = max(1.0, 100 * (pd.Timestamp(gap.end) - pd.Timestamp(gap.start)).total_seconds() / span)
        marks += f'<path class="{"halt" if gap.name else "gap"}" d="M{at:.1f} 5h{wide:.1f}"/>'
    return f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><path d="M0 5H100"/>{marks}</svg>'


def _splits(results: Iterable[ResultLine]) -> list[list[str]]:
    parts, rows = ("train", "validation", "test"), []
    for line in results:
        if line.dates:
            spans = [" to ".join(line.dates.get(part, ())).replace("T", " ") for part in parts]
            windows = " / ".join(f"{line.windows.get(part, 0):,}" for part in parts)
            rows.append((line.series, (*spans, windows)))
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


def _number(value: float | None, form: str) -> str:
    return "" if value is None else signed(value, form)


def _span(times: float, low: float | None, high: float | None, form: str) -> str:
    return "" if low is None or high is None else f"{_number(times * low, form)} to {_number(times * high, form)}"


def _skill_span(low: float | None, high: float | None) -> str:
    """Say the interval of a skill, which may have no end where a few windows decide."""
    return "" if low is None or high is None else verdicts.say_ends(100 * low, 100 * high).replace("-", "−")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
