"""The negative binomial likelihood: counts that vary more than a Poisson's, with or without extra zeros."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.model.likelihood import Likelihood
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.prediction.prediction import (
    Components,
    RegressionPrediction,
    align_target,
    as_numbers,
    refuse_where,
    sum_over_event,
)
from knowable.core.support.checks import as_batch, check_number, check_type
from knowable.errors import InvalidData


@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    r"""Counts with mean :math:`\mu = \mathrm{base} \cdot e^f` and variance :math:`\mu + \alpha \mu^2` (Lawless, 1987).

    .. math:: p(y \mid f) = \frac{\Gamma(y + r)}{\Gamma(r)\, y!} \Big(\frac{r}{r + \mu}\Big)^r
        \Big(\frac{\mu}{r + \mu}\Big)^y, \qquad r = 1 / \alpha

    With ``zeros`` a share of the rows is zero whatever the mean: the last dimension of the network's output is then
    :math:`2d`, first the :math:`d` logarithms of the means, then the :math:`d` logits of that share.

    Args:
        dispersion: α. None: learned, with the prior ``Normal(2.0, loc=-1.0)`` on its logarithm. A positive number:
            fixed; close to 0 it is a Poisson.
        base: The mean where the network's output is 0.
        zeros: Whether there is a share of extra zeros.

    Example:
        >>> NegativeBinomial().params()
        {'log_dispersion': tensor(0.)}
    """

    dispersion: float | None = None
    base: float = field(default=1.0, kw_only=True)
    zeros: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.dispersion is not None:
            object.__setattr__(self, "dispersion", check_number("dispersion", self.dispersion, above=0.0))
        object.__setattr__(self, "base", check_number("base", self.base, above=0.0))
        check_type("zeros", self.zeros, bool, "True or False")

    def params(self) -> Params:
        return {} if self.dispersion is not None else {"log_dispersion": torch.tensor(0.0)}

    def priors(self) -> dict[str, Normal]:
        return {} if self.dispersion is not None else {"log_dispersion": Normal(2.0, loc=-1.0)}

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        return align_target(y.to(output.dtype), self._trailing(output))

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        if self.zeros and (output.dim() < 2 or output.shape[-1] % 2):
            raise InvalidData(
                f"NegativeBinomial(zeros=True) needs a network whose last dimension is even (log means, then logits of "
                f"extra zeros), but its output has shape {as_batch(output.shape)}."
            )
        y = as_numbers(y, output, self._trailing(output), name=name)
        advice = "For numbers that are not counts use Gaussian() or StudentT()."
        refuse_where((y < 0) | (y != y.round()), y, name=name, expected="a whole number, 0 or more", advice=advice)
        return y

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        log_mean, logit = self._parts(output)
        return sum_over_event(log_probability(y, log_mean, self._log_dispersion(params, output), logit))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        log_mean, logit = self._parts(outputs)
        own = self._log_dispersion(params, outputs)
        own = own.reshape(-1, *(1,) * (outputs.dim() - 1)).expand_as(log_mean)
        return RegressionPrediction(NegativeBinomialComponents(log_mean, own, logit), log_weights)

    def _trailing(self, output: Tensor) -> tuple[int, ...]:
        return (*output.shape[1:-1], output.shape[-1] // 2) if self.zeros else tuple(output.shape[1:])

    def _parts(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logarithms of the means, and logits of extra zeros."""
        if not self.zeros:
            return output + math.log(self.base), None
        log_mean, logit = output.chunk(2, dim=-1)
        return log_mean + math.log(self.base), logit

    def _log_dispersion(self, params: Params, like: Tensor) -> Tensor:
        if self.dispersion is None:
            return params["log_dispersion"]
        return torch.tensor(math.log(self.dispersion), dtype=like.dtype, device=like.device)


def log_probability(y: Tensor, log_mean: Tensor, log_dispersion: Tensor, logit: Tensor | None = None) -> Tensor:
    """Log probability of counts, elementwise."""
    log_r = -log_dispersion
    r = log_r.exp()
    total = torch.logaddexp(log_r.expand_as(log_mean), log_mean)  # log(r + mean)
    found = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1.0) + r * (log_r - total) + y * (log_mean - total)
    if logit is None:
        return found
    counted = F.logsigmoid(-logit) + found
    return torch.where(y == 0, torch.logaddexp(F.logsigmoid(logit), counted), counted)


@dataclass
class NegativeBinomialComponents(Components):
    """One negative binomial distribution for each posterior draw, row and output."""

    discrete = True

    log_mean: Tensor  # logarithms of the means, (K, batch, ...)
    log_dispersion: Tensor  # of the same shape
    logit: Tensor | None = None  # logits of the shares of extra zeros, or None

    @property
    def mean(self) -> Tensor:
        return self._counted * self.log_mean.exp()

    @property
    def variance(self) -> Tensor:
        """Of a mixture with a point at zero: c (μ + α μ²) + c (1 - c) μ²."""
        mean, share = self.log_mean.exp(), self._counted
        return share * (mean + self.log_dispersion.exp() * mean.square()) + share * (1 - share) * mean.square()

    def log_prob(self, y: Tensor) -> Tensor:
        is_count = (y >= 0) & (y == y.floor())
        found = log_probability(y.clamp_min(0.0), self.log_mean, self.log_dispersion, self.logit)
        return found.masked_fill(~is_count, -torch.inf)

    def cdf(self, y: Tensor) -> Tensor:
        from scipy.special import betainc  # on the CPU

        r = (-self.log_dispersion).exp()
        success = torch.sigmoid(-self.log_dispersion - self.log_mean)  # r / (r + mean)
        counts: Any = (y.floor().clamp_min(0.0) + 1.0).expand_as(r).detach().cpu().double().numpy()
        below = betainc(r.detach().cpu().double().numpy(), counts, success.detach().cpu().double().numpy())
        found = torch.as_tensor(below).to(self.log_mean)
        share = self._counted
        return (1.0 - share + share * found).masked_fill(y < 0, 0.0)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """By the inverse of the distribution function: doubling, then bisection."""
        shape = index.shape
        level = torch.rand(shape, generator=generator, dtype=self.log_mean.dtype, device=self.log_mean.device)
        chosen = NegativeBinomialComponents(
            self.log_mean.gather(0, index), self.log_dispersion.gather(0, index),
            None if self.logit is None else self.logit.gather(0, index),
        )  # fmt: skip
        low, high = torch.full_like(level, -1.0), torch.ones_like(level)
        while ((short := chosen.cdf(high) < level) & (high < 1e15)).any():
            high = torch.where(short, 2.0 * high, high)
        while (high - low > 1).any():
            middle = ((low + high) / 2).floor()
            inside = chosen.cdf(middle) >= level
            high, low = torch.where(inside, middle, high), torch.where(inside, low, middle)
        return high

    @property
    def _counted(self) -> Tensor:
        """The share that is not an extra zero."""
        return torch.ones_like(self.log_mean) if self.logit is None else torch.sigmoid(-self.logit)
