"""``knowable report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import plain_errors
from knowable.interfaces.cli.options import AsJson, Config, Force, Lenient, Quiet, RunArgument


def report(
    run: RunArgument,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows with outcomes to report on, instead of those held out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Page to write; else report.html in the run.")
    ] = None,
    lenient: Lenient = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Write the report of a run: one page that needs no network.

    Without --data it is made from what the run has kept of its held-out rows. With --json the report is printed as data
    and no page is written.
    """
    with plain_errors():
        from knowable.interfaces.cli.reporting import find_report, write_page
        from knowable.interfaces.report.saving import to_json

        found = find_report(run, data, lenient=lenient, quiet=quiet)
        if as_json:
            typer.echo(to_json(found))
            return
        path = write_page(found, run, out, force=force)
        if not quiet:
            typer.echo(f"Report: {path.resolve()}")
