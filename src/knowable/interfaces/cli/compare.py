"""``knowable compare``: several methods side by side on a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from knowable.core.support.checks import check_count, check_number
from knowable.core.support.files import check_folder
from knowable.errors import InvalidArgument
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.estimators import new_estimator
from knowable.interfaces.cli.messages import NOT_CONVERGED, collected, plain_errors, spoken_for_the_shell, tell
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
    parse_kinds,
    parse_task,
)
from knowable.interfaces.cli.training_table import TrainingTable, read_file, read_training
from knowable.registry import find_method

if TYPE_CHECKING:
    from knowable.comparison import Comparison


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


# --- The work behind ``knowable compare`` ----------------------------------------------------------------------------

JOURNAL = "comparison.jsonl"
FILES = (JOURNAL, "comparison.csv", "comparison.json", "comparison.html")


@dataclass(frozen=True)
class Comparing:
    """The options of ``knowable compare``, as they came."""

    data: str
    target: str
    methods: tuple[str, ...]
    out: Path | None = None
    cv: int = 5
    budget: float | None = None
    outside: str | None = None
    task: str = "auto"
    drop: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    seed: int = 0
    lenient: bool = False
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        check_count("seed", self.seed, at_least=0)
        check_count("cv", self.cv, at_least=2)
        if self.budget is not None:
            check_number("budget", self.budget, above=0.0)
        if not self.methods:
            raise InvalidArgument("--methods names none. Name some with commas: --methods map,laplace,ensemble.")
        for name in self.methods:
            if name != "auto":
                find_method(name)


def run_comparison(settings: Comparing) -> Comparison:
    """Compare, and write the table and the page where a folder is given.

    Raises:
        KnowableError: If anything is wrong with the options or the file; nothing is written then.
    """
    import knowable as kn

    if settings.out is not None:
        check_folder(settings.out, name="--out", ours=lambda entry: entry in FILES or entry.startswith("."))
    kinds = parse_kinds(list(settings.kinds))
    table = read_training(
        settings.data,
        settings.target,
        task=parse_task(settings.task),
        drop=settings.drop,
        kinds=kinds,
        lenient=settings.lenient,
    )
    tell(table.notices, quiet=settings.quiet)
    estimator = new_estimator(table.task, method="auto", seed=settings.seed, kinds=kinds)
    journal = None if settings.out is None else settings.out / JOURNAL
    outside = _outside(settings, table)
    if settings.force and settings.out is not None:
        _remove(settings.out)
    with collected() as found:
        comparison = kn.compare(
            estimator,
            (table.inputs, table.outcomes),
            methods=list(settings.methods),
            cv=settings.cv,
            budget=settings.budget,
            seed=settings.seed,
            out=journal,
            outside=outside,
            progress=False if settings.quiet else None,
        )
    tell(found, quiet=settings.quiet)
    if settings.out is not None:
        write_comparison(comparison, settings.out)
    return comparison


def _remove(folder: Path) -> None:
    """Take an earlier comparison away."""
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def write_comparison(comparison: Comparison, folder: Path) -> None:
    """The table as CSV and JSON, and the page."""
    run_folder.write_file(folder / "comparison.csv", comparison.to_csv())
    run_folder.write_file(folder / "comparison.json", comparison.to_json())
    run_folder.write_file(folder / "comparison.html", comparison.to_html())


def _outside(settings: Comparing, table: TrainingTable) -> Any:
    """Rows unlike the data, with the same inputs."""
    if settings.outside is None:
        return None
    with spoken_for_the_shell():
        other = read_file(settings.outside)
        return other.frame[[other.find(name) for name in table.inputs.columns]]
