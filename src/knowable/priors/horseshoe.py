"""The horseshoe prior: most weights are shrunk to zero, large ones are hardly shrunk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.core.support.checks import check_number


@dataclass(frozen=True, repr=False)
class Horseshoe(Prior):
    r"""A normal whose scale is half-Cauchy, with the scale integrated out (Carvalho et al., 2010).

    .. math:: w \mid \lambda \sim \mathcal{N}(0, \lambda^2 \tau^2), \quad \lambda \sim C^+(0, 1), \qquad
        p(w) = \frac{e^{z} E_1(z)}{\tau \sqrt{2 \pi^3}}, \quad z = \frac{w^2}{2 \tau^2}

    The density is infinite at zero (logarithmically) and its tails fall like :math:`1 / w^2`. At a weight of exactly
    zero the log density given here is large but finite, with gradient zero.

    Args:
        scale: The global scale :math:`\tau`, above 0.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_number("scale", self.scale, above=0.0))

    def log_prob(self, value: Tensor) -> Tensor:
        z = 0.5 * (value / self.scale).square()
        constant = -math.log(self.scale) - 0.5 * math.log(2 * math.pi**3)
        return constant + log_scaled_exponential_integral(z)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape``: a half-Cauchy scale times a normal."""
        shape = tuple(shape)
        uniform = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
        noise = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return self.scale * torch.tan(0.5 * math.pi * uniform) * noise


# --- The scaled exponential integral :math:`e^z E_1(z)`, in logarithms and infinitely differentiable ---------
#
# Everything is written through one smooth function :math:`g`, defined by
#
# .. math:: e^z E_1(z) = \frac{1}{z + g(z)},
#
# which is what the continued fraction of :math:`E_1` (Abramowitz and Stegun, 5.1.22) computes. From
# :math:`\frac{d}{dz} e^z E_1(z) = e^z E_1(z) - 1/z` follows :math:`g'(z) = g (z + g) / z - 1`, with no cancellation in
# :math:`\frac{d}{dz} \log e^z E_1(z) = -g / z`.

EULER_GAMMA = 0.5772156649015329
SWITCH = 1.0  # below: power series; above: continued fraction
SERIES_TERMS, FRACTION_TERMS = 10, 20  # for float32 and less
SERIES_TERMS_DOUBLE, FRACTION_TERMS_DOUBLE = 18, 80  # errors fall like 1 / (k k!) and exp(-4 sqrt(k z))


def log_scaled_exponential_integral(z: Tensor) -> Tensor:
    """log(exp(z) E1(z)) for z >= 0, elementwise; below the smallest normal number z counts as that number."""
    z = z.clamp_min(torch.finfo(z.dtype).tiny)
    return -torch.log(z + _Remainder.apply(z))


class _Remainder(torch.autograd.Function):
    """The function g of this module."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return torch.where(z < SWITCH, _by_series(z.clamp_max(SWITCH)), _by_fraction(z.clamp_min(SWITCH)))

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        (z,) = inputs
        ctx.save_for_backward(z, output)
        ctx.save_for_forward(z, output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * _slope(*ctx.saved_tensors)

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return tangent * _slope(*ctx.saved_tensors)


def _slope(z: Tensor, g: Tensor) -> Tensor:
    return g * (z + g) / z - 1.0


def _by_series(z: Tensor) -> Tensor:
    """From E1(z) = -γ - log z - Σ (-z)^k / (k k!), by Horner's rule."""
    terms = SERIES_TERMS_DOUBLE if z.dtype == torch.float64 else SERIES_TERMS
    total = torch.zeros_like(z)
    for k in range(terms, 0, -1):
        total = (total + (-1.0) ** k / (k * math.factorial(k))) * z
    integral = -EULER_GAMMA - z.log() - total
    return torch.exp(-z) / integral - z


def _by_fraction(z: Tensor) -> Tensor:
    """From exp(z) E1(z) = 1 / (z + 1 - 1 / (z + 3 - 4 / (z + 5 - 9 / ...))), from the far end."""
    terms = FRACTION_TERMS_DOUBLE if z.dtype == torch.float64 else FRACTION_TERMS
    tail = z + (2 * terms + 1)
    for k in range(terms, 1, -1):
        tail = z + (2 * k - 1) - k**2 / tail
    return 1.0 - 1.0 / tail
