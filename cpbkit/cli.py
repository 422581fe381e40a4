"""`cpbkit ...`: arguments, calls, and the showing of what they return."""

import errno
import json
import logging
from collections.abc import Callable

import click

from cpbkit import __version__
from cpbkit.errors import CpbkitError

GO_ON = "Nothing is left half done; the same command goes on from here."


class Command(click.Command):
    """A command that ends a failure with one clear line and exit code 1; the traceback is for --debug."""

    def __init__(self, *args, examples: tuple[str, ...] = (), **settings):
        lines = "\n".join(f"  {line}" for line in examples)
        super().__init__(*args, epilog=f"\b\nExample{'s' * (len(examples) > 1)}:\n{lines}", **settings)
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, callback=_debug, help="Show tracebacks.")
        )

    def invoke(self, context: click.Context):
        """Run the command and translate what a person can act on."""
        try:
            return super().invoke(context)
        except (CpbkitError, OSError) as error:
            if context.meta.get("debug") or getattr(error, "errno", None) == errno.EPIPE:
                raise  # `| head` closes the pipe: no failure, and click knows
            raise click.ClickException(_sentence(error)) from None
        except KeyboardInterrupt:
            click.echo(f"\nStopped. {GO_ON}", err=True)
            context.exit(1)


def _debug(context: click.Context, _, value: bool) -> None:
    context.meta["debug"] = value
    logging.basicConfig(level=logging.DEBUG if value else logging.WARNING, format="%(levelname)s %(message)s")


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error) or type(error).__name__


class Commands(click.Group):
    """The group; its commands share one way to fail."""

    command_class = Command


as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


def _show(document, as_json: bool, text: Callable[[], str]) -> None:
    click.echo(json.dumps(document, indent=2) if as_json else text())


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cpbkit")
def cpbkit():
    """Train forty small crypto-price models at once, and tell the truth about them and about the GPU."""


@cpbkit.command(examples=("cpbkit doctor", "cpbkit doctor --json"))
@as_json
def doctor(as_json):
    """Say what machine this is, and what is wrong with it."""
    from cpbkit.gpu_check.environment import check_environment
    from cpbkit.gpu_check.monitor import load_nvml

    report = check_environment(load_nvml()[0])
    _show(report.to_dict(), as_json, lambda: "\n".join(report.lines()))
