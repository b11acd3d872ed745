"""Tests of what the training loop needs of an objective."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.training.objective import Objective
from tests.core.cases import batch_norm_net


class _Plain(Objective):
    def __init__(self, model: kn.Model, size: int):
        super().__init__(model, size)
        self.theta = nn.Parameter(torch.zeros(3))

    def forward(self, x, y):
        return self.theta.sum(), {}

    def predictive_log_likelihood(self, x, y):
        return torch.zeros(len(x))


def test_an_objective_lists_everything_that_training_changes():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    names = {
        "parameter.theta",
        *(f"buffer.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert set(objective.tensors()) == names
    assert (objective.size, objective.epoch) == (10, 0.0)


def test_the_networks_own_parameters_are_not_the_objectives():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    assert [name for name, _ in objective.named_parameters()] == ["theta"]


def test_the_tensors_are_the_ones_in_use():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    with torch.no_grad():
        objective.tensors()["parameter.theta"].fill_(2.0)
        objective.tensors()["buffer.1.running_mean"].fill_(2.0)
    assert objective.theta.sum() == 6.0
    assert objective.net_buffers["1.running_mean"].sum() == 8.0


def test_the_buffers_are_the_fits_own():
    model = kn.Model(batch_norm_net(), kn.Gaussian(0.1))
    first, second = _Plain(model, 10), _Plain(model, 10)
    first.net_buffers["1.running_mean"].fill_(5.0)
    assert second.net_buffers["1.running_mean"].sum() == 0
    assert model.net[1].running_mean.sum() == 0


def test_an_objective_must_define_its_loss():
    with pytest.raises(TypeError, match="abstract"):
        Objective(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)  # type: ignore[abstract]


def test_an_objective_moves_by_the_optimisers_own_step_unless_it_has_another():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.5)
    objective(None, None)[0].backward()
    objective.update(optimiser)
    assert torch.equal(objective.theta.detach(), torch.full((3,), -0.5))


def test_an_objective_keeps_and_says_nothing_of_itself():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    assert objective.snapshots == [] and objective.summary() == {}
