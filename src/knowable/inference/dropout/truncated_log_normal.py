r"""Truncated log-normal noise: its KL divergence from the log-uniform prior, its moments, and draws.

:math:`\log\theta` is normal with location μ and scale σ, truncated to :math:`[a, b]` (Neklyudov et al., 2017). Every
quantity is computed from the end of the interval that is nearer to μ: with

.. math:: h = \frac{b - a}{\sigma}, \qquad
    \alpha = \frac{a - \mu}{\sigma} \;\text{ or }\; \frac{\mu - b}{\sigma}, \qquad
    R(\alpha) = \int_0^h e^{-\alpha u - u^2 / 2}\, du,

:math:`\log\theta = a + \sigma u` or :math:`b - \sigma u`, where u has the density
:math:`e^{-\alpha u - u^2/2} / R(\alpha)`. If μ lies inside the interval, α is negative and R is a difference of error
functions without cancellation; if μ lies far outside, all mass is in a tail, and R is a difference of Mills ratios
(scaled complementary error functions), which do not underflow as the tail does. There is one distribution for each unit
of a layer, few enough to compute all of this in double precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_ROOT_TWO = math.sqrt(2.0)
_TAIL = 2.0  # α from which the CDF is inverted in log space
_NEWTON_STEPS = 6
_SMALLEST = 2.0**-40  # distance of uniform numbers from 0 and 1
_TINY = 1e-300


def divergence_from_log_uniform(loc: Tensor, scale: Tensor, low: float, high: float) -> Tensor:
    r"""KL(q ‖ p) to the log-uniform distribution on the same interval, elementwise.

    .. math:: \mathrm{KL} = \log (b - a) - H[q]
        = \log h - \log R - \frac12 - \frac{\alpha E[u]}{2} + \frac{h\, e^{-\alpha h - h^2/2}}{2 R}, \qquad
        E[u] = \frac{1 - e^{-\alpha h - h^2/2}}{R} - \alpha

    which is the same as :math:`\log\frac{b - a}{\sqrt{2 \pi e}\, \sigma Z} - \frac{\alpha\phi(\alpha) -
    \beta\phi(\beta)}{2 Z}` with the mass :math:`Z` of the normal between :math:`\alpha` and :math:`\beta`.
    """
    alpha, width, _ = _from_nearer_end(loc, scale, low, high)
    log_mass, _ = _log_masses(alpha, width)
    far = torch.exp(-width * (alpha + 0.5 * width) - log_mass)  # the density at the other end
    mean = torch.exp(-log_mass) - far - alpha
    found = width.log() - log_mass - 0.5 - 0.5 * alpha * mean + 0.5 * width * far
    return found.to(loc.dtype)


def mean_and_relative_variance(loc: Tensor, scale: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    r""":math:`E[\theta]` and :math:`\mathrm{Var}[\theta] / E[\theta]^2`, one over the squared signal-to-noise ratio.

    .. math:: E[\theta^k] = e^{k b} \frac{R(\alpha + k \sigma)}{R(\alpha)} \;\text{ or }\;
        e^{k a} \frac{R(\alpha - k \sigma)}{R(\alpha)}, \qquad
        \frac{\mathrm{Var}[\theta]}{E[\theta]^2} = \exp\big(\log E[\theta^2] - 2 \log E[\theta]\big) - 1
    """
    alpha, width, top = _from_nearer_end(loc, scale, low, high)
    step = torch.where(top, scale.double(), -scale.double())
    masses = (_log_masses(alpha + k * step, width) for k in range(3))
    (base, base_normal), (one, one_normal), (two, two_normal) = masses
    end = torch.where(top, high, low)
    inside = alpha <= 0  # where the factor exp(α² / 2) of R is taken out of the differences by hand
    log_mean = end + torch.where(inside, step * alpha + 0.5 * step**2 + one_normal - base_normal, one - base)
    excess = torch.where(inside, step**2 + two_normal - 2 * one_normal + base_normal, two - 2 * one + base)
    return log_mean.exp().to(loc.dtype), torch.expm1(excess.clamp_min(1e-16)).to(loc.dtype)


def draw_log_noise(loc: Tensor, scale: Tensor, low: float, high: float, uniform: Tensor) -> Tensor:
    r"""Draws of :math:`\log\theta` ``(rows, units)`` from uniform numbers of that shape, by the inverse of the CDF.

    Gradients are implicit (Figurnov et al., 2018): :math:`dx = -(\partial F / \partial\mu\, d\mu + \partial F /
    \partial\sigma\, d\sigma) / q(x)` at a fixed value of the CDF F.
    """
    drawn = _Draw.apply(loc.double(), scale.double(), low, high, uniform.double().clamp(_SMALLEST, 1 - _SMALLEST))
    return drawn.to(loc.dtype)  # pyright: ignore[reportOptionalMemberAccess]


# --- the standard normal between two ends ----------------------------------------------------------------------------


def _from_nearer_end(loc: Tensor, scale: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """α and h of the module's docstring, and whether the nearer end is the upper one."""
    loc, scale = loc.double(), scale.double()
    top = loc > 0.5 * (low + high)
    return torch.where(top, loc - high, low - loc) / scale, (high - low) / scale, top


def _log_masses(alpha: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Log R(α), and the log mass of the standard normal on [α, α + h], which is R(α) φ(α)."""
    mirrored = 2 * alpha + width < 0  # then computed from the other end
    near = torch.where(mirrored, -alpha - width, alpha)
    tail = near > 0
    outside, inside = near.clamp_min(0.0), near.clamp_max(0.0)
    decay = torch.exp(-width * (outside + 0.5 * width))
    log_scaled = (mills_ratio(outside) - decay * mills_ratio(outside + width)).clamp_min(_TINY).log()
    log_inside = (0.5 * (torch.erf((inside + width) / _ROOT_TWO) - torch.erf(inside / _ROOT_TWO))).log()
    shift = torch.where(mirrored, -width * (alpha + 0.5 * width), 0.0)
    log_mass = torch.where(tail, log_scaled + shift, log_inside + 0.5 * alpha**2 + _HALF_LOG_TWO_PI)
    return log_mass, torch.where(tail, log_scaled - 0.5 * outside**2 - _HALF_LOG_TWO_PI, log_inside)


def mills_ratio(x: Tensor) -> Tensor:
    r""":math:`(1 - \Phi(x)) / \phi(x)`."""
    return math.sqrt(0.5 * math.pi) * torch.special.erfcx(x / _ROOT_TWO)


class _Draw(torch.autograd.Function):
    """Draws by the inverse CDF, with implicit gradients."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, scale: Tensor, low: float, high: float, uniform: Tensor) -> Tensor:
        """The draws, and their derivatives with respect to location and scale."""
        alpha, width, top = _from_nearer_end(loc, scale, low, high)
        u = _inverse_cdf(alpha, width, uniform)
        exponent = u * (alpha + 0.5 * u)
        near = (1 - uniform) * torch.exp(exponent)
        far = uniform * torch.exp(exponent - width * (alpha + 0.5 * width))
        by_loc = 1 - near - far
        by_scale = u + alpha * by_loc - width * far
        ctx.save_for_backward(by_loc, torch.where(top, -by_scale, by_scale))
        return torch.where(top, high - scale * u, low + scale * u)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Sums over the rows."""
        by_loc, by_scale = ctx.saved_tensors
        return (grad * by_loc).sum(0), (grad * by_scale).sum(0), None, None, None


def _inverse_cdf(alpha: Tensor, width: Tensor, uniform: Tensor) -> Tensor:
    """The u in [0, h] at which the CDF has the values ``uniform``, ``(rows, units)``."""
    near, far = torch.special.ndtr(-alpha), torch.special.ndtr(-alpha - width)
    found = -torch.special.ndtri((1 - uniform) * near + uniform * far) - alpha
    tail = (alpha > _TAIL).nonzero().squeeze(-1)
    if len(tail):
        found[:, tail] = _inverse_cdf_of_tail(alpha[tail], width[tail], uniform[:, tail])
    return torch.minimum(found.clamp_min(0.0), width)


def _inverse_cdf_of_tail(alpha: Tensor, width: Tensor, uniform: Tensor) -> Tensor:
    r"""The same by Newton's method on the log of the upper tail, which is concave, so that no step overshoots.

    .. math:: \log\frac{1 - \Phi(\alpha + u)}{1 - \Phi(\alpha)} = \log\frac{r(\alpha + u)}{r(\alpha)} - \alpha u -
        \frac{u^2}{2}, \qquad \text{with slope } -1 / r(\alpha + u)

    with Mills' ratio r.
    """
    own = mills_ratio(alpha)
    other = torch.exp(-width * (alpha + 0.5 * width)) * mills_ratio(alpha + width) / own
    target = torch.log1p(uniform * (other - 1))
    u = -2 * target / (alpha + (alpha**2 - 2 * target).sqrt())
    for _ in range(_NEWTON_STEPS):
        ratio = mills_ratio(alpha + u)
        u = u + ((ratio / own).log() - u * (alpha + 0.5 * u) - target) * ratio
    return u
