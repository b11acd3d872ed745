"""Variational families, and the ELBO of a product of families, each over its own group of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.model.prior import Prior
from knowable.core.network.params import Layout, Params, select_names
from knowable.core.posterior.normal import ProductPosterior
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.inference.variational.divergence import HALF_LOG_TWO_PI_E, NormalSegment, prior_segments
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)


class Family(ABC):
    """A kind of distribution over a group of weights; concrete families are frozen dataclasses of their settings.

    Every family has means ``loc`` and standard deviations ``initial_scale`` when training begins (a flow: nearly), so
    that one can be exchanged for another without tuning.
    """

    @abstractmethod
    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FamilyModule:
        """The distribution over the weights of ``layout``, begun at ``loc`` ``(D,)``.

        Raises:
            Unsupported: If the family does not support this number of weights, or their shapes.
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
        stretches: Whether it stays in its family when it is stretched along any one direction; in a group too large
            for that, along any one weight.
    """

    normal_marginals: ClassVar[bool] = False
    stretches: ClassVar[bool] = False

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    @abstractmethod
    def draw(self, count: int) -> tuple[Tensor, Tensor | None]:
        """K reparameterised draws ``(K, D)`` from the global generator, and their log densities ``(K,)``.

        The densities are None where :meth:`entropy` is a closed form.
        """

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """Become the member of the family that is nearest to a normal, in KL(q ‖ normal), if there is a rule for it.

        Args:
            mean: In double precision, ``(D,)``.
            precision: ``(D, D)``, positive definite.
        """
        raise Unsupported(f"{type(self).__name__} has no rule for the distribution nearest to a normal.")

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


KL_GRADIENTS = ("auto", "closed", "path")
_OTHER_DRAWS = 8  # for a KL without a closed form, when it is asked for by itself


class StructuredObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_g q_g(\theta_g)`, by reparameterised weight draws.

    The KL of a group is in closed form where its prior is normal and its family has entropy and moments, and of as
    much of the rest as the priors allow. Its gradient may be taken along the draws instead (``kl_gradient="path"``):

    .. math:: \nabla_\phi E_q[\log q_\phi(\theta) - \log p(\theta)]
        = E_\epsilon\big[\nabla_\phi \theta_\phi(\epsilon)\, \nabla_\theta (\log q - \log p)(\theta)\big]
    """

    def __init__(
        self,
        model: Model,
        size: int,
        groups: Sequence[Group],
        *,
        kl_gradient: str = "auto",
        initial_scale: float = 0.02,
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
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

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        """Whether all families are normal."""
        return all(part.normal_marginals for part in self.parts)

    @property
    def stretches(self) -> bool:  # type: ignore[override]
        """Whether all families do."""
        return all(part.stretches for part in self.parts)

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """Groups are independent: each is given its own block of the precision."""
        first = self.model.params()
        whole = Layout.of({name: first[name] for name in self.model.random_names})
        for part in self.parts:
            places = whole.places_of(part.layout.names)
            part.fit_normal(mean[places], precision[places][:, places])

    def tensors(self) -> dict[str, Tensor]:
        """Also what the families keep beside their parameters."""
        return {**super().tensors(), **{f"state.{name}": value for name, value in self.named_buffers()}}

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
        parts = list(self.parts)
        if len(parts) == 1:
            return parts[0].posterior(self.model, **self.shared(common))
        return ProductPosterior(self.model, [part.posterior(self.model) for part in parts], **self.shared(common))

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points = self.point_params()
        with torch.autocast(x.device.type, enabled=False):  # only the network's own arithmetic is of lower precision
            drawn = [self._draw(part) for part in self.parts]
            kl = self._kl(drawn, points)
            entropy = None if self.temperature == 1.0 else -_negative_entropy_of(drawn)
        thetas = self._by_name([each.values for each in drawn])
        log_likelihood = expected_log_likelihood(self, x, y, points, thetas, weights)
        return negative_elbo(self, log_likelihood, kl, points, entropy=entropy)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step, then :meth:`FamilyModule.after_step` of every family."""
        super().update(optimiser)
        with torch.no_grad():
            for part in self.parts:
                part.after_step()

    def kl_divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        return self._kl(self._draws_for_terms(), self.point_params())

    def entropy(self) -> Tensor:
        """H[q], in closed form where the families have it, else over draws."""
        return -_negative_entropy_of(self._draws_for_terms())

    def _draws_for_terms(self) -> list[Drawn]:
        return [part.draw_with_terms(max(_OTHER_DRAWS, self.draws)) for part in self.parts]

    def _kl(self, drawn: Sequence[Drawn], points: Params) -> Tensor:
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
        """Draws for a step, with the terms that suit the gradient of the KL."""
        if not (part.prefers_path if self.kl_gradient == "auto" else self.kl_gradient == "path"):
            return part.draw_with_terms(self.draws)
        values, log_density = part.draw(self.draws)
        entropy, held = part.entropy(), part.held_log_density(values)
        if held is None:
            return Drawn(values, log_density, entropy, part.moments())
        value = _negative_entropy(Drawn(values, log_density, entropy, None))
        return Drawn(values, held + (value - held.mean()).detach(), None, None)  # its value, and the gradient of held


def lower_factor(precision: Tensor) -> Tensor:
    """The Cholesky factor of the covariance: lower triangular L with L Lᵀ = P⁻¹, without an inverse of P."""
    reverse = torch.linalg.cholesky(precision.flip(0, 1)).flip(0, 1)  # upper triangular R with R Rᵀ = P
    identity = torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(reverse, identity, upper=True).T


def _negative_entropy_of(drawn: Sequence[Drawn]) -> Tensor:
    return torch.stack([_negative_entropy(each) for each in drawn]).sum()


def _negative_entropy(drawn: Drawn) -> Tensor:
    if drawn.entropy is not None:
        return -drawn.entropy
    assert drawn.log_density is not None
    return drawn.log_density.mean()


# --- which weights get which family ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Weights that share one distribution."""

    family: Family
    names: tuple[str, ...]


def check_groups(draws: int | None, families: Any, kl_gradient: str = "auto") -> None:
    """Check the settings of methods with families for groups of weights."""
    if draws is not None:
        check_count("draws", draws)
    if families is not None:
        check_families("families", families)
    check_choice("kl_gradient", kl_gradient, KL_GRADIENTS)


def check_families(argument: str, families: Any) -> None:
    """Refuse what is not a mapping from globs to families; ``argument`` is its name in messages."""
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


# --- the prior's side of the KL --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupPrior:
    """The priors of the weights of one group."""

    model: Model
    layout: Layout
    segments: tuple[NormalSegment, ...]
    others: tuple[str, ...]  # those whose prior is not a fixed normal

    @classmethod
    def of(cls, model: Model, layout: Layout) -> GroupPrior:
        """The priors of the weights of ``layout``."""
        segments, others = prior_segments(layout, model, normal_only=True)
        return cls(model, layout, tuple(segments), tuple(others))

    def cross_entropy(self, drawn: Drawn, points: Params, *, normal: bool) -> Tensor:
        """-E_q[log p], in closed form as far as there is one."""
        if drawn.moments is None:
            return self.sampled(drawn.values, points)
        means, variances = drawn.moments
        sizes = [segment.stop - segment.start for segment in self.segments]
        pieces = zip(self.segments, means.split(sizes), variances.split(sizes), strict=True)
        total = _sum([segment.cross_entropy(m, v) for segment, m, v in pieces if segment.entropy], like=means)
        if not self.others:
            return total
        by_name = self.layout.views(means), self.layout.views(variances), self.layout.views(drawn.values)
        for name in self.others:
            mean, variance, values = (each[name] for each in by_name)
            prior = self._bound(name, points)
            closed = _closed_form(prior, mean, variance, normal=normal)
            total = total + (_sampled(prior, values) if closed is None else closed)
        return total

    def sampled(self, values: Tensor, points: Params) -> Tensor:
        """The mean of -log p over draws ``(K, D)``."""
        pieces = values.split([segment.stop - segment.start for segment in self.segments], dim=1)
        fixed = [
            segment.sampled_cross_entropy(piece)
            for segment, piece in zip(self.segments, pieces, strict=True)
            if segment.entropy
        ]
        total = _sum(fixed, like=values)
        views = self.layout.views(values) if self.others else {}
        return total + sum(_sampled(self._bound(name, points), views[name]) for name in self.others)

    def _bound(self, name: str, points: Params) -> Prior:
        prior = self.model.prior.bound(name, points)
        assert prior is not None  # a prior over all parameters as a whole is asked as a whole
        return prior


def _closed_form(prior: Prior, mean: Tensor, variance: Tensor, *, normal: bool) -> Tensor | None:
    """-E[log p] of independent elements with these moments, or None."""
    if normal:
        scale = variance.sqrt()
        kl = prior.kl_from_normal(mean, scale)
        return None if kl is None else kl + scale.log().sum() + HALF_LOG_TWO_PI_E * scale.numel()
    moments = prior.normal_moments()
    if moments is None:
        return None
    spread = moments[1] * variance
    return 0.5 * spread.sum() - prior.log_prob(mean).sum()


def _sampled(prior: Prior, values: Tensor) -> Tensor:
    return -prior.log_prob(values).sum() / len(values)


def _sum(terms: list[Tensor], *, like: Tensor) -> Tensor:
    return torch.stack(terms).sum() if terms else like.new_zeros(())
