"""Why a row is uncertain, in words: noise, few similar rows, or a value that no training row came near to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from knowable.tabular.columns import find_missing, labels_of, shown
from knowable.tabular.label_columns import CategoricalColumn, OrdinalColumn
from knowable.tabular.number_columns import DateColumn, NumericColumn, as_numbers, as_seconds
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table, as_table

_FAR = 3.0  # standard deviations of the training rows' dates
_WORTH = 0.2  # share of the disagreement that a column must explain to be named
_SOME = 0.1  # share of the uncertainty from which a part is worth a word
_LITTLE = 0.1  # nats of entropy, below which there is hardly a doubt


def remarks(schema: Schema, table: Table) -> list[list[str]]:
    """For each row, which of its values no training row came near to, and which are missing."""
    found: list[list[str]] = [[] for _ in range(len(table))]
    for column in schema.columns:
        values = table.column(column.name)
        missing = find_missing(values)
        for row in np.flatnonzero(missing):
            found[row].append(f"{column.name} is missing: the usual value of the training rows is taken")
        if isinstance(column, NumericColumn):
            numbers = as_numbers(table, column.name)
            for row in np.flatnonzero((numbers < column.low) | (numbers > column.high)):
                found[row].append(
                    f"{column.name} is {numbers[row]:.6g}, outside the training rows, which go from {column.low:.6g} "
                    f"to {column.high:.6g}"
                )
        elif isinstance(column, DateColumn):
            away = np.abs(as_seconds(table, column.name, column.day_first) - column.centre) > _FAR * column.scale
            for row in np.flatnonzero(away & ~missing):
                found[row].append(f"{column.name} is {values.iloc[row]}, far from the dates of the training rows")
        elif isinstance(column, CategoricalColumn | OrdinalColumn):
            known = set(column.categories if isinstance(column, CategoricalColumn) else column.levels)
            others = isinstance(column, CategoricalColumn) and column.rare > 0
            for row, label in enumerate(labels_of(values)):
                if not missing[row] and not others and label not in known:
                    found[row].append(f"{column.name} is {shown(values.iloc[row])}, which no training row has")
    return found


def usual_row(schema: Schema) -> np.ndarray:
    """The usual value of every column, as numbers: what stands for a missing one."""
    import pandas as pd

    table = as_table(pd.DataFrame({column.name: pd.Series([None], dtype=object) for column in schema.columns}))
    found = schema.encode(table)[0]
    for column, part in zip(schema.columns, schema.groups.values(), strict=True):
        if column.gaps:
            found[part.stop - 1] = 0.0
    return found


def explain(
    answer: Mapping[str, Any], without: Mapping[str, Mapping[str, Any]], said: list[str], level: float
) -> dict[str, Any]:
    """Sentences on one row, and the numbers behind them.

    Args:
        answer: What was predicted.
        without: What would be predicted with the usual value in each of the columns.
        said: What is odd about its values.
        level: Probability of the interval.
    """
    noise, model = _parts(answer)
    if not isinstance(noise, float) or not isinstance(model, float):
        return {"reasons": ["This model predicts several outcomes a row; the parts are in the numbers."]}
    total = noise + model
    share = model / total if total > 0 else 0.0
    reasons = [_first(answer, level, total)]
    if share <= 1 - _SOME:
        reasons.append(
            f"Noise is {1 - share:.0%} of the uncertainty: outcomes of rows like this one differ by themselves. More "
            f"rows would not change that."
        )
    if share >= _SOME:
        reasons.append(
            f"Few similar rows are {share:.0%} of it: the posterior's draws disagree here, and would agree more had "
            f"there been more training rows like this one."
        )
    reasons += [f"{each}." for each in said]
    saved = {name: 1 - _parts(each)[1] / model for name, each in without.items()} if model > 0 else {}
    blamed = sorted((name for name in saved if saved[name] >= _WORTH), key=lambda name: -saved[name])[:3]
    if share >= _SOME:
        reasons += [
            f"With the usual value of {name} the draws' disagreement would be {saved[name]:.0%} smaller."
            for name in blamed
        ]
    if "p_value" in answer:
        reasons.append(f"Of the held-out rows, {answer['p_value']:.1%} are at least as uncertain as this one.")
    return {"reasons": reasons, "noise_share": round(1 - share, 4), "few_similar_rows_share": round(share, 4)}


def _parts(answer: Mapping[str, Any]) -> tuple[Any, Any]:
    """Aleatoric and epistemic uncertainty: variances or nats."""
    if "mean" not in answer:
        return answer["aleatoric"], answer["epistemic"]
    noise, model = answer["aleatoric_std"], answer["epistemic_std"]
    return (noise**2, model**2) if isinstance(noise, float) else (noise, model)


def _first(answer: Mapping[str, Any], level: float, total: float) -> str:
    if "mean" in answer:
        return (
            f"The outcome is {answer['mean']:.4g} on average, and with probability {level:.0%} between "
            f"{answer['low']:.4g} and {answer['high']:.4g}."
        )
    doubt = " There is hardly any doubt." if total < _LITTLE else ""
    return f"The most probable label is {answer['label']}, with probability {answer['probability']:.1%}.{doubt}"
