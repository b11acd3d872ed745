"""A fitted posterior as the prior of the next data set.

Yesterday's posterior is today's prior: what was learned stays, and new data moves it. Parameters that the posterior
holds as points have no spread to move within, so they stay where they are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.model.normal import Normal
from knowable.core.model.prior import JointPrior, Prior
from knowable.core.network.params import Buffers, Layout, Params
from knowable.errors import InvalidArgument


class PosteriorPrior(JointPrior):
    """What normal priors that were posteriors share.

    Attributes:
        fixed: Parameters that stay at their values.
        buffers: Buffers the next fit starts from.
    """

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type[PosteriorPrior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            PosteriorPrior.kinds[cls.kind] = cls

    def __init__(self, loc: Params, fixed: Params, buffers: Buffers):
        self.loc_by_name, self.fixed, self.buffers = loc, dict(fixed), buffers

    @abstractmethod
    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision matrix over ``layout``, ``(D,)``."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What has to be saved beside the means, by name."""

    @classmethod
    @abstractmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> PosteriorPrior:
        """The inverse of :meth:`tensors`; ``layout`` has the parameters in the order in which they were."""

    def given(self, frozen: Params) -> PosteriorPrior:
        """The prior once the parameters in ``frozen`` are known: the same, where they are independent of the others."""
        return self

    def start(self, params: Params) -> Params:
        """Start values for the parameters of the next model: the posterior's means."""
        known = self.loc_by_name.keys() | self.fixed.keys()
        missing = [name for name in params if name not in known]
        if missing:
            raise InvalidArgument(
                f"prior is a posterior that says nothing about {', '.join(missing[:5])}. Use the same network and "
                f"likelihood, or freeze these parameters."
            )
        start = {}
        for name, value in params.items():
            mean = self.loc_by_name[name] if name in self.loc_by_name else self.fixed[name]
            if mean.shape != value.shape:
                raise InvalidArgument(
                    f"prior has shape {tuple(mean.shape)} for {name!r}, the network {tuple(value.shape)}."
                )
            start[name] = mean.to(value).clone()
        return start

    def __repr__(self) -> str:
        return f"{type(self).__name__}({sum(v.numel() for v in self.loc_by_name.values()):,} parameters)"


class DiagonalNormalPrior(PosteriorPrior):
    """Independent normal distributions with a mean and a scale for every element."""

    kind = "diagonal"

    def __init__(self, loc: Params, scale: Params, *, fixed: Params, buffers: Buffers):
        super().__init__(loc, fixed, buffers)
        self.scale_by_name = scale

    def prior_of(self, name: str) -> Prior:
        """The normal prior on one parameter."""
        return Normal(self.scale_by_name[name], loc=self.loc_by_name[name])

    def log_prob(self, params: Params) -> Tensor:
        """Log density of one set of parameters."""
        return torch.stack([self.prior_of(name).log_prob(value).sum() for name, value in params.items()]).sum()

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        return {k: self.prior_of(k).sample(v.shape, generator=generator, like=v) for k, v in like.items()}

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """One over the squared scales."""
        return layout.flatten(self.scale_by_name) ** -2

    def tensors(self) -> dict[str, Tensor]:
        """The scales."""
        return {f"scale.{name}": value for name, value in self.scale_by_name.items()}

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> DiagonalNormalPrior:
        """From the scales."""
        return cls(loc, {name: tensors[f"scale.{name}"] for name in loc}, fixed=fixed, buffers=buffers)


class CorrelatedPrior(PosteriorPrior):
    """A normal distribution over all parameters in ``layout``, which are not independent."""

    def __init__(self, layout: Layout, loc: Params, *, fixed: Params, buffers: Buffers):
        super().__init__(loc, fixed, buffers)
        self.layout = layout

    @abstractmethod
    def log_det_precision(self) -> Tensor:
        """Logarithm of the determinant of the precision matrix."""

    @abstractmethod
    def quadratic(self, params: Params) -> Tensor:
        """(θ - μ)ᵀ P (θ - μ)."""

    def prior_of(self, name: str) -> None:
        """None: the parameters are correlated."""
        return

    def log_prob(self, params: Params) -> Tensor:
        """Log density of one set of parameters."""
        constant = self.layout.size * math.log(2 * math.pi)
        return 0.5 * (self.log_det_precision() - self.quadratic(params) - constant)

    def joint_kl(self, loc: Params, scale: Params) -> Tensor:
        r"""KL from independent normals, in closed form.

        .. math:: \tfrac12\Big(\sum_d P_{dd} s_d^2 + (m-\mu)^\top P (m-\mu) - D - \log\det P\Big) - \sum_d \log s_d
        """
        scales = self.layout.flatten(scale)
        spread = (self.precision_diagonal(self.layout) * scales**2).sum()
        total = spread + self.quadratic(loc) - self.layout.size - self.log_det_precision()
        return 0.5 * total - scales.log().sum()


class FullNormalPrior(CorrelatedPrior):
    """One normal distribution over all parameters, with all their correlations."""

    kind = "full"

    def __init__(self, layout: Layout, loc: Tensor, scale_tril: Tensor, *, fixed: Params, buffers: Buffers):
        super().__init__(layout, layout.views(loc), fixed=fixed, buffers=buffers)
        self.loc, self.scale_tril = loc, scale_tril
        self.precision = torch.cholesky_inverse(scale_tril)

    def given(self, frozen: Params) -> FullNormalPrior:
        r"""The prior of the other parameters once those in ``frozen`` are known.

        .. math:: P_{oo}, \qquad \mu_o - P_{oo}^{-1} P_{of} (\theta_f - \mu_f)
        """
        known = {name: value for name, value in frozen.items() if name in self.layout.names}
        if not known:
            return self
        others = Layout.of({name: self.loc_by_name[name] for name in self.layout.names if name not in known})
        held = Layout.of(known)
        places = self.layout.views(torch.arange(self.layout.size, device=self.loc.device))
        o, f = others.flatten(places), held.flatten(places)
        precision = self.precision[o][:, o]
        shift = self.precision[o][:, f] @ (held.flatten(known).to(self.loc) - self.loc[f])
        factor = torch.linalg.cholesky(precision)
        loc = self.loc[o] - torch.cholesky_solve(shift.unsqueeze(-1), factor).squeeze(-1)
        scale_tril = torch.linalg.cholesky(torch.cholesky_inverse(factor))
        return FullNormalPrior(others, loc, scale_tril, fixed=self.fixed, buffers=self.buffers)

    def log_prob(self, params: Params) -> Tensor:
        """Log density of one set of parameters."""
        return torch.distributions.MultivariateNormal(
            self.loc, scale_tril=self.scale_tril, validate_args=False
        ).log_prob(self.layout.flatten(params))

    def log_det_precision(self) -> Tensor:
        """From the Cholesky factor."""
        return -2 * self.scale_tril.diagonal().log().sum()

    def quadratic(self, params: Params) -> Tensor:
        """(θ - μ)ᵀ P (θ - μ)."""
        difference = self.layout.flatten(params) - self.loc
        return difference @ self.precision @ difference

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean and precision in the order of ``layout``."""
        order = layout.flatten(self.layout.views(torch.arange(self.layout.size, device=self.loc.device)))
        return self.loc[order], self.precision[order][:, order]

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision."""
        return layout.flatten(self.layout.views(self.precision.diagonal()))

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        noise = torch.randn(self.loc.shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        drawn = self.layout.views(self.loc + self.scale_tril @ noise)
        return {name: drawn[name] for name in like}

    def tensors(self) -> dict[str, Tensor]:
        """The Cholesky factor of the covariance."""
        return {"scale_tril": self.scale_tril}

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> FullNormalPrior:
        """From the Cholesky factor."""
        return cls(layout, layout.flatten(loc), tensors["scale_tril"], fixed=fixed, buffers=buffers)
