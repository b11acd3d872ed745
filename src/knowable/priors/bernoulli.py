"""The prior of a parameter that is 0 or 1."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.core.support.checks import check_number


@dataclass(frozen=True, repr=False)
class BernoulliPrior(Prior):
    r"""Each element is 1 with probability :math:`\pi`, and else 0: gates, choices, structure.

    .. math:: p(z) = \pi^z (1 - \pi)^{1 - z}, \qquad z \in \{0, 1\}

    A posterior over such parameters is a distribution over networks with parts left out. Methods that follow gradients
    in the weights cannot find it and refuse; :class:`~knowable.inference.variational.discrete.DiscreteVI` can.

    Args:
        probability: Probability of a 1, between 0 and 1.

    Example:
        >>> BernoulliPrior(0.25).log_prob(torch.tensor([1.0, 0.0, 0.5])).exp()
        tensor([0.2500, 0.7500, 0.0000])
    """

    probability: float = 0.5

    binary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked = check_number("probability", self.probability, above=0.0, below=1.0)
        object.__setattr__(self, "probability", checked)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log probability of each element; minus infinity of what is neither 0 nor 1."""
        of_one = torch.full_like(value, math.log(self.probability))
        of_zero = torch.full_like(value, math.log1p(-self.probability))
        nothing = torch.full_like(value, -math.inf)
        return torch.where(value == 1, of_one, torch.where(value == 0, of_zero, nothing))

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        uniform = torch.rand(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)
        return (uniform < self.probability).to(like.dtype)
