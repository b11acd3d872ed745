"""Rate and distortion of a network with a random code in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from knowable.core.data import Data
from knowable.core.final_bound import mean_and_error, passes_over
from knowable.core.model import Model
from knowable.core.point_estimate import PointObjective
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.types import Params
from knowable.inference.variational.bottleneck_code import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    MARGINAL_LOC,
    MARGINAL_LOG_SCALE,
    Tap,
    feature_axis,
    rate_of,
)

_VALIDATION_DRAWS = 8


class BottleneckObjective(PointObjective):
    r"""Distortion + β rate - log p(θ) / N, per example.

    .. math:: D = -\frac1N \sum_n E_{z \mid x_n}[\log p(y_n \mid z)], \qquad
        R = \frac1N \sum_n \mathrm{KL}\big(p(z \mid x_n) \,\|\, r(z)\big)

    Args:
        model: The model, with a tap in its network.
        tap: The tap.
        shape: Shape of one row's code.
        size: Number of training examples N.
        beta: Factor on the rate.
        marginal: ``"standard"`` or ``"learned"``.
        draws: Codes for each example in each step.
        initial_scale: Standard deviation of the code at the start, where it comes from a head.

    Attributes:
        code: Parameters of the code: those of the head and of the marginal.
    """

    def __init__(
        self,
        model: Model,
        tap: Tap,
        shape: torch.Size,
        size: int,
        *,
        beta: float,
        marginal: str = "standard",
        draws: int = 1,
        initial_scale: float = 0.1,
    ):
        super().__init__(model, size, use_prior=True)
        self.tap, self.beta, self.draws = tap, beta, draws
        row = torch.zeros((1, *shape), dtype=model.dtype, device=model.device)
        start: Params = {}
        if tap.place.scale == "head":
            features = row.shape[feature_axis(row)]
            start[HEAD_WEIGHT] = row.new_zeros((features, features))
            start[HEAD_BIAS] = row.new_full((features,), 2 * math.log(initial_scale))
        if marginal == "learned":
            start |= {MARGINAL_LOC: row[0].clone(), MARGINAL_LOG_SCALE: row[0].clone()}
        self.code = nn.ParameterDict({name: nn.Parameter(value) for name, value in start.items()})

    def code_tensors(self) -> Params:
        """Parameters of the code, by name."""
        return dict(self.code.items())

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms, rate and distortion among them in nats per example."""
        params = self.params()
        x, y = (each.repeat(self.draws, *(1,) * (each.dim() - 1)) for each in (x, y))  # several codes: the rows again
        log_likelihood, rates = self.fit_and_rate(params, x, y, training=True)
        distortion, rate = -log_likelihood.mean(), rates.mean()
        log_prior = self.model.log_prior(params)
        terms = {
            "log_likelihood": -distortion.detach() * self.size,
            "log_prior": log_prior.detach(),
            "distortion": distortion.detach(),
            "rate": rate.detach(),
        }
        return distortion + self.beta * rate - log_prior / self.size, terms

    def fit_and_rate(self, params: Params, x: Tensor, y: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """Log likelihood given a new code for each row, and the rate of each row, both ``(batch,)``."""
        tensors = self.code_tensors()
        with self.tap.drawing(tensors, torch.randn_like):
            output = self.model.forward(params, x, buffers=self.net_buffers, training=training)
            assert self.tap.moments is not None
            rate = rate_of(*self.tap.moments, tensors)
        return self.model.score(output, y, params), rate

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few codes, in evaluation mode."""
        params = self.params()
        each = [self.fit_and_rate(params, x, y, training=False)[0] for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def final_terms(self, data: Data, seed: int) -> dict[str, float]:
        """Rate and distortion over all rows, in nats per example, and the distortion's standard error."""
        params, distortions, rate = self.params(), [], 0.0
        with torch.no_grad(), own_randomness(derive_seed(seed, "rate and distortion")):
            for _ in range(passes_over(data.size)):
                found = [self.fit_and_rate(params, x, y, training=False) for x, y in data]
                distortions.append(-sum(fit.sum().item() for fit, _ in found) / data.size)
                rate = sum(each.sum().item() for _, each in found) / data.size  # in closed form: the same each time
        distortion, error = mean_and_error(distortions)
        return {"rate": rate, "distortion": distortion, "distortion_standard_error": error}
