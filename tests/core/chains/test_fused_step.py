"""Tests of fused steps: one graph gives what the operations one by one give, and counts what it takes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains import target as targets
from knowable.core.chains.fused_step import FusedStep
from knowable.core.chains.target import DensityTarget, ModelTarget, Target
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout


def uphill(value_and_grad, position: Tensor, pace: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Two steps along the gradient, each chain at its own pace."""
    for _ in range(2):
        value, gradient = value_and_grad(position)
        position = position + step * pace.unsqueeze(-1) * gradient
    return position, value


def density(mode: str) -> Target:
    layout = Layout.of({"x": torch.zeros(3, dtype=torch.float64)})
    return DensityTarget(lambda p: -0.5 * p["x"].square().sum() - p["x"].exp().sum(), layout, mode=mode)


def network(mode: str, temperature: float = 1.0, prior: kn.priors.Prior | None = None) -> ModelTarget:
    torch.manual_seed(0)
    model = kn.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), kn.Gaussian(noise=0.3), prior)
    data = as_data((torch.randn(7, 2).double(), torch.randn(7, 1).double()))
    return ModelTarget(model, data, points={}, buffers=model.buffers(), mode=mode, temperature=temperature)


TARGETS = {
    "a density": density,
    "a network": network,
    "a tempered network": lambda mode: network(mode, temperature=3.0),
    "a prior without a closed form": lambda mode: network(mode, prior=kn.LaplacePrior(1.0)),
}


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["a density", *(pytest.param(each, marks=pytest.mark.slow) for each in list(TARGETS)[1:])]
)
def test_fused_or_not_a_step_is_the_same(name):
    plain, fused = TARGETS[name]("traced"), TARGETS[name]("compiled")
    position = torch.randn(5, plain.layout.size, dtype=torch.float64)
    pace, step = torch.rand(5, dtype=torch.float64), torch.tensor(0.01, dtype=torch.float64)
    expected = FusedStep(plain, uphill, gradients=2)((position, pace), (step,))
    found = FusedStep(fused, uphill, gradients=2)((position, pace), (step,))
    assert len(fused.step_graphs) == 1 and not plain.step_graphs
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert fused.gradients == plain.gradients == 10
    assert fused.function.calls == plain.function.calls == 2


@pytest.mark.slow  # the compiler takes half a minute where its cache is cold
def test_chains_in_blocks_are_the_same_chains(monkeypatch):
    whole, blocks = network("compiled"), network("compiled")
    position, pace = torch.randn(6, whole.layout.size, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    step = torch.tensor(0.01, dtype=torch.float64)
    expected = FusedStep(whole, uphill, gradients=2)((position, pace), (step,))
    monkeypatch.setattr(targets, "CHAINS_PER_BLOCK", 4)
    monkeypatch.setattr(targets, "_CACHE_BYTES", 1)
    assert (whole.block_size(6), blocks.block_size(4), blocks.block_size(9)) == (3, 4, 3)
    found = FusedStep(blocks, uphill, gradients=2)((position, pace), (step,))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_fused_goes_step_by_step(monkeypatch):
    target = network("compiled")
    monkeypatch.setattr(targets, "_BLOCK_BYTES", 1)  # rows in several pieces
    position, pace = torch.randn(2, target.layout.size, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    FusedStep(target, uphill, gradients=2)((position, pace), (torch.tensor(0.01, dtype=torch.float64),))
    assert not target.step_graphs
    assert target.gradients == 4


def half_plane(mode: str) -> Target:
    """A normal where the first coordinate is positive; elsewhere a matrix cannot be factorised."""
    layout = Layout.of({"x": torch.zeros(2, dtype=torch.float64)})

    def log_density(params):
        x = params["x"]
        root = torch.linalg.cholesky(x[0] * torch.eye(2, dtype=x.dtype))
        return -0.5 * x.square().sum() + 0.0 * root.sum()

    return DensityTarget(log_density, layout, mode=mode)


@pytest.mark.parametrize("mode", ["eager", "traced", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_chain_whose_matrix_cannot_be_factorised_stops_no_other(mode):
    target = half_plane(mode)
    position = torch.tensor([[1.0, 2.0], [-1.0, 2.0], [0.5, -1.0]], dtype=torch.float64)
    inside = torch.tensor([0, 2])
    value, gradient = target.value_and_grad(position)
    torch.testing.assert_close(value[inside], -0.5 * position[inside].square().sum(1))
    torch.testing.assert_close(gradient[inside], -position[inside])
    assert value[1] == -torch.inf and gradient[1].isnan().all()
    assert target.value(position)[1] == -torch.inf
    pace, step = torch.ones(3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    moved, _ = FusedStep(target, uphill, gradients=2)((position, pace), (step,))
    torch.testing.assert_close(moved[inside], 0.81 * position[inside])
    assert moved[1].isnan().all()
