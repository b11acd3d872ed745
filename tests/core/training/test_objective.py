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
    objective(torch.zeros(1, 1), None)[0].backward()
    objective.update(optimiser)
    assert torch.equal(objective.theta.detach(), torch.full((3,), -0.5))


def test_an_objective_keeps_and_says_nothing_of_itself():
    objective = _Plain(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), 10)
    assert objective.snapshots == [] and objective.summary() == {}


OBJECTIVES = [
    kn.MeanFieldVI(), kn.MeanFieldVI(estimator="score"), kn.LowRankVI(2), kn.FullRankVI(), kn.MatrixNormalVI(),
    kn.FlowVI(), kn.NaturalVI(), kn.MomentVI(), kn.FunctionSpaceVI(prior=kn.NetworkPrior(20), context_points=4),
    kn.GaussianDropout(), kn.VariationalDropout(), kn.SparseVariationalDropout(), kn.StructuredDropout(),
]  # fmt: skip


@pytest.mark.parametrize("method", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("likelihood", [kn.Gaussian(0.3), kn.StudentT(), kn.HeteroscedasticGaussian()], ids=repr)
def test_targets_of_either_shape_have_the_same_loss(method, likelihood, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1 + isinstance(likelihood, kn.HeteroscedasticGaussian))
    )
    x, y = torch.randn(20, 2), torch.randn(20)
    objective = method.objective(kn.Model(net, likelihood), x, size=100)
    losses = []
    for target in (y, y.unsqueeze(1), y.double()):
        torch.manual_seed(seed + 1)
        losses.append(objective(x, target)[0].item())
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)


def test_targets_of_another_number_of_rows_are_refused():
    x = torch.randn(20, 2)
    objective = kn.MeanFieldVI().objective(kn.Model(nn.Linear(2, 1), kn.Gaussian(0.3)), x, size=100)
    with pytest.raises(kn.InvalidData, match="y must have 20 rows"):
        objective(x, torch.randn(1))


def test_an_own_loop_with_a_vector_of_targets_fits_the_noise(seed):
    """The std of the prediction is that of fit: with (B, B) residuals it was that of the targets, 4.44 for 0.25."""
    torch.manual_seed(seed)
    x = torch.linspace(-2, 2, 100).unsqueeze(1)
    y = 4.0 * x.squeeze(1) + 0.25 * torch.randn(100)
    objective = kn.MeanFieldVI().objective(kn.Model(nn.Linear(1, 1), kn.Gaussian()), x, size=100)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.05)
    for _ in range(2000):
        optimiser.zero_grad()
        objective(x, y)[0].backward()
        optimiser.step()
    spread = objective.posterior().predict(x).std.mean().item()
    assert abs(spread - 0.25) < 5 * 0.25 / (2 * 100) ** 0.5  # standard error of an estimated standard deviation
