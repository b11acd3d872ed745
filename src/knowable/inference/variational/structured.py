"""Variational methods whose distribution is a product of families over groups of weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.product import ProductPosterior
from knowable.core.support.checks import check_choice, check_count
from knowable.inference.variational.divergence import GroupPrior
from knowable.inference.variational.family import Drawn, Family, FamilyModule, Group, check_families, group_weights
from knowable.inference.variational.method import BoundMethod
from knowable.inference.variational.objective import VariationalObjective, first_values


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


# --- The evidence lower bound of a product of families, each over its own group of weights ---------------------------

KL_GRADIENTS = ("auto", "closed", "path")
_OTHER_DRAWS = 8  # for a KL without a closed form, when it is asked for by itself


class StructuredObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_g q_g(\theta_g)`, by reparameterised weight draws.

    The KL of a group is in closed form where its prior is normal and its family has entropy and moments, and of as
    much of the rest as the priors allow. Its gradient may be taken along the draws instead (``kl_gradient="path"``):

    .. math:: \nabla_\phi E_q[\log q_\phi(\theta) - \log p(\theta)]
        = E_\epsilon\big[\nabla_\phi \theta_\phi(\epsilon)\, \nabla_\theta (\log q - \log p)(\theta)\big]

    Args:
        model: The model.
        size: Number of training examples N.
        groups: The weights, and the family of each group.
        kl_gradient: ``"closed"``, ``"path"``, or ``"auto"``: what suits each family.
        draws: Weight draws in a step.
        beta: Factor on the KL; 1 is Bayes.
        temperature: How often the entropy counts; 1 is Bayes.
        kl_warmup: Epochs over which it rises to its full value.
        initial_scale: Standard deviation all weights start with.
        start: Values to begin at, where they are not the model's own.

    Attributes:
        parts: The distributions of the groups.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        groups: Sequence[Group],
        *,
        kl_gradient: str = "auto",
        draws: int = 1,
        beta: float = 1.0,
        temperature: float = 1.0,
        kl_warmup: int | None = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
    ):
        super().__init__(model, size, draws=draws, beta=beta, temperature=temperature, kl_warmup=kl_warmup, start=start)
        first = first_values(model, start)
        layouts = [Layout.of({name: first[name] for name in group.names}) for group in groups]
        self.parts: Iterable[FamilyModule] = nn.ModuleList(  # type: ignore[assignment]
            group.family.build(layout, layout.flatten(first), initial_scale)
            for group, layout in zip(groups, layouts, strict=True)
        )
        self.kl_gradient = kl_gradient
        whole = any(model.prior.prior_of(name) is None for name in model.random_names)
        self.priors = None if whole else [GroupPrior.of(model, layout) for layout in layouts]

    @property
    def dimension(self) -> int:
        """As many as a mean and a scale for every weight: what else there is has no unit."""
        weights = sum(part.layout.size for part in self.parts)
        return 2 * weights + sum(value.numel() for value in self.points)

    def tensors(self) -> dict[str, Tensor]:
        """Also what the families keep beside their parameters."""
        return {**super().tensors(), **{f"state.{name}": value for name, value in self.named_buffers()}}

    # --- the variational distribution --------------------------------------------------------------------------------

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all groups, by name."""
        return self._by_name([part.draw(count)[0] for part in self.parts])

    def _by_name(self, values: Sequence[Tensor]) -> list[Params]:
        draws: list[Params] = [{} for _ in range(len(values[0]))]
        for part, each in zip(self.parts, values, strict=True):
            for draw, flat in zip(draws, each.unbind(), strict=True):
                draw.update(part.layout.views(flat))
        return draws

    def posterior(self, **common: Any) -> Posterior:
        """The family's own posterior, or for several groups their product."""
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        parts = list(self.parts)
        if len(parts) == 1:
            return parts[0].posterior(self.model, **about)
        return ProductPosterior(self.model, [part.posterior(self.model) for part in parts], **about)

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        with torch.autocast(x.device.type, enabled=False):  # only the network's own arithmetic is of lower precision
            drawn = [self._draw(part) for part in self.parts]
            kl = self._divergence(drawn, points)
            entropy = None if self.temperature == 1.0 else -_negative_entropy_of(drawn)
        draws = self._by_name([each.values for each in drawn])
        each = [self.log_likelihood_of(x, y, {**points, **draw}) for draw in draws]
        return self.loss_and_terms(sum(each[1:], each[0]) / len(each), kl, points, entropy=entropy)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step, and then what families do after it: all gradients of a step are of one form of q."""
        super().update(optimiser)
        with torch.no_grad():
            for part in self.parts:
                part.after_step()

    def divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        return self._divergence(self._draws_for_terms())

    def entropy(self) -> Tensor:
        """H[q], in closed form where the families have it, else over draws."""
        return -_negative_entropy_of(self._draws_for_terms())

    def _draws_for_terms(self) -> list[Drawn]:
        return [part.draw_with_terms(max(_OTHER_DRAWS, self.draws)) for part in self.parts]

    def _divergence(self, drawn: Sequence[Drawn], points: Params | None = None) -> Tensor:
        points = self.point_params() if points is None else points
        total = _negative_entropy_of(drawn)
        if self.priors is None:
            return total - self._joint_log_prior(drawn)
        for part, prior, each in zip(self.parts, self.priors, drawn, strict=True):
            total = total + prior.cross_entropy(each, points, normal=part.normal_marginals)
        return total

    def _joint_log_prior(self, drawn: Sequence[Drawn]) -> Tensor:
        """E_q[log p] over draws, of a prior over all weights as a whole."""
        draws = self._by_name([each.values for each in drawn])
        return torch.stack([self.model.prior.log_prob(draw) for draw in draws]).mean()

    def _draw(self, part: FamilyModule) -> Drawn:
        """Draws for a step; where the gradient goes along them, they are all that the bound is told of q."""
        if not (part.prefers_path if self.kl_gradient == "auto" else self.kl_gradient == "path"):
            return part.draw_with_terms(self.draws)
        values, log_density = part.draw(self.draws)
        entropy, held = part.entropy(), part.held_log_density(values)
        if held is None:
            return Drawn(values, log_density, entropy, part.moments())
        value = _negative_entropy(Drawn(values, log_density, entropy, None))
        return Drawn(values, held + (value - held.mean()).detach(), None, None)  # its value, and the gradient of held


def _negative_entropy_of(drawn: Sequence[Drawn]) -> Tensor:
    return torch.stack([_negative_entropy(each) for each in drawn]).sum()


def _negative_entropy(drawn: Drawn) -> Tensor:
    if drawn.entropy is not None:
        return -drawn.entropy
    assert drawn.log_density is not None
    return drawn.log_density.mean()
