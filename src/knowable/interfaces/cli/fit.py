"""``knowable fit``: from a table to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import INTERRUPTED, NOT_CONVERGED, plain_errors, say
from knowable.interfaces.cli.options import (
    AsJson,
    Budget,
    Config,
    DataFile,
    Drop,
    Force,
    Kind,
    Lenient,
    Quiet,
    Seed,
    Target,
    Task,
    complete_method,
)


def fit(
    data: DataFile,
    target: Target,
    method: Annotated[
        str,
        typer.Option(
            "--method", "-m", metavar="NAME", help="auto, or one of knowable methods.", autocompletion=complete_method
        ),
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the run; else DATA-run.")
    ] = None,
    budget: Budget = None,
    holdout: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of rows to keep back for the scores; 0 fits to all.")
    ] = 0.2,
    task: Task = "auto",
    drop: Drop = None,
    kind: Kind = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Posterior draws behind a prediction.")] = 64,
    seed: Seed = 0,
    lenient: Lenient = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Fit a Bayesian network to a table and write a run: posterior, scores on held-out rows, report.

    Columns may be numbers, categories, dates, yes and no, with gaps. What is wrong with a file is said with its line
    and column, and nothing is written. A run is a folder that the other commands take.
    """
    with plain_errors():
        import json

        from knowable.interfaces.cli.fitting import Fitting, fit_table, print_fit, summary

        settings = Fitting(
            data=data, target=target, method=method, out=out, budget=budget, holdout=holdout, task=task,
            drop=tuple(drop or ()), kinds=tuple(kind or ()), samples=samples, seed=seed, lenient=lenient, force=force,
            quiet=quiet,
        )  # fmt: skip
        made = fit_table(settings)
        if as_json:
            typer.echo(json.dumps(summary(made), indent=1, allow_nan=False))
        elif not quiet:
            print_fit(made)
        if made.interrupted:
            say("the fit was stopped from the keyboard; the run holds what it had learned")
            raise typer.Exit(INTERRUPTED)
        if made.failed:
            say(f"the fit did not converge: {made.verdict}")
            raise typer.Exit(NOT_CONVERGED)
