r"""Moments of activations under a normal distribution: what an infinitely wide layer does to covariances.

For :math:`(u, v)` normal with mean 0, variances a and b and covariance c, every activation φ has

.. math:: K = E[\varphi(u)\, \varphi(v)], \qquad \dot K = E[\varphi'(u)\, \varphi'(v)]

In closed form for piecewise linear activations with one kink at 0 (Cho and Saul, 2009) and for the error function
(Williams, 1997). Others by their Hermite coefficients, each of them an integral over one variable:

.. math:: K = \sum_k h_k(a)\, h_k(b)\, \rho^k, \qquad h_k(a) = E[\varphi(\sqrt a z)\, \mathrm{he}_k(z)], \quad
    \rho = c / \sqrt{ab}

All in double precision, of tensors that broadcast, and differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from knowable.core.network.own_modules import Erf
from knowable.errors import Unsupported

_ALMOST_ONE = 1.0 - 1e-15  # of a correlation: derivatives of arcsin are infinite at 1
_TINY = 1e-30  # of a variance
_TERMS = (16, 32, 64, 128, 256, 512, 1024)  # of a Hermite series: the first that is good enough
_ENOUGH = 1e-7  # share of E[φ²] that the series may leave out before more terms are tried,
_TOLERATED = 1e-4  # and with all of them
_ROUNDING = 1e-14  # share of E[φ²] that what is left out is uncertain by
_REACH = 12.0  # standard deviations to which integrals go
_NUMBERS_AT_ONCE = 2**23
_LARGEST_GRID = 2**23  # numbers: activations of inputs so large that they need more have, for all we can see, kinks


class DualActivation:
    """The two moments of one activation."""

    def covariance(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """K for variances ``a`` and ``b`` and covariances ``c``."""
        raise NotImplementedError

    def derivative(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """The same of the activation's derivative."""
        raise NotImplementedError


@dataclass(frozen=True)
class OneKink(DualActivation):
    r"""The activation x for x > 0 and αx below: the identity (α = 1), ReLU (0), leaky ReLU.

    With :math:`\varphi(u) = \tfrac{1+\alpha}{2} u + \tfrac{1-\alpha}{2} |u|`, of which the two parts are uncorrelated,

    .. math:: K = \tfrac{(1+\alpha)^2}{4} c
        + \tfrac{(1-\alpha)^2}{2\pi} \sqrt{ab}\, \big(\sqrt{1-\rho^2} + \rho \arcsin \rho\big)
    """

    slope: float  # α

    def covariance(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        linear, bent = (1 + self.slope) ** 2 / 4, (1 - self.slope) ** 2 / (2 * math.pi)
        if bent == 0:
            return linear * c
        rho = correlation(a, b, c)
        return linear * c + bent * (a * b).clamp_min(_TINY).sqrt() * ((1 - rho.square()).sqrt() + rho * rho.asin())

    def derivative(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        linear, bent = (1 + self.slope) ** 2 / 4, (1 - self.slope) ** 2 / (2 * math.pi)
        return linear + bent * correlation(a, b, c).asin()


@dataclass(frozen=True)
class ErfMoments(DualActivation):
    r"""The error function: :math:`K = \tfrac{2}{\pi} \arcsin \tfrac{2c}{\sqrt{(1+2a)(1+2b)}}`."""

    def covariance(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return 2 / math.pi * (2 * c / ((1 + 2 * a) * (1 + 2 * b)).sqrt()).asin()

    def derivative(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return 4 / math.pi * ((1 + 2 * a) * (1 + 2 * b) - 4 * c.square()).rsqrt()


@dataclass(frozen=True)
class HermiteSeries(DualActivation):
    """Any activation, by its Hermite coefficients.

    What the series leaves out goes into one last term, so that variances are right. An activation for which that is a
    ten-thousandth or more is refused: it has kinks, or inputs are so large that it looks as if it had.
    """

    function: Callable[[Tensor], Tensor]  # φ, element by element
    name: str  # for errors

    def covariance(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self._sum(self.function, a, b, c, self.name)

    def derivative(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        def slope(u: Tensor) -> Tensor:
            with torch.enable_grad():
                at = u if u.requires_grad else u.detach().requires_grad_()
                return torch.autograd.grad(self.function(at).sum(), at, create_graph=u.requires_grad)[0]

        return self._sum(slope, a, b, c, f"the derivative of {self.name}")

    def _sum(self, function: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, c: Tensor, name: str) -> Tensor:
        rho = correlation(a, b, c)
        largest = float(torch.maximum(a.detach().max(), b.detach().max()))
        terms = _terms_needed(function, largest, name)
        left = _coefficients(function, a, terms, largest)
        right = left if b is a else _coefficients(function, b, terms, largest)
        total = torch.zeros((), dtype=torch.float64, device=rho.device)
        for h, g in zip(reversed(left), reversed(right), strict=True):
            total = total * rho + h * g
        return total


def correlation(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """C / √(ab), a little within -1 and 1; 0 where a variance is 0."""
    return (c / (a * b).clamp_min(_TINY).sqrt()).clamp(-_ALMOST_ONE, _ALMOST_ONE)


def _terms_needed(function: Callable[[Tensor], Tensor], variance: float, name: str) -> int:
    """How many Hermite coefficients activations of this variance need."""
    at, left_out = torch.tensor(variance, dtype=torch.float64), 1.0
    for terms in _TERMS:
        if terms * 2 * _REACH / _step(terms, variance) > _LARGEST_GRID:
            break
        *kept, rest = _coefficients(function, at, terms, variance)
        left_out = float(rest.square() / (torch.stack([*kept, rest]).square().sum() + _TINY))
        if left_out <= _ENOUGH:
            return terms
    if left_out <= _TOLERATED:
        return terms
    raise Unsupported(
        f"The moments of {name} at inputs of variance {variance:.3g} cannot be computed well enough: {left_out:.1e} "
        f"of its variance is left out. Use ReLU, LeakyReLU, Erf or a smooth activation; or standardise the inputs, or "
        f"give the weights before it a smaller prior scale."
    )


def _coefficients(function: Callable[[Tensor], Tensor], variance: Tensor, terms: int, largest: float) -> list[Tensor]:
    """Coefficients h_0, h_1, ... of φ(√a z), each in the shape of ``variance``, and the root of what they leave out."""
    nodes, weights, polynomials = _grid(terms, largest, variance.device)
    scale = variance.clamp_min(_TINY).sqrt().reshape(-1, 1)
    found = []
    for part in scale.split(max(1, _NUMBERS_AT_ONCE // len(nodes))):
        values = function(part * nodes)
        own = (values * weights) @ polynomials.T  # (rows, terms)
        whole = values.square() @ weights
        rest = (whole - own.square().sum(1)).clamp_min(0.0) + _ROUNDING * whole + _TINY
        found.append(torch.cat([own, rest.sqrt().unsqueeze(1)], dim=1))
    table = torch.cat(found)
    return [column.reshape(variance.shape) for column in table.unbind(1)]


def _grid(terms: int, largest: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and weights of integrals over a standard normal, and normalised Hermite polynomials ``(terms, nodes)``.

    The trapezoidal rule, whose error falls exponentially for smooth functions; steps are short where √a is large.
    """
    found = _grid_of(terms, math.floor(math.log2(_step(terms, largest))))
    return tuple(each.to(device) for each in found)  # type: ignore[return-value]


def _step(terms: int, largest: float) -> float:
    return min(0.05, 0.2 / math.sqrt(max(largest, _TINY)), 1.0 / math.sqrt(terms))


@lru_cache(maxsize=8)
def _grid_of(terms: int, log_step: int) -> tuple[Tensor, Tensor, Tensor]:
    count = 2 * math.ceil(_REACH / 2.0**log_step) + 1
    nodes = torch.linspace(-_REACH, _REACH, count, dtype=torch.float64)
    root = (-nodes.square() / 4).exp()  # of the density, so that polynomials of high order stay in range
    density = root.square() / root.square().sum()
    previous, current, found = torch.zeros_like(nodes), root, [root]
    for k in range(terms - 1):
        previous, current = current, (nodes * current - math.sqrt(k) * previous) / math.sqrt(k + 1)
        found.append(current)
    return nodes, density, torch.stack(found) / root


def dual_of(module: nn.Module, path: str) -> DualActivation | None:
    """The moments of an activation module, or None if the module is not one."""
    if isinstance(module, nn.ReLU):
        return OneKink(0.0)
    if isinstance(module, nn.LeakyReLU):
        return OneKink(module.negative_slope)
    if isinstance(module, Erf):
        return ErfMoments()
    return HermiteSeries(module, f"layer {path!r} ({type(module).__name__})") if is_elementwise(module) else None


def is_elementwise(module: nn.Module) -> bool:
    """Whether a module without parameters acts on each number by itself, found out by trying."""
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    x = torch.linspace(-2.0, 2.0, 24, dtype=torch.float64).reshape(2, 12)
    try:
        with torch.no_grad():
            whole, again = module(x.clone()), module(x.clone())
            each = torch.stack([module(value.clone().reshape(1, 1)).reshape(()) for value in x.flatten()])
    except Exception:  # whatever a module says of inputs that are not for it
        return False
    return (
        isinstance(whole, Tensor)
        and whole.shape == x.shape
        and torch.equal(whole, again)
        and bool((whole.flatten() - each).abs().max() < 1e-12)
    )
