"""Tests of the data seen from given weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.laplace import expansion as module
from knowable.inference.laplace.expansion import random_weights
from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion, expansion_of, gradients, jacobians


def test_only_the_networks_random_parameters_are_expanded():
    model = kn.Model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), kn.Gaussian(), random="last_layer")
    assert model.random_names[-1] == "likelihood.log_noise"
    assert random_weights(model) == ("2.weight", "2.bias")


def test_batches_are_all_rows_once_in_order_and_bounded(monkeypatch):
    monkeypatch.setattr(module, "_BATCH_BYTES", 200_000)
    expansion = case_expansion("batchnorm_cnn", rows=23)
    batches = list(expansion.batches())
    assert len(batches) > 1
    x, y = expansion.data.tensors
    assert torch.equal(torch.cat([a for a, _ in batches]), x) and torch.equal(torch.cat([b for _, b in batches]), y)
    assert max(len(a) for a, _ in expansion.batches(100_000)) < max(len(a) for a, _ in batches)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_log_likelihood_has_the_gradient_of_autograd(name):
    expansion = case_expansion(name)
    x, y = expansion.data.tensors
    value, gradient = expansion.log_likelihood()
    output = expansion.model.forward(expansion.params, x, buffers=expansion.buffers)
    torch.testing.assert_close(value, expansion.model.score(output, y, expansion.params).sum())
    torch.testing.assert_close(gradient, gradients(expansion).sum(0), rtol=1e-9, atol=1e-10)


def test_a_sweep_over_the_data_sums_up_the_log_likelihood_too(monkeypatch):
    swept, plain = case_expansion("batchnorm_cnn"), case_expansion("batchnorm_cnn")
    seen = []
    swept.sweep(lambda jacobian, number, y: seen.append((len(jacobian.x), len(y), number)))
    assert seen == [(5, 5, 0)]
    expected = plain.log_likelihood()
    monkeypatch.setattr(module.ExpansionPoint, "sweep", None)  # not a second time
    torch.testing.assert_close(swept.log_likelihood(), expected)


def test_the_empirical_information_is_the_gradient_in_the_outputs():
    expansion = case_expansion("transformer", kind="empirical_fisher")
    x, y = expansion.data.tensors
    (information,) = expansion.informations(expansion.jacobian(x).output, y)
    found = torch.einsum("no,nod->nd", information.gradient.flatten(1), jacobians(expansion))
    torch.testing.assert_close(found, gradients(expansion))


@pytest.mark.parametrize(
    ("likelihood", "kind", "groups", "name"),
    [
        (kn.Gaussian(), "ggn", 1, "likelihood.log_noise"),
        (kn.Gaussian(outputs=3), "ggn", 3, "likelihood.log_noise"),
        (kn.Gaussian(outputs=3), "empirical_fisher", 1, "likelihood.log_noise"),
        (kn.Gaussian(0.1), "ggn", 1, None),
        (kn.StudentT(), "ggn", 1, "likelihood.log_scale"),
        (kn.Poisson(), "ggn", 1, None),
    ],
)
def test_there_is_a_group_for_each_noise(likelihood, kind, groups, name):
    x = torch.rand(4, 2).round()
    model = kn.Model(nn.Linear(2, 3), likelihood)
    expansion = expansion_of(model, (x, x[:, :1].expand(4, 3)), kind=kind)
    assert (expansion.groups, expansion.noise_name) == (groups, name)
    output = model.forward(expansion.params, x)
    assert len(expansion.informations(output, expansion.data.tensors[1])) == groups


def test_random_directions_depend_on_the_seed_and_the_batch_alone():
    expansion = case_expansion("batchnorm_cnn", most=2)
    x, y = expansion.data.tensors
    (information,) = expansion.informations(expansion.jacobian(x).output, y)
    first, again, other = (torch.cat(list(expansion.columns(information, batch))) for batch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert expansion.has_random_columns and not case_expansion("batchnorm_cnn").has_random_columns


def test_directions_come_in_pieces_that_fit_in_memory():
    model = kn.Model(nn.Linear(2, 3), kn.Categorical())
    expansion = expansion_of(model, (torch.randn(6, 2), torch.arange(6) % 3))
    (information,) = expansion.informations(
        expansion.jacobian(expansion.data.tensors[0]).output, expansion.data.tensors[1]
    )
    whole = list(expansion.columns(information, 0))
    pieces = list(expansion.columns(information, 0, 10**9))
    assert (len(whole), len(pieces)) == (1, 2)  # one less than there are classes
    assert torch.equal(whole[0], torch.cat(pieces))


def test_directions_go_back_through_convolutions_one_by_one():
    expansion = case_expansion("batchnorm_cnn")
    x, y = expansion.data.tensors
    (information,) = expansion.informations(expansion.jacobian(x).output, y)
    assert [len(piece) for piece in expansion.columns(information, 0)] == [1, 1]


def test_a_loader_is_read_as_tensors_are():
    expansion = case_expansion("mlp", rows=12)
    x, y = expansion.data.tensors
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    loaded = module.ExpansionPoint(
        expansion.model, as_data(loader, expansion.model), expansion.params, expansion.buffers, "ggn", 64, 0
    )
    assert torch.equal(torch.cat([a for a, _ in loaded.batches()]), x)
