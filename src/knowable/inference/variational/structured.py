"""Variational methods whose distribution is a product of families over groups of weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from knowable.core.checks import check_choice, check_count
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.inference.variational.family import Family
from knowable.inference.variational.family_groups import check_families, group_weights
from knowable.inference.variational.structured_objective import KL_GRADIENTS, StructuredObjective


@dataclass(frozen=True, repr=False)
class FamiliesVI(BoundMethod):
    """A variational method that takes other families for groups of weights.

    Args:
        draws: Weight draws per step; None is one.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as ``{"head.*": FullRank()}``;
            the first that matches wins, and groups are independent. Weights that none of them names have the method's
            own family.
    """

    draws: int | None = None
    families: Mapping[str, Family] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.families is not None:
            check_families("families", self.families)

    def _by_groups(
        self, model: Model, size: int, own: Family, *, kl_gradient: str = "auto", start: Params | None = None
    ) -> StructuredObjective:
        """The loss where weights are in groups, ``own`` being the family of those that ``families`` does not name."""
        return StructuredObjective(
            model, size, group_weights(self.families or {}, own, model), kl_gradient=kl_gradient,
            draws=self.draws or 1, beta=self.beta, temperature=self.temperature, kl_warmup=self.kl_warmup,
            initial_scale=self.initial_scale, start=start,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class StructuredVI(FamiliesVI):
    """A variational method that has a family of its own, for the weights to which ``families`` gives no other.

    Args:
        kl_gradient: How the gradient of the KL is computed. ``"closed"``: from its closed form, where there is one.
            ``"path"``: along the weight draws that the likelihood is given too (Roeder et al., 2017); the noise of the
            two cancels as q approaches the posterior, and until then there is more of it. ``"auto"``: what suits each
            family, which is ``"path"`` for a full covariance, or a radial or real NVP flow, of up to 300 weights. All
            aim at the same optimum.
    """

    kl_gradient: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kl_gradient", self.kl_gradient, KL_GRADIENTS)

    @property
    @abstractmethod
    def own_family(self) -> Family:
        """The family of all weights to which no other was given."""

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        return self._by_groups(model, size, self.own_family, kl_gradient=self.kl_gradient, start=start)
