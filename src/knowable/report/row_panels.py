"""Single rows: predictions against truth, error against certainty, and the most and least certain rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.evaluation.detection import risk_coverage
from knowable.report.panels import Axes, Line, LinesPanel, Numbers, TruthPanel
from knowable.report.report import Listing

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MOST_POINTS = 400  # rows of one figure
_MOST_INPUTS = 5  # columns of the tables of rows
_MOST_COLUMNS = 60  # rows of the table of columns


def truth_panel(
    target: str,
    prediction: RegressionPrediction,
    y: Tensor,
    lines: Sequence[int],
    *,
    level: float = 0.9,
    always: Sequence[int] = (),
) -> TruthPanel:
    """Predictions with their intervals against what was observed."""
    low, high = prediction.interval(level)
    places = _evenly(len(y), always)
    columns = [_pick(values, places) for values in (y, prediction.mean, low, high)]
    held = ((low.flatten() <= y.flatten()) & (y.flatten() <= high.flatten())).double().mean().item()
    some = f" {len(places)} of {len(y)} rows, evenly spaced, are drawn." if len(places) < len(y) else ""
    return TruthPanel(
        title="Prediction against truth",
        caption=f"A row on the diagonal was predicted exactly; upright lines are {level:.0%} intervals.{some}",
        alt=(
            f"Predicted {target} with {level:.0%} intervals against observed {target}, {len(places)} rows. Observed "
            f"from {y.min():.4g} to {y.max():.4g}, predicted means from {prediction.mean.min():.4g} to "
            f"{prediction.mean.max():.4g}. The intervals hold {held:.1%} of the outcomes."
        ),
        axes=Axes(f"observed {target}", f"predicted {target}"),
        level=level,
        truth=columns[0],
        mean=columns[1],
        low=columns[2],
        high=columns[3],
        rows=tuple(int(lines[place]) for place in places),
    )


def certainty_panel(predictions: Mapping[str, Prediction], y: Tensor) -> LinesPanel:
    """The error among the rows that each prediction is most certain of, as more and more of them are kept."""
    lines = tuple(_certainty_line(name, prediction, y) for name, prediction in predictions.items())
    numbers = all(isinstance(prediction, RegressionPrediction) for prediction in predictions.values())
    what = "root mean square error" if numbers else "error rate"
    said = (
        f"{line.name}: {line.y[0]:.4g} for the surest {line.x[0]:.0%}, {line.y[len(line.y) // 2]:.4g} for "
        f"{line.x[len(line.x) // 2]:.0%}, {line.y[-1]:.4g} for all."
        for line in lines
    )
    return LinesPanel(
        title="Error against certainty (risk-coverage curve)",
        caption="Rows are kept from the most certain on. If the uncertainty is informative, the curve rises: certain "
        "rows have smaller errors.",
        alt=f"{what.capitalize()} among the most certain rows. {' '.join(said)}",
        axes=Axes("share of rows kept, most certain first", what),
        lines=lines,
        percent=True,
    )


def _certainty_line(name: str, prediction: Prediction, y: Tensor) -> Line:
    curve = risk_coverage(prediction, y)
    error = curve.risk.sqrt() if isinstance(prediction, RegressionPrediction) else curve.risk
    first = min(len(error) - 1, max(4, len(error) // 50))  # an average over a handful of rows says nothing
    places = [place for place in _evenly(len(error), (), most=100) if place >= first] or [len(error) - 1]
    return Line(name, tuple(curve.coverage[places].tolist()), tuple(error[places].tolist()))


def extreme_rows(prediction: Prediction, count: int = 5) -> tuple[list[int], list[int]]:
    """Places of the most and of the least certain rows, each beginning with the most extreme; none is in both."""
    uncertainty = prediction.total.detach().double().reshape(len(prediction), -1).mean(1)
    order = torch.argsort(uncertainty, stable=True).tolist()
    count = min(count, len(order) // 2)
    return order[:count], order[::-1][:count]


def row_listings(
    prediction: Prediction,
    y: Tensor,
    frame: DataFrame,
    lines: Sequence[int],
    *,
    inputs: Sequence[str],
    classes: tuple[str, ...] = (),
    count: int = 5,
) -> tuple[Listing, ...]:
    """Tables of the most and least certain rows, with the inputs that matter most."""
    shown = list(inputs)[:_MOST_INPUTS]
    if isinstance(prediction, ClassPrediction):
        headings = ("Row", "Predicted", "Probability", "Truth", "Aleatoric", "Epistemic", *shown)
        unit = "nats of entropy"
    else:
        headings = ("Row", "Mean", "90% interval", "Truth", "Aleatoric", "Epistemic", *shown)
        unit = "standard deviations in the outcome's unit"
    tell = _RowTeller(prediction, y, classes)
    listings = []
    titles = ("The most certain rows", "The least certain rows")
    for title, places in zip(titles, extreme_rows(prediction, count), strict=True):
        rows = tuple(
            (f"line {lines[place]}", *tell(place), *(_text(frame[name].iloc[place]) for name in shown))
            for place in places
        )
        note = f"Rows are counted as lines of the file. Aleatoric and epistemic are {unit}."
        listings.append(Listing(title, headings, rows, note, tuple(int(lines[place]) for place in places)))
    return tuple(listing for listing in listings if listing.rows)


class _RowTeller:
    """What a prediction says of one row, as texts."""

    def __init__(self, prediction: Prediction, y: Tensor, classes: tuple[str, ...]):
        self.prediction, self.y, self.classes = prediction, y, classes
        self.aleatoric, self.epistemic = prediction.aleatoric, prediction.epistemic
        self.bounds = prediction.interval(0.9) if isinstance(prediction, RegressionPrediction) else None

    def __call__(self, place: int) -> tuple[str, ...]:
        noise, doubt = self.aleatoric[place].mean().item(), self.epistemic[place].mean().item()
        if isinstance(self.prediction, ClassPrediction):
            label = int(self.prediction.labels[place])
            said, was = self.classes[label], self.classes[int(self.y[place])]
            mark = "" if said == was else " ✗"
            return said, f"{self.prediction.probs[place][label]:.1%}", was + mark, f"{noise:.3f}", f"{doubt:.4f}"
        assert isinstance(self.prediction, RegressionPrediction) and self.bounds is not None
        low, high = (side[place].mean().item() for side in self.bounds)
        was = self.y[place].item()
        mark = "" if low <= was <= high else " ✗"
        mean = self.prediction.mean[place].mean().item()
        return f"{mean:.4g}", f"{low:.4g} to {high:.4g}", f"{was:.4g}{mark}", f"{noise**0.5:.3g}", f"{doubt**0.5:.3g}"


def _evenly(count: int, always: Sequence[int], *, most: int = _MOST_POINTS) -> list[int]:
    """At most about ``most`` places out of ``count``, in order, with those in ``always``."""
    if count <= most:
        return list(range(count))
    return sorted({*(i * (count - 1) // (most - 1) for i in range(most)), *always})


def _pick(values: Tensor, places: Sequence[int]) -> Numbers:
    flat = values.detach().double().reshape(-1)
    return tuple(flat[list(places)].tolist())


def _text(value: Any) -> str:
    """A cell of the user's table as it is shown."""
    if isinstance(value, float):
        return "missing" if value != value else f"{value:.6g}"
    text = str(value)
    return "missing" if text in ("None", "nan", "NaT", "<NA>", "") else text


def data_listing(frame: DataFrame, kinds: Mapping[str, str], target: str) -> Listing:
    """One row for each column: its kind, what is missing, and what it holds; the outcome first."""
    others = [name for name in frame.columns if name != target]
    shown = [target, *others][: _MOST_COLUMNS + 1]
    columns: dict[Any, Any] = {name: frame[name] for name in shown}
    used = {**kinds, target: "outcome"}
    rows = tuple(_column_row(str(name), values, used.get(str(name), "not used")) for name, values in columns.items())
    left = len(others) + 1 - len(shown)
    note = f"{left} more columns are not listed." if left else ""
    return Listing("Columns", ("Column", "Kind", "Missing", "Distinct", "Holds"), rows, note)


def _column_row(name: str, values: Series, kind: str) -> tuple[str, ...]:
    missing = int(values.isna().sum())
    share = f"{missing} ({missing / max(1, len(values)):.0%})" if missing else "none"
    return name, kind, share, str(values.nunique()), _holds(values.dropna())


def _holds(values: Series) -> str:
    """A range with the middle for numbers and dates; the most frequent values for everything else."""
    import pandas

    if not len(values):
        return "nothing"
    types = pandas.api.types
    if types.is_bool_dtype(values):
        return f"true in {values.astype(bool).mean():.0%}"
    if types.is_numeric_dtype(values):
        return f"{values.min():.5g} to {values.max():.5g}, median {values.median():.5g}"
    if types.is_datetime64_any_dtype(values):
        return f"{values.min():%Y-%m-%d} to {values.max():%Y-%m-%d}"
    counts = values.astype(str).value_counts()
    named = ", ".join(f"{_cut(str(value))} ({count})" for value, count in counts.head(3).items())
    return f"{named}{', …' if len(counts) > 3 else ''}"


def _cut(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"
