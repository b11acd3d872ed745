"""``knowable report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from knowable.errors import InvalidArgument
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.estimators import as_fitted, outcome_tensor
from knowable.interfaces.cli.messages import plain_errors, spoken_for_the_shell
from knowable.interfaces.cli.options import AsJson, Config, Force, Lenient, Quiet, RunArgument
from knowable.interfaces.cli.predict import open_with
from knowable.interfaces.cli.run_folder import Run
from knowable.interfaces.cli.training_table import lines_of
from knowable.report import html as saving
from knowable.report.fit_report import Rows, run_report
from knowable.report.quality import Outcomes
from knowable.report.report import Report


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
        from knowable.report.html import to_json

        found = find_report(run, data, lenient=lenient, quiet=quiet)
        if as_json:
            typer.echo(to_json(found))
            return
        path = write_page(found, run, out, force=force)
        if not quiet:
            typer.echo(f"Report: {path.resolve()}")


# --- The work behind ``knowable report`` -----------------------------------------------------------------------------


def find_report(run: Path, data: str | None, *, lenient: bool, quiet: bool) -> Report:
    """The report that a run has kept; or with ``data``, one on other rows."""
    if data is None:
        return saving.from_json(Run.open(run).file(run_folder.REPORT_DATA).read_text(encoding="utf-8"))
    return _report_on(run, data, lenient=lenient, quiet=quiet)


def _report_on(run: Path, data: str, *, lenient: bool, quiet: bool) -> Report:
    opened = open_with(run, data, lenient=lenient, quiet=quiet)
    table, made = opened.table, opened.run.made
    with spoken_for_the_shell():
        table.find(opened.target)
        y = outcome_tensor(opened.estimator, opened.estimator.schema_.target_of(table))
    inputs: Any = table.frame[[column.name for column in opened.estimator.schema_.columns]]
    fitted = as_fitted(
        opened.estimator,
        name=table.source,
        target=opened.target,
        held_out=Rows(inputs, y, tuple(lines_of(table))),
        outcomes=Outcomes.from_json(made.get("outcomes", {})),
        table=table.frame,
        trained_on=int(made["trained_on"]),
        seen=False,
        seed=int(opened.run.options["seed"]),
        seconds=float(made["seconds"]),
        notices=opened.notices,
        facts=(("Run", opened.run.folder.name),),
    )
    return run_report(fitted)


def write_page(report: Report, run: Path, out: Path | None, *, force: bool) -> Path:
    """Write the page, and say where it is.

    A page that would come out the same is left as it is. Another one is overwritten with ``force`` only.
    """
    from knowable.report.html import render

    path = run / run_folder.REPORT if out is None else out
    if path.is_dir():
        raise InvalidArgument(f"--out {str(path)!r} is a folder. Give the name of a file.")
    page = render(report)
    if path.is_file() and path.read_bytes() == page.encode():
        return path
    run_folder.write_file(path, page, force=force)
    return path
