"""Blocks of draws, resampling, and what weights are worth."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.sampling import weighing
from knowable.inference.sampling.sampler import Start
from knowable.inference.sampling.weighing import (
    JointDensity,
    PriorProposal,
    drawn_again,
    effective_sizes,
    systematic,
    weigh,
)


def small_model(likelihood=None) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = kn.Model(
        nn.Linear(2, 1).double(), likelihood or kn.Gaussian(), {"bias": kn.LaplacePrior(2.0), "*": kn.Normal(1.0)}
    )
    return model, (torch.randn(7, 2, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64))


def density_of(model, data) -> JointDensity:
    return JointDensity(model, as_data(data, model), Start(torch.zeros(1, 0), {}, model.buffers()))


@pytest.mark.parametrize("likelihood", [kn.Gaussian(), kn.Gaussian(0.5), kn.StudentT()])
def test_joint_density_is_that_of_the_model(likelihood):
    model, data = small_model(likelihood)
    density = density_of(model, data)
    position, _ = PriorProposal(model, density.layout).draw(70, torch.Generator().manual_seed(0))
    draws = [density.layout.views(flat) for flat in position]
    expected = torch.stack([model.log_joint(params, *data, size=7) for params in draws])
    assert torch.allclose(density(position), expected, atol=1e-9)


def test_draws_are_the_same_when_made_again(monkeypatch):
    model, data = small_model(kn.Gaussian(1.0))
    density = density_of(model, data)
    proposal = PriorProposal(model, density.layout)
    run = weigh(proposal, density, 150, smooth=False, seed=3, progress=False)
    whole = drawn_again(proposal, run, None, 3)
    assert torch.allclose(density.log_likelihood(whole), run.log_weights)
    index = torch.tensor([0, 3, 64, 149])
    assert torch.equal(drawn_again(proposal, run, index, 3), whole[index])


def test_large_draws_go_in_small_blocks():
    assert weighing._block_size(3) == 64
    assert weighing._block_size(2**20) == 8
    assert weighing._block_size(2**30) == 1


def test_systematic_resampling_takes_each_as_often_as_its_weight_says(generator):
    log_weights = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05], dtype=torch.float64).log()
    counts = systematic(log_weights, 20, generator).bincount(minlength=5)
    assert counts.tolist() == [10, 5, 0, 4, 1]
    odd = systematic(torch.randn(50, generator=generator, dtype=torch.float64), 33, generator)
    assert (odd.diff() >= 0).all() and len(odd) == 33


def test_effective_sizes_predict_the_error_of_weighted_means(seed):
    # 400 runs of self-normalised importance sampling: N(0, 1) by N(0, 1.5²). The sd of the estimates of the mean
    # against sd / sqrt(ess): its own relative error is 1 / sqrt(800).
    generator = torch.Generator().manual_seed(seed)
    means, sizes = [], []
    for _ in range(400):
        x = 1.5 * torch.randn((500, 1), generator=generator, dtype=torch.float64)
        log_weights = (-0.5 * x.square() * (1 - 1 / 1.5**2)).squeeze(1)
        means.append((log_weights.softmax(0) @ x).item())
        sizes.append(effective_sizes(x, log_weights).item())
    predicted = math.sqrt(sum(1 / size for size in sizes) / len(sizes))
    assert abs(torch.tensor(means).std().item() / predicted - 1) < 4 / math.sqrt(800)
