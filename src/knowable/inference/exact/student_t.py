"""The exact posterior of a linear model whose noise is not known: normal weights, an inverse-gamma noise variance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FullCovarianceNormal
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.monte_carlo import predict_outputs
from knowable.core.posterior.normal import saved_normal
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import Prediction, RegressionPrediction
from knowable.inference.exact.design import output_moments
from knowable.likelihoods.student_t import CorrelatedStudentT, StudentTComponents
from knowable.priors.normal_inverse_gamma import NOISE, NormalInverseGamma, log_noise_draws


class LinearStudentT(Posterior):
    r"""Weights and noise of a linear model, whose predictions are Student-t distributions.

    .. math:: \sigma^2 \sim \mathrm{IG}(a, b), \quad \theta \mid \sigma \sim \mathcal{N}(m, \sigma^2 V), \qquad
        p(y \mid x, D) = \mathrm{St}_{2a}\big(f_0(x) + J(x) m,\; \tfrac{b}{a} (J(x) V J(x)^\top + I)\big)

    Args:
        model: The model.
        layout: Order of the weights in the flat vector.
        loc: Mean m of the weights, ``(D,)``.
        scale_tril: Lower Cholesky factor of V, ``(D, D)``: the covariance of the weights for a noise of 1.
        shape: Shape a of the noise variance.
        rate: Rate b of the noise variance.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "linear_student_t"

    def __init__(
        self, model: Model, layout: Layout, loc: Tensor, scale_tril: Tensor, shape: float, rate: float, **common: Any
    ):
        super().__init__(model, **common)
        self.normal = FullCovarianceNormal(layout, loc, scale_tril).copied()
        self.layout, self.shape, self.rate = layout, shape, rate

    @property
    def loc(self) -> Tensor:
        """Mean of the weights, ``(D,)``."""
        return self.normal.loc

    @property
    def covariance(self) -> Tensor:
        """Covariance of the weights, ``(D, D)``; infinite where the shape is 1 or less."""
        return self._mean_noise_variance * self.normal.covariance_matrix()

    @property
    def _mean_noise_variance(self) -> float:
        return self.rate / (self.shape - 1.0) if self.shape > 1.0 else math.inf

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        log_noise = log_noise_draws(self.shape, self.rate, n, self.loc, generator)
        flat = self.layout.flatten(self.normal.sample(n, generator))
        return {**self.layout.views(self.loc + (flat - self.loc) * log_noise.exp().unsqueeze(1)), NOISE: log_noise}

    def _mean_random(self) -> Params:
        shape = torch.tensor(self.shape, dtype=torch.float64)
        log_noise = 0.5 * (math.log(self.rate) - torch.digamma(shape))
        return {**{k: v.clone() for k, v in self.normal.means.items()}, NOISE: log_noise.to(self.loc)}

    def _std_random(self) -> Params:
        wide = math.sqrt(self._mean_noise_variance)
        of_noise = 0.5 * torch.polygamma(1, torch.tensor(self.shape, dtype=torch.float64)).sqrt()
        return {**{name: wide * value for name, value in self.normal.std().items()}, NOISE: of_noise.to(self.loc)}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of weights and log noise: a scalar for one set of parameters, ``(n,)`` for a stack."""
        known = self.as_prior()
        weights = {name: params[name] for name in (*self.layout.names, NOISE)}
        return torch.func.vmap(known.log_prob)(weights) if params[NOISE].dim() else known.log_prob(weights)

    def as_prior(self) -> NormalInverseGamma:
        """The same distribution as a prior."""
        return NormalInverseGamma(self.normal, shape=self.shape, rate=self.rate)

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        """The exact predictive distribution; ``samples`` functions are drawn as well, for ``prediction.samples``."""
        draws, _, _ = predict_outputs(self, x, samples, seed, memory)
        shape, dtype = draws.shape[1:], draws.dtype
        mean, spread = output_moments(self.model, self.normal, self.buffers, x)  # spread: J V Jᵀ of each row
        mean = mean.reshape(1, *shape).to(dtype)
        variance = spread.diagonal(dim1=-2, dim2=-1).reshape(1, *shape)
        scale = (self.rate / self.shape * (1.0 + variance)).sqrt().to(dtype)
        components = StudentTComponents(2.0 * self.shape, mean, scale)
        if spread.shape[-1] > 1:
            one = torch.eye(spread.shape[-1], dtype=spread.dtype, device=spread.device)
            factor = torch.linalg.cholesky(self.rate / self.shape * (spread + one)).to(dtype)
            components = CorrelatedStudentT(2.0 * self.shape, mean, scale, factor)
        return RegressionPrediction(
            components,
            torch.zeros(1, dtype=dtype, device=mean.device),
            within=(self._mean_noise_variance * variance).to(dtype),
            samples=draws,
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.normal.mean_tensors(), **self.normal.tensors()}

    def _settings(self) -> dict[str, Any]:
        return {"shape": self.shape, "rate": self.rate}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> LinearStudentT:
        normal = saved_normal(model, tensors)
        assert isinstance(normal, FullCovarianceNormal)
        return cls(model, normal.layout, normal.loc, normal.scale_tril, **common)
