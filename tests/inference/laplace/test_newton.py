"""Tests of the last steps to the mode."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace.laplace import log_joint, log_joint_and_gradient, polished
from knowable.testing import LinearGaussian, network_case
from tests.inference.laplace.oracle import expansion_of


def test_one_step_reaches_the_top_of_a_parabola():
    target = LinearGaussian.make()
    found = polished(expansion_of(target.model(), target.data), 1)
    torch.testing.assert_close(target.as_flat(found.weights), target.mean)


def test_value_and_gradient_are_those_of_the_log_joint():
    case = network_case("batchnorm_cnn", dtype=torch.float64)
    model = case.model()
    expansion = expansion_of(model, case.data)
    params = {name: value.requires_grad_() for name, value in model.params().items()}
    expected = model.log_joint(params, case.x, case.y, len(case.x))
    value, gradient = log_joint_and_gradient(expansion)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(log_joint(expansion), expected.detach())
    slopes = torch.autograd.grad(expected, list(params.values()))
    torch.testing.assert_close(gradient, torch.cat([each.flatten() for each in slopes]))


def test_no_step_leads_down_and_the_gradient_vanishes():
    case = network_case("mlp", rows=40, dtype=torch.float64)
    expansion = expansion_of(kn.Model(case.net, kn.Gaussian(0.5)), case.data)
    values, before = [log_joint(expansion)], log_joint_and_gradient(expansion)[1].norm()
    for _ in range(30):
        expansion = polished(expansion, 1)
        values.append(log_joint(expansion))
    assert all(second >= first for first, second in pairwise(values))
    assert log_joint_and_gradient(expansion)[1].norm() < 1e-2 * before


def test_points_and_the_data_are_left_alone():
    case = network_case("last_layer", dtype=torch.float64)
    expansion = expansion_of(case.model(), case.data)
    found = polished(expansion, 3)
    assert torch.equal(found.params["0.weight"], expansion.params["0.weight"])
    assert not torch.equal(found.params["2.weight"], expansion.params["2.weight"])


def test_a_prior_without_slope_is_no_trouble():
    x = torch.randn(20, 2, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(20, 1, dtype=torch.float64)
    expansion = expansion_of(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.1), kn.Flat()), (x, y))
    found = polished(expansion, 2).params
    design = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    expected = torch.linalg.lstsq(design, y).solution.squeeze(1)
    torch.testing.assert_close(torch.cat([found["weight"].flatten(), found["bias"]]), expected)
