r"""Normal distributions over named tensors, one value object for each structure of the covariance.

.. math:: \mathcal{N}(\theta \mid \mu, P^{-1})

A posterior holds one to draw from, a prior holds the same one to be compared with: everything either of them needs is
here once. Those with a low-rank part and with Kronecker factors are in :mod:`~knowable.core.model.structured_normal`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from knowable.core.network.params import Layout, Params, joined_params, without_prefix
from knowable.errors import InvalidArgument


class JointNormal(ABC):
    """A normal distribution over several named tensors."""

    kind: ClassVar[str]  # name of the structure in saved artifacts
    kinds: ClassVar[dict[str, type[JointNormal]]] = {}
    independent: ClassVar[bool] = False  # whether all elements are independent
    layout: Layout  # order of the parameters in a flat vector

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            JointNormal.kinds[cls.kind] = cls

    # --- what a structure defines ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def means(self) -> Params:
        """Means by name."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        """Draw n sets of parameters, stacked along a new leading dimension."""

    @abstractmethod
    def std(self) -> Params:
        """Standard deviations by name."""

    @abstractmethod
    def quadratic(self, params: Params) -> Tensor:
        """(θ - μ)ᵀ P (θ - μ): a scalar for one set of parameters, ``(n,)`` for a stack."""

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Log determinant of the precision matrix P."""

    @abstractmethod
    def precision_diagonal(self) -> Params:
        """Diagonal of the precision matrix, by name."""

    @abstractmethod
    def precision_matrix(self) -> Tensor:
        """The precision matrix in the order of ``layout``, ``(D, D)``: for few parameters."""

    @abstractmethod
    def condition(self, known: Params) -> JointNormal:
        r"""The distribution of the other parameters o, given the values of those in ``known``, f.

        .. math:: P_{oo}, \qquad \mu_o - P_{oo}^{-1} P_{of} (\theta_f - \mu_f)
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved besides the means, by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> JointNormal:
        """The inverse of :meth:`tensors`, for means in the order in which they were."""

    # --- what follows ------------------------------------------------------------------------------------------------

    def log_prob(self, params: Params) -> Tensor:
        """Log density: a scalar for one set of parameters, ``(n,)`` for a stack."""
        check_has(params, self.layout.names)
        constant = self.layout.size * math.log(2 * math.pi)
        return 0.5 * (self.log_det_precision() - self.quadratic(params) - constant)

    def covariance_matrix(self) -> Tensor:
        """The covariance matrix in the order of ``layout``, ``(D, D)``: for few parameters."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self.precision_matrix()))

    def dense(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean ``(D,)`` and precision matrix ``(D, D)`` in the order of another ``layout``: for few parameters."""
        precision = self.precision_matrix()
        order = layout.flatten(self.layout.views(torch.arange(self.layout.size, device=precision.device)))
        return layout.flatten(self.means), precision[order][:, order]

    def mean_tensors(self) -> dict[str, Tensor]:
        """The means as a posterior saves them; :func:`saved_means` reads them."""
        return {f"loc.{name}": value for name, value in self.means.items()}

    def copied(self) -> Self:
        """A copy that shares neither memory nor a gradient with what it was made from."""
        return type(self)(**{field.name: _copied(getattr(self, field.name)) for field in fields(self)})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class IndependentNormal(JointNormal):
    r"""Independent elements: :math:`\prod_d \mathcal{N}(\theta_d \mid m_d, s_d^2)`."""

    kind = "diagonal"
    independent = True

    loc: Params  # means by name
    scale: Params  # standard deviations by name

    @property
    def means(self) -> Params:
        return self.loc

    @cached_property
    def layout(self) -> Layout:
        """Order of the parameters in a flat vector."""
        return Layout.of(self.loc)

    @cached_property
    def _flat(self) -> tuple[Tensor, Tensor]:
        return self.layout.flatten(self.loc), self.layout.flatten(self.scale)

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        loc, scale = self._flat
        return self.layout.views(torch.addcmul(loc, scale, standard_noise(n, loc, generator)))

    def std(self) -> Params:
        return self.scale

    def quadratic(self, params: Params) -> Tensor:
        loc, scale = self._flat
        return ((self.layout.flatten(params) - loc) / scale).square().sum(-1)

    def log_det_precision(self) -> Tensor:
        return -2.0 * self._flat[1].log().sum()

    def precision_diagonal(self) -> Params:
        return {name: value**-2 for name, value in self.scale.items()}

    def precision_matrix(self) -> Tensor:
        return (self._flat[1] ** -2).diag()

    def condition(self, known: Params) -> IndependentNormal:
        kept = [name for name in self.loc if name not in known]
        return IndependentNormal({name: self.loc[name] for name in kept}, {name: self.scale[name] for name in kept})

    def tensors(self) -> dict[str, Tensor]:
        return {f"scale.{name}": value for name, value in self.scale.items()}

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> IndependentNormal:
        return cls(loc, {name: tensors[f"scale.{name}"] for name in loc})


class FlatNormal(JointNormal):
    """What correlated normals over one flat vector share.

    Attributes:
        layout: Order of the parameters in the flat vector.
    """

    loc: Tensor  # mean, (D,)

    @property
    def means(self) -> Params:
        return self.layout.views(self.loc)

    def split(self, known: Params) -> tuple[Layout, Layout] | None:
        """Layouts of the other parameters and of those in ``known``; None if ``known`` has none of ours."""
        held = Layout.of({name: known[name] for name in self.layout.names if name in known})
        means = self.means
        others = Layout.of({name: means[name] for name in self.layout.names if name not in known})
        return (others, held) if held.names else None

    def places(self, layout: Layout) -> Tensor:
        """Where the elements of ``layout`` are in the flat vector."""
        return layout.flatten(self.layout.views(torch.arange(self.layout.size, device=self.loc.device)))

    def mean_tensors(self) -> dict[str, Tensor]:
        """The flat mean, and an empty tensor of the shape of each parameter, in order."""
        entries = enumerate(zip(self.layout.names, self.layout.shapes, strict=True))
        return {"loc": self.loc, **{f"shape.{i}.{name}": torch.zeros(shape) for i, (name, shape) in entries}}


@dataclass(frozen=True, eq=False)
class FullCovarianceNormal(FlatNormal):
    r"""A full covariance: :math:`\mathcal{N}(\theta \mid m, L L^\top)`."""

    kind = "full"

    layout: Layout  # order of the parameters in the flat vector
    loc: Tensor  # mean, (D,)
    scale_tril: Tensor  # lower Cholesky factor L of the covariance, (D, D)

    @cached_property
    def _precision(self) -> Tensor:
        return torch.cholesky_inverse(self.scale_tril)

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        return self.layout.views(self.loc + standard_noise(n, self.loc, generator) @ self.scale_tril.T)

    def std(self) -> Params:
        return self.layout.views(self.scale_tril.square().sum(-1).sqrt())

    def quadratic(self, params: Params) -> Tensor:
        difference = (self.layout.flatten(params) - self.loc).unsqueeze(-1)
        return torch.linalg.solve_triangular(self.scale_tril, difference, upper=False).squeeze(-1).square().sum(-1)

    def log_det_precision(self) -> Tensor:
        return -2.0 * self.scale_tril.diagonal().log().sum()

    def precision_diagonal(self) -> Params:
        return self.layout.views(self._precision.diagonal())

    def precision_matrix(self) -> Tensor:
        return self._precision

    def covariance_matrix(self) -> Tensor:
        return self.scale_tril @ self.scale_tril.T

    def condition(self, known: Params) -> FullCovarianceNormal:
        layouts = self.split(known)
        if layouts is None:
            return self
        others, held = layouts
        o, f = self.places(others), self.places(held)
        shift = self._precision[o][:, f] @ (held.flatten(known).to(self.loc) - self.loc[f])
        factor = torch.linalg.cholesky(self._precision[o][:, o])
        loc = self.loc[o] - torch.cholesky_solve(shift.unsqueeze(-1), factor).squeeze(-1)
        return FullCovarianceNormal(others, loc, torch.linalg.cholesky(torch.cholesky_inverse(factor)))

    def tensors(self) -> dict[str, Tensor]:
        return {"scale_tril": self.scale_tril}

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> FullCovarianceNormal:
        layout = Layout.of(loc)
        return cls(layout, layout.flatten(loc), tensors["scale_tril"])


@dataclass(frozen=True, eq=False)
class ProductNormal(JointNormal):
    """Independent groups of parameters, each with a structure of its own."""

    kind = "product"

    parts: tuple[JointNormal, ...]  # normals of disjoint groups of parameters

    @classmethod
    def of(cls, parts: Iterable[JointNormal]) -> ProductNormal | IndependentNormal:
        """The product; where all elements of all parts are independent, as one such normal."""
        parts = tuple(parts)
        independent = [part for part in parts if isinstance(part, IndependentNormal)]
        if len(independent) < len(parts):
            return cls(parts)
        return IndependentNormal(joined_params(p.loc for p in independent), joined_params(p.scale for p in independent))

    @cached_property
    def means(self) -> Params:
        return joined_params(part.means for part in self.parts)

    @cached_property
    def layout(self) -> Layout:
        """Order of the parameters in a flat vector: part by part."""
        return Layout.of(self.means)

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        return joined_params(part.sample(n, generator) for part in self.parts)

    def std(self) -> Params:
        return joined_params(part.std() for part in self.parts)

    def quadratic(self, params: Params) -> Tensor:
        return torch.stack([part.quadratic(params) for part in self.parts]).sum(0)

    def log_det_precision(self) -> Tensor:
        return torch.stack([part.log_det_precision() for part in self.parts]).sum()

    def precision_diagonal(self) -> Params:
        return joined_params(part.precision_diagonal() for part in self.parts)

    def precision_matrix(self) -> Tensor:
        return torch.block_diag(*(part.precision_matrix() for part in self.parts))

    def condition(self, known: Params) -> ProductNormal:
        """Each part given what is known of its own parameters; parts known as a whole go."""
        kept = (part for part in self.parts if part.means.keys() - known.keys())
        return ProductNormal(tuple(part.condition(known) for part in kept))

    def tensors(self) -> dict[str, Tensor]:
        """Those of the parts: ``part.1.full.scale_tril`` and the like; ``name.1.0.weight`` says what they hold."""
        saved: dict[str, Tensor] = {}
        for k, part in enumerate(self.parts):
            saved |= {f"name.{k}.{place}.{name}": torch.zeros(()) for place, name in enumerate(part.means)}
            saved |= {f"part.{k}.{part.kind}.{key}": value for key, value in part.tensors().items()}
        return saved

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> ProductNormal:
        held = [key.split(".", 3) for key in tensors if key.startswith("name.")]
        parts = []
        for k in range(1 + max(int(key[1]) for key in held)):
            names = [name for _, name in sorted((int(key[2]), key[3]) for key in held if key[1] == str(k))]
            stored = without_prefix(f"part.{k}.", tensors)
            kind = next(iter(stored)).partition(".")[0]
            own = {name: loc[name] for name in names}
            parts.append(JointNormal.kinds[kind].from_tensors(own, without_prefix(f"{kind}.", stored)))
        return cls(tuple(parts))


def check_has(params: Params, names: Iterable[str]) -> None:
    """Refuse parameters that lack one of ``names``."""
    lacking = [name for name in names if name not in params]
    if lacking:
        raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")


def saved_means(tensors: dict[str, Tensor]) -> Params:
    """Means by name, from what :meth:`JointNormal.mean_tensors` gave."""
    if "loc" not in tensors:
        return without_prefix("loc.", tensors)
    keys = sorted((key.split(".", 2) for key in tensors if key.startswith("shape.")), key=lambda parts: int(parts[1]))
    layout = Layout(tuple(parts[2] for parts in keys), tuple(tensors[".".join(parts)].shape for parts in keys))
    return layout.views(tensors["loc"])


def standard_noise(n: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal noise ``(n, D)`` for a flat vector like ``like`` ``(D,)``."""
    return torch.randn((n, len(like)), generator=generator, dtype=like.dtype, device=like.device)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return value.detach().contiguous().clone() if isinstance(value, Tensor) else value
