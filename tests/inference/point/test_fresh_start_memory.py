"""Tests of what a fresh start copies of a network, and what it leaves alone."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn
from knowable.inference.point.point import _out_of_reach, _reset_values


def test_frozen_layers_are_not_copied():
    net = nn.Sequential(nn.Linear(3, 50), nn.Linear(50, 50), nn.Linear(50, 1))
    model = kn.Model(net, kn.Gaussian(0.1), frozen=["0.*", "1.*"])
    assert _out_of_reach(model).keys() == {id(value) for layer in net[:2] for value in layer.parameters()}
    assert _reset_values(model).keys() == {"2.weight", "2.bias"}


def test_frozen_weights_that_a_module_around_them_would_reset_stay_as_they_are():
    attention = nn.MultiheadAttention(8, 2)  # resets the bias of its projection, a layer of its own
    nn.init.constant_(attention.out_proj.bias, 3.0)
    model = kn.Model(attention, kn.Gaussian(0.1), frozen="out_proj.*", output=0)
    _reset_values(model)
    assert torch.equal(attention.out_proj.bias.detach(), torch.full((8,), 3.0))
