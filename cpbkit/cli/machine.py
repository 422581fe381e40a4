"""The machine: what it is, where the time of a step goes, and how fast the kit is on it."""

import click

from cpbkit.cli.command import Command, any_setting, as_json, show, status_line, vary_as_told
from cpbkit.config.presets import PRESETS


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},  # what follows is the script's
    examples=(
        "cpbkit doctor",
        "cpbkit doctor train.py --epochs 2",
        "cpbkit doctor --preset gru",
        "cpbkit doctor --inject",
    ),
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="Measure a training step of this preset too.")
@any_setting
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="To measure the step in.")
@click.option("--claims", is_flag=True, help="Measure the folklore about slow training, claim by claim.")
@click.option("--inject", is_flag=True, help="Inject known faults, and say how often they are found.")
@as_json
def doctor(script, arguments, preset, settings, seconds, claims, inject, as_json):
    """Say what is wrong with the machine, and why a step takes as long as it does.

    With a SCRIPT: run it as `python SCRIPT ARGUMENTS` would, watch its training, and name the line that costs the
    time. Ctrl-C ends it with the verdict so far.
    """
    if script:
        from cpbkit.gpu_check.script import run_script

        if claims or preset or inject:
            raise click.UsageError("a script goes without --preset, --claims and --inject")
        watched, ended = run_script(script, arguments, live=not as_json)
        if ended:
            click.echo(ended, err=True)
        show(watched.to_dict() | {"ended": ended}, as_json, watched.report)
        return
    if inject and (claims or preset):
        raise click.UsageError("--inject puts faults into a toy of its own: it goes without --preset and --claims")
    if settings and not preset:
        raise click.UsageError("--set changes a preset: it goes with --preset")
    experiment = vary_as_told(PRESETS[preset], settings) if preset else None
    if claims:
        from cpbkit.gpu_check.claims import judge_claims
        from cpbkit.gpu_check.doctor import preset_step

        step = preset_step(experiment) if experiment else None
        _show_rows(judge_claims(step), as_json, "{key:4} {verdict:20} {claim}\n     {text}")
    elif inject:
        from cpbkit.gpu_check.faults import inject_all, render_faults

        with status_line() as say:
            rows = []
            for row in inject_all():
                rows.append(row)
                say(f"{row['fault']}: {row['found'] or row['note']}")
        show(rows, as_json, lambda: render_faults(rows))
    elif preset:
        from cpbkit.gpu_check.doctor import diagnose, preset_step, render

        with status_line() as say:
            say(f"measuring a step of {preset}, about {seconds:.0f} s")
            examination = diagnose(preset_step(experiment), seconds)
        show(examination.to_dict(), as_json, lambda: render(examination))
        if examination.failure:
            raise click.exceptions.Exit(1)
    else:
        from cpbkit.gpu_check.findings import check_environment

        report = check_environment()
        show(report.to_dict(), as_json, lambda: "\n".join(report.lines()))


BENCHMARKS = ("sweep", "presets", "doctor")


@click.command(cls=Command, examples=("cpbkit bench sweep --quick", "cpbkit bench sweep --peers --out bench.json"))
@click.argument("what", type=click.Choice(BENCHMARKS))
@click.option("--quick", is_flag=True, help="Fewer sizes and rounds.")
@click.option("--peers", is_flag=True, help="With sweep: also time neuralforecast and darts, installed for it.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write the figures as JSON too, with sweep also as PNG.")
@as_json
def bench(what, quick, peers, out, as_json):
    """Measure the kit on this machine: both sides of each ratio, in one run.

    sweep: the engine against the loop in circulation. presets: which one to take here.
    doctor: how often its verdicts are right.
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
    show(document, as_json, lambda: render(document))


def _show_rows(rows, as_json: bool, form: str) -> None:
    """Print each row as it comes; as JSON all at the end."""
    if as_json:
        show(list(rows), True, str)
    else:
        for row in rows:
            click.echo(form.format(**row))
