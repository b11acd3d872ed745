"""A mixture of posteriors of the same model, such as an ensemble of Laplace or variational fits."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import Params, expand_params, with_prefix, without_prefix
from knowable.core.posterior.particles import normalised_log_weights, systematic_indices
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import build_posterior, describe_posterior
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.randomness import derive_seed, generator_for
from knowable.errors import InvalidArgument


class Mixture(Posterior):
    r"""Several posteriors with weights: :math:`q(\theta) = \sum_k w_k\, q_k(\theta)`.

    A draw first chooses a member by its weight, then draws from it. A prediction is the mixture of the members'
    predictions, each made in the member's own way and with its own buffers; outcomes have the shape that the members
    agree on, and the training rows of all members are its own.

    Args:
        model: The model.
        members: Posteriors of this model. Where it has point estimates, these are the mixture's, the same for all.
        log_weights: Log weights, normalised here; equal if not given.
        common: See :class:`Posterior`.
    """

    family = "mixture"

    def __init__(self, model: Model, members: Sequence[Posterior], log_weights: Tensor | None = None, **common: Any):
        if not members:
            raise InvalidArgument("members must be at least one posterior, got none.")
        super().__init__(model, **{"buffers": members[0].buffers, **common})
        self.members = [_of_model(member, model, self.points) for member in members]
        log_weights = None if log_weights is None else log_weights.to(model.dtype)
        self.log_weights = normalised_log_weights(log_weights, len(members), model)
        shapes = [member.target_shape for member in members]
        self.target_shape = shapes[0] if all(each == shapes[0] for each in shapes) else None
        for member in members:
            if member.training_rows is not None:
                self.training_rows = member.training_rows.joined(self.training_rows)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def weights(self) -> Tensor:
        """The members' weights."""
        return self.log_weights.exp()

    # --- draws and moments -------------------------------------------------------------------------------------------

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        index = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        drawn: Params = {}
        for k in index.unique().tolist():
            places = torch.nonzero(index == k).flatten()
            for name, value in self._draws_of(self.members[k], len(places), generator).items():
                drawn.setdefault(name, value.new_empty((n, *value.shape[1:])))[places] = value
        return drawn

    def _draws_of(self, member: Posterior, n: int, generator: torch.Generator | None) -> Params:
        """Draws of the mixture's random parameters, some of which may be point estimates in the member."""
        draws = {**expand_params(member.points, n), **member._sample_random(n, generator)}
        return {name: draws[name] for name in self._random_names}

    @property
    def _random_names(self) -> list[str]:
        return [name for name in self.model.random_names if name not in self.points]

    def _mean_random(self) -> Params:
        means = [member.mean() for member in self.members]
        return {name: self._mix([mean[name] for mean in means]) for name in self._random_names}

    def _std_random(self) -> Params:
        """By the law of total variance."""
        means, spreads = [each.mean() for each in self.members], [each.std() for each in self.members]
        variances = {}
        for name, centre in self._mean_random().items():
            each = [s[name] ** 2 + (m[name] - centre) ** 2 for m, s in zip(means, spreads, strict=True)]
            variances[name] = self._mix(each)
        return {name: value.sqrt() for name, value in variances.items()}

    def _mix(self, values: list[Tensor]) -> Tensor:
        return torch.tensordot(self.weights.to(values[0].dtype), torch.stack(values), dims=1)

    def log_prob(self, params: Params) -> Tensor:
        """Log density, where all members have one."""
        each = torch.stack([member.log_prob(params) for member in self.members])  # (K,) or (K, n)
        weights = self.log_weights.to(each.dtype)
        return (each + weights.view(-1, *(1,) * (each.dim() - 1))).logsumexp(0)

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        counts, log_weights = self._shares(samples, seed)
        parts = []
        for k, count in enumerate(counts):
            if count:
                budget = None if memory is None else max(1, memory * count // samples)
                parts.append(self.members[k]._predict(x, count, derive_seed(seed, "member", k), budget))
        kept = log_weights[[k for k, count in enumerate(counts) if count]]
        return type(parts[0]).joined(parts, kept)

    def _outputs_of_draws(
        self, x: Tensor | None, samples: int, seed: int, memory: int | None
    ) -> tuple[Params, Tensor | None, Tensor]:
        """Of each member as many draws as its weight says, so that draws weigh the same."""
        offset = torch.rand((), generator=generator_for(seed, "predict")).item()
        counts = torch.bincount(systematic_indices(self.weights, samples, offset), minlength=len(self)).tolist()
        parts = []
        for k, count in enumerate(counts):
            if count:
                budget = None if memory is None else max(1, memory * count // samples)
                found = self.members[k]._outputs_of_draws(x, count, derive_seed(seed, "member", k), budget)
                parts.append((math.log(count / samples), found))
        stack = {name: torch.cat([part[name] for _, (part, _, _) in parts]) for name in self.model.params()}
        outputs = [part for _, (_, part, _) in parts if part is not None]
        weights = torch.cat([share + own for share, (_, _, own) in parts])
        return stack, torch.cat(outputs) if outputs else None, weights

    def _shares(self, samples: int, seed: int) -> tuple[list[int], Tensor]:
        """How many of the draws each member makes, and the members' log weights in the prediction.

        All members make the same number of draws; where there are more members than draws, members are resampled by
        their weights.
        """
        count = len(self)
        if count <= samples:
            return [samples // count + (k < samples % count) for k in range(count)], self.log_weights
        chosen = systematic_indices(
            self.weights, samples, torch.rand((), generator=generator_for(seed, "predict")).item()
        )
        counts = torch.bincount(chosen, minlength=count)
        return counts.tolist(), (counts / samples).log().to(self.log_weights)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        found = {"log_weights": self.log_weights}
        for k, member in enumerate(self.members):
            own = {k: v for k, v in member.points.items() if k not in self.points or not torch.equal(v, self.points[k])}
            parts = {"posterior": member._tensors(), "point": own, "buffer": member.buffers}
            for part, tensors in parts.items():
                found |= with_prefix(f"{k}.{part}.", tensors)
        return found

    def _settings(self) -> dict[str, Any]:
        return {"about_members": [describe_posterior(member) for member in self.members]}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, about_members: list[dict[str, Any]], **common: Any
    ) -> Mixture:
        shared = common.get("points") or {}
        members = []
        for k, about in enumerate(about_members):
            own, points, buffers = (
                without_prefix(f"{k}.{part}.", tensors) for part in ("posterior", "point", "buffer")
            )
            members.append(build_posterior(model, about, own, points={**shared, **points}, buffers=buffers))
        loaded = cls(model, members, tensors["log_weights"], **common)
        loaded.log_weights = tensors["log_weights"]  # to the bit: they were normalised before they were saved
        return loaded

    def __repr__(self) -> str:
        kinds = sorted({type(member).__name__ for member in self.members})
        return Posterior.__repr__(self).replace("(", f"({len(self)} members: {', '.join(kinds)}; ", 1)


def _of_model(member: Posterior, model: Model, points: Params) -> Posterior:
    """A member as a posterior of ``model``: it may have been fitted with the model's point estimates held fixed."""
    if member.model is model:
        return member
    bound = copy.copy(member)
    bound.model, bound.points, bound._kept = model, {**points, **member.points}, None
    return bound
