"""The heteroscedastic Student-t likelihood: the network says how large the noise is, the data how heavy its tails."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.prediction.prediction import (
    Components,
    RegressionPrediction,
    align_target,
    sum_over_event,
)
from knowable.likelihoods.heteroscedastic_gaussian import check_halves


@dataclass(frozen=True)
class HeteroscedasticStudentT(Likelihood):
    r"""Regression with noise whose size depends on the input and whose tails are learned.

    .. math:: p(y \mid f) = t_\nu\big(y \mid f_{1:d},\ \exp(f_{d+1:2d})\big), \qquad \nu = 2 + e^{\eta}

    The last dimension of the network's output is :math:`2d`: first the :math:`d` centres, then the :math:`d` logarithms
    of the scales. (Of images, move them there: ``output.movedim(1, -1)`` of a convolution with two channels.) The
    degrees of freedom ν are above 2, so that the variance is finite; with the prior ``Normal(1.0, loc=2.0)`` on η they
    are between 3 and 55 with probability 0.95. Where tails are normal they grow, and the likelihood becomes
    :class:`~knowable.likelihoods.heteroscedastic_gaussian.HeteroscedasticGaussian`; where they are not, a surprising
    row costs its logarithm and not its square.

    Example:
        >>> HeteroscedasticStudentT().params()
        {'log_df': tensor(2.)}
    """

    def params(self) -> Params:
        return {"log_df": torch.tensor(2.0)}

    def priors(self) -> dict[str, Normal]:
        return {"log_df": Normal(1.0, loc=2.0)}

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        return align_target(y.to(output.dtype), (*output.shape[1:-1], output.shape[-1] // 2))

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return check_halves(y, output, "HeteroscedasticStudentT", "centres", name=name)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        centre, log_scale = output.chunk(2, dim=-1)
        return sum_over_event(log_density(y - centre, log_scale, degrees(params["log_df"])))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        centre, log_scale = outputs.chunk(2, dim=-1)
        df = degrees(params["log_df"]).reshape(-1, *(1,) * (outputs.dim() - 1)).to(outputs).expand_as(centre)
        return RegressionPrediction(LearnedTailComponents(centre, log_scale, df), log_weights)

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        """(ν + 1) / (ν + 3) / scale² of the centres and 2 ν / (ν + 3) of the log scales."""
        _, log_scale = output.chunk(2, dim=-1)
        df = degrees(params["log_df"]).to(output)
        centre = (df + 1) / (df + 3) * torch.exp(-2.0 * log_scale)
        return DiagonalInformation(torch.cat([centre, (2 * df / (df + 3)).expand_as(log_scale)], dim=-1))


def degrees(log_df: Tensor) -> Tensor:
    """ν = 2 + exp(η)."""
    return 2.0 + log_df.exp()


def log_density(distance: Tensor, log_scale: Tensor, df: Tensor) -> Tensor:
    """Log density at ``distance`` from the centre, elementwise, differentiable in everything."""
    constant = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * torch.log(df * math.pi)
    return constant - log_scale - (df + 1) / 2 * torch.log1p((distance * torch.exp(-log_scale)).square() / df)


@dataclass
class LearnedTailComponents(Components):
    """One Student-t distribution for each posterior draw, row and output; all tensors ``(K, batch, ...)``."""

    discrete = False

    loc: Tensor
    log_scale: Tensor
    df: Tensor

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.df / (self.df - 2.0) * torch.exp(2.0 * self.log_scale)

    def log_prob(self, y: Tensor) -> Tensor:
        return log_density(y - self.loc, self.log_scale, self.df)

    def cdf(self, y: Tensor) -> Tensor:
        from scipy.special import stdtr  # on the CPU

        distance = ((y - self.loc) * torch.exp(-self.log_scale)).detach().cpu().double().numpy()
        return torch.as_tensor(stdtr(self.df.cpu().double().numpy(), distance)).to(self.loc)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        loc, log_scale, df = (each.gather(0, index) for each in (self.loc, self.log_scale, self.df))
        u, v = torch.rand((2, *index.shape), generator=generator, dtype=loc.dtype, device=loc.device)
        radius = (df * torch.expm1(-2.0 / df * (1.0 - u).log())).sqrt()  # the polar method (Bailey, 1994)
        return loc + log_scale.exp() * radius * torch.cos(2 * math.pi * v)
