"""Tests of where a network begins anew."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn
from knowable.inference.point.point import fresh_start
from tests.core.cases import DTYPE, batch_norm_net, mlp


def test_members_begin_at_weights_of_their_own_that_repeat_themselves():
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian())
    first, again, other = (fresh_start(model, 0, member)[0] for member in (1, 1, 2))
    for name in model.params():
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        assert first[name].dtype == DTYPE


def test_running_statistics_of_a_trained_network_begin_anew():
    net = batch_norm_net()
    net.train()(torch.randn(50, 2) + 3)
    params, buffers = fresh_start(kn.Model(net, kn.Gaussian(0.1)), 0, 1)
    assert (buffers["1.running_mean"] == 0).all() and (buffers["1.running_var"] == 1).all()
    assert buffers["1.num_batches_tracked"] == 0
    assert not torch.equal(params["0.weight"], net[0].weight)
    assert net[1].running_mean.abs().max() > 0  # the network itself is as it was


def test_what_is_frozen_stays_as_it_is():
    net = batch_norm_net()
    net.train()(torch.randn(50, 2) + 3)
    params, buffers = fresh_start(kn.Model(net, kn.Gaussian(0.1), frozen=("0.*", "1.*")), 0, 1)
    assert set(params) == {"3.weight", "3.bias"}
    assert all(torch.equal(value, buffers[name]) for name, value in net.named_buffers())


def test_attention_begins_at_weights_of_its_own():
    net = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(4, 1))
    start = fresh_start(kn.Model(net, kn.Gaussian(0.1)), 0, 1)[0]
    weights = start["0.self_attn.in_proj_weight"]
    assert weights.abs().max() <= (6 / 16) ** 0.5  # torch draws them within the root of 6 / (in + out)
    assert not torch.equal(weights, net[0].self_attn.in_proj_weight)


def test_hyperparameters_of_the_prior_are_kept():
    model = kn.Model(mlp(), kn.Gaussian(), kn.EmpiricalBayes(kn.Normal(1.0)))
    start = fresh_start(model, 0, 1)[0]
    assert all(torch.equal(start[name], model.params()[name]) for name in model.hyper_names)
    assert not torch.equal(start["likelihood.log_noise"], model.params()["likelihood.log_noise"])
