"""The estimators, as the commands use them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.support.checks import check_choice
from knowable.interfaces.cli.messages import collected, refuse_doubtful, spoken_for_the_shell, tell
from knowable.interfaces.cli.run_folder import SCORES, RunFolder
from knowable.interfaces.cli.training_table import file_hash, lines_of, notice_of
from knowable.registry import find_method
from knowable.report.report import Notice
from knowable.tabular.classifier import BayesianClassifier
from knowable.tabular.estimators import LIKELIHOODS
from knowable.tabular.fit_report import FittedRun, Outcomes
from knowable.tabular.reading import read_table
from knowable.tabular.regressor import BayesianRegressor
from knowable.tabular.table import Table
from knowable.tabular.targets import ClassTargets

Estimator = BayesianRegressor | BayesianClassifier


def new_estimator(
    task: str,
    *,
    method: str,
    seed: int,
    kinds: Mapping[str, Any] | None = None,
    likelihood: str = "auto",
    budget: str = "normal",
    time_limit: float | None = None,
    samples: int = 64,
    progress: bool = False,
    engine: str | None = None,
) -> Estimator:
    """An estimator for the task; an unknown method is refused now and not after the data was read."""
    if method != "auto":
        method = find_method(method).name
    return _class_for(task)(
        method,
        likelihood=None if likelihood == "auto" else check_choice("likelihood", likelihood, LIKELIHOODS[task]),
        budget=budget,
        time_limit=time_limit,
        samples=samples,
        random_state=seed,
        kinds=dict(kinds) if kinds else None,
        verbose=progress,
        engine=engine,
    )


def _class_for(task: str) -> type[Estimator]:
    return BayesianClassifier if task == "classification" else BayesianRegressor


def outcome_tensor(estimator: Estimator, outcomes: np.ndarray) -> Tensor:
    """Outcomes as predictions are scored against them: numbers in the user's unit, or codes of the classes.

    Raises:
        InvalidData: If there is a class that was not there in training.
    """
    targets = estimator.schema_.targets
    if isinstance(targets, ClassTargets):
        return torch.from_numpy(targets.codes(outcomes))
    return torch.from_numpy(np.array(outcomes, dtype=np.float64))


def open_run(
    folder: Path, data: str, *, lenient: bool, quiet: bool
) -> tuple[RunFolder, Estimator, Table, tuple[Notice, ...]]:
    """Load a run's estimator and a file checked against its schema, with notices of what looks wrong in it.

    Raises:
        InvalidData: If a column is missing or has the wrong type; or if something looks wrong and not ``lenient``.
        DamagedArtifact: If files of the run are missing, truncated or altered.
    """
    run = RunFolder.open(folder)
    estimator = _class_for(str(run.made.get("task"))).load(folder)
    with spoken_for_the_shell():
        table = read_table(data).with_missing(run.options.get("missing", ()))
        with collected() as found:
            estimator.schema_.encode(table)
        refuse_doubtful(found, lenient=lenient)
    found += map(notice_of, table.notes)
    tell(found, quiet=quiet)
    return run, estimator, table, tuple(found)


def run_on(folder: Path, data: str, *, lenient: bool, quiet: bool) -> FittedRun:
    """A run on the rows of a file that has the outcomes.

    Raises:
        InvalidData: If the file lacks the target, or has missing values in it.
    """
    run, estimator, table, notices = open_run(folder, data, lenient=lenient, quiet=quiet)
    with spoken_for_the_shell():
        table.find(str(run.options["target"]))
        y = outcome_tensor(estimator, estimator.schema_.target_of(table))
    inputs: Any = table.frame[[column.name for column in estimator.schema_.columns]]
    seen = data != "-" and file_hash(data) == run.made.get("data_sha256")
    if seen:
        known = Notice(
            "Scores",
            f"The model was fitted to rows of {table.source}: scores on them are too good to be true. Those on "
            f"held-out rows are in {run.folder / SCORES} and in the report of the run.",
        )
        tell([known], quiet=quiet)
        notices = (*notices, known)
    return FittedRun(
        estimator,
        data=table.source,
        table=table.frame,
        inputs=inputs,
        y=y,
        lines=tuple(lines_of(table)),
        outcomes=Outcomes.from_json(run.made.get("outcomes", {})),
        seconds=float(run.made["seconds"]),
        held_out=not seen,
        notices=notices,
        facts=(("Run", run.folder.name),),
    )
