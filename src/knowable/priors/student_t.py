"""The Student-t prior, and the Student-t density and draws that the likelihood of that name shares."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.prior import Prior, Scale, check_scale, log_of
from knowable.core.support.checks import check_number


@dataclass(frozen=True, repr=False)
class StudentTPrior(Prior):
    r"""Independent Student-t distributions: most weights small, a few allowed to be large.

    .. math:: p(w) = \frac{\Gamma(\frac{\nu + 1}{2})}{\Gamma(\frac{\nu}{2}) \sqrt{\nu \pi}\, s}
        \Big(1 + \frac{w^2}{\nu s^2}\Big)^{-(\nu + 1) / 2}

    Heavy-tailed priors match the weights of trained networks better than normal ones (Fortuin et al., 2022).

    Args:
        df: Degrees of freedom, above 0. The default of 3 has a finite variance and heavy tails.
        scale: Scale, above 0.
    """

    df: float = 3.0
    scale: Scale = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", check_number("df", self.df, above=0.0))
        object.__setattr__(self, "scale", check_scale("scale", self.scale))

    def log_prob(self, value: Tensor) -> Tensor:
        return student_t_log_prob(value, self.df, self.scale)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        return self.scale * standard_student_t(self.df, shape, generator=generator, like=like)


def student_t_log_prob(distance: Tensor, df: float, scale: Scale) -> Tensor:
    """Log density of a Student-t distribution at ``distance`` from its centre, elementwise."""
    constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return constant - log_of(scale) - (df + 1) / 2 * torch.log1p((distance / scale).square() / df)


def standard_student_t(
    df: float, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor
) -> Tensor:
    r"""Draw from the Student-t distribution of scale 1 by the polar method (Bailey, 1994).

    .. math:: t = \sqrt{\nu (u^{-2/\nu} - 1)} \cos(2 \pi v), \qquad u, v \sim \mathrm{Uniform}(0, 1)
    """
    shape = tuple(shape)
    u = 1.0 - torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)  # in (0, 1]
    v = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
    radius = (df * torch.expm1(-2.0 / df * u.log())).sqrt()
    return radius * torch.cos(2 * math.pi * v)
