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
_SETTLED = 0.1  # nats: a gain that is not worth waiting for
_LONGEST = 10_000  # steps for which the loss is not called settled because of the scales

Choose = Callable[[Params, Buffers], tuple[Params, float]]
"""``(params, buffers) -> values of the scales that maximise the evidence there, gain in nats``."""


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
        self._gain = torch.full((), math.inf, dtype=torch.float64)  # of the last choice

    @property
    def settles_from(self) -> float:
        """Not while the scales still have something to gain."""
        return math.inf if self._gain > _SETTLED and self._steps < _LONGEST else 0.0

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        self._steps += 1
        return super().forward(x, y, weights)

    def end_of_epoch(self) -> None:
        """Choose the scales, if it is time."""
        self._epochs += 1
        since = torch.stack([self._steps, self._epochs]) - self._last
        if self._steps < _FIRST or since[0] < _STEPS or since[1] < _EPOCHS:
            return
        params = {name: value.detach() for name, value in self.params().items()}
        chosen, gain = self._choose(params, self.net_buffers)
        for name, value in chosen.items():
            params[name] += (value.to(params[name]) - params[name]).clamp(-_FARTHEST, _FARTHEST)
        self._gain.fill_(gain)
        self._last.copy_(torch.stack([self._steps, self._epochs]))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes."""
        own = {"steps": self._steps, "epochs": self._epochs, "last": self._last, "gain": self._gain}
        return {**super().tensors(), **{f"tuning.{name}": value for name, value in own.items()}}
