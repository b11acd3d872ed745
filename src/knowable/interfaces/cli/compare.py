"""``knowable compare``: several methods side by side on a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import NOT_CONVERGED, plain_errors
from knowable.interfaces.cli.options import (
    AsJson,
    Config,
    DataFile,
    Drop,
    Kind,
    Lenient,
    Quiet,
    Seed,
    Target,
    Task,
    complete_methods,
)

DEFAULT_METHODS = "map,laplace,mean_field_vi,deep_ensemble"


def compare(
    data: DataFile,
    target: Target,
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            "-m",
            metavar="NAME,NAME",
            help="Methods by name, with commas between them.",
            autocompletion=complete_methods,
        ),
    ] = DEFAULT_METHODS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the table (CSV, JSON), the page, and what is needed to resume."),
    ] = None,
    cv: Annotated[int, typer.Option(metavar="N", help="Number of folds.")] = 5,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Time for everything together.")] = None,
    outside: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rows unlike the data: does the uncertainty tell them apart?"),
    ] = None,
    task: Task = "auto",
    drop: Drop = None,
    kind: Kind = None,
    seed: Seed = 0,
    lenient: Lenient = False,
    force: Annotated[bool, typer.Option("--force", help="Begin anew where an earlier comparison is.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Fit several methods to the same folds and rank them on rows they have not seen.

    Scores come with standard errors over folds and with paired differences from the best. With --out, a comparison that
    was stopped or killed goes on when the same command is given again.
    """
    with plain_errors():
        from knowable.interfaces.cli.comparing import Comparing, run_comparison

        wanted = [name.strip() for name in methods.split(",") if name.strip()]
        settings = Comparing(
            data=data, target=target, methods=tuple(wanted), out=out, cv=cv, budget=budget, outside=outside,
            task=task, drop=tuple(drop or ()), kinds=tuple(kind or ()), seed=seed, lenient=lenient, force=force,
            quiet=quiet,
        )  # fmt: skip
        comparison = run_comparison(settings)
        if as_json:
            typer.echo(comparison.to_json(), nl=False)
        elif not quiet:
            typer.echo(repr(comparison))
        if any(record.error is not None for record in comparison.records):
            raise typer.Exit(NOT_CONVERGED)
