"""The options that several commands share: which bars, which settings, and in what form the result is told."""

import dataclasses
import os
from typing import Any, get_args

import click

from cpbkit.config.experiment import PARTS, SEARCHED, with_quote
from cpbkit.config.presets import PRESETS
from cpbkit.errors import UnknownName, check_name


def names(_, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Read a list such as `BTC,ETH`; coins of the kit may be given without their USDT."""
    if value is None:
        return None
    found = value.replace(",", " ").split()
    if not found:
        raise click.BadParameter("at least one name")
    if parameter.name == "symbols":
        found = with_quote(found)  # patterns too: TOP20
    if parameter.name == "intervals":
        from cpbkit.data.klines import find_interval

        found = [find_interval(name) or name for name in found]  # 60m is 1h
    return tuple(dict.fromkeys(found))


def _setting(_, __, values: tuple[str, ...]) -> dict:
    """Read `name=value` pairs, each value in the type that the setting has."""
    fields = {f.name: f for cls in PARTS.values() for f in dataclasses.fields(cls)}
    settings = {}
    for pair in values:
        name, equals, text = pair.partition("=")
        try:
            check_name("setting", name, fields)
        except UnknownName as error:
            raise click.BadParameter(str(error)) from None
        if not equals:
            raise click.BadParameter(f"a setting needs a value, such as {name}={fields[name].default}")
        settings[name] = _typed(name, text, fields[name].type)
    return settings


def _search(_, __, values: tuple[str, ...]) -> tuple | None:
    """Read `name=value,value` pairs of a search."""
    found = []
    for pair in values:
        name, _, numbers = pair.partition("=")
        try:
            found.append((name, tuple(float(number) for number in numbers.split(","))))
        except ValueError:
            raise click.BadParameter(f"such as learning_rate=1e-3,3e-4; got {pair!r}") from None
    return tuple(found) or None


def _typed(name: str, text: str, kind: Any):
    item = (*get_args(kind), kind)[0]  # of a tuple
    if get_args(item):
        raise click.BadParameter(f"{name} is a tuple of tuples, which --set cannot write; give it to vary() in Python")
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        if item is not kind:
            return tuple(item(part.strip()) for part in text.split(",") if part)
        return kind(text)
    except (KeyError, ValueError):
        raise click.BadParameter(f"{name} is a {kind.__name__}; got {text!r}") from None


def _variable(option: str, name: str, text: str, **settings):
    """Make an option that is also the environment variable which the called modules and their child processes read."""

    def keep(_, __, value: str | bool | None) -> None:
        if value:
            os.environ[name] = "1" if value is True else value

    return click.option(option, expose_value=False, callback=keep, help=f"{text}  [env: {name}]", **settings)


def together(*options):
    """Return several options as one decorator, in the order in which --help lists them."""

    def add(function):
        for option in reversed(options):
            function = option(function)
        return function

    return add


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
trust_code = click.option(
    "--trust-code", is_flag=True, help="Let the RUN use the own code or foundation model it names."
)
run_folder = click.argument("folder", metavar="RUN", type=click.Path(file_okay=False))
which_bars = together(
    click.option(
        "--symbols", callback=names, help="Such as BTC,ETH, or top20, all, '*USDT' of what trades.  [default: 20 coins]"
    ),
    click.option("--quote", metavar="MONEY", help="What top20 and all are traded in.  [default: USDT]"),
    click.option("--intervals", callback=names, help="Such as 15m,1h.  [default: 15m,1h]"),
    click.option("--days", type=click.IntRange(1), help="So many days until today."),
    click.option("--start", metavar="DAY", help="First UTC day, such as 2025-03-01."),
    click.option("--end", metavar="DAY", help="Last UTC day, inclusive.  [default: today]"),
    click.option("--market", type=click.Choice(["spot", "um"]), help="Spot, or USD-M futures.  [default: spot]"),
    _variable("--archive-url", "CPBKIT_ARCHIVE_URL", "A mirror of the archive."),
    _variable("--rest-url", "CPBKIT_REST_URL", "A mirror of the REST host."),
    _variable("--allow-unsigned", "CPBKIT_ALLOW_UNSIGNED", "Take files that have no checksum.", is_flag=True),
)
which_source = together(
    click.option(
        "--source",
        type=click.Choice(["binance", "yahoo", "files", "synthetic"]),
        help="The venue, Yahoo (no volumes), your own files, or the seeded market.  [default: binance]",
    ),
    click.option(
        "--files",
        metavar="PATH",
        help="Your own bars: a file, a folder or a 'pattern*.csv', in any usual layout; or traces.",
    ),
    click.option(
        "--venue",
        type=click.Choice(["binance", "other"]),
        help="Of your own bars: its halts and listings count.  [default: what the files' names say]",
    ),
)
which_rows = together(
    click.option("--time", metavar="COLUMN", help="Where the times are.  [default: the first that holds times]"),
    click.option(
        "--drop-missing", is_flag=True, help="Leave out rows with a missing value; no window crosses their place."
    ),
    click.option("--slide-over-gaps", is_flag=True, help="Take rows as even steps, whatever their times."),
)
any_setting = click.option(
    "--set", "settings", multiple=True, callback=_setting, metavar="NAME=VALUE", help="Any setting of the preset."
)
change_settings = together(click.option("--epochs", type=click.IntRange(1), help="At most so many."), any_setting)
which_settings = together(
    click.option(
        "--preset",
        default="quick",
        show_default=True,
        help=f"One of {', '.join(PRESETS)}, or the JSON or TOML file of an own one.",
    ),
    change_settings,
    click.option(
        "--search",
        multiple=True,
        callback=_search,
        metavar="NAME=V1,V2",
        help=f"Train these values side by side, validation chooses: {', '.join(SEARCHED)}.",
    ),
    click.option(
        "--features",
        callback=names,
        metavar="FILE.py,...",
        help="Features of your own besides the preset's: all that a file marks, or FILE.py:NAME.",
    ),
)
