"""What the commands share: one way to fail, a status line, and how bars and settings that were asked for are found."""

import contextlib
import dataclasses
import datetime as dt
import errno
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from cpbkit.config.experiment import PARTS, Experiment, vary
from cpbkit.errors import NO_ROOM, CpbkitError, DataError, Terminated, UnknownName
from cpbkit.texts import one_line, printable, rewrite

if TYPE_CHECKING:  # pandas takes its time to load
    import pandas as pd

    from cpbkit.runs.settle import Settled

EXTRAS = {
    "talib": "talib",
    "openpyxl": "excel",
    "yfinance": "yahoo",
    "ray": "ray",
    "arch": "garch",
    "chronos": "zeroshot",
    "jupyterlab": "notebooks",
    "starlette": "serve",
    "uvicorn": "serve",
}  # by module
GO_ON = "Nothing is left half done; the same command goes on from here."


class Command(click.Command):
    """A command that ends a failure with one clear line and exit code 1; the traceback is for --debug."""

    def __init__(self, *args, examples: tuple[str, ...] = (), **settings: Any):
        lines = "\n".join(f"  {line}" for line in examples)
        settings["epilog"] = f"\b\nExample{'s' * (len(examples) > 1)}:\n{lines}"
        super().__init__(*args, **settings)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_debug, help="Show tracebacks.")
        )

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a setting that was given as an option is sent to --set."""
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            settings = {f.name for part in PARTS.values() for f in dataclasses.fields(part)}
            if name in settings and any("--set" in option.opts for option in self.params):
                raise click.UsageError(f"{error.option_name} is a setting: --set {name}=VALUE", context) from None
            raise

    def invoke(self, context: click.Context):
        """Run the command and translate what a person can act on."""
        try:
            return super().invoke(context)
        except (CpbkitError, OSError) as error:
            if context.meta.get("debug") or getattr(error, "errno", None) == errno.EPIPE:
                raise  # `| head` closes the pipe: no failure, and click knows
            kind = click.UsageError if isinstance(error, UnknownName) else click.ClickException
            said = printable(_sentence(error))
            # A stranger's cell or name may be of any length; what to do stands at the end.
            raise kind(said if len(said) < 3000 else f"{said[:1500]} ... {said[-1000:]}") from None
        except ModuleNotFoundError as error:
            if context.meta.get("debug") or (error.name or "").startswith("cpbkit"):
                raise
            extra = EXTRAS.get(error.name or "")
            what = f'"cpbkit[{extra}]"' if extra else "--upgrade cpbkit"
            raise click.ClickException(
                f"the module {error.name} is not installed: pip install {what}; in a notebook, then restart it"
            ) from None
        except Terminated:
            click.echo(f"\nAsked to end (SIGTERM). {GO_ON}", err=True)
            raise
        except KeyboardInterrupt:
            click.echo(f"\nStopped. {GO_ON}", err=True)
            context.exit(1)


def make_command(*examples: str, **settings):
    """Return the decorator of a command whose help ends in these examples."""
    return click.command(cls=Command, examples=examples, **settings)


def _debug(context: click.Context, _, value: bool) -> None:
    context.meta["debug"] = value
    logging.basicConfig(level=logging.DEBUG if value else logging.WARNING, format="%(levelname)s %(message)s")
    for name in ("matplotlib", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename}" if error.filename else ""
        return error.strerror + place + (f". Make room there. {GO_ON}" if error.errno in NO_ROOM else "")
    return str(error) or type(error).__name__


class Commands(click.Group):
    """The group; its commands share one way to fail, and are listed in the order of use."""

    command_class = Command

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names in the order they are written here."""
        return list(self.commands)


def show(document, as_json: bool, text: Callable[[], str], failed: object = False) -> None:
    """Print a document as JSON, or the text a person reads; end with exit code 1 where something failed."""
    click.echo(json.dumps(document, indent=2) if as_json else printable(text()))
    if failed:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that says what is going on: in place on a terminal, else a line every ten seconds."""
    terminal, said, shown = sys.stderr.isatty(), 0.0, False

    def say(text: str) -> None:
        nonlocal said, shown
        if terminal:
            rewrite(sys.stderr, one_line(text))
            shown = True
        elif time.monotonic() - said > 10:
            click.echo(one_line(text), err=True)
            said = time.monotonic()

    try:
        yield say
    finally:
        if shown:
            rewrite(sys.stderr, "", "\r")


def merge_settings(settings: dict, **given) -> dict:
    """Return the settings of --set together with what was given otherwise; what is None was not given.

    Errors: UsageError for a setting that has two values.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in settings:
            raise click.UsageError(f"{name} is {given[name]!r} already; leave out --set {name}")
    return settings | given


@contextlib.contextmanager
def wrong_usage() -> Iterator[None]:
    """Let a setting that cannot be end the command as wrong usage does; what is wrong with data does not."""
    try:
        yield
    except DataError:
        raise
    except CpbkitError as error:
        raise click.UsageError(str(error)) from None


def today() -> dt.date:
    """Return the day it is in UTC."""
    return dt.datetime.now(dt.timezone.utc).date()


def is_moving(symbols=None, start=None, end=None, days=None, files=None, **_) -> bool:
    """Say whether what was given means other days or symbols tomorrow."""
    return bool(days or (start and not end and not files) or any(map(is_pattern, symbols or ())))


def is_pattern(symbol: str) -> bool:
    """Say whether a symbol stands for several: TOP20, ALL, *USDT."""
    return bool(re.fullmatch(r"TOP\d+|ALL|.*[*?].*", symbol))


def name_bars(symbols=None, start=None, end=None, days=None, quote=None, **given) -> dict:
    """Return what was given with days and symbols by their names; of patterns the venue says what trades."""
    if days:
        if start:
            raise click.UsageError("--days counts back from --end, or from today: leave out --start")
        last = dt.date.fromisoformat(end) if end else today()
        start, end = str(last - dt.timedelta(days=days - 1)), str(last)
    elif start and not end and not given.get("files"):
        end = str(today())
    if any(map(is_pattern, symbols or ())):
        from cpbkit.data.binance import find_symbols

        symbols = tuple(find_symbols(symbols, given.get("market") or "spot", quote or "USDT"))
    return {"symbols": symbols, "start": start, "end": end, **given}


def settle_as_told(
    preset: "str | Experiment",
    settings: dict,
    features: tuple[str, ...] | None = None,
    data: "dict[str, pd.DataFrame] | None" = None,
    **given,
) -> "Settled":
    """Return what was asked for on the command line, own files opened and listed; what is None was not given."""
    from cpbkit.runs.settle import settle

    given = merge_settings(settings, **name_bars(**given))
    with status_line() as tell, wrong_usage():
        settled = settle(preset, given, data, say=lambda text: click.echo(text, err=True), tell=tell)
    if settled.found:
        click.echo(settled.found.text(), err=True)
    return dataclasses.replace(settled, experiment=add_features(settled.experiment, features))


def add_features(experiment: Experiment, wanted: tuple[str, ...] | None) -> Experiment:
    """Return the experiment with features besides its own, of which `mine.py` stands for all that the file marks."""
    if not wanted:
        return experiment
    from cpbkit.indicators import features_in

    found = [name for place in wanted for name in (features_in(place) if place.endswith(".py") else (place,))]
    with wrong_usage():
        return vary(experiment, features=tuple(dict.fromkeys((*experiment.task.features, *found))))
