"""A posterior made of independent parts, each over its own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import ProductNormal
from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.network.params import Params, joined_params, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, Unsupported


class ProductPosterior(Posterior):
    r"""Independent posteriors of groups of parameters: :math:`q(\theta) = \prod_g q_g(\theta_g)`.

    Args:
        model: The model.
        parts: Posteriors of this model over disjoint groups of its random parameters; together they hold every random
            parameter once. Point estimates and buffers belong to the product, not to its parts.
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
        return joined_params(part._sample_random(n, generator) for part in self.parts)

    def _mean_random(self) -> Params:
        return joined_params(part._mean_random() for part in self.parts)

    def _std_random(self) -> Params:
        return joined_params(part._std_random() for part in self.parts)

    def log_prob(self, params: Params) -> Tensor:
        return torch.stack([part.log_prob(params) for part in self.parts]).sum(0)

    def as_prior(self) -> PosteriorPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        normals = []
        for part in self.parts:
            prior = part.as_prior()
            if not isinstance(prior, PosteriorPrior):
                raise Unsupported(f"{type(part).__name__} cannot be part of a prior: only normal posteriors can.")
            normals.append(prior.normal)
        return PosteriorPrior(ProductNormal.of(normals), fixed=self.points, buffers=self.buffers)

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
                model, without_prefix(f"{k}.", tensors), **about["settings"]
            )
            for k, about in enumerate(about_parts)
        ]  # fmt: skip
        return cls(model, parts, **common)

    def __repr__(self) -> str:
        kinds = ", ".join(type(part).__name__ for part in self.parts)
        return Posterior.__repr__(self).replace("(", f"({kinds}: ", 1)
