"""The estimators, as the commands use them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction
from knowable.errors import KnowableWarning
from knowable.interfaces.cli import run_folder
from knowable.registry import find_method
from knowable.report.fit_report import FittedTable, Rows
from knowable.report.quality import Outcomes
from knowable.report.report import Notice
from knowable.tabular.classifier import BayesianClassifier
from knowable.tabular.reading import read_table
from knowable.tabular.regressor import BayesianRegressor
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table
from knowable.tabular.targets import ClassTargets

if TYPE_CHECKING:
    from pandas import DataFrame

Estimator = BayesianRegressor | BayesianClassifier


def new_estimator(
    task: str,
    *,
    method: str,
    seed: int,
    kinds: Mapping[str, Any] | None = None,
    budget: float | None = None,
    samples: int = 64,
    progress: bool = False,
) -> Estimator:
    """An estimator for the task; an unknown method is refused now and not after the data was read."""
    if method != "auto":
        method = find_method(method).name
    made = BayesianClassifier if task == "classification" else BayesianRegressor
    return made(
        method,
        budget=budget,
        samples=samples,
        random_state=seed,
        kinds=dict(kinds) if kinds else None,
        verbose=progress,
    )


def encode(estimator: Estimator, table: Table) -> np.ndarray:
    """Rows as the network takes them, after a check that they have the columns and types of the training rows."""
    return estimator.schema_.encode(table)


def class_names(estimator: Estimator) -> tuple[str, ...]:
    """Names of the classes in the order of their codes; none for numbers."""
    targets = estimator.schema_.targets
    return tuple(str(label) for label in targets.classes) if isinstance(targets, ClassTargets) else ()


def outcome_tensor(estimator: Estimator, outcomes: np.ndarray) -> Tensor:
    """Outcomes as predictions are scored against them: numbers in the user's unit, or codes of the classes.

    Raises:
        InvalidData: If there is a class that was not there in training.
    """
    targets = estimator.schema_.targets
    if isinstance(targets, ClassTargets):
        return torch.from_numpy(targets.codes(outcomes))
    return torch.from_numpy(np.array(outcomes, dtype=np.float64))


def quiet_prediction(estimator: Estimator, frame: DataFrame) -> Prediction:
    """Predict rows made from rows that were looked at already: what is wrong with them has been said."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KnowableWarning)
        return estimator.predict_dist(read_table(frame))


def quiet_encoding(estimator: Estimator, frame: DataFrame) -> np.ndarray:
    """Encode such rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KnowableWarning)
        return encode(estimator, read_table(frame))


def as_fitted(
    estimator: Estimator,
    *,
    name: str,
    target: str,
    held_out: Rows,
    outcomes: Outcomes,
    table: DataFrame,
    trained_on: int,
    seen: bool,
    seed: int,
    seconds: float,
    notices: tuple[Notice, ...],
    facts: tuple[tuple[str, str], ...] = (),
) -> FittedTable:
    """What a report needs to know of a fitted estimator; see :class:`~knowable.report.fit_report.FittedTable`."""
    schema: Schema = estimator.schema_
    entry = find_method(type(estimator.method_).__name__)
    return FittedTable(
        name=name,
        target=target,
        classes=class_names(estimator),
        kinds={column.name: column.kind for column in schema.columns},
        predict=lambda frame: quiet_prediction(estimator, frame),
        encode=lambda frame: quiet_encoding(estimator, frame),
        posterior=estimator.posterior_,
        method=entry,
        settings=repr(estimator.method_),
        why=f"{entry.cls_name} was chosen for you: {estimator.choice_.why}." if estimator.method == "auto" else "",
        seed=seed,
        seconds=seconds,
        trained_on=trained_on,
        outcomes=outcomes,
        table=table,
        held_out=held_out,
        seen=seen,
        notices=notices,
        facts=facts,
    )


def save_estimator(estimator: Estimator, folder: Path) -> None:
    """Write ``estimator.json``, ``posterior/`` and ``schema.json`` into an empty folder."""
    estimator.save(folder)
    run_folder.write_json(folder / run_folder.SCHEMA, estimator.schema_.to_json())


def load_estimator(folder: Path, task: str) -> Estimator:
    """Read what :func:`save_estimator` wrote.

    Raises:
        DamagedArtifact: If files are missing, truncated or altered.
    """
    made = BayesianClassifier if task == "classification" else BayesianRegressor
    return made.load(folder)
