"""The variance of each estimator of the ELBO's gradient, measured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.method import FitJob
from knowable.core.model.data import Batch
from knowable.core.model.model import Model
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.core.support.figure import COLOURS, GRID, INK, MUTED, new_figure
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import InvalidArgument
from knowable.inference.point.point import means_for
from knowable.inference.variational.mean_field import BY_SCORE, ESTIMATORS, MeanFieldObjective, MeanFieldVI

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class EstimatorNoise:
    """The gradient of one estimator, over many repetitions at the same point.

    Attributes:
        mean: Mean gradient with respect to means and log scales, in the model's order of parameters, ``(2 D,)``.
        standard_error: Of that mean.
        variance: Sum of the gradient's variances over all D means and D log scales.
        milliseconds: Time of one gradient.
        draws: Draws that each gradient was made of.
    """

    estimator: str
    mean: Tensor
    standard_error: Tensor
    variance: float
    milliseconds: float
    draws: int = 1

    @property
    def cost(self) -> float:
        """Variance times milliseconds: what is left of the variance after a millisecond of averaging."""
        return self.variance * self.milliseconds


@dataclass(frozen=True)
class GradientVariance:
    """The comparison; prints as a table, noisiest first, and plots."""

    rows: tuple[EstimatorNoise, ...]

    def __getitem__(self, estimator: str) -> EstimatorNoise:
        return {row.estimator: row for row in self.rows}[estimator]

    @property
    def by_noise(self) -> list[EstimatorNoise]:
        """The rows, noisiest first."""
        return sorted(self.rows, key=lambda each: -each.variance)

    def __repr__(self) -> str:
        least = min(row.variance for row in self.rows)
        lines = [f"{'estimator':<12}{'draws':>7}{'variance':>14}{'ratio to best':>16}{'ms a gradient':>16}"]
        for row in self.by_noise:
            ratio = row.variance / least if least > 0 else float("nan")
            lines.append(
                f"{row.estimator:<12}{row.draws:>7}{row.variance:>14.4g}{ratio:>16.1f}{row.milliseconds:>16.3f}"
            )
        return "\n".join(lines)

    def plot(self) -> Figure:
        """The same as bars on a logarithmic scale: the variance of one gradient, and that for equal time.

        Returns:
            A matplotlib figure; ``figure.savefig("noise.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        rows = self.by_noise[::-1]  # bars are drawn from below

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2, sharey=True)
            _bars(left, rows, [row.variance for row in rows], "variance of one gradient")
            _bars(right, rows, [row.cost for row in rows], "variance x milliseconds: for equal time")

        return new_figure(8.6, 0.9 + 0.42 * len(rows), draw)


def _bars(axes: Axes, rows: list[EstimatorNoise], values: list[float], title: str) -> None:
    """Bars from the smallest value on, a factor of two to spare, each with its figure."""
    least = min((value for value in values if value > 0), default=1.0) / 2
    places = range(len(rows))
    colours = [COLOURS[ESTIMATORS.index(row.estimator) % len(COLOURS)] for row in rows]
    axes.barh(places, [max(value, least) - least for value in values], left=least, height=0.62, color=colours)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlim(least, 8 * max(*values, least))
    axes.set_yticks(list(places), [f"{row.estimator} ({row.draws})" for row in rows])
    axes.set_title(title, loc="left", color=INK)
    axes.grid(axis="x", color=GRID, lw=0.6)
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f"{value:.3g}", (max(value, least), place), xytext=(4, 0), textcoords="offset points", va="center",
            color=MUTED, fontsize=8,
        )  # fmt: skip


def gradient_variance(
    model: Model,
    data: Any,
    estimators: Iterable[str] = ("score", "local_score", "weight", "flipout", "local"),
    *,
    at: DiagonalNormal | None = None,
    draws: int = 1,
    repeats: int = 200,
    seed: int = 0,
) -> GradientVariance:
    """Measure the variance of the ELBO's gradient under several estimators, at the same point on the same data.

    Args:
        model: The model.
        data: The batch: all rows are used in every gradient.
        estimators: Which to compare.
        at: Where: a fitted mean-field posterior; None is the start of a fit.
        draws: Draws per gradient (``"score"`` and ``"local_score"`` compare draws with each other: they get two at the
            least).
        repeats: Gradients per estimator.
        seed: Fixes the noise.
    """
    check_count("draws", draws)
    check_count("repeats", repeats, at_least=2)
    estimators = [estimators] if isinstance(estimators, str) else list(estimators)
    for estimator in estimators:
        check_choice("estimators", estimator, ESTIMATORS)
    if not estimators:
        raise InvalidArgument(f"estimators must name at least one of {', '.join(ESTIMATORS)}; got none.")
    job = FitJob.of(MeanFieldVI(), model, data, seed=seed)
    rows, seed = job.rows, job.seed
    batch = rows.tensors
    if at is not None:
        check_type("at", at, DiagonalNormal, "a posterior fitted by MeanFieldVI, or None")
        means_for("at", model, at)
    found = []
    for estimator in estimators:
        enough = max(2, draws) if estimator in BY_SCORE else draws
        objective = MeanFieldVI(estimator=estimator, draws=enough).objective(model, batch[0], rows.size)
        assert isinstance(objective, MeanFieldObjective)  # without families it is
        if at is not None:
            _move_to(objective, at)
        with own_randomness(derive_seed(seed, "gradient variance", estimator)):
            found.append(_measure(estimator, objective, batch, repeats))
    return GradientVariance(tuple(found))


def _move_to(objective: MeanFieldObjective, posterior: DiagonalNormal) -> None:
    with torch.no_grad():
        objective.q[0] = objective.layout.flatten(posterior.loc)
        objective.q[1] = objective.layout.flatten(posterior.scale).log()
        for name, point in objective.point_params().items():
            if name in posterior.points:
                point.copy_(posterior.points[name])


def _measure(estimator: str, objective: MeanFieldObjective, batch: Batch, repeats: int) -> EstimatorNoise:
    started = time.perf_counter()
    gradients = torch.stack([_gradient(objective, batch) for _ in range(repeats)]).double()
    spent = (time.perf_counter() - started) / repeats * 1e3
    variance = gradients.var(0)
    error, total = (variance / repeats).sqrt(), variance.sum().item()
    return EstimatorNoise(estimator, gradients.mean(0), error, total, spent, objective.draws)


def _gradient(objective: MeanFieldObjective, batch: Batch) -> Tensor:
    """The gradient of the loss, in the model's order of parameters: all means, then all log scales."""
    loss, _ = objective(*batch)
    (gradient,) = torch.autograd.grad(loss, objective.q)
    names = objective.model.random_names
    parts = [objective.layout.views(each) for each in gradient]
    return torch.cat([part[name].flatten() for part in parts for name in names])
