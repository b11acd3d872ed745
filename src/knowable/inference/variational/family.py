"""What a variational family is: settings that build a trainable distribution over one flat vector of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, select_names
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, InvalidType


class Family(ABC):
    """A kind of distribution over a group of weights; concrete families are frozen dataclasses of their knobs.

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
    """Draws of a family, and all that the bound needs of it beside them, differentiable.

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


# --- Which weights get which family: globs over the names of parameters, the first that matches wins -----------------


@dataclass(frozen=True)
class Group:
    """Weights that share one distribution.

    Attributes:
        family: Of what kind it is.
        names: The weights, in the model's order.
    """

    family: Family
    names: tuple[str, ...]


def check_families(argument: str, families: Any) -> None:
    """Refuse what is not a mapping from globs to families; ``argument`` is what messages call it."""
    if not isinstance(families, Mapping):
        raise InvalidType(
            f"{argument} must map names or globs to families, such as {{'head.*': FullRank()}}; got {families!r:.60}."
        )
    if not families:
        raise InvalidArgument(f"{argument} must name at least one glob, got an empty mapping. Leave it out.")
    for glob, family in families.items():
        if not isinstance(glob, str):
            raise InvalidType(f"{argument} must map names or globs to families; {glob!r} is not a name.")
        if isinstance(family, type) and issubclass(family, Family):
            raise InvalidType(f"{argument}[{glob!r}] must be an instance: write {family.__name__}() with parentheses.")
        if not isinstance(family, Family):
            raise InvalidType(f"{argument}[{glob!r}] must be a family such as FullRank(), got {family!r:.60}.")


def group_weights(families: Mapping[str, Family], others: Family, model: Model) -> list[Group]:
    """Cut the random weights of a model into groups, one for each glob.

    Args:
        families: Globs, or ``"last_layer"``, in order of precedence.
        others: The family of the weights that none of them names, all together.
        model: The model.

    Raises:
        InvalidArgument: If a glob matches none of the random weights.
    """
    left = list(model.random_names)
    groups = []
    for glob, family in families.items():
        chosen = select_names("families", glob, model.random_names, model.net)
        names = tuple(name for name in left if name in chosen)
        left = [name for name in left if name not in chosen]
        if names:
            groups.append(Group(family, names))
    return [*groups, Group(others, tuple(left))] if left else groups
