"""A fitted posterior as the prior of the next data set.

Yesterday's posterior is today's prior: what was learned stays, and new data moves it. Parameters that the posterior
holds as points have no spread to move within, so they stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import IndependentNormal, JointNormal
from knowable.core.model.prior import JointPrior, Normal, Prior
from knowable.core.network.params import Buffers, Layout, Params, with_prefix, without_prefix
from knowable.errors import InvalidArgument


class PosteriorPrior(JointPrior):
    """A normal posterior as a prior.

    Attributes:
        normal: The distribution.
        fixed: Parameters that stay at their values.
        buffers: Buffers the next fit starts from.
    """

    kind = "posterior"

    def __init__(self, normal: JointNormal, *, fixed: Params, buffers: Buffers):
        self.normal, self.fixed, self.buffers = normal, dict(fixed), buffers
        if self.correlated:
            self._precision_diagonal = normal.layout.flatten(normal.precision_diagonal())

    @property
    def correlated(self) -> bool:
        """Whether it does not factorise over parameters."""
        return not self.normal.independent

    def condition(self, known: Params) -> PosteriorPrior:
        """The prior of the other parameters, given the values of those in ``known``."""
        return PosteriorPrior(self.normal.condition(known), fixed=self.fixed, buffers=self.buffers)

    def prior_of(self, name: str) -> Prior | None:
        """The normal prior on one parameter; None if the parameters are correlated."""
        if isinstance(self.normal, IndependentNormal):
            return Normal(self.normal.scale[name], loc=self.normal.loc[name])
        return None

    def log_prob(self, params: Params) -> Tensor:
        if self.correlated:
            return self.normal.log_prob(params)
        return torch.stack([self._each(name).log_prob(value).sum() for name, value in params.items()]).sum()

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        if self.correlated:
            drawn = self.normal.sample(1, generator)
            return {name: drawn[name][0] for name in like}
        return {k: self._each(k).sample(v.shape, generator=generator, like=v) for k, v in like.items()}

    def _each(self, name: str) -> Prior:
        prior = self.prior_of(name)
        assert prior is not None  # asked only where the parameters are independent
        return prior

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        """Mean ``(D,)`` and precision ``(D, D)`` over ``layout``, where the parameters are correlated."""
        return self.normal.dense(layout) if self.correlated else None

    def joint_kl(self, loc: Params, scale: Params) -> Tensor | None:
        r"""KL from independent normals, in closed form, where the parameters are correlated.

        .. math:: \tfrac12\Big(\sum_d P_{dd} s_d^2 + (m-\mu)^\top P (m-\mu) - D - \log\det P\Big) - \sum_d \log s_d
        """
        if not self.correlated:
            return None
        layout = self.normal.layout
        scales = layout.flatten(scale)
        trace = (self._precision_diagonal * scales**2).sum()
        total = trace + self.normal.quadratic(loc) - layout.size - self.normal.log_det_precision()
        return 0.5 * total - scales.log().sum()

    def start(self, params: Params) -> Params:
        """Start values for the parameters of the next model: the posterior's means."""
        known = {**self.fixed, **self.normal.means}
        missing = [name for name in params if name not in known]
        if missing:
            raise InvalidArgument(
                f"prior is a posterior that says nothing about {', '.join(missing[:5])}. Use the same network and "
                f"likelihood, or freeze these parameters."
            )
        for name, value in params.items():
            if known[name].shape != value.shape:
                raise InvalidArgument(
                    f"prior has shape {tuple(known[name].shape)} for {name!r}, the network {tuple(value.shape)}."
                )
        return {name: known[name].to(value).clone() for name, value in params.items()}

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        means = self.normal.means
        tensors = {
            **with_prefix("loc.", means),
            **with_prefix("fixed.", self.fixed),
            **with_prefix("buffers.", self.buffers),
            **self.normal.tensors(),
        }
        return {"posterior": self.normal.kind, "order": list(means)}, tensors

    @classmethod
    def from_description(cls, about: Mapping[str, Any], tensors: dict[str, Tensor]) -> PosteriorPrior:
        loc, fixed, buffers = (without_prefix(part, tensors) for part in ("loc.", "fixed.", "buffers."))
        loc = {name: loc[name] for name in about.get("order") or loc}
        normal = JointNormal.kinds[about["posterior"]].from_tensors(loc, dict(tensors))
        return cls(normal, fixed=fixed, buffers=buffers)

    def __repr__(self) -> str:
        return f"PosteriorPrior({self.normal.kind} normal, {self.normal.layout.size:,} parameters)"
