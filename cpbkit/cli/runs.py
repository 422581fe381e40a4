"""Runs: train, look, judge, report."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
from typing import Any

import click

from cpbkit.cli.command import is_moving, make_command, settle_as_told, show, status_line
from cpbkit.cli.options import as_json, names, run_folder, trust_code, which_bars, which_settings, which_source
from cpbkit.config.experiment import Experiment, vary
from cpbkit.config.presets import PRESETS, find_preset
from cpbkit.errors import CpbkitError, check_name
from cpbkit.quantities import Standing, duration
from cpbkit.texts import printable

REPORT_SECONDS, REPORT_SECONDS_EACH = 2.0, 0.05  # that a report and the verdicts take, and more for each series
SILENT = 10.0  # s after which the last word of a sweep is told with its age


@make_command("cpbkit demo", "cpbkit demo --run runs/first")
@click.option("--run", "folder", default="runs/demo", show_default=True, help="Run folder.")
def demo(folder):
    """Sweep 40 models on the seeded market: the whole way, in a minute or two."""
    experiment = vary(PRESETS["quick"], source="synthetic", start="2025-01-01", end="2025-02-28")
    _sweep(experiment, folder, as_json=False)


@make_command(
    "cpbkit sweep --source synthetic --start 2025-01-01 --end 2025-03-31",
    "cpbkit sweep --preset quick --start 2025-03-01 --end 2025-06-30 --intervals 15m --run runs/real",
)
@which_settings
@which_source
@which_bars
@click.option("--run", "folder", help="Run folder; one that was stopped goes on.  [default: runs/PRESET]")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="A budget from now; a run keeps the plan that it began with.",
)
@click.option(
    "--executor",
    type=click.Choice(["processes", "local", "ray"]),
    default="processes",
    show_default=True,
    help="Where stacks run: in a process per core or GPU (one: in this process), in this one alone, on a Ray cluster.",
)
@click.option("--workers", type=click.IntRange(1), help="Processes at once.  [default: what is there]")
@click.option("--folds", type=click.IntRange(1), help="Test periods, each with models trained up to it.  [default: 1]")
@click.option(
    "--zero-shot",
    metavar="MODEL",
    help="A Chronos model to hold against too, or that `--preset chronos` is: a folder, or its name on the Hub.",
)
@click.option("--pooled", is_flag=True, default=None, help="One model for all series, judged on each of them.")
@click.option("--address", default="", help="Of the Ray cluster.  [default: the one of this machine]")
@click.option("--gpus", type=float, default=1.0, show_default=True, help="GPUs a stack takes on the cluster.")
@click.option("--plan", "only_plan", is_flag=True, help="Time a few steps, print the plan, train nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Also the losses, every few epochs.")
@as_json
def sweep(folder, minutes, executor, workers, address, gpus, only_plan, verbose, as_json, **given):
    """Train and judge a model per series, into a run folder with a report.

    Stopped at any moment, by Ctrl-C, a lost connection or a kill, the same command goes on from there. Exit code 0
    only when every series has its model.
    """
    since = _when_started()
    folder = folder or f"runs/{find_preset(given['preset']).preset}"
    begun = _as_begun(folder)
    if is_moving(**given):
        given |= begun
    elif begun.get("start") and not (given["start"] or given["end"] or given["files"] or "start" in given["settings"]):
        given |= {"start": begun["start"], "end": begun["end"]}
        click.echo(f"No days were given: those of {folder}, {begun['start']} to {begun['end']}.", err=True)
    settled = settle_as_told(**given)
    place = {"minutes": minutes, "executor": executor, "workers": workers, "klines": settled.bars}
    if executor == "ray":
        from cpbkit.runs.executors import Ray

        place["executor"] = Ray(address, gpus)
    if only_plan:
        return _preview(settled.experiment, as_json, **place)
    _sweep(settled.experiment, folder, as_json, verbose=verbose, since=since, **place)


def _as_begun(folder: str) -> dict:
    """Return the days and symbols that a run began with, so that the same command goes on with it tomorrow."""
    from cpbkit.runs.folder import EXPERIMENT, RunFolder

    if not (pathlib.Path(folder) / EXPERIMENT).exists():
        return {}
    data = RunFolder(folder).experiment.data
    return {"symbols": data.symbols, "start": data.start, "end": data.end, "days": None}


@make_command("cpbkit smoke", "cpbkit smoke --preset gru --epochs 1")
@which_settings
@as_json
def smoke(as_json, **given):
    """Train two small models whose answer is known: one has something to find.

    On the seeded market a part of BTCUSDT's next bar is planted, and nothing of ETHUSDT's. Exit code 0 only when the
    model can learn one batch by heart, the first one beats the best naive forecast, the second does not, and both
    trainings were sound.
    """
    from cpbkit.data.load import load_klines
    from cpbkit.data.synthetic import predictable_series
    from cpbkit.evaluation.leakage import check_overfit
    from cpbkit.evaluation.training_checks import check_results
    from cpbkit.evaluation.verdicts import judgements, verdicts
    from cpbkit.runs.sweep import prepare, sweep

    bars: dict[str, Any] = {"source": "synthetic", "symbols": ("BTCUSDT", "ETHUSDT"), "intervals": ("15m",)}
    experiment = settle_as_told(**given, **bars, start="2025-01-01", end="2025-02-28").experiment
    if experiment.data.market == "network":
        raise click.UsageError(f"something is planted in bars alone; {experiment.preset} forecasts network traces")
    with status_line() as say, tempfile.TemporaryDirectory() as folder:
        say("learning one batch by heart")
        series, _ = prepare(experiment, load_klines(experiment, say))
        batch = check_overfit(experiment, next(iter(series.values())))
        results = sweep(experiment, folder, executor="local", on_progress=lambda state: say(state.stage))
    planted = predictable_series(experiment.data.symbols, experiment.data.intervals, experiment.data.seed)
    found = verdicts(judgements(results).get("price", {}))
    wrong = [name for name in experiment.series if (name in planted) != (name in found and found[name].word == "BEATS")]
    sick = [
        f"{check.series}: {check.check}: {check.evidence}"
        for check in check_results(results)
        if check.verdict == "SICK"
    ]
    if batch.verdict == "FAIL":
        sick.append(f"{batch.check}: {batch.evidence}")
    document = {
        "one_batch": batch.evidence,
        "planted": sorted(planted),
        "verdicts": {name: dataclasses.asdict(verdict) for name, verdict in found.items()},
        "unexpected": wrong,
        "sick": sick,
    }

    def text() -> str:
        lines = [
            f"{name} ({'planted' if name in planted else 'nothing to find'}): {verdict.word}, {verdict.reason}"
            for name, verdict in sorted(found.items())
        ]
        lines += [f"one batch by heart: {batch.evidence}", *(f"not as expected: {name}" for name in wrong)]
        return "\n".join([*lines, *sick, "Not sound." if wrong or sick else "Sound."])

    show(document, as_json, text, wrong or sick)


def _preview(experiment: Experiment, as_json: bool, **place) -> None:
    from cpbkit.runs.sweep import preview

    with status_line() as say:
        plan = preview(experiment, **place, tell=say)
    show(
        dataclasses.asdict(plan),
        as_json,
        lambda: (
            f"{sum(map(len, plan.jobs))} models: {plan.reason}.\n"
            f"At most {plan.epochs} epochs of {plan.steps} steps a model, or {plan.patience} without a better one; "
            f"about {plan.seconds / 60:.1f} min in all (predicted from timed steps; early stops make it less)."
        ),
    )


def _sweep(
    experiment: Experiment,
    folder: str,
    as_json: bool,
    minutes: float | None = None,
    since: float = 0.0,  # when the command began, monotonic s: a budget counts from there
    verbose: bool = False,
    **place,
) -> None:
    from cpbkit.runs.folder import REPORT, RunFolder
    from cpbkit.runs.sweep import sweep
    from cpbkit.views.account import Account
    from cpbkit.views.live import Terminal
    from cpbkit.views.report import write_report

    if minutes is not None:  # what is left after loading, without the report and the verdicts at the end
        after = min(6 * minutes, REPORT_SECONDS + len(experiment.series) * REPORT_SECONDS_EACH)  # at most a tenth
        place["minutes"] = max(0.1 * minutes, minutes - (time.monotonic() - since + after) / 60)
    run = RunFolder(folder)
    before, report = sum(line.status != "failed" for line in run.results()), run.folder / REPORT
    command = "cpbkit " + shlex.join(sys.argv[1:])
    with Terminal() as view:
        results = sweep(experiment, folder, command=command, on_progress=Account(view, verbose), **place)
    if before:
        click.echo(f"{before} of {len(experiment.series)} were done already.", err=True)
    if len(results) > before or not report.is_file():
        write_report(folder)
    _show_verdicts(folder, as_json)
    if not as_json:
        clock = sorted(RunFolder(folder).clock().items(), key=lambda stage: -stage[1])
        for where, prefix in (("Time", ""), ("in workers", "worker: ")):
            stages = [(name, s) for name, s in clock if name.startswith("worker: ") == bool(prefix)]
            line = f"{where}: " + ", ".join(f"{name.removeprefix(prefix)} {s:.1f} s" for name, s in stages)
            click.echo(click.wrap_text(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
        click.echo(f"Report: {report}")
    if any(line.status != "done" for line in results):
        raise click.exceptions.Exit(1)


def _when_started() -> float:
    """Return when the command began, monotonic s: until its options are read there is only this process's own work."""
    return time.monotonic() - time.process_time()


def _show_verdicts(folder: str, as_json: bool) -> None:
    """Show the verdict on every series of a run, the best first, what is missing, and what is said of all."""
    from cpbkit.api import open_run

    found = open_run(folder).verdicts()
    document = {"run": str(folder), **found.to_dict()}
    show(document, as_json, lambda: str(found))


@make_command("cpbkit status runs/quick")
@run_folder
@as_json
def status(folder, as_json):
    """Say how far a run is, and whether it is being worked on."""
    from cpbkit.runs.folder import RunFolder

    run = RunFolder(folder)
    parent, training = run.about().get("parent", ""), run.experiment.training
    origin = (
        [f"A refit of {parent}, begun {'from its' if training.warm_start else 'from drawn'} weights"] if parent else []
    )
    results, series = run.results(), run.experiment.series
    ended = {line.series for line in results}
    missing = [name for name in series if name not in ended]
    holder, told = run.holder(), run.status()
    failed = sum(line.status == "failed" for line in results)
    trouble = [f"{line.series} {line.status}: {line.reason}" for line in results if line.status != "done"]
    document = {"run": folder, "done": len(results), "total": len(series), "missing": missing, "trouble": trouble}
    document |= {"writer": holder, "last": told, "parent": parent}

    def text() -> str:
        if holder:
            now = f"{told.get('stage', 'starting')} ({holder})"
            silent = time.time() - told.get("at", time.time())
            if silent > SILENT:
                now = f"nothing new for {duration(silent)}, {now}"
        elif not missing and failed:
            now = f"{failed} failed; the command that started it tries {'it' if failed == 1 else 'them'} again"
        elif missing:
            more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
            now = f"stopped without {', '.join(missing[:6])}{more}. The command that started it goes on"
        else:
            now = "complete"
        at: dict[str, Any] = {"share": len(results) / len(series)}
        if holder and told.get("total") == len(series):
            at |= {field.name: told[field.name] for field in dataclasses.fields(Standing) if field.name in told}
        stands = Standing(**at | {"done": len(results), "total": len(series)})
        return "\n".join([f"{folder}: {', '.join([*stands.words(), now])}", *origin, *trouble])

    show(document, as_json, text)


@make_command("cpbkit stop runs/quick", "cpbkit stop runs/quick BTCUSDT_1h")
@run_folder
@click.argument("series", nargs=-1)
@click.option("--after-epoch", is_flag=True, help="End all models with the running epoch, and judge them as they are.")
def stop(folder, series, after_epoch):
    """Ask the sweep that works on a run to end after a checkpoint; the command that started it goes on from there.

    With SERIES only their models end, with the running epoch, and are judged as they are. Not on a Ray cluster.
    """
    from cpbkit.runs.folder import RunFolder

    run = RunFolder(folder)
    run.stop(run.experiment.series if after_epoch else series)
    what = ", ".join(series) or ("all models" if after_epoch else "the sweep")
    click.echo(f"{what}: asked to end, which takes a step or an epoch; `cpbkit status {folder}` says how far it is")


@make_command(
    "cpbkit refit runs/first --until 2025-09-30",
    "cpbkit refit runs/first --until 2025-09-30 --from-zero --run runs/anew",
)
@run_folder
@click.option("--until", metavar="DAY", required=True, help="Last UTC day of the bars, later than the RUN's.")
@click.option("--from-zero", is_flag=True, help="Begin from drawn weights, not from those of the RUN.")
@click.option("--run", "out", help="Folder of the new run; one that was stopped goes on.  [default: RUN-until-DAY]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="A budget from now.")
@click.option("--workers", type=click.IntRange(1), help="Processes at once.  [default: what is there]")
@trust_code
@as_json
def refit(folder, until, from_zero, out, minutes, workers, trust_code, as_json):
    """Train a run's experiment on more bars, from the weights that are there, into a new run.

    Old and new weights are judged side by side on the new test days, which neither has seen. Stopped at any moment,
    the same command goes on from there.
    """
    from cpbkit.runs.folder import RunFolder
    from cpbkit.runs.sweep import name_refit, plan_refit

    parent, since = RunFolder(folder), _when_started()
    settled = settle_as_told(plan_refit(parent, until, from_zero, trust_code), {})
    out = out or str(name_refit(parent.folder, until, from_zero))
    place = {"workers": workers, "klines": settled.bars, "parent": parent}
    _sweep(settled.experiment, out, as_json, minutes, since, **place)


@make_command("cpbkit verdict runs/quick --json")
@run_folder
@as_json
def verdict(folder, as_json):
    """Say whether each model beats the best naive forecast, and all of them at once; of several runs: `compare`."""
    _show_verdicts(folder, as_json)


@make_command("cpbkit compare runs/first runs/wide", "cpbkit compare runs/seed0 runs/seed1 --plot seeds.png")
@click.argument("folders", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path(file_okay=False))
@click.option("--plot", metavar="FILE.png", type=click.Path(dir_okay=False), help="Draw the figure too.")
@as_json
def compare(folders, plot, as_json):
    """Hold runs of the same series side by side: presets, seeds, settings.

    Each run's skill over all series against the best naive forecast, corrected for having tried so many; which pairs
    differ; and for each series the run that validation chooses, never test. Of runs that differ in their seed alone
    (`cpbkit sweep ... --set seed=1 --run runs/seed1`) also how much of each skill is the luck of it.
    """
    from cpbkit import api, atomic

    found = api.compare(*folders)
    show(found.to_dict(), as_json, lambda: str(found))
    if plot:
        atomic.write_bytes(pathlib.Path(plot), found.plot().png(scale=2))


@make_command("cpbkit report runs/quick", "cpbkit report /kaggle/input/run --out report.html")
@run_folder
@click.option("--out", type=click.Path(dir_okay=False), help="Where to write it.  [default: report.html in the RUN]")
@click.option("--with-command", is_flag=True, help="Show the command line of the run too, with its paths.")
@click.option("--series", callback=names, help="Those that get a part, such as BTCUSDT_1h.  [default: 200 at most]")
def report(folder, out, with_command, series):
    """Write the report of a run, finished or not: one HTML file."""
    from cpbkit.views.report import write_report

    click.echo(write_report(folder, out, with_command=with_command, series=series))


@make_command("cpbkit forecast runs/quick", "cpbkit forecast runs/quick --symbols BTC --bars BTC.csv")
@run_folder
@click.option("--symbols", callback=names, help="Such as BTC,ETH.  [default: all that have a model]")
@click.option("--intervals", callback=names, help="Such as 1h.  [default: all that have a model]")
@click.option("--series", callback=names, help="Such as BTCUSDT_1h, or tables by their names.  [default: all]")
@click.option("--bars", type=click.Path(dir_okay=False), help="Own bars, or rows of a table, of the one series chosen.")
@trust_code
@as_json
def forecast(folder, symbols, intervals, series, bars, trust_code, as_json):
    """Forecast the next bars with the trained models of a run, from the newest closed bars.

    Each forecast stands beside the interval that held in the test split and what the verdict means. Exit code 1 where
    a series could not be forecast, which does not stop the others.
    """
    from cpbkit.api import open_run
    from cpbkit.runs.trained import forecast_able

    run = open_run(folder, trust_code)
    known = list(run)  # read once: each time reads the ledger
    parts = {name: name.rpartition("_")[::2] for name in known if not series or name in series}
    for name in series or ():
        check_name("series", name, known)
    for each, place in ((symbols, 0), (intervals, 1)):
        for name in each or ():
            if name not in {pair[place] for pair in parts.values()}:
                raise CpbkitError(f"{folder} has no model of {name}; it has {', '.join(known) or 'none'}")
    chosen = [
        name
        for name, (symbol, interval) in parts.items()
        if (not symbols or symbol in symbols) and (not intervals or interval in intervals)
    ]
    if not chosen:
        why = f"no model that is chosen; it has {', '.join(known)}" if known else f"no finished model yet; {run!r}"
        raise CpbkitError(f"{folder} has {why}")
    if bars and len(chosen) > 1:
        raise click.UsageError(f"--bars goes with one series; choose one of {', '.join(chosen)}: --series {chosen[0]}")
    with status_line() as say:
        say("forecasting" if bars else "getting the newest bars")
        found, trouble = forecast_able(run.models(chosen), {chosen[0]: bars} if bars else None)
    for why in trouble.values():
        click.echo(f"not forecast: {printable(why)}", err=True)
    document = {name: one.to_dict() for name, one in found.items()}
    show(document, as_json, lambda: "\n\n".join(map(str, found.values())), trouble)


@make_command("cpbkit publish runs/first --repo me/forty", "cpbkit publish runs/first --repo me/forty --dry-run look")
@run_folder
@click.option("--repo", required=True, metavar="USER/NAME", help="The repository; it is made where it is not there.")
@click.option("--public", is_flag=True, help="For everyone to see.  [default: private]")
@click.option("--collection", default="", metavar="TITLE", help="Add it to this one, for several presets.")
@click.option("--dry-run", type=click.Path(file_okay=False), help="Write what would be published to this folder.")
@click.option("--page", is_flag=True, help="Publish the page instead, as a static Space of that name.")
@trust_code
def publish(folder, repo, public, collection, dry_run, page, trust_code):
    """Publish the models of a run on the Hugging Face Hub, with their verdicts on the card; never the bars.

    Others then load one of them in two lines. Needs a token with the right to write: `hf auth login`, or HF_TOKEN.
    """
    from cpbkit.api import open_run

    click.echo(open_run(folder, trust_code).publish(repo, public, dry_run, page, collection=collection))


@make_command(
    "cpbkit record runs/first --repo me/forty-record",
    "cpbkit record me/forty --repo me/forty-record --as forty --public",
)
@click.argument("place", metavar="RUN")
@click.option("--repo", required=True, metavar="USER/NAME", help="The dataset; it is made where it is not there.")
@click.option("--as", "name", metavar="NAME", help="Under which the lines are kept.  [default: of RUN's settings]")
@click.option("--public", is_flag=True, help="For everyone to see.  [default: private]")
@trust_code
def record(place, repo, name, public, trust_code):
    """Commit forecasts of the coming bars to a record on the Hub, before they happen.

    RUN is a folder, or a run that was published, user/name. To be called after each bar, from cron, a notebook or a CI
    schedule (docs/record.md): the same call again adds nothing twice, and bars that were missed are told, not filled.
    """
    from cpbkit import api
    from cpbkit.hub.client import HubError
    from cpbkit.hub.load import load
    from cpbkit.hub.record import record
    from cpbkit.runs.settle import Settled

    if pathlib.Path(place).is_dir():
        return click.echo(api.open_run(place, trust_code).record(repo, name or "", public=public))
    try:
        published = load(place, trust_code=trust_code)
    except HubError as error:
        raise CpbkitError(f"{place} is no run folder here, and {error}") from None
    models = [published[series] for series in published]
    click.echo(record(models, repo, name or Settled(models[0].experiment).name(), public=public))


@make_command("cpbkit score --repo me/forty-record", "cpbkit score --repo me/forty-record --check")
@click.option("--repo", required=True, metavar="USER/NAME", help="The record.")
@click.option("--check", is_flag=True, help="Compute every score anew, from the history and the bars; write nothing.")
@as_json
def score(repo, check, as_json):
    """Fill in what happened to the forecasts of a record whose bars are over, beside them, and say how all stand.

    A line counts when its commit is older than its bar, of a close before a tenth of it has passed, by the Hub's
    clock; later ones are marked late. A price is held against that of the minute in which its commit came. Exit code 1
    where --check finds a score that does not say what happened.
    """
    from cpbkit.hub import score as scoring

    if check:
        wrong = scoring.check(repo)
        right = f"{repo}: every score says what happened"
        return show({"wrong": wrong}, as_json, lambda: "\n".join(wrong) or right, wrong)
    done, table = scoring.score(repo), scoring.standing(repo)
    document = dataclasses.asdict(done) | {"standing": json.loads(table.to_json(orient="records"))}
    standings = [] if table.empty else [table.to_string(index=False, float_format="{:.2f}".format)]
    show(document, as_json, lambda: "\n".join([str(done), *standings]))
