"""Atoms: a posterior made of one or many sets of parameters, each with a weight.

A point estimate is one atom, an ensemble or a chain is many, importance sampling weighs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Params, index_params, number_of_draws, with_prefix, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.tensor_file import Unchecked
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument


class Particles(Posterior):
    """K sets of parameters with weights that sum to one.

    Args:
        model: The model.
        stack: The random parameters, each with a leading dimension K.
        log_weights: Log weights ``(K,)``, normalised here; equal if not given.
        buffer_stack: Buffers of the network that differ from atom to atom (the running statistics of networks trained
            apart), each with a leading dimension K.
        common: See :class:`Posterior`.
    """

    family = "particles"

    def __init__(
        self,
        model: Model,
        stack: Params,
        log_weights: Tensor | None = None,
        *,
        buffer_stack: Buffers | None = None,
        **common: Any,
    ):
        super().__init__(model, **common)
        self._stack = {name: stack[name].detach() for name in model.random_names if name in stack}
        self._unchecked: Unchecked | None = None
        count = number_of_draws(stack)
        self.log_weights = normalised_log_weights(log_weights, count, model)
        self.buffer_stack = {name: value.detach() for name, value in (buffer_stack or {}).items()}
        for name, value in self._stack.items():
            if len(value) != count:
                raise InvalidArgument(f"stack has {len(value)} of {name!r} and {count} of others: as many are needed.")
        if any(len(value) != count for value in self.buffer_stack.values()):
            raise InvalidArgument(f"buffer_stack must have a leading dimension of {count}, one entry for each atom.")

    @property
    def stack(self) -> Params:
        """The random parameters of all atoms, each with a leading dimension K."""
        if self._unchecked is not None:
            self._unchecked.check_all()
            self._unchecked = None
        return self._stack

    @stack.setter
    def stack(self, stack: Params) -> None:
        self._stack, self._unchecked = stack, None

    def check_when_used(self, unchecked: Unchecked | None) -> None:
        """Take over atoms in mapped memory: each is read, and compared with its hash, when it is drawn."""
        self._unchecked = unchecked

    def __len__(self) -> int:
        return number_of_draws(self._stack)

    @property
    def weights(self) -> Tensor:
        """The atoms' weights."""
        return self.log_weights.exp()

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        index = torch.multinomial(self.weights, n, replacement=True, generator=generator)
        return self._atoms(index)

    def _atoms(self, index: Tensor) -> Params:
        """Some of the atoms, in the model's dtype and on its device: they may be stored otherwise, and elsewhere."""
        kept = index.to(next(iter(self._stack.values())).device)
        if self._unchecked is not None:
            self._unchecked.check_rows(kept)
        like = {"dtype": self.model.dtype, "device": self.model.device}
        return {name: value.to(**like) for name, value in index_params(self._stack, kept).items()}

    def _mean_random(self) -> Params:
        weights = self.weights.to(self.model.dtype)
        return {name: torch.tensordot(weights, v.to(weights.dtype), dims=1) for name, v in self.stack.items()}

    def _std_random(self) -> Params:
        mean = self._mean_random()
        return {
            name: torch.tensordot(self.weights.to(mean[name].dtype), (v - mean[name]) ** 2, dims=1).sqrt()
            for name, v in self.stack.items()
        }

    def draws_for_prediction(self, samples: int, seed: int) -> tuple[int, Tensor]:
        """All atoms with their weights; where there are more than ``samples``, that many of them."""
        return (len(self), self.log_weights) if len(self) <= samples else super().draws_for_prediction(samples, seed)

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """Atoms themselves, or a systematic resample of them where there are too many."""
        stack = self._atoms(self._chosen(start, stop, samples, seed))
        fixed = {name: value.expand(stop - start, *value.shape) for name, value in self.points.items()}
        return self._ordered({**stack, **fixed})

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """The buffers of the same atoms."""
        if not self.buffer_stack:
            return {}
        return index_params(self.buffer_stack, self._chosen(start, stop, samples, seed))

    def _chosen(self, start: int, stop: int, samples: int, seed: int) -> Tensor:
        """Which atoms draws ``start`` to ``stop`` of a prediction are."""
        if len(self) <= samples:
            return torch.arange(start, stop, device=self.model.device)
        chosen = systematic_indices(
            self.weights, samples, torch.rand((), generator=generator_for(seed, "predict")).item()
        )
        return chosen[start:stop].to(self.model.device)

    def _draws_to_export(self, samples: int | None) -> tuple[Posterior, int, int, dict[str, Tensor]]:
        return self, len(self) if samples is None else samples, 1, {}

    def _tensors(self) -> dict[str, Tensor]:
        stacks = {**with_prefix("stack.", self.stack), **with_prefix("buffers.", self.buffer_stack)}
        return {**stacks, "log_weights": self.log_weights}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> Particles:
        stack, buffers = without_prefix("stack.", tensors), without_prefix("buffers.", tensors)
        loaded = cls(model, stack, tensors["log_weights"], buffer_stack=buffers, **common)
        loaded.log_weights = tensors["log_weights"]  # to the bit: they were normalised before they were saved
        return loaded

    def __repr__(self) -> str:
        what = "point estimate" if len(self) == 1 else f"{len(self)} atoms"
        return super().__repr__().replace("Particles(", f"Particles({what}, ", 1)


def normalised_log_weights(log_weights: Tensor | None, count: int, model: Model) -> Tensor:
    """Log weights ``(count,)`` that sum to one; equal ones if None are given."""
    if log_weights is None:
        log_weights = torch.zeros(count, dtype=model.dtype)
    log_weights = log_weights.to(model.device)
    if log_weights.shape != (count,) or not torch.isfinite(log_weights.logsumexp(0)):
        raise InvalidArgument(
            f"log_weights must be {count} numbers, not all -inf; got shape {tuple(log_weights.shape)}."
        )
    return log_weights.log_softmax(0)


def systematic_indices(weights: Tensor, n: int, offset: float) -> Tensor:
    """Systematic resampling (Kitagawa, 1996): n indices, in order and on the CPU, in proportion to ``weights``.

    They are where n evenly spaced points, the first at ``offset`` / n, fall in the cumulative weights; an index with a
    share w of the total is drawn floor(n w) or ceil(n w) times. ``offset`` is drawn uniformly from [0, 1).
    """
    points = (torch.arange(n, dtype=torch.float64) + offset) / n
    total = weights.double().cpu().cumsum(0)
    return torch.searchsorted(total / total[-1], points).clamp_max(len(weights) - 1)
