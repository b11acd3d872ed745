"""Figures of certificates and of alarms for streams."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from knowable.core.support.figure import COLOURS, GRID, MUTED, new_figure
from knowable.evaluation.calibration import ReliabilityCurve
from knowable.evaluation.conformal import p_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from knowable.decisions.certificate import Certificate

_BLUE, _RED = COLOURS[0], COLOURS[1]


def plot_certificate(certificate: Certificate) -> Figure:
    """Calibration, rejection and the alarm side by side."""

    def draw(figure: Figure) -> None:
        first, second, third = figure.subplots(1, 3)
        _calibration(first, certificate)
        _rejection(second, certificate)
        _alarm(third, certificate)

    return new_figure(10.5, 3.3, draw)


def _calibration(axes: Axes, certificate: Certificate) -> None:
    curve = certificate.calibration
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle="--")
    if isinstance(curve, ReliabilityCurve):
        filled = curve.count > 0
        sizes = 8 + 80 * (curve.count[filled] / curve.count.sum())
        axes.plot(curve.confidence[filled], curve.accuracy[filled], color=_BLUE, linewidth=1.2)
        axes.scatter(curve.confidence[filled], curve.accuracy[filled], s=sizes, color=_BLUE)
        axes.set(xlabel="confidence", ylabel="accuracy")
    else:
        axes.plot(curve.levels, curve.coverage, color=_BLUE, linewidth=1.2, marker="o", markersize=3)
        axes.set(xlabel="nominal coverage", ylabel="observed coverage")
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), title=f"Calibration on {certificate.n:,} held-out rows")


def _rejection(axes: Axes, certificate: Certificate) -> None:
    curve, rule = certificate.risk_coverage, certificate.rejection
    axes.plot(curve.coverage, curve.risk, color=_BLUE, linewidth=1.2)
    limit = rule.bound if rule.alpha is None else rule.alpha
    axes.axhline(limit, color=_RED, linewidth=1.0, linestyle="--")
    axes.annotate(f"at most {limit:.3g}", (0.01, limit), color=_RED, va="bottom", fontsize=8)
    if rule.certified and rule.n:
        axes.axvspan(0, rule.accepted, color=GRID, alpha=0.45, linewidth=0)
        title = f"Rejection: {rule.accepted:.0%} accepted"
    else:
        title = "Rejection: nothing accepted" if not rule.certified else "Rejection: not tested"
    top = max(curve.risk.max().item(), limit)
    axes.set(xlim=(0, 1), ylim=(0, 1.15 * top), xlabel="share accepted", ylabel="mean loss of accepted", title=title)


def _alarm(axes: Axes, certificate: Certificate) -> None:
    scores = certificate.novelty_scores
    axes.plot(scores, p_values(scores, scores), color=_BLUE, linewidth=1.2, drawstyle="steps-pre")
    axes.axhline(certificate.alpha, color=_RED, linewidth=1.0, linestyle="--")
    axes.annotate(
        f"{certificate.alpha:g}", (0.99, certificate.alpha), xycoords=("axes fraction", "data"), color=_RED,
        ha="right", va="bottom", fontsize=8,
    )  # fmt: skip
    axes.set(
        ylim=(0, 1.02), xlabel=f"{certificate.novelty} uncertainty", ylabel="p-value", title="Alarm: small is strange"
    )


def plot_wealth(log_wealth: Tensor, delta: float, alarm_at: int | None) -> Figure:
    """The wealth of a stream's gambler, in powers of ten."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rows = torch.arange(1, len(log_wealth) + 1)
        axes.plot(rows, log_wealth / math.log(10), color=_BLUE, linewidth=1.2)
        axes.axhline(-math.log10(delta), color=_RED, linewidth=1.0, linestyle="--")
        axes.annotate(
            f"alarm, false with probability {delta:g} at most", (0.01, -math.log10(delta)), va="bottom", fontsize=8,
            xycoords=("axes fraction", "data"), color=_RED,
        )  # fmt: skip
        if alarm_at is not None:
            axes.axvline(alarm_at, color=_RED, linewidth=1.0)
        title = "No alarm" if alarm_at is None else f"Alarm after {alarm_at:,} rows"
        axes.set(xlabel="rows of the stream", ylabel="wealth, power of ten", title=title)

    return new_figure(6.0, 3.2, draw)
