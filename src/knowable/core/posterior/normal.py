"""Normal posteriors, one for each structure of the covariance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor

from knowable.core.model.joint_normal import (
    FlatNormal,
    FullCovarianceNormal,
    IndependentNormal,
    JointNormal,
    ProductNormal,
    saved_means,
)
from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.structured_normal import DiagonalPlusLowRank, KroneckerBlock, KroneckerFactored
from knowable.core.network.params import Layout, Params, joined_params, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, Unsupported


class NormalPosterior(Posterior):
    """What normal posteriors share: the distribution, whose fields (``loc``, ``scale``, ...) are attributes here too.

    Args:
        model: The model.
        normal: The distribution of the random parameters; it is copied.
        common: See :class:`Posterior`.
    """

    def __init__(self, model: Model, normal: JointNormal, **common: Any):
        super().__init__(model, **common)
        self.normal = normal.copied()
        for field in fields(self.normal):  # type: ignore[arg-type]
            setattr(self, field.name, getattr(self.normal, field.name))

    @property
    def covariance(self) -> Tensor:
        """Covariance matrix of the flat random parameters, ``(D, D)``, in the order of ``normal.layout``."""
        return self.normal.covariance_matrix()

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return self.normal.sample(n, generator)

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.normal.means.items()}

    def _std_random(self) -> Params:
        return {name: value.clone() for name, value in self.normal.std().items()}

    def log_alpha(self) -> Params:
        r"""Log of noise over signal of every random parameter, :math:`\log \alpha = \log (s^2 / m^2)`, elementwise.

        Weights above ``log_alpha_threshold`` are drowned in their own noise (Molchanov et al., 2017).
        """
        means = self.normal.means
        return {name: 2.0 * (std.log() - means[name].abs().log()) for name, std in self.normal.std().items()}

    def log_prob(self, params: Params) -> Tensor:
        return self.normal.log_prob(params)

    def as_prior(self) -> PosteriorPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return PosteriorPrior(self.normal, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.normal.mean_tensors(), **self.normal.tensors()}

    @classmethod
    def of(cls, model: Model, normal: JointNormal, **common: Any) -> Self:
        """The posterior whose arguments are the fields of ``normal``."""
        parts = {field.name: getattr(normal, field.name) for field in fields(normal)}  # type: ignore[arg-type]
        return cls(model, **parts, **common)

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> Self:
        return cls.of(model, saved_normal(model, tensors), **common)


def saved_normal(model: Model, tensors: dict[str, Tensor]) -> JointNormal:
    """The distribution whose tensors a normal posterior saved; their names tell its structure."""
    structure: type[JointNormal] = IndependentNormal
    if "scale_tril" in tensors:
        structure = FullCovarianceNormal
    elif "basis" in tensors:
        structure = DiagonalPlusLowRank
    elif any(name.startswith("block.") for name in tensors):
        structure = KroneckerFactored
    means = saved_means(tensors)
    return structure.from_tensors(means if issubclass(structure, FlatNormal) else in_order(model, means), tensors)


def in_order(model: Model, params: Params) -> Params:
    """The random parameters among ``params``, in the order of the model."""
    return {name: params[name] for name in model.random_names if name in params}


class DiagonalNormal(NormalPosterior):
    r"""Independent normal distributions: :math:`q(\theta) = \prod_d \mathcal{N}(\theta_d \mid m_d, s_d^2)`.

    Args:
        model: The model.
        loc: Means of the random parameters.
        scale: Their standard deviations.
        common: See :class:`Posterior`.
    """

    family = "diagonal_normal"
    loc: Params
    scale: Params

    def __init__(self, model: Model, loc: Params, scale: Params, **common: Any):
        super().__init__(model, IndependentNormal(in_order(model, loc), in_order(model, scale)), **common)


class FullNormal(NormalPosterior):
    r"""A normal distribution with a full covariance: :math:`q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)`.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale_tril: Lower Cholesky factor L of the covariance, ``(D, D)``.
        common: See :class:`Posterior`.
    """

    family = "full_normal"
    layout: Layout
    loc: Tensor
    scale_tril: Tensor

    def __init__(self, model: Model, layout: Layout, loc: Tensor, scale_tril: Tensor, **common: Any):
        super().__init__(model, FullCovarianceNormal(layout, loc, scale_tril), **common)


class LowRankNormal(NormalPosterior):
    r"""A normal distribution whose covariance is a diagonal and a low-rank part.

    .. math:: \Sigma = D^{1/2} \big(I + Q\, \mathrm{diag}(\lambda - 1)\, Q^\top\big) D^{1/2}

    Make one from a covariance or a precision with :meth:`of_covariance` and :meth:`of_precision`.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale: Square roots of the diagonal D, ``(D,)``.
        basis: Q, ``(D, k)``, with orthonormal columns.
        basis_variance: λ, ``(k,)``, above 0: the variance along each column of Q, in units of the diagonal.
        common: See :class:`Posterior`.
    """

    family = "low_rank_normal"
    layout: Layout
    loc: Tensor
    scale: Tensor
    basis: Tensor
    basis_variance: Tensor

    def __init__(
        self, model: Model, layout: Layout, loc: Tensor, scale: Tensor, basis: Tensor, basis_variance: Tensor,
        **common: Any,
    ):  # fmt: skip
        super().__init__(model, DiagonalPlusLowRank(layout, loc, scale, basis, basis_variance), **common)

    @classmethod
    def of_covariance(
        cls, model: Model, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor, **common: Any
    ) -> LowRankNormal:
        """The covariance is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        return cls.of(model, DiagonalPlusLowRank.of_covariance(layout, loc, diagonal, factor), **common)

    @classmethod
    def of_precision(
        cls, model: Model, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor, **common: Any
    ) -> LowRankNormal:
        """The precision (inverse covariance) is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        return cls.of(model, DiagonalPlusLowRank.of_precision(layout, loc, diagonal, factor), **common)

    @property
    def rank(self) -> int:
        """Number of columns k of the low-rank part."""
        return len(self.basis_variance)


class KroneckerNormal(NormalPosterior):
    r"""Independent layers, each normal with a Kronecker-factored precision.

    Args:
        model: The model.
        loc: Means of the random parameters.
        blocks: Precisions; together they hold every random parameter once.
        common: See :class:`Posterior`.
    """

    family = "kronecker_normal"
    loc: Params
    blocks: tuple[KroneckerBlock, ...]

    def __init__(self, model: Model, loc: Params, blocks: Iterable[KroneckerBlock], **common: Any):
        super().__init__(model, KroneckerFactored(in_order(model, loc), tuple(blocks)), **common)


# --- A posterior made of independent parts, each over its own parameters ---------------------------------------------


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
