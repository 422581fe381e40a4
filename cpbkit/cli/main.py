"""All commands under one name, in the order of use."""

import click

from cpbkit import __version__
from cpbkit.cli import audit, bars, machine, pages, runs
from cpbkit.cli.command import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cpbkit")
def cpbkit():
    """Train forty small crypto-price models at once, and tell the truth about them and about the GPU."""


for command in (
    runs.demo,
    machine.doctor,
    machine.presets,
    bars.fetch,
    bars.passport,
    bars.export,
    bars.draw_map,
    runs.smoke,
    runs.sweep,
    runs.status,
    runs.stop,
    runs.verdict,
    runs.compare,
    runs.refit,
    runs.forecast,
    runs.publish,
    runs.record,
    runs.score,
    runs.report,
    pages.page,
    pages.serve,
    audit.audit,
    bars.series,
    bars.cache,
    machine.bench,
):
    cpbkit.add_command(command)
