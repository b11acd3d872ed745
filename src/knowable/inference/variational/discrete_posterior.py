"""Independent Bernoullis for what is 0 or 1, independent normals for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.posterior import Posterior
from knowable.core.prior import JointPrior
from knowable.core.types import Params
from knowable.errors import InvalidArgument, Unsupported


class BernoulliNormal(Posterior):
    r"""Zeros and ones with a probability each, and normals, all independent.

    .. math:: q(z, w) = \prod_j \pi_j^{z_j} (1 - \pi_j)^{1 - z_j} \prod_d \mathcal{N}(w_d \mid m_d, s_d^2)

    Args:
        model: The model.
        probabilities: Of a 1, for the binary parameters.
        loc: Means of the other random parameters.
        scale: Their standard deviations.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "bernoulli_normal"

    def __init__(self, model: Model, probabilities: Params, loc: Params, scale: Params, **common: Any):
        super().__init__(model, **common)
        self.probabilities = {k: probabilities[k].detach().clone() for k in model.random_names if k in probabilities}
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.scale = {name: scale[name].detach().clone() for name in self.loc}
        self._gates, self._layout = Layout.of(self.probabilities), Layout.of(self.loc)
        parts = (self._gates, self.probabilities), (self._layout, self.loc), (self._layout, self.scale)
        self._flat = [layout.flatten(values).to(device=model.device, dtype=model.dtype) for layout, values in parts]

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        probability, loc, scale = self._flat
        like: Any = {"generator": generator, "dtype": loc.dtype, "device": loc.device}
        uniform, noise = torch.rand((n, len(probability)), **like), torch.randn((n, len(loc)), **like)
        gates = self._gates.views((uniform < probability).to(loc.dtype))
        return {**gates, **self._layout.views(torch.addcmul(loc, scale, noise))}

    def _mean_random(self) -> Params:
        """Means: of a binary parameter its probability of being 1."""
        return {name: value.clone() for name, value in {**self.probabilities, **self.loc}.items()}

    def _std_random(self) -> Params:
        gates = {name: (value * (1 - value)).sqrt() for name, value in self.probabilities.items()}
        return {**gates, **{name: value.clone() for name, value in self.scale.items()}}

    def log_prob(self, params: Params) -> Tensor:
        """Log probability of what is binary plus log density of the rest: a scalar, or ``(n,)`` for a stack."""
        lacking = [name for name in (*self._gates.names, *self._layout.names) if name not in params]
        if lacking:
            raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
        probability, loc, scale = self._flat
        total = torch.zeros((), dtype=loc.dtype, device=loc.device)
        if self._layout.names:
            standard = (self._layout.flatten(params) - loc) / scale
            constant = scale.log().sum() + 0.5 * len(loc) * math.log(2 * math.pi)
            total = total - 0.5 * (standard**2).sum(-1) - constant
        if self._gates.names:
            gates = self._gates.flatten(params)
            chance = torch.where(gates == 1, probability, torch.where(gates == 0, 1 - probability, 0.0))
            total = total + chance.log().sum(-1)
        return total

    def as_prior(self) -> JointPrior:
        """Not there yet: a prior that is part Bernoulli with probabilities of its own, part normal."""
        raise Unsupported(
            "BernoulliNormal cannot be a prior. Freeze the gates at their likelier values and fit MeanFieldVI, whose "
            "posterior can."
        )

    def _tensors(self) -> dict[str, Tensor]:
        parts = ("probabilities", "loc", "scale")
        return {f"{part}.{name}": value for part in parts for name, value in getattr(self, part).items()}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> BernoulliNormal:
        def part(prefix: str) -> Params:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        return cls(model, part("probabilities."), part("loc."), part("scale."), **common)
