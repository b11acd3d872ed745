"""Objectives whose minimum is known, for the training loop."""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import Data, as_data
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Training, TrainingSettings
from tests.core.cases import linear_model


def settings_of(**given: Any) -> TrainingSettings:
    """Settings of the loop, those of ``kn.Training`` among them."""
    own = {each.name: given.pop(each.name) for each in fields(Training) if each.name in given}
    return TrainingSettings(**given, training=Training(**own))


class Quadratic(Objective):
    r"""Mean of (θ - y)² / 2 over the batch: the minimum is the mean of y. It keeps what it saw."""

    def __init__(
        self, *, start: float = 0.0, centre: float | None = None, fail_at: dict[int, BaseException] | None = None
    ):
        super().__init__(linear_model(), 10)
        self.theta = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        self.fail_at, self.calls = fail_at or {}, 0
        self.batches: list[list[float]] = []
        self.losses: list[float] = []
        self.validated: list[tuple[float, float]] = []
        self.centre = centre  # of the held-out data

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        if self.calls in self.fail_at:
            raise self.fail_at[self.calls]
        loss = 0.5 * (self.theta - y).square().mean()
        self.batches.append(y.flatten().tolist())
        self.losses.append(loss.item())
        return loss, {"twice": 2 * loss.detach()}

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        score = -(self.theta - (self.centre or 0.0)).square().expand(len(x))
        self.validated.append((score[0].item(), self.theta.item()))
        return score


def some_data(rows: int = 10, generator: torch.Generator | None = None) -> Data:
    y = torch.randn(rows, generator=generator, dtype=torch.float64) + 1.0
    return as_data((torch.zeros(rows, 2, dtype=torch.float64), y))


def run_quietly(objective: Objective, data: Data, training: TrainingSettings, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        return train(objective, data, training, **settings)


class Cliff(Quadratic):
    """The loss is NaN once θ is above 10."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().forward(x, y)
        return torch.where(self.theta.squeeze() > 10.0, torch.nan, loss), terms


FAR = as_data((torch.zeros(4, 2), torch.full((4,), 3.0, dtype=torch.float64)))
