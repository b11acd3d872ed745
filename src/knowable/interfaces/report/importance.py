"""Which inputs matter: how much worse predictions become when one input is shuffled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from knowable.core.prediction import Prediction
from knowable.evaluation.scores import nll_rows
from knowable.interfaces.report.panels import Axes, BarsPanel

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Predict = Callable[["DataFrame"], Prediction]
"""Rows of the user's table to a prediction in the user's units."""

_MOST_INPUTS = 64  # that are shuffled; beyond, those that move with the prediction are taken
_MOST_ROWS = 400
_BARS = 12


@dataclass(frozen=True)
class Importance:
    """How much one input matters.

    Attributes:
        name: The input.
        gain: Nats of log density a row that are lost when it is shuffled.
        error: Standard error of that mean over rows.
    """

    name: str
    gain: float
    error: float


def importances(
    predict: Predict, frame: DataFrame, y: Tensor, inputs: Sequence[str], *, seed: int = 0
) -> tuple[Importance, ...]:
    r"""Permutation importance (Breiman, 2001) of each input, measured in log density; the most important first.

    .. math:: \frac1n \sum_i \log p(y_i \mid x_i) - \log p(y_i \mid x_i \text{ with input } j \text{ of another row})

    Args:
        predict: The fitted model.
        frame: Inputs of held-out rows.
        y: Their outcomes.
        inputs: Which inputs to look at; of very many, those that move most with the prediction are taken.
        seed: Fixes the shuffles.
    """
    generator = np.random.default_rng(seed)
    places = np.sort(generator.choice(len(frame), min(len(frame), _MOST_ROWS), replace=False))
    rows, outcome = frame.iloc[places], y[places.tolist()]
    if len(rows) < 2:
        return ()
    straight = predict(rows)
    before = nll_rows(straight, outcome)
    found = []
    for name in _moving(rows, straight, list(inputs)):
        shuffled = rows.copy()
        shuffled[name] = rows[name].take(_elsewhere(len(rows), generator)).set_axis(rows.index)
        loss = nll_rows(predict(shuffled), outcome) - before
        found.append(Importance(name, loss.mean().item(), loss.std().item() / math.sqrt(len(loss))))
    return tuple(sorted(found, key=lambda each: -each.gain))


def _elsewhere(count: int, generator: np.random.Generator) -> np.ndarray:
    """A random permutation that leaves nothing in its place: a random order, moved on by one within it."""
    order = generator.permutation(count)
    moved = np.empty(count, dtype=np.int64)
    moved[order] = np.roll(order, 1)
    return moved


def _moving(rows: DataFrame, prediction: Prediction, inputs: list[str]) -> list[str]:
    """At most so many inputs, those along which the prediction moves most, in the order of the table."""
    if len(inputs) <= _MOST_INPUTS:
        return inputs
    level = prediction.samples.mean(0).double().reshape(len(prediction), -1)[:, -1].numpy()
    columns: dict[str, Any] = {name: rows[name] for name in inputs}
    share = {name: _explained(column, level) for name, column in columns.items()}
    chosen = set(sorted(inputs, key=lambda name: -share[name])[:_MOST_INPUTS])
    return [name for name in inputs if name in chosen]


def _explained(values: Series, level: np.ndarray) -> float:
    """Share of the variance of ``level`` between groups of rows with like values (the correlation ratio)."""
    import pandas

    groups: Any = values
    if pandas.api.types.is_numeric_dtype(values) and values.nunique() > 8:
        groups = pandas.qcut(values, 8, labels=False, duplicates="drop")
    means = pandas.Series(level).groupby(groups.to_numpy(), dropna=False).transform("mean")
    return float(means.var() / max(level.var(), 1e-300))


def importance_panel(found: Sequence[Importance]) -> BarsPanel | None:
    """The inputs that matter most, as bars; None where there is none to compare."""
    shown = list(found)[:_BARS]
    if not shown:
        return None
    words = "; ".join(f"{each.name} {each.gain:.3g} ± {each.error:.2g}" for each in shown)
    more = f" The {len(shown)} largest of {len(found)} are shown." if len(found) > len(shown) else ""
    return BarsPanel(
        title="Which inputs matter",
        caption="How much log density a row loses when one input is taken from another row. Inputs that say the same "
        f"share what they are worth. Lines are one standard error.{more}",
        alt=f"Loss of log density when an input is shuffled, in nats a row: {words}.",
        axes=Axes("loss when shuffled (nats a row)", "input"),
        names=tuple(each.name for each in shown),
        values=tuple(each.gain for each in shown),
        errors=tuple(each.error if math.isfinite(each.error) else 0.0 for each in shown),
    )
