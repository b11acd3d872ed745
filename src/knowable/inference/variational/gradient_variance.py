"""How noisy each estimator of the bound's gradient is: the comparison the lectures talk about, measured."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_type
from knowable.core.method import admit
from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.start_values import means_for
from knowable.errors import InvalidArgument
from knowable.inference.variational.mean_field import MeanFieldVI
from knowable.inference.variational.mean_field_objective import ESTIMATORS, MeanFieldObjective


@dataclass(frozen=True)
class EstimatorNoise:
    """The gradient of one estimator, over many repetitions at the same point.

    Attributes:
        mean: Mean gradient with respect to means and log scales, in the model's order of parameters, ``(2 D,)``.
        standard_error: Of that mean.
        variance: Sum of the gradient's variances over all D means and D log scales.
        milliseconds: Time of one gradient.
    """

    estimator: str
    mean: Tensor
    standard_error: Tensor
    variance: float
    milliseconds: float


@dataclass(frozen=True)
class GradientVariance:
    """The comparison; prints as a table, noisiest first."""

    rows: tuple[EstimatorNoise, ...]

    def __getitem__(self, estimator: str) -> EstimatorNoise:
        return {row.estimator: row for row in self.rows}[estimator]

    def __repr__(self) -> str:
        least = min(row.variance for row in self.rows)
        lines = [f"{'estimator':<12}{'variance':>14}{'ratio to best':>16}{'ms a gradient':>16}"]
        for row in sorted(self.rows, key=lambda each: -each.variance):
            lines.append(
                f"{row.estimator:<12}{row.variance:>14.4g}{row.variance / least:>16.1f}{row.milliseconds:>16.3f}"
            )
        return "\n".join(lines)


def gradient_variance(
    model: Model,
    data: Any,
    estimators: Iterable[str] = ("score", "weight", "flipout", "local"),
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
        draws: Draws per gradient (``"score"`` needs two or more and is then given as many as it needs).
        repeats: Gradients per estimator.
        seed: Fixes the noise.
    """
    check_count("repeats", repeats, at_least=2)
    rows, _, seed = admit(model, data, None, seed)
    x, y = rows.tensors
    found = []
    estimators = [estimators] if isinstance(estimators, str) else list(estimators)
    if not estimators:
        raise InvalidArgument(f"estimators must name at least one of {', '.join(ESTIMATORS)}; got none.")
    if at is not None:
        check_type("at", at, DiagonalNormal, "a posterior fitted by MeanFieldVI, or None")
        means_for("at", model, at)
    for estimator in estimators:
        check_choice("estimators", estimator, ESTIMATORS)
        enough = max(2, draws) if estimator == "score" else draws
        objective = MeanFieldVI(estimator=estimator, draws=enough).objective(model, x, rows.size)
        assert isinstance(objective, MeanFieldObjective)  # without families it is
        if at is not None:
            _move_to(objective, at)
        with own_randomness(derive_seed(seed, "gradient variance", estimator)):
            found.append(_measure(estimator, objective, x, y, repeats))
    return GradientVariance(tuple(found))


def _move_to(objective: MeanFieldObjective, posterior: DiagonalNormal) -> None:
    with torch.no_grad():
        objective.q[0] = objective.layout.flatten(posterior.loc)
        objective.q[1] = objective.layout.flatten(posterior.scale).log()


def _measure(estimator: str, objective: MeanFieldObjective, x: Tensor, y: Tensor, repeats: int) -> EstimatorNoise:
    started = time.perf_counter()
    gradients = torch.stack([_gradient(objective, x, y) for _ in range(repeats)]).double()
    spent = (time.perf_counter() - started) / repeats * 1e3
    variance = gradients.var(0)
    return EstimatorNoise(estimator, gradients.mean(0), (variance / repeats).sqrt(), variance.sum().item(), spent)


def _gradient(objective: MeanFieldObjective, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the loss, in the model's order of parameters: all means, then all log scales."""
    loss, _ = objective(x, y)
    (gradient,) = torch.autograd.grad(loss, objective.q)
    names = objective.model.random_names
    parts = [objective.layout.views(each) for each in gradient]
    return torch.cat([part[name].flatten() for part in parts for name in names])
