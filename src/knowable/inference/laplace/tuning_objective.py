"""Training in which the evidence chooses noise and prior scale as it goes (Immer et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.point_estimate import PointObjective
from knowable.core.types import Buffers, Params

_FIRST = 500  # steps before the first choice: the weights should have found the data
_STEPS, _EPOCHS = 200, 4  # at the least, from one choice to the next
_FARTHEST = 0.5  # that the logarithm of a scale moves at once
_SETTLED = 0.02  # a move that is not worth waiting for
_LONGEST = 10_000  # steps for which the loss is not called settled because scales still move

Choose = Callable[[Params, Buffers], Params]
"""``(params, buffers) -> values of the scales that maximise the evidence there``."""


class TuningObjective(PointObjective):
    """-log p(D, θ) / N at a noise and a prior scale that are chosen anew every few epochs.

    Args:
        model: The model.
        size: Number of rows.
        names: The parameters that are chosen: noise, hyperparameters of the prior.
        choose: Chooses them.
    """

    def __init__(self, model: Model, size: int, *, names: list[str], choose: Choose):
        super().__init__(model, size, use_prior=True, held=names)
        self._chosen, self._choose = names, choose
        self._steps, self._epochs = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
        self._last = torch.zeros(2, dtype=torch.long)  # steps and epochs at the last choice
        self._moved = torch.full((), math.inf, dtype=torch.float64)

    @property
    def settles_from(self) -> float:
        """Not while the scales still move."""
        return math.inf if self._moved > _SETTLED and self._steps < _LONGEST else 0.0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        self._steps += 1
        return super().forward(x, y)

    def end_of_epoch(self) -> None:
        """Choose the scales, if it is time."""
        self._epochs += 1
        since = torch.stack([self._steps, self._epochs]) - self._last
        if self._steps < _FIRST or since[0] < _STEPS or since[1] < _EPOCHS:
            return
        params = {name: value.detach() for name, value in self.params().items()}
        chosen = self._choose(params, self.net_buffers)
        moves = [self._move(params[name], value) for name, value in chosen.items()]
        self._moved.fill_(max(moves, default=0.0))
        self._last.copy_(torch.stack([self._steps, self._epochs]))

    @staticmethod
    def _move(scale: Tensor, towards: Tensor) -> float:
        """Change a scale in place, not too far; return how far the largest of its elements went."""
        step = (towards.to(scale) - scale).clamp(-_FARTHEST, _FARTHEST)
        scale += step
        return step.abs().max().item()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes."""
        own = {"steps": self._steps, "epochs": self._epochs, "last": self._last, "moved": self._moved}
        return {**super().tensors(), **{f"tuning.{name}": value for name, value in own.items()}}
