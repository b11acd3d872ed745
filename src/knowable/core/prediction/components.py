"""The distributions that a regression prediction mixes: normal components, and any components in other units."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Components, JoinedComponents, RegressionPrediction
from knowable.errors import Unsupported


def restored(prediction: RegressionPrediction, shift: float | Tensor, scale: float | Tensor) -> RegressionPrediction:
    """The predictive distribution of shift + scale · y', where ``prediction`` is that of y'.

    Not a change of two moments: densities gain the Jacobian 1 / scale and every quantile moves with the map.

    Args:
        prediction: In standardised units.
        shift: A number, or one for each output (the last dimension).
        scale: A positive number, or one for each output.
    """
    shift, scale = _like(prediction.samples, shift), _like(prediction.samples, scale)
    if prediction.components.discrete and ((shift != 0).any() or (scale != 1).any()):
        raise Unsupported(
            "A prediction of counts has no other units. Standardise the inputs only and leave y as it is."
        )
    return RegressionPrediction(
        AffineComponents(prediction.components, shift, scale),
        prediction.log_weights,
        within=None if prediction.within is None else prediction.within * scale.square(),
        samples=prediction.samples * scale + shift,
        missing=prediction.missing,
    )


class AffineComponents(Components):
    """The ``inner`` components after y = shift + scale · y', with scale > 0: a number, or one for each output."""

    def __init__(self, inner: Components, shift: Tensor, scale: Tensor):
        self.inner, self.shift, self.scale = inner, shift, scale
        self.discrete = inner.discrete

    @property
    def mean(self) -> Tensor:
        return self.inner.mean * self.scale + self.shift

    @property
    def variance(self) -> Tensor:
        return self.inner.variance * self.scale.square()

    def log_prob(self, y: Tensor) -> Tensor:
        return self.inner.log_prob(self._inverse(y)) - self.scale.log().to(y.dtype)

    def cdf(self, y: Tensor) -> Tensor:
        return self.inner.cdf(self._inverse(y))

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return self.inner.sample(index, generator=generator) * self.scale + self.shift

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.shift) / self.scale


def _like(samples: Tensor, value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=samples.dtype, device=samples.device)


@dataclass
class NormalComponents(Components):
    """One normal distribution for each posterior draw, row and output."""

    discrete = False

    loc: Tensor  # means, (K, batch, ...)
    scale: Tensor  # standard deviations, broadcastable to loc

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square().expand_as(self.loc)

    def log_prob(self, y: Tensor) -> Tensor:
        return normal_log_prob(y, self.loc, self.scale)

    def cdf(self, y: Tensor) -> Tensor:
        return 0.5 * torch.erfc(math.sqrt(0.5) * (self.loc - y) / self.scale)  # erfc keeps its digits in the lower tail

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(index.shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc.gather(0, index) + self.scale.expand_as(self.loc).gather(0, index) * noise


def transformed(prediction: RegressionPrediction, transform: str, shift: Tensor, scale: Tensor) -> RegressionPrediction:
    """The predictive distribution of T⁻¹(shift + scale · y'), where ``prediction`` is that of y' and mixes normals.

    Args:
        prediction: Of standardised transformed targets.
        transform: T: ``"log"`` or ``"logit"``.
        shift: One number for each output (the last dimension).
        scale: One positive number for each output.
    """
    parts = prediction.components.parts if isinstance(prediction.components, JoinedComponents) else []
    normals = parts or [prediction.components]
    if not all(type(each) is NormalComponents for each in normals):
        raise Unsupported(f"A {transform} transform of the targets needs normal noise: Gaussian() or one like it.")
    shift, scale = _like(prediction.samples, shift), _like(prediction.samples, scale)
    moved = [
        TransformedNormal(transform, shift + scale * each.loc, (scale * each.scale).expand_as(each.loc))
        for each in normals
        if isinstance(each, NormalComponents)
    ]
    components = JoinedComponents(moved) if parts else moved[0]
    within = None
    if prediction.within is not None:  # its share of the variance, which is exact where the variance is small
        within = prediction.within / prediction.components.variance * components.variance
    samples = None
    if prediction.samples is not prediction.components.mean and prediction.within is not None:
        samples = _inverse_of(transform, prediction.samples * scale + shift)
    return RegressionPrediction(
        components, prediction.log_weights, within=within, samples=samples, missing=prediction.missing
    )


def _inverse_of(transform: str, value: Tensor) -> Tensor:
    return value.exp() if transform == "log" else value.sigmoid()


@dataclass
class TransformedNormal(Components):
    """Distributions whose logarithm or logit is normal: log-normal and logit-normal ones."""

    discrete = False

    transform: str  # "log" or "logit"
    loc: Tensor  # means of the transformed values, (K, batch, ...)
    scale: Tensor  # their standard deviations, of the same shape

    @property
    def mean(self) -> Tensor:
        if self.transform == "log":
            return torch.exp(self.loc + 0.5 * self.scale.square())
        return self._moment(1)

    @property
    def variance(self) -> Tensor:
        if self.transform == "log":
            return torch.expm1(self.scale.square()) * torch.exp(2.0 * self.loc + self.scale.square())
        return self._moment(2) - self._moment(1).square()

    def log_prob(self, y: Tensor) -> Tensor:
        value, log_slope, inside = self._forward(y)
        return (normal_log_prob(value, self.loc, self.scale) + log_slope).masked_fill(~inside, -torch.inf)

    def cdf(self, y: Tensor) -> Tensor:
        value, _, inside = self._forward(y)
        found = 0.5 * torch.erfc(math.sqrt(0.5) * (self.loc - value) / self.scale)
        return torch.where(inside, found, (y > 0).to(found))

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(index.shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return _inverse_of(self.transform, self.loc.gather(0, index) + self.scale.gather(0, index) * noise)

    def _forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """T(y), the logarithm of its slope, and whether y is where T is defined."""
        if self.transform == "log":
            inside = y > 0
            value = torch.where(inside, y, 1.0).log()
            return value, -value, inside
        inside = (y > 0) & (y < 1)
        value = torch.where(inside, y, 0.5).logit()
        return value, torch.nn.functional.softplus(value) + torch.nn.functional.softplus(-value), inside

    def _moment(self, power: int) -> Tensor:
        """E[sigmoid(x)^power] by the trapezoidal rule over eight standard deviations on each side."""
        nodes = torch.linspace(-8.0, 8.0, 129, dtype=self.loc.dtype, device=self.loc.device)
        weights = torch.exp(-0.5 * nodes.square())
        total = torch.zeros_like(self.loc)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            total += weight * torch.sigmoid(self.loc + node * self.scale).pow(power)
        return total


@dataclass
class CorrelatedNormal(NormalComponents):
    """Normal components whose outputs are correlated within a row."""

    factor: Tensor  # cholesky factor of each row's covariance, (rows, outputs, outputs)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each output given those before it in the row; their sum is the joint log density."""
        difference = (y - self.mean).reshape(*self.factor.shape[:-1], 1)
        standard = torch.linalg.solve_triangular(self.factor, difference, upper=False).squeeze(-1)
        log_scale = self.factor.diagonal(dim1=-2, dim2=-1).log()
        return (-0.5 * standard.square() - log_scale - 0.5 * math.log(2 * math.pi)).reshape(self.mean.shape)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, rows, ...)``; outputs of a row are drawn together."""
        flat = (len(index), *self.factor.shape[:-1], 1)
        noise = torch.randn(flat, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (self.factor @ noise).reshape(index.shape)


def normal_log_prob(value: Tensor, loc: Tensor | float, scale: Tensor | float) -> Tensor:
    """Log density of a normal distribution, elementwise."""
    log_scale = scale.log() if isinstance(scale, Tensor) else math.log(scale)
    return -0.5 * ((value - loc) / scale) ** 2 - log_scale - 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class NormalOutputs:
    """A normal distribution over the outputs of each row, which likelihoods turn into a prediction."""

    mean: Tensor  # means, (batch, ...)
    variance: Tensor  # variances, (batch, ...)
    covariance: Tensor | None  # of each row's flattened outputs, (batch, outputs, outputs), where they are known
    draws: Tensor  # draws of the outputs, (K, batch, ...)
    at_places: Tensor | None = None  # covariances of each place's outputs (dimension 1), (batch, places, n, n)

    @property
    def log_weights(self) -> Tensor:
        """Equal weights of the draws, ``(K,)``."""
        return torch.zeros(len(self.draws), dtype=self.mean.dtype, device=self.mean.device).log_softmax(0)

    @classmethod
    def of_moments(cls, mean: Tensor, covariance: Tensor, noise: Tensor) -> NormalOutputs:
        """From means ``(batch, ...)``, covariances and standard normal ``noise`` ``(K, outputs)``.

        All rows use the same noise, so that a row's draws do not depend on the other rows. They have each row's own
        distribution, but not the correlations between rows.
        """
        root = root_of(covariance)
        draws = mean + torch.einsum("boi,ki->kbo", root, noise).view(len(noise), *mean.shape)
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        return cls(mean, variance, covariance, draws)


def root_of(covariance: Tensor) -> Tensor:
    """A with A Aᵀ = covariance, for a batch of positive semi-definite matrices ``(..., n, n)``."""
    if covariance.shape[-1] == 1:
        return covariance.clamp_min(0.0).sqrt()
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
