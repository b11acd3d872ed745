"""What a variational family is: settings that build a trainable distribution over one flat vector of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.posterior import Posterior


class Family(ABC):
    """A kind of distribution over a group of weights; concrete families are frozen dataclasses of their knobs.

    Every family is a normal with standard deviations ``initial_scale`` around ``loc`` when training begins, so that
    one can be exchanged for another without tuning.
    """

    @abstractmethod
    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FamilyModule:
        """The distribution over the weights of ``layout``, begun at ``loc`` ``(D,)``.

        Raises:
            Unsupported: Where the family is not made for so many weights, or for weights of these shapes.
        """


class FamilyModule(nn.Module, ABC):
    """A trainable distribution q over one flat vector of D numbers in the order of ``layout``.

    A family with a closed-form entropy draws without densities, which are then never needed; the others give the log
    density of each draw.

    Attributes:
        layout: Names and shapes of the weights.
    """

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    @abstractmethod
    def draw(self, count: int) -> tuple[Tensor, Tensor | None]:
        """K reparameterised draws ``(K, D)`` from the global generator, and their log densities ``(K,)``.

        The densities are None where :meth:`entropy` is a closed form.
        """

    def entropy(self) -> Tensor | None:
        r"""Differentiable :math:`-E_q[\log q]` in closed form, or None."""
        return None

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Differentiable means and variances ``(D,)`` in closed form, or None; with them a normal prior needs no draws."""
        return None

    @abstractmethod
    def posterior(self, model: Model, **common: Any) -> Posterior:
        """The distribution as it is now, as a posterior of the weights of ``layout``; ``common`` goes to Posterior."""
