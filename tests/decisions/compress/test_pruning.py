"""Tests of which weights go; the oracle is the definition, weight by weight."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.decisions.compress.compress import find_masks, mean_params, network_at, prunable_names
from tests.core.cases import diagonal_posterior, full_posterior


def _posterior(generator: torch.Generator) -> kn.DiagonalNormal:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    return diagonal_posterior(kn.Model(net, kn.Gaussian(), frozen="3.bias"), generator)


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 3.0])
def test_weights_go_whose_log_alpha_is_above_the_threshold(threshold, generator):
    posterior = _posterior(generator)
    masks = find_masks(posterior, threshold=threshold)
    assert list(masks) == ["0.weight", "3.weight"]
    for name, mask in masks.items():
        mean, std = posterior.loc[name].flatten().tolist(), posterior.scale[name].flatten().tolist()
        expected = [math.log(s**2 / m**2) <= threshold for m, s in zip(mean, std, strict=True)]
        assert mask.flatten().tolist() == expected


def test_thresholds_of_ratio_and_of_log_alpha_are_the_same_thing(generator):
    posterior = _posterior(generator)
    by_alpha = find_masks(posterior, threshold=0.5)
    by_ratio = find_masks(posterior, threshold=math.exp(-0.25), by="snr")
    assert all(torch.equal(by_alpha[name], by_ratio[name]) for name in by_alpha)
    posterior.log_alpha_threshold = 0.5
    for by in ("snr", "log_alpha"):
        assert all(torch.equal(by_alpha[name], mask) for name, mask in find_masks(posterior, by=by).items())


def test_a_mean_of_zero_goes_and_a_weight_without_spread_stays():
    model = kn.Model(nn.Linear(3, 1, bias=False), kn.Gaussian(0.1))
    loc = {"weight": torch.tensor([[0.0, 1e-9, 0.0]])}
    posterior = kn.DiagonalNormal(model, loc, {"weight": torch.tensor([[1e-9, 0.0, 0.0]])})
    assert find_masks(posterior, threshold=50.0)["weight"].tolist() == [[False, True, True]]


def test_other_weights_may_be_named(generator):
    posterior = _posterior(generator)
    assert prunable_names(posterior, "0.*") == ["0.weight", "0.bias"]
    assert prunable_names(posterior, ["3.weight"]) == ["3.weight"]
    with pytest.raises(kn.InvalidArgument, match="where='conv' matches no parameter"):
        prunable_names(posterior, "conv")
    with pytest.raises(kn.InvalidArgument, match="no random weight matrix"):
        prunable_names(diagonal_posterior(kn.Model(nn.Linear(2, 1), kn.Gaussian(), random="bias"), generator))


def test_a_posterior_with_correlations_is_pruned_by_its_marginals(generator):
    posterior = full_posterior(kn.Model(nn.Linear(3, 2), kn.Gaussian(0.1)), generator)
    ratio = posterior.mean()["weight"].abs() / posterior.std()["weight"]
    assert torch.equal(find_masks(posterior, threshold=1.0, by="snr")["weight"], ratio >= 1.0)


def test_a_network_at_given_values_is_a_copy_with_buffers_and_frozen_ones(generator):
    posterior = _posterior(generator)
    net = posterior.model.net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior.buffers["1.running_mean"].fill_(7.0)
    made = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    assert torch.equal(made[0].weight, posterior.loc["0.weight"])
    assert torch.equal(made[3].bias, net[3].bias)
    assert (made[1].running_mean == 7).all() and not made.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"by": "size"}, "by must be one of 'log_alpha', 'snr'"),
        ({"threshold": "high"}, "threshold must be a number"),
        ({"threshold": math.nan}, "threshold must be a finite number"),
        ({"threshold": -1.0, "by": "snr"}, "threshold must be a finite number >= 0"),
        ({"where": 3}, "where must be a name"),
    ],
)
def test_wrong_arguments_are_named(settings, error, generator):
    with pytest.raises(kn.KnowableError, match=error):
        find_masks(_posterior(generator), **settings)
