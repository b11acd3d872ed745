"""``knowable fit``: from a table to a run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from knowable._version import __version__
from knowable.core.support.checks import check_count, check_number
from knowable.errors import MissingExtra
from knowable.evaluation.evaluate import Scores
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.estimators import (
    Estimator,
    as_fitted,
    class_names,
    new_estimator,
    outcome_tensor,
    save_estimator,
)
from knowable.interfaces.cli.messages import INTERRUPTED, NOT_CONVERGED, collected, plain_errors, say, tell
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
    parse_kinds,
    parse_task,
)
from knowable.interfaces.cli.training_table import TrainingTable, divide, file_hash, lines_of, read_training
from knowable.registry import find_method
from knowable.report import html as saving
from knowable.report.fit_report import FittedTable, Judged, Rows, all_notices, run_report
from knowable.report.quality import Outcomes, quality_table
from knowable.report.report import Notice, Report
from knowable.report.verdict import verdict


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


# --- The work behind ``knowable fit`` --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitting:
    """The options of ``knowable fit``, as they came."""

    data: str
    target: str
    method: str = "auto"
    out: Path | None = None
    budget: float | None = None
    holdout: float = 0.2
    task: str = "auto"
    drop: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    samples: int = 64
    seed: int = 0
    lenient: bool = False
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        check_count("seed", self.seed, at_least=0)
        check_count("samples", self.samples, at_least=2)
        if self.budget is not None:
            check_number("budget", self.budget, above=0.0)
        if self.method != "auto":
            find_method(self.method)
        parse_task(self.task)
        parse_kinds(list(self.kinds))

    @property
    def folder(self) -> Path:
        """Where the run goes."""
        if self.out is not None:
            return self.out
        return Path("knowable-run" if self.data == "-" else f"{Path(self.data).stem}-run")

    def options(self) -> dict[str, Any]:
        """What a configuration file must say to repeat this."""
        return {
            "data": self.data, "target": self.target, "method": self.method, "budget": self.budget,
            "holdout": self.holdout, "task": self.task, "drop": list(self.drop), "kind": list(self.kinds),
            "samples": self.samples, "seed": self.seed, "lenient": self.lenient,
        }  # fmt: skip


@dataclass(frozen=True)
class Made:
    """What a fit has left behind.

    Attributes:
        folder: The run.
        fitted: The fit.
        judged: Its held-out prediction and scores.
        notices: All warnings.
        report: Where the page is; None where it could not be made.
    """

    folder: Path
    fitted: FittedTable
    judged: Judged
    notices: tuple[Notice, ...]
    report: Path | None

    @property
    def converged(self) -> bool | None:
        """Whether the fit had settled, or its chains have mixed."""
        return self.fitted.posterior.diagnostics.converged

    @property
    def failed(self) -> bool:
        """Whether the fit ended by itself and is judged not to have converged; its budget may end it at any time."""
        diagnostics = self.fitted.posterior.diagnostics
        return not diagnostics.out_of_time and verdict(diagnostics).good is False

    @property
    def interrupted(self) -> bool:
        """Whether it was stopped from the keyboard."""
        return self.fitted.posterior.diagnostics.interrupted

    @property
    def verdict(self) -> str:
        """The judgement on the fit in words."""
        return verdict(self.fitted.posterior.diagnostics).text


def fit_table(settings: Fitting) -> Made:
    """Read, fit, score, and write the run.

    Raises:
        KnowableError: If anything is wrong with the options or the file; nothing is written then.
    """
    run_folder.check_place(settings.folder, force=settings.force)
    table = read_training(
        settings.data,
        settings.target,
        task=parse_task(settings.task),
        drop=settings.drop,
        kinds=parse_kinds(list(settings.kinds)),
        lenient=settings.lenient,
    )
    estimator = new_estimator(
        table.task,
        method=settings.method,
        budget=settings.budget,
        samples=settings.samples,
        seed=settings.seed,
        kinds=parse_kinds(list(settings.kinds)),
        progress=not settings.quiet,
    )
    training, held = divide(
        table.outcomes, settings.holdout, classes=table.task == "classification", seed=settings.seed
    )
    start = time.perf_counter()
    with collected() as found:
        estimator.fit(table.table.rows(training), table.target)
    seconds = time.perf_counter() - start
    fitted = _fitted(settings, table, estimator, training, held, seconds, (*table.notices, *found))
    judged = Judged.of(fitted)
    return _write(settings, estimator, fitted, judged)


def _fitted(
    settings: Fitting,
    table: TrainingTable,
    estimator: Estimator,
    training: np.ndarray,
    held: np.ndarray,
    seconds: float,
    notices: tuple[Notice, ...],
) -> FittedTable:
    seen = not len(held)
    scored = training if seen else held
    lines = lines_of(table.table)
    y = outcome_tensor(estimator, table.outcomes)
    return as_fitted(
        estimator,
        name=table.table.source,
        target=table.target,
        held_out=Rows(
            table.inputs.iloc[scored].reset_index(drop=True), y[scored], tuple(lines[place] for place in scored)
        ),
        outcomes=Outcomes.of(y[training], len(class_names(estimator))),
        table=table.table.frame,
        trained_on=len(training),
        seen=seen,
        seed=settings.seed,
        seconds=seconds,
        notices=notices,
    )


def _write(settings: Fitting, estimator: Estimator, fitted: FittedTable, judged: Judged) -> Made:
    report = run_report(fitted, judged)
    with run_folder.new_run(settings.folder, force=settings.force) as partial:
        save_estimator(estimator, partial)
        run_folder.write_json(partial / run_folder.CONFIG, {**settings.options(), "made": _made(settings, fitted)})
        run_folder.write_history(partial / run_folder.HISTORY, fitted.posterior.diagnostics.history)
        run_folder.write_json(partial / run_folder.SCORES, scores_content(judged, fitted))
        run_folder.write_file(partial / run_folder.REPORT_DATA, saving.to_json(report))
        page = _write_page(report, partial)
    notices = all_notices(fitted, judged)
    tell(notices, quiet=settings.quiet)
    return Made(settings.folder, fitted, judged, notices, settings.folder / run_folder.REPORT if page else None)


def _write_page(report: Report, folder: Path) -> bool:
    """Write the page where matplotlib and jinja2 are there; a run is a run without it."""
    from knowable.report.html import render

    try:
        run_folder.write_file(folder / run_folder.REPORT, render(report))
    except MissingExtra as error:
        say(f"warning: no report.html. {error} Then: knowable report")
        return False
    return True


def _made(settings: Fitting, fitted: FittedTable) -> dict[str, Any]:
    return {
        "knowable": __version__,
        "torch": torch.__version__,
        "command": "fit",
        "task": "classification" if fitted.classes else "regression",
        "data_sha256": file_hash(settings.data),
        "method": fitted.method.name,
        "settings": fitted.settings,
        "why": fitted.why,
        "trained_on": fitted.trained_on,
        "held_out": 0 if fitted.seen else len(fitted.held_out),
        "outcomes": fitted.outcomes.to_json(),
        "seconds": round(fitted.seconds, 3),
        "converged": fitted.posterior.diagnostics.converged,
    }


def plain_scores(scores: Scores) -> dict[str, Any]:
    """Scores with standard errors as plain values."""
    return {
        name: {"value": value, "standard_error": scores.standard_errors.get(name)} for name, value in scores.items()
    }


def scores_content(judged: Judged, fitted: FittedTable) -> dict[str, Any]:
    """Scores beside those of the guess, as plain values."""
    return {
        "rows": len(fitted.held_out),
        "held_out": not fitted.seen,
        "scores": plain_scores(judged.scores),
        "guess_without_inputs": plain_scores(judged.baseline),
    }


def summary(made: Made) -> dict[str, Any]:
    """What ``--json`` prints."""
    content = {
        "run": str(made.folder),
        "report": None if made.report is None else str(made.report),
        "method": made.fitted.method.name,
        "why": made.fitted.why,
        "converged": made.converged,
        "verdict": made.verdict,
        "seconds": made.fitted.seconds,
        **scores_content(made.judged, made.fitted),
        "warnings": [notice.text for notice in made.notices],
    }
    return run_folder.finite(content)


def print_fit(made: Made) -> None:
    """What people see."""
    from knowable.interfaces.cli.messages import as_rich, standard_output

    console, fitted = standard_output(), made.fitted
    rows = "the training rows" if fitted.seen else f"{len(fitted.held_out)} rows the fit has not seen"
    title = f"{fitted.target} by {fitted.method.cls_name}, on {rows}"
    console.print(as_rich(quality_table(fitted.method.cls_name, made.judged.scores, made.judged.baseline, title=title)))
    for line in (fitted.why, made.verdict, f"Run: {made.folder}", f"Report: {made.report}" if made.report else ""):
        if line:
            console.print(line, markup=False, soft_wrap=True)
