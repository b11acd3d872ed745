"""A posterior made of independent parts, each over its own parameters, and the same as a prior."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import CorrelatedPrior, DiagonalNormalPrior, PosteriorPrior
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, Unsupported

NormalPart = DiagonalNormalPrior | CorrelatedPrior


class ProductPosterior(Posterior):
    r"""Independent posteriors of groups of parameters: :math:`q(\theta) = \prod_g q_g(\theta_g)`.

    Args:
        model: The model.
        parts: Posteriors of this model that say something of some of its random parameters only; together they hold
            every random parameter once. Point estimates and buffers are the product's, not theirs.
        common: See :class:`Posterior`.
    """

    family = "product"

    def __init__(self, model: Model, parts: Sequence[Posterior], **common: Any):
        super().__init__(model, **common)
        self.parts = list(parts)
        self.names = [tuple(part._mean_random()) for part in self.parts]
        held = [name for names in self.names for name in names]
        wanted = [name for name in model.random_names if name not in self.points]
        if sorted(held) != sorted(wanted):
            raise InvalidArgument(f"parts must hold each of {sorted(wanted)} once, got {sorted(held)}.")

    def part_of(self, name: str) -> Posterior:
        """The part that holds a parameter."""
        for part, names in zip(self.parts, self.names, strict=True):
            if name in names:
                return part
        raise InvalidArgument(f"name must be one of the random parameters, got {name!r}.")

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return _joined(part._sample_random(n, generator) for part in self.parts)

    def _mean_random(self) -> Params:
        return _joined(part._mean_random() for part in self.parts)

    def _std_random(self) -> Params:
        return _joined(part._std_random() for part in self.parts)

    def log_prob(self, params: Params) -> Tensor:
        """Sum of the log densities of the parts: a scalar for one draw, ``(n,)`` for a stack."""
        return torch.stack([part.log_prob(params) for part in self.parts]).sum(0)

    def as_prior(self) -> ProductPrior | DiagonalNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        priors = []
        for part in self.parts:
            prior = part.as_prior()
            if not isinstance(prior, NormalPart):
                raise Unsupported(f"{type(part).__name__} cannot be part of a prior: only normal posteriors can.")
            priors.append(prior)
        independent = [prior for prior in priors if isinstance(prior, DiagonalNormalPrior)]
        if len(independent) < len(priors):
            return ProductPrior(priors, fixed=self.points, buffers=self.buffers)
        loc = _joined(each.loc_by_name for each in independent)
        scale = _joined(each.scale_by_name for each in independent)
        return DiagonalNormalPrior(loc, scale, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{k}.{key}": value for k, part in enumerate(self.parts) for key, value in part._tensors().items()}

    def _settings(self) -> dict[str, Any]:
        return {"about_parts": [{"family": part.family, "settings": part._settings()} for part in self.parts]}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, about_parts: list[dict[str, Any]], **common: Any
    ) -> ProductPosterior:
        parts = [
            Posterior.families[about["family"]]._from_tensors(
                model, _unprefixed(f"{k}.", tensors), **about["settings"]
            )
            for k, about in enumerate(about_parts)
        ]  # fmt: skip
        return cls(model, parts, **common)

    def __repr__(self) -> str:
        kinds = ", ".join(type(part).__name__ for part in self.parts)
        return Posterior.__repr__(self).replace("(", f"({kinds}: ", 1)


class ProductPrior(CorrelatedPrior):
    """The same as a prior: one normal over all parameters, whose precision is made of blocks.

    Args:
        parts: Priors of disjoint groups of parameters.
        fixed: Parameters that stay at their values.
        buffers: Buffers the next fit starts from.
    """

    kind = "product"

    def __init__(self, parts: Iterable[NormalPart], *, fixed: Params, buffers: Buffers):
        self.parts = tuple(parts)
        loc = _joined(part.loc_by_name for part in self.parts)
        super().__init__(Layout.of(loc), loc, fixed=fixed, buffers=buffers)

    def given(self, frozen: Params) -> ProductPrior:
        """The prior of the others: each part given what is known of its own parameters."""
        kept = [part for part in self.parts if part.loc_by_name.keys() - frozen.keys()]
        return ProductPrior((_given(part, frozen) for part in kept), fixed=self.fixed, buffers=self.buffers)

    def log_det_precision(self) -> Tensor:
        """Sum over the parts."""
        return torch.stack([_log_det(part) for part in self.parts]).sum()

    def quadratic(self, params: Params) -> Tensor:
        """Sum over the parts."""
        return torch.stack([_quadratic(part, params) for part in self.parts]).sum()

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        shares = [{name: like[name] for name in part.loc_by_name} for part in self.parts]
        drawn = _joined(part.sample(share, generator=generator) for part, share in zip(self.parts, shares, strict=True))
        return {name: drawn[name] for name in like}

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision."""
        own = [Layout.of(part.loc_by_name) for part in self.parts]
        found = [each.views(part.precision_diagonal(each)) for part, each in zip(self.parts, own, strict=True)]
        return layout.flatten(_joined(found))

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean and dense precision in the order of ``layout``: for few parameters."""
        mean = layout.flatten(self.loc_by_name)
        precision = mean.new_zeros((layout.size, layout.size))
        places = layout.views(torch.arange(layout.size, device=mean.device))
        for part in self.parts:
            own = Layout.of(part.loc_by_name)
            index = own.flatten(places)
            joint = part.joint_normal(own)
            precision[index.unsqueeze(1), index] = part.precision_diagonal(own).diag() if joint is None else joint[1]
        return mean, precision

    def tensors(self) -> dict[str, Tensor]:
        """Those of the parts: ``part.1.full.scale_tril`` and the like; ``name.1.0.weight`` says what they hold."""
        saved: dict[str, Tensor] = {}
        for k, part in enumerate(self.parts):
            saved |= {f"name.{k}.{place}.{name}": torch.zeros(()) for place, name in enumerate(part.loc_by_name)}
            saved |= {f"part.{k}.{part.kind}.{key}": value for key, value in part.tensors().items()}
        return saved

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> ProductPrior:
        """From those of the parts."""
        held = [key.split(".", 3) for key in tensors if key.startswith("name.")]
        parts = []
        for k in range(1 + max(int(key[1]) for key in held)):
            names = [name for _, name in sorted((int(key[2]), key[3]) for key in held if key[1] == str(k))]
            own = {name: loc[name] for name in names}
            stored = _unprefixed(f"part.{k}.", tensors)
            kind = next(iter(stored)).partition(".")[0]
            made = PosteriorPrior.kinds[kind].from_tensors(
                Layout.of(own), own, _unprefixed(f"{kind}.", stored), fixed={}, buffers={}
            )
            assert isinstance(made, NormalPart)
            parts.append(made)
        return cls(parts, fixed=fixed, buffers=buffers)


def _joined(parts: Iterable[Params]) -> Params:
    return {name: value for part in parts for name, value in part.items()}


def _given(part: NormalPart, frozen: Params) -> NormalPart:
    """A part once some of its parameters are known."""
    if isinstance(part, CorrelatedPrior):
        made = part.given(frozen)
        assert isinstance(made, CorrelatedPrior)
        return made
    loc, scale = (
        {name: value for name, value in values.items() if name not in frozen}
        for values in (part.loc_by_name, part.scale_by_name)
    )
    return DiagonalNormalPrior(loc, scale, fixed=part.fixed, buffers=part.buffers)


def _log_det(part: NormalPart) -> Tensor:
    """Log determinant of the precision."""
    if isinstance(part, CorrelatedPrior):
        return part.log_det_precision()
    return -2.0 * torch.stack([scale.log().sum() for scale in part.scale_by_name.values()]).sum()


def _quadratic(part: NormalPart, params: Params) -> Tensor:
    """Squared distance from the mean in units of the precision."""
    if isinstance(part, CorrelatedPrior):
        return part.quadratic(params)
    loc, scale = part.loc_by_name, part.scale_by_name
    return torch.stack([((params[name] - loc[name]) / scale[name]).square().sum() for name in loc]).sum()


def _unprefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
