"""Tests of scores of one network; the posterior with that network as its only atom is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.decisions.compress.compress import mean_params, network_at, score
from tests.core.cases import diagonal_posterior

CASES = [
    (kn.Gaussian(), 1, "rmse"),
    (kn.HeteroscedasticGaussian(), 2, "rmse"),
    (kn.Categorical(), 3, "accuracy"),
    (kn.Bernoulli(), 1, "accuracy"),
    (kn.Poisson(), 1, "rmse"),
]


@pytest.mark.parametrize(("likelihood", "outputs", "first"), CASES, ids=lambda value: str(value))
def test_a_network_is_scored_as_the_posterior_with_this_atom_is(likelihood, outputs, first, generator):
    posterior = diagonal_posterior(kn.Model(nn.Linear(2, outputs), likelihood), generator)
    x = torch.randn((50, 2), generator=generator)
    kinds = {3: torch.arange(50) % 3, 2: torch.randn((50, 1), generator=generator)}
    y = kinds.get(outputs, (torch.arange(50) % 2).float().unsqueeze(1))
    net = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    found = score(net, posterior, as_data((x, y), posterior.model))
    atom = {name: value.unsqueeze(0) for name, value in posterior.mean().items()}
    expected = kn.evaluate(kn.Particles(posterior.model, atom, torch.zeros(1)).predict(x), y)
    assert list(found) == [first, "nll"]
    assert found == pytest.approx({name: expected[name] for name in found})


def test_data_that_comes_in_batches_is_scored_whole(generator):
    posterior = diagonal_posterior(kn.Model(nn.Linear(2, 3), kn.Categorical()), generator)
    x, y = torch.randn((50, 2), generator=generator), torch.arange(50) % 3
    net = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    whole = score(net, posterior, as_data((x, y), posterior.model))
    assert score(net, posterior, as_data(loader, posterior.model)) == pytest.approx(whole)
