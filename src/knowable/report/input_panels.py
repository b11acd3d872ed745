"""Partial dependence with aleatoric and epistemic uncertainty, and permutation importance, of each input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.evaluation.scores import nll_rows
from knowable.report.panels import Axes, BarsPanel, DependencePanel, Numbers, Response

if TYPE_CHECKING:
    from pandas import DataFrame, Series


_BACKGROUND = 40  # rows averaged over
_GRID = 25  # values of a number or a date
_FEW = 8  # distinct numbers or fewer are taken as they are
_MOST_CATEGORIES = 10
_MOST_CLASSES = 3
_RUG = 120


@dataclass(frozen=True)
class InputGrid:
    """Values to put in the place of one input."""

    values: tuple[Any, ...]  # as the user's table has them
    x: Numbers
    categories: tuple[str, ...] = ()
    seen: Numbers = ()  # values in the data along the axis, where they are numbers
    label: str = ""


def dependence_panel(
    predict: Predict,
    frame: DataFrame,
    name: str,
    *,
    kind: str,
    target: str,
    classes: tuple[str, ...] = (),
    level: float = 0.9,
    seed: int = 0,
) -> DependencePanel | None:
    r"""Partial dependence (Friedman, 2001) with the uncertainty of a typical row.

    Every value v of the input is put into the same background rows. The mean, the aleatoric and the epistemic variance
    (entropies for classes) are averaged over these rows; bands are :math:`\bar\mu \pm z \sqrt{\bar v}` with z the
    normal quantile of the level.

    Returns:
        The panel, or None where the input takes fewer than two values.
    """
    values: Any = frame[name]
    grid = grid_of(values, kind, name)
    if len(grid.values) < 2:
        return None
    chosen = np.random.default_rng(seed).choice(len(frame), min(_BACKGROUND, len(frame)), replace=False)
    background = frame.iloc[np.sort(chosen)]
    prediction = predict(_filled(background, name, grid.values))
    shape = (len(grid.values), len(background))
    if isinstance(prediction, ClassPrediction):
        return _of_classes(prediction, grid, shape, name, target, classes, level)
    assert isinstance(prediction, RegressionPrediction)
    return _of_numbers(prediction, grid, shape, name, target, level)


def grid_of(values: Series, kind: str, name: str) -> InputGrid:
    """Values to try: evenly spaced over the middle 95% of numbers or dates, the most frequent categories."""
    import pandas

    known = values.dropna()
    if kind == "date":
        return _dates(known, name)
    if kind == "numeric" and pandas.api.types.is_numeric_dtype(known):
        return _numbers(known.to_numpy(dtype=float), name)
    common = list(known.value_counts().index[:_MOST_CATEGORIES])
    x = tuple(float(place) for place in range(len(common)))
    return InputGrid(tuple(common), x, tuple(str(value) for value in common), label=name)


def _numbers(known: np.ndarray, name: str) -> InputGrid:
    known = known[np.isfinite(known)]
    distinct = np.unique(known)
    if len(distinct) <= _FEW:
        return InputGrid(tuple(distinct.tolist()), tuple(distinct.tolist()), label=name)
    low, high = np.quantile(known, (0.025, 0.975))
    if low == high:  # nearly all rows have the same value
        low, high = distinct[0], distinct[-1]
    points = tuple(np.linspace(low, high, _GRID).tolist())
    inside = known[(known >= low) & (known <= high)][:_RUG]
    return InputGrid(points, points, seen=tuple(inside.tolist()), label=name)


def _dates(known: Series, name: str) -> InputGrid:
    """Days between the first and the last date, written as the table writes them; the axis counts in years."""
    import pandas

    days = pandas.to_datetime(known, errors="coerce", format="mixed").dropna()
    if days.nunique() < 2:
        return InputGrid((), ())
    days = days.dt.tz_localize(None) if days.dt.tz is not None else days
    points = pandas.date_range(days.min(), days.max(), periods=_GRID)
    written = pandas.api.types.is_datetime64_any_dtype(known)
    values = tuple(points) if written else tuple(point.isoformat(sep=" ", timespec="seconds") for point in points)
    years = tuple(point.year + (point.day_of_year - 1) / 366 for point in points)
    return InputGrid(values, years, label=f"{name} (year)")


def _filled(background: DataFrame, name: str, values: Sequence[Any]) -> DataFrame:
    """The background rows once for each value, with that value in the place of their own."""
    import pandas

    filled = pandas.concat([background] * len(values), ignore_index=True)
    column = pandas.Series([value for value in values for _ in range(len(background))])
    if background[name].dtype == object or isinstance(background[name].dtype, pandas.CategoricalDtype):
        column = column.astype(object)
    filled[name] = column
    return filled


def _of_numbers(
    prediction: RegressionPrediction, grid: InputGrid, shape: tuple[int, int], name: str, target: str, level: float
) -> DependencePanel:
    mean = _averaged(prediction.mean, shape)
    noise, doubt = _averaged(prediction.aleatoric, shape), _averaged(prediction.epistemic, shape)
    reach = NormalDist().inv_cdf((1 + level) / 2)
    inner, outer = reach * np.sqrt(doubt), reach * np.sqrt(noise + doubt)
    response = Response("mean", _tuple(mean), _tuple(mean - inner), _tuple(mean + inner))
    return DependencePanel(
        title=f"Partial dependence on {name}",
        caption=_caption(shape[1], "The outer band is the total uncertainty, the inner one its epistemic part."),
        alt=_alt(name, target, grid, mean, np.sqrt(noise), np.sqrt(doubt)),
        axes=Axes(grid.label, target),
        level=level,
        x=grid.x,
        categories=grid.categories,
        responses=(response,),
        low=_tuple(mean - outer),
        high=_tuple(mean + outer),
        aleatoric=_tuple(np.sqrt(noise)),
        epistemic=_tuple(np.sqrt(doubt)),
        unit="sd",
        seen=grid.seen,
    )


def _of_classes(
    prediction: ClassPrediction,
    grid: InputGrid,
    shape: tuple[int, int],
    name: str,
    target: str,
    classes: tuple[str, ...],
    level: float,
) -> DependencePanel:
    reach = NormalDist().inv_cdf((1 + level) / 2)
    probs, spread = prediction.probs, _spread(prediction)
    responses = []
    for label in _shown_classes(prediction, classes):
        mean, doubt = _averaged(probs[:, label], shape), reach * np.sqrt(_averaged(spread[:, label], shape))
        low, high = np.clip(mean - doubt, 0.0, 1.0), np.clip(mean + doubt, 0.0, 1.0)
        responses.append(Response(f"P({target} = {classes[label]})", _tuple(mean), _tuple(low), _tuple(high)))
    noise, doubt = _averaged(prediction.aleatoric, shape), _averaged(prediction.epistemic, shape)
    return DependencePanel(
        title=f"Partial dependence on {name}",
        caption=_caption(shape[1], "Bands are the epistemic uncertainty of the probability."),
        alt=_alt(name, responses[0].name, grid, np.array(responses[0].mean), noise, doubt),
        axes=Axes(grid.label, "probability"),
        level=level,
        x=grid.x,
        categories=grid.categories,
        responses=tuple(responses),
        aleatoric=_tuple(noise),
        epistemic=_tuple(doubt),
        unit="nats",
        seen=grid.seen,
    )


def _spread(prediction: ClassPrediction) -> Tensor:
    """Variance of the draws' probabilities, ``(rows, classes)``."""
    weights = prediction.log_weights.exp().double().view(-1, 1, 1)
    draws = prediction.samples.double()
    mean = (weights * draws).sum(0)
    return (weights * (draws - mean).square()).sum(0)


def _shown_classes(prediction: Prediction, classes: tuple[str, ...]) -> list[int]:
    """The second of two classes; of more, those that are named most often."""
    if len(classes) == 2:
        return [1]
    total = prediction.samples.double().mean(0).sum(0)
    return sorted(total.argsort(descending=True)[:_MOST_CLASSES].tolist())


def _averaged(values: Tensor, shape: tuple[int, int]) -> np.ndarray:
    """Means over the background rows, one for each value of the grid."""
    return values.detach().double().reshape(shape).mean(1).clamp(-1e300, 1e300).numpy()


def _caption(rows: int, bands: str) -> str:
    lead = f"Averaged over {rows} held-out rows in which only this input is changed."
    return f"{lead} {bands} Below: aleatoric and epistemic apart."


def _alt(name: str, what: str, grid: InputGrid, mean: np.ndarray, noise: np.ndarray, doubt: np.ndarray) -> str:
    def at(place: int) -> str:
        return grid.categories[place] if grid.categories else f"{grid.x[place]:.4g}"

    low, high, least = int(mean.argmin()), int(mean.argmax()), int(doubt.argmax())
    return (
        f"{what} along {name}: least {mean[low]:.4g} at {at(low)}, most {mean[high]:.4g} at {at(high)}. Aleatoric from "
        f"{noise.min():.3g} to {noise.max():.3g}; epistemic from {doubt.min():.3g} to {doubt.max():.3g}, largest at "
        f"{at(least)}."
    )


def _tuple(values: np.ndarray) -> Numbers:
    return tuple(float(value) for value in values)


# --- Permutation importance: how much worse predictions become when one input is shuffled ----------------------------

Predict = Callable[["DataFrame"], Prediction]
"""Rows of the user's table to a prediction in the user's units."""

_MOST_INPUTS = 64  # that are shuffled; beyond, those that move with the prediction are taken
_MOST_ROWS = 400
_BARS = 12


@dataclass(frozen=True)
class Importance:
    """How much one input matters."""

    name: str
    gain: float  # rise of the NLL in nats per row when it is permuted
    error: float  # standard error of that mean over rows


def importances(
    predict: Predict, frame: DataFrame, y: Tensor, inputs: Sequence[str], *, seed: int = 0
) -> tuple[Importance, ...]:
    r"""Permutation importance (Breiman, 2001) of each input, measured in log density; the most important first.

    .. math:: \frac1n \sum_i \log p(y_i \mid x_i) - \log p(y_i \mid x_i \text{ with input } j \text{ of another row})
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
        title="Feature importance",
        caption="Permutation importance: how much NLL rises when one input is taken from another row. Correlated "
        f"inputs share their importance. Lines are one standard error.{more}",
        alt=f"Rise of NLL when an input is permuted, in nats per row: {words}.",
        axes=Axes("rise of NLL when permuted (nats per row)", "input"),
        names=tuple(each.name for each in shown),
        values=tuple(each.gain for each in shown),
        errors=tuple(each.error if math.isfinite(each.error) else 0.0 for each in shown),
    )
