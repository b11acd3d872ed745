"""Tests of networks for tables."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.tabular.networks import (
    ResidualMLP,
    default_network,
    default_prior,
    embedding_size,
    network_from_json,
    network_to_json,
)


@pytest.mark.parametrize(
    ("rows", "width", "depth"),
    [(2, 16, 1), (256, 16, 1), (1_000, 32, 1), (4_900, 70, 1), (5_000, 71, 2), (10**6, 128, 2)],
)
def test_the_width_grows_with_the_square_root_of_the_rows(rows: int, width: int, depth: int):
    net = default_network(5, 2, rows)
    assert isinstance(net, ResidualMLP)
    assert (net.width, net.depth, net.first.out_features, net.last.out_features) == (width, depth, width, 2)


def test_columns_of_many_categories_are_embedded():
    net = default_network(18, 1, 100, categorical=[slice(2, 12), slice(12, 18)])
    assert isinstance(net, ResidualMLP) and net.embedded == [(2, 12)]


def test_the_linear_map_is_added_and_both_parts_have_their_gain():
    net = ResidualMLP(3, 2, width=5, depth=1, skip=True, gain=True)
    plain = ResidualMLP(3, 2, width=5, depth=1)
    plain.load_state_dict(net.state_dict(), strict=False)
    x = torch.randn(7, 3)
    assert net.skip is not None and net.gain is not None
    torch.testing.assert_close(net(x), plain(x) + x @ net.skip.weight.T)
    with torch.no_grad():
        net.gain.copy_(torch.tensor([2.0, 3.0]).log())
    torch.testing.assert_close(net(x), 2.0 * plain(x) + 3.0 * x @ net.skip.weight.T)


@pytest.mark.parametrize("rows", [300, 1_000, 10_000])
def test_functions_of_the_prior_are_of_the_size_of_standardised_targets_whatever_the_width(rows: int, seed: int):
    inputs, draws = 10, 400
    net = default_network(inputs, 1, rows)
    model = kn.Model(net, kn.Gaussian(noise=0.1), default_prior(net))
    x = torch.randn(8, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    weights = [model.prior.sample(model.params(), generator=generator) for _ in range(draws)]
    functions = torch.stack([model.forward(each, x).flatten() for each in weights])
    # about 1.75 with a standard error of 0.06; with N(0, 1) on all weights 4.9 with 17 units, 10.3 with 100
    assert 1.5 < functions.square().mean().sqrt() < 2.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_networks_have_the_precision_asked_for(dtype: torch.dtype):
    for rows in (100, 10_000):
        assert {value.dtype for value in default_network(3, 1, rows, dtype=dtype).parameters()} == {dtype}


def test_an_embedding_is_the_row_of_its_matrix_that_belongs_to_the_category():
    net = ResidualMLP(6, 1, width=4, embedded=[(1, 5)])
    x = torch.eye(4)
    rows = torch.cat([torch.zeros(4, 1), x, torch.zeros(4, 1)], dim=1)
    table = net.embeddings[0].weight.T  # (categories, size): what nn.Embedding holds
    seen = []
    net.first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net(rows)
    torch.testing.assert_close(seen[0][:, 2:], table)
    assert net.plain == [0, 5]


def test_a_residual_network_without_inner_layers_is_a_perceptron():
    net = ResidualMLP(3, 2, width=5, depth=0)
    x = torch.randn(7, 3)
    torch.testing.assert_close(net(x), net.last(torch.tanh(net.first(x))))


def test_residual_layers_add_to_what_came_before():
    net = ResidualMLP(3, 2, width=5, depth=2)
    for layer in net.outer:
        nn.init.zeros_(layer.weight)
    x = torch.randn(7, 3)
    torch.testing.assert_close(net(x), net.last(torch.tanh(net.first(x))))


def test_the_activation_is_between_the_layers():
    net = ResidualMLP(3, 2, width=5, depth=1, activation="relu")
    x = torch.randn(7, 3)
    hidden = net.first(x)
    hidden = hidden + net.outer[0](net.inner[0](hidden).clamp_min(0))
    torch.testing.assert_close(net(x), net.last(hidden.clamp_min(0)))
    with pytest.raises(kn.InvalidArgument, match="activation must be one of 'tanh', 'relu'"):
        ResidualMLP(3, 2, activation="step")


def test_a_widened_prior_leaves_the_linear_map_and_the_biases_as_they_are():
    net = default_network(8, 1, 100)
    usual, wide = default_prior(net), default_prior(net, widened=5.0)
    assert usual["first.weight"] == kn.Normal(0.5) and wide["first.weight"] == kn.Normal(2.5)
    assert wide["skip.weight"] == usual["skip.weight"] and wide["*"] == usual["*"]


def test_logits_are_mostly_linear_in_the_prior():
    usual, logits = (default_prior(default_network(8, 2, 256, gain=gain)) for gain in (False, True))
    assert usual["last.weight"] == kn.Normal(0.3536) and logits["last.weight"] == kn.Normal(0.08839)
    assert {**logits, "last.weight": None} == {**usual, "last.weight": None}


@pytest.mark.parametrize("method", [kn.MAP(epochs=3), kn.MeanFieldVI(epochs=3), kn.Laplace(epochs=3)], ids=repr)
def test_methods_take_a_residual_network(method):
    net = default_network(12, 1, 60, categorical=[slice(2, 12)])
    x = torch.cat([torch.randn(60, 2), torch.eye(10).repeat(6, 1)], dim=1).double()
    posterior = method.fit(kn.Model(net, kn.Gaussian()), (x, x[:, :1]))
    assert posterior.predict(x[:5]).mean.shape == (5, 1)


def test_a_network_of_ours_is_made_again_from_json():
    net = ResidualMLP(6, 2, width=4, depth=1, embedded=[(1, 5)], skip=True, gain=True, activation="relu").double()
    made = network_from_json(json.loads(json.dumps(network_to_json(net))))
    assert made is not None
    made.load_state_dict(net.state_dict())
    x = torch.randn(3, 6).double()
    torch.testing.assert_close(made(x), net(x))
    assert network_to_json(nn.Linear(1, 1)) is None
    assert network_from_json(None) is None


def test_a_damaged_description_is_told():
    with pytest.raises(kn.DamagedArtifact, match="cannot be made"):
        network_from_json({"network": "ResidualMLP", "dtype": "float64"})


def test_ranges_outside_the_inputs_are_refused():
    with pytest.raises(kn.InvalidArgument, match="ranges within 3 inputs"):
        ResidualMLP(3, 1, embedded=[(2, 5)])


@pytest.mark.parametrize(("categories", "size"), [(2, 2), (9, 3), (100, 10), (1000, 16)])
def test_the_size_of_an_embedding_is_the_square_root_of_the_categories(categories: int, size: int):
    assert embedding_size(categories) == size


@pytest.mark.parametrize("wrong", [{"inputs": 0}, {"outputs": 0}, {"rows": 0}])
def test_sizes_are_at_least_one(wrong: dict[str, int]):
    with pytest.raises(kn.InvalidArgument, match="must be a whole number >= 1"):
        default_network(**{"inputs": 1, "outputs": 1, "rows": 1, **wrong})
