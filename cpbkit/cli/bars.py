"""Bars and tables: fetch, look after, and train on a table of one's own."""

import dataclasses
import time
from pathlib import Path

import click

from cpbkit.cli.command import (
    Command,
    Commands,
    as_json,
    change_settings,
    experiment_of,
    merge_settings,
    names,
    show,
    status_line,
    which_bars,
)
from cpbkit.errors import DataError


@click.command(
    cls=Command,
    examples=(
        "cpbkit fetch --symbols BTC,ETH --intervals 1h --start 2025-03-01 --end 2025-06-30",
        "cpbkit fetch --symbols SOL --intervals 15m --start 2021-01-01 --end 2021-12-31 --allow-gaps 20",
    ),
)
@which_bars
@click.option("--allow-gaps", type=click.IntRange(0), default=0, help="Accept so many unexplained missing bars.")
@as_json
def fetch(allow_gaps, as_json, **given):
    """Download, check and cache bars; show how complete they are.

    Exit code 0 only when every bar is there that the venue is known to have made, but for --allow-gaps.
    """
    from cpbkit.data.binance import Incomplete, fetch_klines
    from cpbkit.data.klines import passport_table
    from cpbkit.quantities import downloaded

    data = experiment_of("quick", {}, **given).data
    begun = time.monotonic()
    with status_line() as say:

        def tell(done: int, total: int, size: int, text: str) -> None:
            say(f"{downloaded(done, total, size, time.monotonic() - begun)}  {text}")

        market, failure = data.market, None
        try:
            klines = fetch_klines(data.symbols, data.intervals, data.start, data.end, market=market, progress=tell)
        except Incomplete as error:
            klines, failure = error.klines, error
    passports = [each.passport for each in klines.values()]
    if passports or as_json:
        show([p.to_dict() for p in passports], as_json, lambda: _passport_text(passports, passport_table(passports)))
    if failure:
        raise failure
    if (missing := sum(p.unexplained for p in passports)) > allow_gaps:
        raise DataError(
            f"at most {allow_gaps} missing bars may stay unexplained; got {missing}. They are listed above; accept "
            f"them with --allow-gaps {missing}, or ask for another range"
        )


def _passport_text(passports, table) -> str:
    """Show what there is: the columns that say something, each gap once with its series, the notes."""
    core = ["first", "last", "expected", "got", "missing"]
    counts = ["unexplained", "zero_volume", "flat", "dropped", "jumps", "disagreements"]
    blocks = [table[core + [name for name in counts if table[name].any()]].rename_axis(None).to_string()]
    gaps: dict = {}
    for passport in passports:
        for gap in passport.gaps:
            gaps.setdefault(gap, []).append(passport.series)
    lines = []
    for gap, series in gaps.items():
        who = ", ".join(series[:3]) + (f" and {len(series) - 3} more" if len(series) > 3 else "")
        when = gap.start if gap.bars == 1 else f"{gap.start} to {gap.end} ({gap.bars} bars)"
        lines.append(f"{when}, {gap.name or 'not explained'}: {who}")
    blocks += ["\n".join(["Gaps (UTC bar starts)", *lines])] if lines else []
    blocks += [f"{passport.series}: {' '.join(passport.notes)}" for passport in passports if passport.notes]
    return "\n\n".join(blocks)


@click.group(cls=Commands)
def cache():
    """Look after the cache of bars."""


def _cache_command(name: str, text: str):
    @cache.command(name, help=text, examples=(f"cpbkit cache {name}", f"cpbkit cache {name} --series BTCUSDT_15m"))
    @click.option("--market", type=click.Choice(["spot", "um"]))
    @click.option("--series", metavar="NAME", help="One series.  [default: all]")
    @as_json
    def command(market, series, as_json):
        from cpbkit.data.cache import Store

        store = Store()
        entries = [dataclasses.asdict(entry) for entry in getattr(store, name)(market, series)]
        show(entries, as_json, lambda: _entries_text(store.folder, entries))
        if name == "verify" and any(entry["problem"] for entry in entries):
            raise click.exceptions.Exit(1)


def _entries_text(folder, entries: list[dict]) -> str:
    lines = [
        f"{e['market']:4} {e['series']:14} "
        + (e["problem"] or f"{e['first']} to {e['last']}  {e['bars']:>9,} bars  {e['bytes'] / 1e6:8.2f} MB")
        for e in entries
    ]
    damaged = sum(bool(e["problem"]) for e in entries)
    total = f"{len(entries)} series, {sum(e['bytes'] for e in entries) / 1e6:.1f} MB in {folder}"
    return "\n".join([*lines, total + (f"; {damaged} damaged: the next fetch gets them anew" if damaged else "")])


_cache_command("list", "List what is cached.")
_cache_command("verify", "Read every file to the last bit; exit code 1 where one is damaged.")
_cache_command("remove", "Remove files, and list them.")


@click.command(
    cls=Command,
    examples=(
        "cpbkit series load.csv --horizon 24",
        "cpbkit series ETTh1.csv --model nlinear --context 336 --horizon 96 --train 8640 --val 2880 --test 2880",
    ),
)
@click.argument("file", type=click.Path())
@click.option("--model", default="dlinear", show_default=True, help="A preset, or persistence.")
@click.option("--time", metavar="COLUMN", help="Where the times are.  [default: the first that holds times]")
@click.option("--columns", callback=names, help="What is forecast, from itself.  [default: every column of numbers]")
@click.option("--context", type=click.IntRange(1), default=336, show_default=True, help="Rows in.")
@click.option("--horizon", type=click.IntRange(1), default=96, show_default=True, help="Rows out.")
@click.option("--train", type=click.IntRange(1), help="Rows to train on, the oldest.  [default: 70 % of all]")
@click.option("--val", type=click.IntRange(1), help="Rows to validate on, the next.  [default: 10 % of all]")
@click.option("--test", type=click.IntRange(1), help="Rows to test on, the next.  [default: 20 % of all]")
@click.option("--scale", type=click.Choice(["standard", "persistence", "none"]), default="standard", show_default=True)
@click.option(
    "--drop-last", type=click.IntRange(0), default=0, help="Also without the last incomplete batch of this size."
)
@click.option("--slide-over-gaps", is_flag=True, help="Take rows as even steps, whatever their times.")
@change_settings
@as_json
def series(
    file,
    model,
    time,
    columns,
    context,
    horizon,
    train,
    val,
    test,
    scale,
    drop_last,
    slide_over_gaps,
    settings,
    epochs,
    as_json,
):
    """Train a model on a table of your own, beside the forecast that nothing changes."""
    from cpbkit.data.tables import read_table
    from cpbkit.runs.table import plan_series, run_series

    table = read_table(file, time, columns)
    tenth = len(table) // 10
    settings = merge_settings(settings, epochs=epochs)
    experiment = plan_series(model, table.columns, context, horizon, scale, settings)
    with status_line() as say:
        found = run_series(
            table,
            Path(file).name.partition(".")[0],
            experiment,
            (train or len(table) - 3 * tenth, val or tenth, test or 2 * tenth),
            drop_last=drop_last,
            slide_over_gaps=slide_over_gaps,
            on_progress=say,
        )
    show(found.to_dict(), as_json, lambda: _series_text(found))


def _series_text(found) -> str:
    counts = ", ".join(f"{count:,} {part}" for part, count in found.windows.items())
    lines = [f"{found.name}: {found.model}, {found.context} rows in, {found.horizon} out; windows: {counts}"]
    if found.parameters:
        lines += [f"{found.parameters:,} parameters, epoch {found.best_epoch} of {found.epochs}, {found.seconds:.0f} s"]
    lines += [f"{'':24}{'MSE':>9}{'MAE':>9}   persistence{'MSE':>9}{'MAE':>9}"]
    rows = {"all columns": (found.errors, found.persistence)}
    if found.errors_dropped:
        rows[f"whole batches of {found.drop_last}"] = (found.errors_dropped, found.persistence_dropped)
    for name, (ours, floor) in (rows | found.by_column).items():
        lines.append(f"{name:24}{ours.mse:9.4f}{ours.mae:9.4f}{'':14}{floor.mse:9.4f}{floor.mae:9.4f}")
    return "\n".join([*lines, *found.notes])
