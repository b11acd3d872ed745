"""What a variational family is: settings that build a trainable distribution over one flat vector of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout
from knowable.core.posterior.posterior import Posterior


class Family(ABC):
    """A kind of distribution over a group of weights; concrete families are frozen dataclasses of their settings.

    Every family has means ``loc`` and standard deviations ``initial_scale`` when training begins (a flow: nearly), so
    that one can be exchanged for another without tuning.
    """

    @abstractmethod
    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FamilyModule:
        """The distribution over the weights of ``layout``, begun at ``loc`` ``(D,)``.

        Raises:
            Unsupported: Where the family is not made for so many weights, or for weights of these shapes.
        """


@dataclass(frozen=True)
class Drawn:
    """Draws of a family and the terms of the ELBO that belong to it, differentiable.

    Attributes:
        values: Reparameterised draws, ``(K, D)``.
        log_density: Log density of each, ``(K,)``, or None where there is the entropy.
        entropy: In closed form, or None.
        moments: Means and variances, ``(D,)`` each, in closed form, or None.
    """

    values: Tensor
    log_density: Tensor | None
    entropy: Tensor | None
    moments: tuple[Tensor, Tensor] | None


class FamilyModule(nn.Module, ABC):
    """A trainable distribution q over one flat vector of D numbers in the order of ``layout``.

    A family with a closed-form entropy draws without densities, which are then not needed; the others give the log
    density of each draw.

    Attributes:
        layout: Names and shapes of the weights.
        normal_marginals: Whether each weight by itself is normal. With :meth:`moments`, priors that have a closed form
            for normals are then used in closed form.
    """

    normal_marginals: ClassVar[bool] = False

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    @abstractmethod
    def draw(self, count: int) -> tuple[Tensor, Tensor | None]:
        """K reparameterised draws ``(K, D)`` from the global generator, and their log densities ``(K,)``.

        The densities are None where :meth:`entropy` is a closed form.
        """

    @abstractmethod
    def posterior(self, model: Model, **common: Any) -> Posterior:
        """The distribution as it is now, as a posterior of the weights of ``layout``; ``common`` goes to Posterior."""

    def entropy(self) -> Tensor | None:
        r"""Differentiable :math:`-E_q[\log q]` in closed form, or None."""
        return None

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Differentiable means and variances ``(D,)`` in closed form, or None; a normal prior then needs no draws."""
        return None

    def draw_with_terms(self, count: int) -> Drawn:
        """All of the above in one call, for families that have a quicker way to compute it together."""
        values, log_density = self.draw(count)
        return Drawn(values, log_density, self.entropy(), self.moments())

    def held_log_density(self, values: Tensor) -> Tensor | None:
        r"""Log q up to a constant, ``(K,)``, at ``values`` ``(K, D)``: differentiable in these, q itself is held.

        Its gradient through reparameterised draws is that of :math:`E_q[\log q]` without the term whose mean is zero
        (Roeder et al., 2017): its noise and that of the log joint cancel where q is the posterior. None where a family
        does not have it.
        """
        return None

    def after_step(self) -> None:
        """Called after every step, without gradients: it may change how q is written, and not what it is."""

    @property
    def prefers_path(self) -> bool:
        """Whether the gradient of :meth:`held_log_density` is better to train with, if nothing was asked for."""
        return False
