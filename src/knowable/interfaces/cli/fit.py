"""``knowable fit``: from a table to a run."""

from __future__ import annotations

import json
import os
import time as clock
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from knowable._version import __version__
from knowable.core.compiling.engine import as_engine
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.errors import MissingExtra
from knowable.evaluation.evaluate import Scores
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.estimators import Estimator, new_estimator, outcome_tensor
from knowable.interfaces.cli.messages import (
    INTERRUPTED,
    NOT_CONVERGED,
    as_rich,
    collected,
    plain_errors,
    say,
    standard_output,
    tell,
    told,
)
from knowable.interfaces.cli.options import (
    AsJson,
    Budget,
    Config,
    DataFile,
    Drop,
    EngineName,
    Force,
    Group,
    Identifier,
    Kind,
    Lenient,
    Likelihood,
    Missing,
    Quiet,
    Seed,
    Target,
    Task,
    Time,
    TimeLimit,
    complete_method,
    parse_kinds,
    parse_task,
)
from knowable.interfaces.cli.training_table import TrainingTable, divide, file_hash, lines_of, read_training
from knowable.registry import find_method
from knowable.report.html import finite, render, to_json
from knowable.report.quality import quality_table
from knowable.report.report import Notice, Report
from knowable.report.verdict import verdict
from knowable.tabular.auto import BUDGETS
from knowable.tabular.fit_report import FittedRun, Outcomes, all_notices, class_names, fit_report


def fit(
    data: DataFile,
    target: Target = None,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            metavar="NAME",
            help="auto, or a name from 'knowable methods'.",
            autocompletion=complete_method,
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder or file.knowable for the run; else DATA-run."),
    ] = None,
    likelihood: Likelihood = "auto",
    budget: Budget = "normal",
    time_limit: TimeLimit = None,
    holdout: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of rows to hold out for the scores; 0 fits to all.")
    ] = 0.2,
    task: Task = "auto",
    drop: Drop = None,
    kind: Kind = None,
    identifier: Identifier = None,
    missing: Missing = None,
    group: Group = None,
    time: Time = None,
    refit: Annotated[
        bool, typer.Option("--refit/--no-refit", help="Fit once more, to all rows, after scoring; a second fit.")
    ] = True,
    samples: Annotated[int, typer.Option(metavar="N", help="Posterior draws behind a prediction.")] = 64,
    seed: Seed = 0,
    engine: EngineName = None,
    lenient: Lenient = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Fit a Bayesian network to a table and write a run: posterior, scores on held-out rows, report.

    Columns may be numbers, categories, dates or booleans, with missing values. Errors name the line and the column of
    the file, and nothing is written. A run is a folder that the other commands take.

    Scores are of a model fitted to the rows that are not held out. The model in the run is then fitted to all rows.
    """
    with plain_errors():
        folder = out or Path("knowable-run" if data == "-" else f"{Path(data).stem.removesuffix('.csv')}-run")
        options = {
            "data": data, "target": target, "method": method, "likelihood": likelihood, "budget": budget,
            "time_limit": time_limit, "holdout": holdout, "task": task,
            "drop": list(drop or ()), "kind": list(kind or ()),
            "id": list(identifier or ()), "missing": list(missing or ()), "group": group, "time": time, "refit": refit,
            "samples": samples, "seed": seed, "lenient": lenient,
        }  # fmt: skip
        with told(quiet=quiet):
            run = fit_table(options, folder, force=force, quiet=quiet, engine=engine)
        if os.environ.get("RANK", "0") != "0":  # of torchrun: the first process writes and speaks
            return
        page = write_run(run, options, folder, force=force)
        tell(all_notices(run), quiet=quiet)
        report = folder / run_folder.REPORT if page and folder.is_dir() else None
        if as_json:
            typer.echo(json.dumps(summary(run, folder, report), indent=1, allow_nan=False))
        elif not quiet:
            print_fit(run, folder, report)
        diagnostics = (run.delivered or run.estimator).posterior_.diagnostics
        judgement = verdict(diagnostics)
        if diagnostics.interrupted:
            say("the fit was stopped from the keyboard; the run holds what it had learned")
            raise typer.Exit(INTERRUPTED)
        if judgement.good is False and not diagnostics.out_of_time:  # a limit may end a fit at any time
            say(f"the fit did not converge: {judgement.text}")
            raise typer.Exit(NOT_CONVERGED)


def fit_table(
    options: Mapping[str, Any], folder: Path, *, force: bool, quiet: bool, engine: str | None = None
) -> FittedRun:
    """Check the options, read the file, fit.

    Raises:
        KnowableError: If anything is wrong with the options or the file; nothing is written then.
    """
    seed = check_count("seed", options["seed"], at_least=0)
    check_count("samples", options["samples"], at_least=2)
    check_choice("budget", options["budget"], BUDGETS)
    if options["time_limit"] is not None:
        check_number("time_limit", options["time_limit"], above=0.0)
    if options["method"] != "auto":
        find_method(options["method"])
    as_engine(engine)
    task, kinds = parse_task(options["task"]), parse_kinds(options["kind"])
    run_folder.check_place(folder, force=force)
    table = read_training(
        options["data"], options["target"], task=task, drop=options["drop"], kinds=kinds, identifiers=options["id"],
        missing=options["missing"], group=options["group"], time=options["time"], lenient=options["lenient"],
    )  # fmt: skip
    make = partial(
        new_estimator,
        table.task, method=options["method"], likelihood=options["likelihood"], budget=options["budget"],
        time_limit=options["time_limit"], samples=options["samples"], seed=seed, kinds=kinds, progress=not quiet,
        engine=engine,
    )  # fmt: skip
    training, held = divide(
        table.outcomes, options["holdout"], classes=table.task == "classification", seed=seed, groups=table.groups,
        times=table.times,
    )  # fmt: skip
    estimator = make()
    start = clock.perf_counter()
    with collected() as found:
        estimator.fit(table.table.rows(training), table.target)
    seconds = clock.perf_counter() - start
    scored = held if len(held) else training
    lines, y = lines_of(table.table), outcome_tensor(estimator, table.outcomes)
    delivered, more = None, list[Notice]()
    if options["refit"] and len(held) and not estimator.posterior_.diagnostics.interrupted:
        delivered, more = _refitted(make(), table, seconds, quiet=quiet)
    return FittedRun(
        estimator,
        data=table.table.source,
        table=table.table.frame,
        inputs=table.inputs.iloc[scored].reset_index(drop=True),
        y=y[scored],
        lines=tuple(lines[place] for place in scored),
        outcomes=Outcomes.of(y[training], len(class_names(estimator))),
        seconds=seconds,
        held_out=len(held) > 0,
        elsewhere="of other groups" if options["group"] else "later than those in training" if options["time"] else "",
        notices=(*table.notices, *found, *more),
        delivered=delivered,
        all_outcomes=None if delivered is None else Outcomes.of(y, len(class_names(delivered))),
    )


def _refitted(
    estimator: Estimator, table: TrainingTable, seconds: float, *, quiet: bool
) -> tuple[Estimator | None, list[Notice]]:
    """The estimator fitted to all rows, and what there is to know of that; None where it was stopped."""
    rows = len(table.table)
    if not quiet:
        say(f"scored after {seconds:.0f} s; now a second fit, to all {rows} rows (--no-refit leaves it out)")
    try:
        with collected() as found:
            estimator.fit(table.table, table.target)
        stopped = estimator.posterior_.diagnostics.interrupted
    except KeyboardInterrupt:  # before there was anything to keep
        stopped = True
    if stopped:
        return None, [Notice("Fit", "The fit to all rows was stopped: the run has the model that was scored.")]
    return estimator, [Notice(each.source, f"Fit to all rows: {each.text}") for each in found]


def write_run(run: FittedRun, options: Mapping[str, Any], folder: Path, *, force: bool) -> bool:
    """Write the run's folder; whether it has a page."""
    report = fit_report(run)
    kept = run.delivered or run.estimator
    with run_folder.new_run(folder, force=force) as place:
        kept.save(place)
        run_folder.write_json(place / run_folder.SCHEMA, kept.schema_.to_json())
        run_folder.write_json(place / run_folder.CONFIG, {**options, "made": _made(run, options["data"])})
        run_folder.write_history(place / run_folder.HISTORY, kept.posterior_.diagnostics.history)
        run_folder.write_json(place / run_folder.SCORES, scores_content(run))
        run_folder.write_file(place / run_folder.REPORT_DATA, to_json(report))
        return _write_page(report, place)


def _write_page(report: Report, folder: Path) -> bool:
    """Write the page where matplotlib and jinja2 are there; a run is a run without it."""
    try:
        run_folder.write_file(folder / run_folder.REPORT, render(report))
    except MissingExtra as error:
        say(f"warning: no report.html. {error} Then: knowable report")
        return False
    return True


def _made(run: FittedRun, source: str) -> dict[str, Any]:
    return {
        "knowable": __version__,
        "torch": torch.__version__,
        "command": "fit",
        "task": "classification" if run.classes else "regression",
        "data_sha256": file_hash(source),
        "method": run.method.name,
        "settings": repr(run.estimator.method_),
        "why": run.why,
        "trained_on": run.trained_on,
        "refitted_on": None if run.delivered is None else run.delivered.schema_.rows,
        "held_out": len(run.y) if run.held_out else 0,
        "outcomes": (run.all_outcomes or run.outcomes).to_json(),
        "seconds": round(run.seconds, 3),
        "converged": run.posterior.diagnostics.converged,
    }


def plain_scores(scores: Scores) -> dict[str, Any]:
    """Scores with standard errors as plain values."""
    return {
        name: {"value": value, "standard_error": scores.standard_errors.get(name)} for name, value in scores.items()
    }


def scores_content(run: FittedRun) -> dict[str, Any]:
    """Scores beside those of the baseline, as plain values."""
    return {
        "rows": len(run.y),
        "held_out": run.held_out,
        "scores": plain_scores(run.scores),
        "guess_without_inputs": plain_scores(run.baseline),
    }


def summary(run: FittedRun, folder: Path, report: Path | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    content = {
        "run": str(folder),
        "report": None if report is None else str(report),
        "method": run.method.name,
        "why": run.why,
        "converged": run.posterior.diagnostics.converged,
        "verdict": verdict(run.posterior.diagnostics).text,
        "seconds": run.seconds,
        **scores_content(run),
        "refitted_on": None if run.delivered is None else run.delivered.schema_.rows,
        "warnings": [notice.text for notice in all_notices(run)],
    }
    return finite(content)


def print_fit(run: FittedRun, folder: Path, report: Path | None) -> None:
    """What people see."""
    console, name = standard_output(), run.method.cls_name
    rows = f"{len(run.y)} held-out rows" if run.held_out else "the training rows"
    title = f"{run.target} by {name}, on {rows}"
    console.print(as_rich(quality_table(name, run.scores, run.baseline, title=title)))
    judgement = verdict(run.posterior.diagnostics).text
    for line in (run.why, judgement, run.what_is_delivered, f"Run: {folder}", f"Report: {report}" if report else ""):
        if line:
            console.print(line, markup=False, soft_wrap=True)
