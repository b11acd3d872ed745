"""``knowable report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.errors import InvalidArgument
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.estimators import run_on
from knowable.interfaces.cli.messages import plain_errors
from knowable.interfaces.cli.options import AsJson, Config, Force, Lenient, Quiet, RunArgument
from knowable.interfaces.cli.run_folder import RunFolder
from knowable.report.html import from_json, render, to_json
from knowable.report.report import Report
from knowable.tabular.fit_report import fit_report


def report(
    run: RunArgument,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows with outcomes to report on, instead of those held out."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Page to write; else report.html in the run, or beside its file."
        ),
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
        if data is None:
            found = from_json(RunFolder.open(run).read_text(run_folder.REPORT_DATA))
        else:
            found = fit_report(run_on(run, data, lenient=lenient, quiet=quiet))
        if as_json:
            typer.echo(to_json(found))
            return
        path = write_page(found, run, out, force=force)
        if not quiet:
            typer.echo(f"Report: {path.resolve()}")


def write_page(report: Report, run: Path, out: Path | None, *, force: bool) -> Path:
    """Write the page, and say where it is.

    A page that would come out the same is left as it is. Another one is overwritten with ``force`` only.
    """
    path = (run.with_suffix(".html") if run.is_file() else run / run_folder.REPORT) if out is None else out
    if path.is_dir():
        raise InvalidArgument(f"--out {str(path)!r} is a folder. Give the name of a file.")
    page = render(report)
    if path.is_file() and path.read_bytes() == page.encode():
        return path
    run_folder.write_file(path, page, force=force)
    return path
