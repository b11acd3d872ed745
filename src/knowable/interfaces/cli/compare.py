"""``knowable compare``: several methods side by side on a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import knowable as kn
from knowable.core.compiling.engine import as_engine
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.files import check_folder
from knowable.errors import InvalidArgument, MissingExtra
from knowable.interfaces.cli.estimators import new_estimator
from knowable.interfaces.cli.messages import NOT_CONVERGED, collected, plain_errors, say, spoken_for_the_shell, tell
from knowable.interfaces.cli.options import (
    AsJson,
    Config,
    DataFile,
    Drop,
    EngineName,
    Group,
    Identifier,
    Kind,
    Lenient,
    Missing,
    Quiet,
    Seed,
    Target,
    Task,
    Time,
    complete_methods,
    parse_kinds,
    parse_task,
)
from knowable.interfaces.cli.training_table import TrainingTable, folds_of, read_training
from knowable.registry import find_method
from knowable.tabular.reading import read_table

DEFAULT_METHODS = "map,laplace,mean_field_vi,deep_ensemble"
JOURNAL = "comparison.jsonl"
FILES = (JOURNAL, "comparison.csv", "comparison.json", "comparison.html")


def compare(
    data: DataFile,
    target: Target = None,
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
    cv: Annotated[int, typer.Option(metavar="N", help="Number of cross-validation folds.")] = 5,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Time limit of all fits together.")] = None,
    outside: Annotated[
        str | None, typer.Option(metavar="FILE", help="Out-of-distribution rows: does the uncertainty detect them?")
    ] = None,
    task: Task = "auto",
    drop: Drop = None,
    kind: Kind = None,
    identifier: Identifier = None,
    missing: Missing = None,
    group: Group = None,
    time: Time = None,
    seed: Seed = 0,
    engine: EngineName = None,
    lenient: Lenient = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, deleting an earlier comparison.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Compare methods by cross-validation and rank them on held-out rows.

    Scores have standard errors over folds; differences from the best are paired row by row. With --out, a comparison
    that was stopped or killed resumes when the same command is given again.
    """
    with plain_errors():
        check_count("seed", seed, at_least=0)
        check_count("cv", cv, at_least=2)
        if budget is not None:
            check_number("budget", budget, above=0.0)
        wanted = [name.strip() for name in methods.split(",") if name.strip()]
        if not wanted:
            raise InvalidArgument("--methods is empty. Name some with commas: --methods map,laplace,ensemble.")
        for name in wanted:
            if name != "auto":
                find_method(name)
        if out is not None:
            check_folder(out, name="--out", ours=lambda entry: entry in FILES or entry.startswith("."))
        as_engine(engine)
        kinds = parse_kinds(kind)
        table = read_training(
            data, target, task=parse_task(task), drop=drop or (), kinds=kinds, identifiers=identifier or (),
            missing=missing or (), group=group, time=time, lenient=lenient,
        )  # fmt: skip
        tell(table.notices, quiet=quiet)
        elsewhere = None if outside is None else _outside(outside, table)
        if force and out is not None:
            for name in FILES:
                (out / name).unlink(missing_ok=True)
        with collected() as found:
            comparison = kn.compare(
                new_estimator(table.task, method="auto", seed=seed, kinds=kinds),
                (table.inputs, table.outcomes),
                methods=wanted,
                cv=folds_of(table, cv, seed=seed),
                budget=budget,
                seed=seed,
                out=None if out is None else out / JOURNAL,
                outside=elsewhere,
                progress=False if quiet else None,
                engine=engine,
            )
        tell(found, quiet=quiet)
        if out is not None:
            write_comparison(comparison, out)
        if as_json:
            typer.echo(comparison.to_json(), nl=False)
        elif not quiet:
            typer.echo(repr(comparison))
        if any(record.error is not None for record in comparison.records):
            raise typer.Exit(NOT_CONVERGED)


def write_comparison(comparison: kn.Comparison, folder: Path) -> None:
    """The table as CSV and JSON, and the page where matplotlib and jinja2 are installed."""
    comparison.to_csv(folder / "comparison.csv")
    comparison.to_json(folder / "comparison.json")
    try:
        comparison.to_html(folder / "comparison.html")
    except MissingExtra as error:
        say(f"warning: no comparison.html. {error}")


def _outside(source: str, table: TrainingTable) -> Any:
    """Rows unlike the data, with the same inputs."""
    with spoken_for_the_shell():
        other = read_table(source)
        return other.frame[[other.find(name) for name in table.inputs.columns]]
