"""The flat (improper uniform) prior."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.prior import Prior


@dataclass(frozen=True, repr=False)
class Flat(Prior):
    r"""The improper prior with constant density: :math:`p(w) \propto 1`.

    Under it the posterior mode is the maximum likelihood estimate. It cannot be sampled.

    Example:
        >>> Flat().log_prob(torch.tensor([-3.0, 100.0]))
        tensor([0., 0.])
    """

    proper: ClassVar[bool] = False

    def log_prob(self, value: Tensor) -> Tensor:
        """Zero everywhere: the constant of an improper density is arbitrary, and this is the choice made here."""
        return torch.zeros_like(value)

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        r"""KL from a normal, up to the improper prior's constant: the negative entropy of the normal.

        .. math:: -\sum \tfrac{1}{2} \log(2 \pi e s^2)
        """
        return -(scale.log() + 0.5 * math.log(2 * math.pi * math.e)).sum()

    def normal_moments(self) -> tuple[float, float]:
        """A normal of precision 0."""
        return 0.0, 0.0
