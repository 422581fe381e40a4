"""Bars and tables: fetch, look after, and train on an own table."""

import dataclasses
import json
import shutil
import time
from pathlib import Path

import click

from cpbkit.cli import command
from cpbkit.cli.command import Commands, make_command, merge_settings, settle_as_told, show, status_line
from cpbkit.cli.options import (
    as_json,
    change_settings,
    names,
    together,
    which_bars,
    which_rows,
    which_source,
)
from cpbkit.config.experiment import with_quote
from cpbkit.errors import DataError, SourceError

allowances = together(
    click.option("--allow-gaps", type=click.IntRange(0), default=0, help="Accept so many unexplained missing bars."),
    click.option(
        "--allow-doubts",
        type=click.IntRange(0),
        default=0,
        help="Accept so many bars that sources disagree on, or that stand a factor of ten off.",
    ),
)


@make_command(
    "cpbkit fetch --symbols BTC,ETH --intervals 1h --days 90",
    "cpbkit fetch --symbols SOL --intervals 15m --start 2021-01-01 --end 2021-12-31 --allow-gaps 20",
    "cpbkit fetch --symbols top20 --intervals 1h --start 2025-01-01 --verify",
    "cpbkit fetch",
)
@which_bars
@click.option("--refresh", is_flag=True, help="Fetch anew what the cache has of these dates.")
@click.option("--verify", is_flag=True, help="Compare a month in each quarter with a second source.")
@allowances
@as_json
def fetch(refresh, verify, allow_gaps, allow_doubts, as_json, **given):
    """Download, check and cache bars; show how complete they are. Without any word: bring the cache up to date.

    Exit code 0 only when every bar is there that the venue is known to have made and none is in doubt, but for
    --allow-gaps and --allow-doubts.
    """
    from cpbkit.data.binance import fetch_klines
    from cpbkit.data.klines import Incomplete
    from cpbkit.quantities import downloaded

    if any(given.values()):
        data = settle_as_told("quick", {}, **given).experiment.data
        wishes = [(data.symbols, data.intervals, data.start, data.end, data.market)]
    else:
        wishes = _all_that_is_cached()
    passports: dict[str, object] = {}
    failures, begun = [], time.monotonic()
    with status_line() as say:

        def tell(done: int, total: int, size: int, text: str) -> None:
            say(f"{downloaded(done, total, size, time.monotonic() - begun)}  {text}")

        for symbols, intervals, start, end, market in wishes:
            try:
                got = fetch_klines(
                    symbols, intervals, start, end, market=market, progress=tell, refresh=refresh, verify=verify
                )
            except Incomplete as error:
                got = error.klines
                failures.append(error)
            passports |= {f"{market} {name}": each.passport for name, each in got.items()}
    _show_passports([*passports.values()], as_json)
    if failures:
        raise failures[0] if len(failures) == 1 else SourceError("\n".join(map(str, failures)))
    _check_allowed(passports.values(), allow_gaps, allow_doubts)


def _all_that_is_cached() -> list[tuple]:
    """Return what to fetch so that every series of the cache ends now: symbols, intervals, days and market."""
    from cpbkit.data.cache import Store
    from cpbkit.data.klines import split_name

    alike: dict[tuple, list[str]] = {}
    for entry in Store().list():
        symbol, interval = split_name(entry.series)
        if entry.first:
            alike.setdefault((interval, entry.first[:10], entry.market), []).append(symbol)
    if not alike:
        raise click.UsageError("which bars? The cache is empty: --symbols BTC,ETH --intervals 1h --days 90")
    return [
        (symbols, [interval], first, str(command.today()), market)
        for (interval, first, market), symbols in alike.items()
    ]


def _show_passports(passports, as_json: bool) -> None:
    from cpbkit.data.klines import passport_table

    if passports or as_json:
        show([p.to_dict() for p in passports], as_json, lambda: _passport_text(passports, passport_table(passports)))


def _check_allowed(passports, gaps: int, doubts: int) -> None:
    """Raise DataError where more is missing or in doubt than was accepted."""
    doubtful = "bars may be in doubt (sources or rows that disagree, prices a factor of ten off)"
    for name, most, what, option in (
        ("unexplained", gaps, "missing bars may stay unexplained", "--allow-gaps"),
        ("doubts", doubts, doubtful, "--allow-doubts"),
    ):
        got = sum(getattr(passport, name) for passport in passports)
        if got > most:
            raise DataError(
                f"at most {most} {what}; got {got}. They are listed above; accept them with {option} {got}, or ask "
                "for another range"
            )


@make_command("cpbkit passport bars/", "cpbkit passport BTC,ETH --intervals 1h --figure passport.png")
@click.argument("what", metavar="PATH|SYMBOLS", required=False)
@click.option("--intervals", callback=names, help="Such as 15m,1h.  [default: all that is there]")
@click.option("--market", type=click.Choice(["spot", "um"]), default="spot", show_default=True, help="Of cached bars.")
@click.option("--venue", type=click.Choice(["binance", "other"]), help="Of own bars.  [default: what their names say]")
@click.option("--figure", type=click.Path(dir_okay=False), help="Draw them into this file too, .png or .svg.")
@allowances
@as_json
def passport(what, intervals, market, venue, figure, allow_gaps, allow_doubts, as_json):
    """Show how complete and how sound bars are: own files, or what the cache has. Nothing is fetched or trained.

    Exit code 0 only when nothing is missing without a reason, in doubt or refused.
    """
    refused = {}
    if what and (Path(what).expanduser().exists() or any(mark in what for mark in "*?[/.")):
        from cpbkit.data.files import read_files

        with status_line() as say:
            found = read_files(what, intervals=intervals or (), venue=venue or "", tell=say)
        klines, refused = found.klines, found.refused
        click.echo(found.text(), err=True)
    else:
        from cpbkit.data.binance import cached_klines

        klines = cached_klines(with_quote((what or "").replace(",", " ").split()), intervals or (), market)
    passports = [each.passport for each in klines.values()]
    if figure:
        from cpbkit.views.market import passport_figure

        passport_figure(passports).savefig(figure)
    _show_passports(passports, as_json)
    _check_allowed(passports, allow_gaps, allow_doubts)
    if refused:
        raise DataError(f"{len(refused)} of the files or series cannot be used; they are listed above as not taken")


@make_command("cpbkit export --to bars", "cpbkit export BTC,ETH --intervals 1h --to user_data/data --as freqtrade")
@click.argument("symbols", metavar="SYMBOLS", required=False, callback=names)
@click.option("--intervals", callback=names, help="Such as 15m,1h.  [default: all that is there]")
@click.option("--market", type=click.Choice(["spot", "um"]), default="spot", show_default=True)
@click.option("--to", "folder", required=True, type=click.Path(file_okay=False), help="Folder; made where it is not.")
@click.option(
    "--as",
    "kind",
    type=click.Choice(["parquet", "csv", "freqtrade"]),
    default="parquet",
    show_default=True,
    help="One file a series; freqtrade's is feather, as its data folder wants it.",
)
def export(symbols, intervals, market, folder, kind):
    """Write cached bars to files that other programs read; gaps stay gaps."""
    from cpbkit.data.binance import cached_klines
    from cpbkit.data.export import write_klines

    for path in write_klines(cached_klines(symbols or (), intervals or (), market), folder, kind):
        click.echo(path)


def _passport_text(passports, table) -> str:
    """Show what there is: the columns that say something, each gap once with its series, the notes."""
    core = ["first", "last", "expected", "got", "missing"]
    counts = "unexplained zero_volume flat dropped jumps conflicts tenfold disagreements checked".split()
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
    off = [f"{time}: {p.series}" for p in passports for time in p.tenfold[:5]]
    blocks += ["\n".join(["A factor of ten off their neighbours (UTC bar starts)", *off])] if off else []
    blocks += [f"{passport.series}: {' '.join(passport.notes)}" for passport in passports if passport.notes]
    return "\n\n".join(blocks)


def _horizons(_, __, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"bars, such as 1,4,24; got {text!r}") from None


@make_command(
    "cpbkit map --intervals 1h --days 180",
    "cpbkit map --files my/bars --horizons 1,12 --figure map.png",
    name="map",
)
@which_source
@which_bars
@click.option("--horizons", callback=_horizons, default="1,4,24", show_default=True, help="Bars ahead.")
@click.option("--figure", type=click.Path(dir_okay=False), help="Draw the map into this file too, .png or .svg.")
@as_json
def draw_map(horizons, figure, as_json, **given):
    """Say what can be forecast at all, before a GPU hour is spent on it.

    Return, direction, volatility, range and volume of every series, some bars ahead, by closed-form models that are
    refitted as they go through the second half of the bars, each with a verdict corrected for all of them.
    """
    from cpbkit.api import Map

    settled = settle_as_told("quick", {}, **given)
    with status_line() as say:
        klines = settled.bars(settled.experiment, say)
        say(f"judging {len(klines)} series")
        found = Map.of(klines, horizons)
    show(json.loads(found.table.to_json(orient="records")), as_json, lambda: str(found))
    if figure:
        found.plot().savefig(figure)


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
        failed = name == "verify" and any(entry["problem"] for entry in entries)
        show(entries, as_json, lambda: _entries_text(store.folder, entries), failed)


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


@make_command(
    "cpbkit series load.csv --horizon 24",
    "cpbkit series ETTh1.csv --model nlinear --context 336 --horizon 96 --train 8640 --val 2880 --test 2880",
)
@click.argument("file", type=click.Path())
@click.option("--model", default="dlinear", show_default=True, help="A preset, or persistence.")
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
@which_rows
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
    drop_missing,
    slide_over_gaps,
    settings,
    epochs,
    as_json,
):
    """Train a model on a table of your own: its errors as published tables give them, and its verdicts."""
    from cpbkit.data.tables import find_moving, read_table
    from cpbkit.runs.table import plan_series, run_series

    table = read_table(file, time, columns)
    table = table.dropna() if drop_missing else table
    table = table if columns else table[find_moving([table], Path(file).name)]
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
    from cpbkit.evaluation.verdicts import say_meanings, table_text

    counts = ", ".join(f"{count:,} {part}" for part, count in found.windows.items())
    lines = [f"{found.name}: {found.model}, {found.context} rows in, {found.horizon} out; windows: {counts}"]
    if found.parameters:
        lines += [f"{found.parameters:,} parameters, epoch {found.best_epoch} of {found.epochs}, {found.seconds:.0f} s"]
    lines += ["Errors of the columns as they are scaled:"]
    lines += [f"{'':24}{'MSE':>9}{'MAE':>9}   persistence{'MSE':>9}{'MAE':>9}"]
    rows = {"all columns": (found.errors, found.persistence)}
    if found.errors_dropped:
        rows[f"whole batches of {found.drop_last}"] = (found.errors_dropped, found.persistence_dropped)
    for name, (ours, naive) in (rows | found.by_column).items():
        cells = [f" {x:8.4f}" if x < 1000 else f" {x:8.3g}" for x in (ours.mse, ours.mae, naive.mse, naive.mae)]
        lines.append(f"{name:24}{cells[0]}{cells[1]}{'':14}{cells[2]}{cells[3]}")
    said = [f"{column}: {say_meanings({column: judgement})[column]}" for column, judgement in found.judged.items()]
    verdicts = table_text(found.verdicts, shutil.get_terminal_size().columns)
    return "\n".join(filter(None, [*lines, *found.notes, verdicts, *said]))
