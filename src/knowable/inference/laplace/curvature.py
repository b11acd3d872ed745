"""What the curvature of a log likelihood must be able to do, whatever its structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from knowable.core.posterior import Posterior
from knowable.errors import InvalidArgument
from knowable.inference.laplace.expansion import Expansion
from knowable.inference.laplace.prior_precision import PriorPrecision


class Curvature(ABC):
    r"""The curvature H of the negative log likelihood at some weights, on the full-data scale, in some structure.

    The posterior's precision is :math:`P = \sum_o w_o H_o + \Lambda_0`: the curvature of each noise with a factor
    (inversely proportional to the noise's square) and the prior's precision. Both may change after the pass over the
    data, which is what makes tuning them cheap.

    Attributes:
        notes: What was done differently from what was asked for.
    """

    notes: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def of(cls, expansion: Expansion, *, rank: int) -> Curvature:
        """Go through the data once (or a few times)."""

    @abstractmethod
    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Log determinant of P, differentiable in the prior's precision and the weights ``(groups,)``."""

    @abstractmethod
    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """P⁻¹ v for a vector over the weights ``(D,)``."""

    @abstractmethod
    def posterior(self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any) -> Posterior:
        """The normal distribution with precision P around the expansion's weights."""


def undetermined() -> InvalidArgument:
    """The error where P is not positive definite."""
    return InvalidArgument(
        "The data do not determine all weights under this prior (a flat one, or one without curvature). Give them a "
        "Normal prior."
    )
