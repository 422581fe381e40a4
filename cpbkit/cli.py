"""`cpbkit ...`: arguments, calls, and the showing of what they return."""

import dataclasses
import json
import shlex
import sys

import click

from cpbkit import __version__
from cpbkit.command import (
    Commands,
    as_json,
    experiment_of,
    run_folder,
    show,
    status_line,
    which_bars,
    which_experiment,
)
from cpbkit.errors import CpbkitError
from cpbkit.experiment import PRESETS, Experiment, vary


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cpbkit")
def cpbkit():
    """Train forty small crypto-price models at once, and tell the truth about them and about the GPU."""


@cpbkit.command(examples=("cpbkit demo", "cpbkit demo --run runs/first"))
@click.option("--run", "folder", default="runs/demo", show_default=True, help="Run folder.")
def demo(folder):
    """Sweep 40 models on the seeded market: the whole way, in a minute or two."""
    experiment = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-02-28")
    _sweep(experiment, folder, as_json=False)


@cpbkit.command(examples=("cpbkit doctor", "cpbkit doctor --json"))
@as_json
def doctor(as_json):
    """Say what machine this is, and what is wrong with it."""
    from cpbkit.gpu_check.environment import check_environment
    from cpbkit.gpu_check.monitor import load_nvml

    report = check_environment(load_nvml()[0])
    show(report.to_dict(), as_json, lambda: "\n".join(report.lines()))


@cpbkit.command(examples=("cpbkit fetch --symbols BTC,ETH --intervals 1h --start 2025-03-01 --end 2025-06-30",))
@which_bars
@as_json
def fetch(as_json, **given):
    """Download, check and cache bars; show how complete they are."""
    from cpbkit.data.binance import fetch_klines
    from cpbkit.data.klines import passport_table

    data = experiment_of("quick", {}, **given).data
    with status_line() as say:
        klines = fetch_klines(
            data.symbols,
            data.intervals,
            data.start,
            data.end,
            market=data.market,
            progress=lambda done, total, size, text: say(f"{done} of {total} files, {size / 1e6:.1f} MB  {text}"),
        )
    passports = [each.passport for each in klines.values()]
    show([p.to_dict() for p in passports], as_json, lambda: _passport_text(passports, passport_table))


def _passport_text(passports, passport_table) -> str:
    table = passport_table(passports).drop(columns=["source", "notes"])
    notes = [f"{p.series}: {' '.join(p.notes)}" for p in passports if p.notes]
    gaps = [
        f"{p.series}: {gap.start} to {gap.end}, {gap.bars} bars: {gap.name or 'not explained'}"
        for p in passports
        for gap in p.gaps
    ]
    return "\n".join(
        [table.to_string(), *(["", "Gaps (UTC)", *gaps] if gaps else []), *(["", *notes] if notes else [])]
    )


@cpbkit.command(
    examples=(
        "cpbkit sweep --source synthetic --start 2025-01-01 --end 2025-03-31",
        "cpbkit sweep --preset quick --start 2025-03-01 --end 2025-06-30 --intervals 15m --run runs/real",
    )
)
@which_experiment
@click.option("--run", "folder", help="Run folder; one that was stopped goes on.  [default: runs/PRESET]")
@click.option("--workers", type=click.IntRange(0), help="Processes; 0 trains in this one.  [default: decides itself]")
@as_json
def sweep(folder, workers, as_json, **given):
    """Train and judge a model a series, into a run folder.

    Stopped at any moment, the same command goes on from there."""
    experiment = experiment_of(**given)
    _sweep(experiment, folder or f"runs/{experiment.preset}", as_json, workers)


def _sweep(experiment: Experiment, folder: str, as_json: bool, workers: int | None = None) -> None:
    from cpbkit.run import Run
    from cpbkit.sweep import sweep

    before = len(Run(folder).results())
    with status_line() as say:
        results = sweep(
            experiment,
            folder,
            workers=workers,
            command="cpbkit " + shlex.join(sys.argv[1:]),
            on_progress=lambda state: say(_state_text(vars(state) | {"done": state.done})),
        )
    if before:
        click.echo(f"{before} of {len(experiment.series)} were done already.", err=True)
    _show_run(folder, results, as_json)
    if any(line["status"] != "done" for line in results):
        raise click.exceptions.Exit(1)


def _state_text(state: dict) -> str:
    left = state.get("seconds_left")
    left = "" if left is None else f"  {int(left // 60)} m {left % 60:02.0f} s left"
    return f"{state['done']} of {state['total']} done  {state['stage']}{left}"


def _show_run(folder: str, results: list[dict], as_json: bool) -> None:
    """Show the verdict on every series of a run, the best first, and one line a head."""
    from cpbkit.evaluate import headline, judgements, verdict_table, verdicts

    lost = [line for line in results if line["status"] != "done"]
    by_head = judgements(line for line in results if line["status"] == "done")
    table = verdict_table(by_head)
    heads = {head: headline(verdicts(group), head, len(results) - len(group)) for head, group in by_head.items()}
    trouble = [f"{line['series']} {line['status']}: {line['reason']}" for line in lost]
    document = {
        "run": str(folder),
        "models": len(results),
        "headlines": heads,
        "trouble": trouble,
        "verdicts": json.loads(table.to_json(orient="records")),
    }
    show(document, as_json, lambda: "\n".join(filter(None, [_verdict_text(table), *trouble, *heads.values()])))


def _verdict_text(table) -> str:
    if table.empty:
        return ""
    shown = table[["series", "head", "verdict"]].copy()
    shown["skill %, 95 % interval"] = [
        f"{skill:+.2f}  [{low:+.2f}, {high:+.2f}]"
        for skill, low, high in zip(table["skill %"], table["low %"], table["high %"], strict=True)
    ]
    shown["against"] = table["best floor"]
    for name in ("rmse", "floor rmse"):
        shown[name] = [f"{value:.4g} {unit}" for value, unit in zip(table[name], table["unit"], strict=True)]
    shown["direction %"] = table["direction %"].map("{:.1f}".format, na_action="ignore").fillna("")
    return shown.to_string(index=False)


@cpbkit.command(examples=("cpbkit status runs/quick",))
@run_folder
@as_json
def status(folder, as_json):
    """Say how far a run is, and whether it is being worked on."""
    from cpbkit.run import Run

    run = Run(folder)
    results, series = run.results(), run.experiment.series
    missing = [name for name in series if name not in {line["series"] for line in results}]
    holder, told = run.holder(), run.status()
    trouble = [f"{line['series']} {line['status']}: {line['reason']}" for line in results if line["status"] != "done"]
    document = {"run": folder, "done": len(results), "total": len(series), "missing": missing, "trouble": trouble}
    document |= {"writer": holder, "last": told}

    def text() -> str:
        if holder:
            now = f"{_state_text(told)}  ({holder})" if told else holder
        elif missing:
            now = f"stopped; missing: {', '.join(missing)}. The command that started it goes on"
        else:
            now = "complete"
        return "\n".join([f"{folder}: {len(results)} of {len(series)} done, {now}", *trouble])

    show(document, as_json, text)


@cpbkit.command(examples=("cpbkit verdict runs/quick", "cpbkit verdict runs/quick --json"))
@run_folder
@as_json
def verdict(folder, as_json):
    """Say whether each model beats the best naive forecast."""
    from cpbkit.run import Run

    run = Run(folder)
    results, series = run.results(), run.experiment.series
    if not results:
        raise CpbkitError(f"{folder} has no finished series yet, of {len(series)}")
    _show_run(folder, results, as_json)


@cpbkit.group(cls=Commands)
def cache():
    """Look after the cache of bars."""


def _cache_command(name: str, text: str):
    @cache.command(name, help=text, examples=(f"cpbkit cache {name}", f"cpbkit cache {name} --series BTCUSDT_15m"))
    @click.option("--market", type=click.Choice(["spot", "um"]))
    @click.option("--series", metavar="NAME", help="One series.  [default: all]")
    @as_json
    def command(market, series, as_json):
        from cpbkit.data.store import Store

        store = Store()
        entries = [dataclasses.asdict(entry) for entry in getattr(store, name)(market, series)]
        show(entries, as_json, lambda: _entries_text(store.folder, entries))
        if name == "verify" and any(entry["problem"] for entry in entries):
            raise click.exceptions.Exit(1)


def _entries_text(folder, entries: list[dict]) -> str:
    lines = [
        f"{e['market']:4} {e['series']:14} {e['first']} to {e['last']}  {e['bars']:>9,} bars"
        f"  {e['bytes'] / 1e6:8.2f} MB  {e['problem']}".rstrip()
        for e in entries
    ]
    total = f"{len(entries)} series, {sum(e['bytes'] for e in entries) / 1e6:.1f} MB in {folder}"
    return "\n".join([*lines, total])


_cache_command("list", "List what is cached.")
_cache_command("verify", "Read every file to the last bit; exit code 1 where one is damaged.")
_cache_command("remove", "Remove files, and list them.")
