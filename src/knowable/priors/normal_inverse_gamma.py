"""A joint prior of weights and noise under which a linear model has a posterior in closed form."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import JointNormal
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import JointPrior, Normal
from knowable.core.network.params import Layout, Params
from knowable.core.support.checks import check_number
from knowable.errors import InvalidArgument, InvalidType, Unsupported

NOISE = LIKELIHOOD_PREFIX + "log_noise"


class NormalInverseGamma(JointPrior):
    r"""Weights whose scale is in units of the noise, and a noise that is not known.

    .. math:: \sigma^2 \sim \mathrm{IG}(a, b), \qquad w \mid \sigma \sim \mathcal{N}(m_0, \sigma^2 V_0)

    With ``Gaussian()`` it is conjugate to linear models: :class:`~knowable.inference.exact.linear.ExactLinear`
    integrates over the noise, and predictions are Student-t distributions. Other methods that need the prior's density
    alone, such as NUTS and MAP, take it with any network.

    Args:
        weights: Prior of all weights for a noise of 1: a ``Normal``, or a mapping of globs to them (the first match
            wins).
        shape: Shape a of the noise variance: as much as 2a observations say of it.
        rate: Rate b: those have a mean square of b / a. The default, with targets of spread 1, has a noise of 0.18 to
            1.4 with probability 0.9.

    Example:
        >>> import torch, knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(), kn.NormalInverseGamma())
        >>> kn.ExactLinear().fit(model, (x, 2 * x)).log_evidence.kind
        'exact'
    """

    kind = "normal_inverse_gamma"

    def __init__(
        self, weights: Normal | Mapping[str, Normal] | JointNormal | None = None, *, shape: float = 1.0,
        rate: float = 0.1,
    ):  # fmt: skip
        weights = Normal(1.0) if weights is None else weights
        self.weights = {"*": weights} if isinstance(weights, Normal) else weights
        if not isinstance(self.weights, Mapping | JointNormal) or (
            isinstance(self.weights, Mapping) and not all(isinstance(each, Normal) for each in self.weights.values())
        ):
            raise InvalidType(f"weights must be a Normal or a mapping of globs to Normals, got {weights!r}.")
        self.shape = check_number("shape", shape, above=0)
        self.rate = check_number("rate", rate, above=0)

    def log_prob(self, params: Params) -> Tensor:
        r"""Log density of weights and log noise λ.

        .. math:: \log \mathcal{N}(w \mid m_0, e^{2\lambda} V_0) + a \log b - \log\Gamma(a) - 2 a \lambda
            - b e^{-2\lambda} + \log 2
        """
        log_noise = _noise_of(params)
        constant = self.shape * math.log(self.rate) - math.lgamma(self.shape) + math.log(2.0)
        of_noise = constant - 2.0 * self.shape * log_noise - self.rate * torch.exp(-2.0 * log_noise)
        weights = {name: value for name, value in params.items() if name != NOISE}
        return self._weights_at(weights, log_noise) + of_noise

    def _weights_at(self, weights: Params, log_noise: Tensor) -> Tensor:
        """Log density of the weights: that of their distances from the mean in units of the noise."""
        size = sum(value.numel() for value in weights.values())
        shrink = torch.exp(-log_noise)
        if isinstance(self.weights, JointNormal):
            means = self.weights.means
            near = {name: means[name] + (value - means[name]) * shrink for name, value in weights.items()}
            return self.weights.log_prob(near) - size * log_noise
        total = -size * log_noise
        for name, value in weights.items():
            normal = self._normal(name)
            total = total + normal.log_prob(normal.loc + (value - normal.loc) * shrink).sum()
        return total

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw the noise, then the weights."""
        noise = _noise_of(like)
        log_noise = log_noise_draws(self.shape, self.rate, 1, noise, generator)[0]
        drawn: Params = {NOISE: log_noise}
        if isinstance(self.weights, JointNormal):
            means, found = self.weights.means, self.weights.sample(1, generator)
            drawn |= {name: means[name] + (found[name][0] - means[name]) * log_noise.exp() for name in means}
        for name, value in like.items():
            if name not in drawn:
                normal = self._normal(name)
                unit = normal.sample(value.shape, generator=generator, like=value)
                drawn[name] = normal.loc + (unit - normal.loc) * log_noise.exp()
        return {name: drawn[name] for name in like}

    def prior_of(self, name: str) -> None:
        """None: it does not factorise."""

    def weight_moments(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean ``(D,)`` and precision (``(D,)`` or ``(D, D)``) of the weights for a noise of 1."""
        if isinstance(self.weights, JointNormal):
            if set(self.weights.layout.names) != set(layout.names):
                odd = sorted(set(self.weights.layout.names) ^ set(layout.names))
                raise Unsupported(f"prior is a posterior of other weights; they differ in {', '.join(odd[:5])}.")
            mean, precision = self.weights.dense(layout)
            return mean.double(), precision.double()
        pairs = list(zip(map(self._normal, layout.names), layout.sizes, strict=True))
        mean = torch.cat([torch.full((size,), float(each.loc), dtype=torch.float64) for each, size in pairs])
        precision = [torch.full((size,), float(each.scale) ** -2, dtype=torch.float64) for each, size in pairs]
        return mean, torch.cat(precision)

    def _normal(self, name: str) -> Normal:
        assert isinstance(self.weights, Mapping)
        for glob, normal in self.weights.items():
            if fnmatch.fnmatchcase(name, glob):
                return normal
        raise InvalidArgument(f"weights has no entry for {name!r}: add a glob that matches it, or '*'.")

    # --- on disk -----------------------------------------------------------------------------------------------------

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values, and tensors where the weights are those of a posterior."""
        plain: dict[str, Any] = {"shape": self.shape, "rate": self.rate}
        if isinstance(self.weights, JointNormal):
            prior = PosteriorPrior(self.weights, fixed={}, buffers={})
            about, tensors = prior.described()
            return {**plain, "normal": about}, tensors
        return {**plain, "globs": {glob: [each.scale, each.loc] for glob, each in self.weights.items()}}, {}

    @classmethod
    def from_description(cls, about: Mapping[str, Any], tensors: dict[str, Tensor]) -> NormalInverseGamma:
        """The inverse of :meth:`described`."""
        plain = {"shape": about["shape"], "rate": about["rate"]}
        if "normal" in about:
            return cls(PosteriorPrior.from_description(about["normal"], tensors).normal, **plain)
        return cls({glob: Normal(scale, loc=loc) for glob, (scale, loc) in about["globs"].items()}, **plain)

    def __repr__(self) -> str:
        if isinstance(self.weights, JointNormal):
            weights = f"{self.weights.kind} normal, {self.weights.layout.size:,} weights"
        else:
            weights = repr(self.weights["*"] if set(self.weights) == {"*"} else dict(self.weights))
        return f"NormalInverseGamma({weights}, shape={self.shape:g}, rate={self.rate:g})"


def log_noise_draws(shape: float, rate: float, n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """The logarithm of the noise, ``(n,)``: the noise variance is inverse gamma."""
    shapes = torch.full((n,), shape, dtype=torch.float64, device=like.device)
    gamma = torch._standard_gamma(shapes, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
    return (-0.5 * (gamma / rate).log()).to(like.dtype)


def _noise_of(params: Params) -> Tensor:
    if NOISE not in params or params[NOISE].dim() > 0:
        raise InvalidArgument(
            "NormalInverseGamma is a prior of one noise that is not known: use it with the likelihood Gaussian()."
        )
    return params[NOISE]
