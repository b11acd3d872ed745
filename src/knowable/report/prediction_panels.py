"""Panels of a report made from predictions and training histories."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidData
from knowable.evaluation.calibration import coverage_curve, reliability_curve
from knowable.report.panels import (
    Axes,
    BandPanel,
    CalibrationPanel,
    CurvesPanel,
    Line,
    NoisePanel,
    Numbers,
    Picture,
    PicturesPanel,
)

_TERM_NAMES = {"kl": "KL"}
_NOT_TERMS = ("step", "epoch", "learning_rate", "loss", "validation_log_likelihood")


def band_panel(
    title: str,
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    axes: Axes,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
    level: float = 0.9,
    caption: str = "",
) -> BandPanel:
    r"""The predictive band along one input, split in two.

    The outer band is the mixture's own central interval. The inner band is :math:`\bar\mu \pm z \sqrt{v_e}` with
    :math:`v_e` the epistemic variance and :math:`z` the normal quantile of the same level.
    """
    level = check_number("level", level, above=0.0, below=1.0)
    z = NormalDist().inv_cdf((1 + level) / 2)
    mean, reach = _column(prediction.mean), z * _column(prediction.epistemic).sqrt()
    low, high = (_column(side) for side in prediction.interval(level))
    noise, doubt = _column(prediction.aleatoric).mean().sqrt(), _column(prediction.epistemic).mean().sqrt()
    return BandPanel(
        title=title,
        caption=caption,
        alt=(
            f"{title}: predicted {axes.y} against {axes.x} from {x.min():.3g} to {x.max():.3g}. The mean runs from "
            f"{mean.min():.3g} to {mean.max():.3g}; the {level:.0%} band is {(high - low).mean():.3g} wide on average. "
            f"Root mean square aleatoric standard deviation {noise:.3g}, epistemic {doubt:.3g}."
        ),
        axes=axes,
        level=level,
        x=_numbers(x.flatten()),
        mean=_numbers(mean),
        epistemic_low=_numbers(mean - reach),
        epistemic_high=_numbers(mean + reach),
        low=_numbers(low),
        high=_numbers(high),
        data_x=_numbers(data[0].flatten()) if data else (),
        data_y=_numbers(data[1].flatten()) if data else (),
        truth=() if truth is None else _numbers(truth.flatten()),
    )


def noise_panel(
    title: str,
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    axes: Axes,
    data_x: Tensor,
    residuals: Tensor,
    bins: int = 9,
    caption: str = "",
) -> NoisePanel:
    """The predicted noise sd along one input, beside the spread of residuals in bins of equal counts."""
    local_x, local_std, local_error = local_spread(data_x.flatten(), residuals.flatten(), bins)
    noise = _column(prediction.aleatoric).sqrt()
    return NoisePanel(
        title=title,
        caption=caption,
        alt=(
            f"{title}: predicted noise standard deviation along {axes.x}, from {noise.min():.3g} to {noise.max():.3g}, "
            f"and the root mean square residual in {len(local_x)} groups of neighbours, from {min(local_std):.3g} to "
            f"{max(local_std):.3g}."
        ),
        axes=axes,
        x=_numbers(x.flatten()),
        noise=_numbers(noise),
        local_x=local_x,
        local_std=local_std,
        local_error=local_error,
    )


def local_spread(x: Tensor, residuals: Tensor, bins: int) -> tuple[Numbers, Numbers, Numbers]:
    r"""Root mean square residual in bins of (nearly) equal counts along x.

    Returns:
        Mean x of each bin, its root mean square residual s, and the standard error :math:`s / \sqrt{2 n}` of s for
        normal residuals.
    """
    check_count("bins", bins, at_most=len(x))
    order = torch.argsort(x, stable=True)
    groups = torch.tensor_split(order, bins)
    spread = [residuals[group].square().mean().sqrt().item() for group in groups]
    error = [s / math.sqrt(2 * len(group)) for s, group in zip(spread, groups, strict=True)]
    return tuple(x[group].mean().item() for group in groups), tuple(spread), tuple(error)


Parts = Sequence[tuple[RegressionPrediction, Tensor]]
"""Predictions with their outcomes: one pair, or one for each fold of a cross-validation."""


def coverage_panel(
    title: str, predictions: Mapping[str, Parts], *, points: int = 19, caption: str = ""
) -> CalibrationPanel:
    """Observed against nominal coverage of central intervals, for each method."""
    levels = torch.linspace(0, 1, points + 2, dtype=torch.float64)[1:-1]
    lines = tuple(coverage_line(name, parts, levels) for name, parts in predictions.items())
    return CalibrationPanel(
        title=title,
        caption=caption,
        alt=f"{title}. At the level nearest 90%: " + "; ".join(_nearest_90(line) for line in lines) + ".",
        axes=Axes("nominal coverage", "observed coverage"),
        lines=lines,
    )


def coverage_line(name: str, parts: Parts, levels: Tensor) -> Line:
    r"""Observed coverage of all rows at each level L, with the standard error :math:`\sqrt{L (1 - L) / n}`."""
    inside = torch.stack([len(y) * coverage_curve(prediction, y, levels).coverage for prediction, y in parts]).sum(0)
    rows = sum(len(y) for _, y in parts)
    error = (levels * (1 - levels) / rows).sqrt()
    return Line(name, _numbers(levels), _numbers(inside / rows), _numbers(error), (rows,) * len(levels))


def quantile_panel(
    title: str, predictions: Mapping[str, tuple[RegressionPrediction, Tensor]], *, points: int = 19, caption: str = ""
) -> CalibrationPanel:
    """How often outcomes are below a predicted quantile, against its level; above the diagonal they are too high."""
    levels = torch.linspace(0, 1, points + 2, dtype=torch.float64)[1:-1]
    lines = tuple(quantile_line(name, prediction, y, levels) for name, (prediction, y) in predictions.items())
    return CalibrationPanel(
        title=title,
        caption=caption,
        alt=f"{title}. "
        + " ".join(f"{line.name}: {line.y[points // 2]:.1%} of the outcomes are below their median." for line in lines),
        axes=Axes("level of the quantile", "share of outcomes below it"),
        lines=lines,
    )


def quantile_line(name: str, prediction: RegressionPrediction, y: Tensor, levels: Tensor) -> Line:
    r"""Share of outcomes with :math:`F(y) \le q` at each level q, with its error :math:`\sqrt{q (1 - q) / n}`."""
    places = prediction.cdf(y).double().flatten()  # the probability integral transform: uniform if F is right
    share = (places.unsqueeze(0) <= levels.unsqueeze(1)).double().mean(1)
    error = (levels * (1 - levels) / len(y)).sqrt()
    return Line(name, _numbers(levels), _numbers(share), _numbers(error), (len(y),) * len(levels))


def reliability_panel(
    title: str, predictions: Mapping[str, tuple[ClassPrediction, Tensor]], *, bins: int = 10, caption: str = ""
) -> CalibrationPanel:
    """Accuracy against confidence in bins of equal width, for each method; empty bins are left out."""
    lines = tuple(reliability_line(name, *pair, bins=bins) for name, pair in predictions.items())
    return CalibrationPanel(
        title=title,
        caption=caption,
        alt=f"{title}. "
        + " ".join(
            f"{line.name}: at mean confidence {line.x[-1]:.1%} the accuracy is {line.y[-1]:.1%} "
            f"({line.count[-1]} rows)."
            for line in lines
        ),
        axes=Axes("confidence (probability of the predicted class)", "accuracy"),
        lines=lines,
    )


def reliability_line(name: str, prediction: ClassPrediction, y: Tensor, *, bins: int) -> Line:
    r"""Share right in each filled bin of confidence, with its standard error if the confidence is justified.

    That is :math:`\sqrt{c (1 - c) / n}` with c the bin's mean confidence and n its number of rows.
    """
    curve = reliability_curve(prediction, y, bins)
    filled = curve.count > 0
    confidence, right, count = curve.confidence[filled], curve.accuracy[filled], curve.count[filled]
    error = (confidence * (1 - confidence) / count).clamp_min(0.0).sqrt()
    return Line(name, _numbers(confidence), _numbers(right), _numbers(error), tuple(count.tolist()))


def pictures_panel(
    title: str,
    prediction: ClassPrediction,
    rows: Sequence[int],
    *,
    images: Tensor,
    y: Tensor,
    classes: Sequence[str],
    caption: str = "",
) -> PicturesPanel:
    """Chosen images with label probabilities and the split of their uncertainty."""
    probs, labels = prediction.probs, prediction.labels
    pictures = tuple(
        Picture(
            pixels=tuple(_numbers(line) for line in images[row]),
            truth=classes[int(y[row])],
            label=classes[int(labels[row])],
            probs=tuple(zip(classes, _numbers(probs[row]), strict=True)),
            total=prediction.total[row].item(),
            aleatoric=prediction.aleatoric[row].item(),
            epistemic=prediction.epistemic[row].item(),
        )
        for row in rows
    )
    seen = "; ".join(f"a {p.truth} taken for {p.label} with {dict(p.probs)[p.label]:.0%}" for p in pictures)
    return PicturesPanel(title=title, caption=caption, alt=f"{title}: {seen}.", pictures=pictures)


def curves_panel(
    title: str, histories: Mapping[str, Sequence[Mapping[str, float]]], *, caption: str = ""
) -> CurvesPanel:
    """Training curves: for each method that has any, the terms of its objective against the epoch."""
    groups = tuple((method, _term_lines(records)) for method, records in histories.items() if records)
    ends = "; ".join(
        f"{method}: " + ", ".join(f"{line.name} from {line.y[0]:.4g} to {line.y[-1]:.4g}" for line in lines)
        for method, lines in groups
    )
    axes = Axes("epoch", "nats")
    return CurvesPanel(title=title, caption=caption, alt=f"{title}. {ends}.", axes=axes, groups=groups)


def _term_lines(records: Sequence[Mapping[str, float]]) -> tuple[Line, ...]:
    """One line for each term that every record has."""
    epochs = tuple(float(record["epoch"]) for record in records)
    terms = [name for name in records[0] if name not in _NOT_TERMS and all(name in record for record in records)]
    return tuple(
        Line(_TERM_NAMES.get(name, name.replace("_", " ")), epochs, tuple(float(r[name]) for r in records))
        for name in terms
    )


def _nearest_90(line: Line) -> str:
    place = min(range(len(line.x)), key=lambda i: abs(line.x[i] - 0.9))
    return f"{line.name} nominal {line.x[place]:.0%}, observed {line.y[place]:.1%}"


def _column(values: Tensor) -> Tensor:
    """One outcome per row, ``(rows,)``."""
    if values[0].numel() != 1:
        raise InvalidData(f"These figures show one outcome per row, got shape {tuple(values.shape)}.")
    return values.reshape(-1)


def _numbers(values: Tensor) -> Numbers:
    return tuple(values.detach().flatten().double().tolist())
