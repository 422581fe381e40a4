"""A run to look at in a browser: as files, or from a server on this machine."""

import socket

import click

from cpbkit.cli.command import make_command, status_line
from cpbkit.cli.options import run_folder, trust_code
from cpbkit.errors import CpbkitError


@make_command("cpbkit page runs/quick", "cpbkit page runs/quick --out site --public")
@run_folder
@click.option("--out", type=click.Path(file_okay=False), help="Where to write it.  [default: page in the RUN]")
@click.option("--public", is_flag=True, help="Without any bar, fit to be shown around.")
@trust_code
def page(folder, out, public, trust_code):
    """Write a page to look at: candles, forecasts, past forecasts and verdicts, as a folder of static files.

    It opens as a file and from any web server, and asks no other host for anything.
    """
    from cpbkit.api import open_run

    with status_line() as say:
        say("getting the newest bars")
        link = open_run(folder, trust_code).page(out, public=public)
    click.echo(link)


@make_command("cpbkit serve runs/quick", "cpbkit serve runs/quick --port 9000")
@run_folder
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Any other needs a token, CPBKIT_TOKEN or a new one."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8765, show_default=True)
@trust_code
def serve(folder, host, port, trust_code):
    """Serve the page of a run on this machine, with live forecasts, until Ctrl-C.

    /api/forecast?series=BTCUSDT_1h answers in JSON; /api/schema.json says what is in it.
    """
    from cpbkit.api import open_run
    from cpbkit.serve.server import make_server
    from cpbkit.views.site import Site

    run = open_run(folder, trust_code)
    server, address = make_server(Site(run.folder, run.models()), host, port)
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (")[0]
        raise CpbkitError(f"{host} port {port}: {why}. Take another --port, or --host") from None
    click.echo(f"{address}  (Ctrl-C ends it)", err=True)
    server.run(sockets=[listening])
