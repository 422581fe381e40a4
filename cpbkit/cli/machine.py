"""The machine: what it is, where the time of a step goes, and how fast the kit is on it."""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import click

from cpbkit.cli.command import make_command, show, status_line, wrong_usage
from cpbkit.cli.options import any_setting, as_json
from cpbkit.config.experiment import vary
from cpbkit.config.presets import PRESETS, TRAINED


@make_command(
    "cpbkit doctor",
    "cpbkit doctor train.py --epochs 2",
    "cpbkit doctor --json train.py > before.json",
    "cpbkit doctor --compare before.json after.json",
    "cpbkit doctor --preset gru",
    "cpbkit doctor --inject",
    context_settings={"allow_interspersed_args": False},  # what follows is the script's
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--preset", type=click.Choice(TRAINED), help="Measure a training step of this preset too.")
@any_setting
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="To measure the step in.")
@click.option("--inject", is_flag=True, help="Run loops with a known fault, or a folder of yours: what is named?")
@click.option("--compare", is_flag=True, help="Two reports that --json wrote: did the change between them help?")
@as_json
def doctor(script, arguments, preset, settings, seconds, inject, compare, as_json):
    """Say what is wrong with the machine, and why a step takes as long as it does.

    With a SCRIPT: run it as `python SCRIPT ARGUMENTS` would, watch its training, and name the line that costs the
    time. Ctrl-C ends it with the verdict so far.
    """
    if sum(map(bool, (inject, compare, preset))) + bool(script and preset) > 1:
        raise click.UsageError("--preset, --inject, --compare and a script to watch: one at a time")
    if settings and not preset:
        raise click.UsageError("--set changes a preset: it goes with --preset")
    if compare:
        from cpbkit.gpu_check.compare import compare_reports, load_report, render_comparison

        if not script or len(arguments) != 1:
            raise click.UsageError("--compare takes two reports: cpbkit doctor --compare before.json after.json")
        found = compare_reports(load_report(script), load_report(arguments[0]))
        show(found, as_json, lambda: render_comparison(found))
    elif inject:
        from cpbkit.gpu_check.inject import OWN_LOOPS, inject_all, render_faults

        with status_line() as say:
            rows = inject_all(script or OWN_LOOPS, say)
        show(rows, as_json, lambda: render_faults(rows))
    elif script:
        from cpbkit.gpu_check.script import run_script

        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            watched, ended = run_script(script, arguments, live=not as_json)
        if ended:
            click.echo(ended, err=True)
        failed = ended.startswith("the script failed")
        show(watched.to_dict() | {"ended": ended}, as_json, watched.report, failed)
    elif preset:
        from cpbkit.gpu_check.doctor import diagnose, preset_step, render

        with wrong_usage():
            experiment = vary(PRESETS[preset], **settings)
        with status_line() as say:
            say(f"measuring a step of {preset}, about {seconds:.0f} s")
            examination = diagnose(preset_step(experiment), seconds)
        show(examination.to_dict(), as_json, lambda: render(examination), examination.failure)
    else:
        from cpbkit.data.reach import try_hosts
        from cpbkit.gpu_check.findings import check_environment

        report = check_environment()
        hosts = try_hosts()
        document = report.to_dict() | {"hosts": [dataclasses.asdict(host) for host in hosts]}
        show(document, as_json, lambda: "\n".join([*report.lines(), *map(str, hosts)]))


def _timed_presets() -> Path:
    from cpbkit.data.cache import cache_folder

    return cache_folder() / "bench_presets.json"


@make_command("cpbkit presets", "cpbkit bench presets --quick")
@as_json
def presets(as_json):
    """Say what each preset is, how large, where it comes from, and which one to take here.

    What `cpbkit bench presets` measured here last is shown beside it.
    """
    from cpbkit.bench.choice import describe_presets, render_presets

    timed = _timed_presets()
    rows = describe_presets(json.loads(timed.read_text()) if timed.exists() else None)
    show(rows, as_json, lambda: render_presets(rows))


@make_command("cpbkit bench sweep --quick", "cpbkit bench sweep --peers --out bench.json")
@click.argument("what", type=click.Choice(["sweep", "presets"]))
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")
@click.option("--peers", is_flag=True, help="With sweep: also time neuralforecast and darts, installed for it.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the figures as JSON too, with sweep also as PNG.")
@as_json
def bench(what, quick, peers, out, as_json):
    """Measure the kit on this machine: both sides of each ratio, in one run.

    sweep: the engine against the loop in circulation. presets: which one to take here.
    """
    import importlib

    from cpbkit.bench.report import render, save

    if peers and what != "sweep":
        raise click.UsageError(f"--peers goes with `bench sweep`; got `bench {what}`")
    measure = getattr(importlib.import_module(f"cpbkit.bench.{what}"), f"bench_{what}")
    with status_line() as say:
        document = measure(quick=quick, say=say, **({"peers": True} if peers else {}))
    if out:
        save(document, out)
    if what == "presets":
        save(document, _timed_presets())  # `cpbkit presets` shows it
    show(document, as_json, lambda: render(document))
