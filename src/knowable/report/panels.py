"""The figures of a report as data: what is to be drawn, with a title, a caption and a text alternative.

Each panel is a frozen dataclass of numbers and strings with a ``kind``. They are made from predictions by
:mod:`knowable.report.prediction_panels` and drawn by :mod:`knowable.report.drawing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """What every figure has."""

    title: str
    caption: str
    alt: str  # the figure in words, for those who cannot see it
    kind: str = ""


@dataclass(frozen=True)
class Axes:
    """Names of the two axes, units included."""

    x: str
    y: str


@dataclass(frozen=True, kw_only=True)
class BandPanel(Panel):
    """Prediction along one input: mean, epistemic band inside, total band outside, data."""

    kind: str = "band"
    axes: Axes
    level: float
    x: Numbers
    mean: Numbers
    epistemic_low: Numbers
    epistemic_high: Numbers
    low: Numbers
    high: Numbers
    data_x: Numbers = ()
    data_y: Numbers = ()
    truth: Numbers = ()


@dataclass(frozen=True, kw_only=True)
class NoisePanel(Panel):
    """Predicted noise along one input, beside the spread of the data around the prediction."""

    kind: str = "noise"
    axes: Axes
    x: Numbers
    noise: Numbers
    local_x: Numbers
    local_std: Numbers
    local_error: Numbers


@dataclass(frozen=True)
class Line:
    """A named curve with standard errors."""

    name: str
    x: Numbers
    y: Numbers
    error: Numbers = ()
    count: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CalibrationPanel(Panel):
    """Promised against kept: coverage of intervals (``coverage``) or accuracy by confidence (``reliability``)."""

    kind: str = "calibration"
    axes: Axes
    lines: tuple[Line, ...]


@dataclass(frozen=True, kw_only=True)
class CurvesPanel(Panel):
    """The terms of the objective during training, one small plot for each method."""

    kind: str = "curves"
    axes: Axes
    groups: tuple[tuple[str, tuple[Line, ...]], ...]


@dataclass(frozen=True)
class Picture:
    """One classified image."""

    pixels: tuple[Numbers, ...]  # rows of values between 0 (paper) and 1 (ink)
    truth: str
    label: str
    probs: tuple[tuple[str, float], ...]
    total: float
    aleatoric: float
    epistemic: float

    @property
    def largest(self) -> float:
        """Entropy when all classes are equally likely, in nats."""
        return math.log(len(self.probs))


@dataclass(frozen=True, kw_only=True)
class PicturesPanel(Panel):
    """Images with what the model says of them."""

    kind: str = "pictures"
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True)
class TracesPanel(CurvesPanel):
    """What the draws of several chains say of a few quantities, one small plot for each quantity."""

    kind: str = "traces"


@dataclass(frozen=True, kw_only=True)
class LinesPanel(Panel):
    """Named curves on one pair of axes; where ``percent`` is set the first axis is a share."""

    kind: str = "lines"
    axes: Axes
    lines: tuple[Line, ...]
    percent: bool = False


@dataclass(frozen=True, kw_only=True)
class BarsPanel(Panel):
    """Named values with standard errors, the largest first."""

    kind: str = "bars"
    axes: Axes  # x: what the values are; y: what the names are
    names: tuple[str, ...]
    values: Numbers
    errors: Numbers = ()


@dataclass(frozen=True, kw_only=True)
class ForestPanel(Panel):
    """A forest plot: named values with error bars, one below the other."""

    kind: str = "forest"
    axes: Axes
    names: tuple[str, ...]
    values: Numbers  # where each marker is; one that is not finite is not drawn
    half_widths: Numbers  # half the length of each error bar
    verdicts: tuple[str, ...]
    texts: tuple[str, ...]  # each value in words
    zero: bool = False


@dataclass(frozen=True, kw_only=True)
class TruthPanel(Panel):
    """Predictions with their intervals against what was observed, one point a row."""

    kind: str = "truth"
    axes: Axes
    level: float
    truth: Numbers
    mean: Numbers
    low: Numbers
    high: Numbers
    rows: tuple[int, ...]  # where each row is in the file

    @property
    def inside(self) -> tuple[bool, ...]:
        """Whether the interval of each row holds what was observed."""
        return tuple(low <= truth <= high for low, truth, high in zip(self.low, self.truth, self.high, strict=True))


@dataclass(frozen=True)
class Response:
    """A mean that changes along an input, with what the model doubts about it."""

    name: str
    mean: Numbers
    low: Numbers
    high: Numbers


@dataclass(frozen=True, kw_only=True)
class DependencePanel(Panel):
    """A prediction along one input, averaged over the rows, and its uncertainty split in two."""

    kind: str = "dependence"
    axes: Axes
    level: float
    x: Numbers  # values of the input; ``0, 1, ...`` where it has categories
    categories: tuple[str, ...] = ()
    responses: tuple[Response, ...]  # the mean, or the probability of each class
    low: Numbers = ()  # lower end of the total band; empty for classes
    high: Numbers = ()
    aleatoric: Numbers
    epistemic: Numbers
    unit: str  # what the two are measured in
    seen: Numbers = ()  # values of the input in the data, where it is a number
