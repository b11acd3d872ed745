"""Tests of products with Jacobians."""

from __future__ import annotations

import pytest
import torch

from knowable.core.network.params import index_params
from knowable.inference.laplace.tangents import pulled_back, pushed_forward
from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion, jacobians


def _function(expansion):
    network, (x, _) = expansion.model.network_params(expansion.params), expansion.data.tensors

    def function(weights):
        return expansion.model.network({**network, **weights}, x, buffers=expansion.buffers)

    return function, {name: network[name] for name in expansion.layout.names}


@pytest.mark.parametrize("name", NETWORKS)
def test_products_are_those_of_the_slow_jacobian(name):
    expansion = case_expansion(name, rows=3)
    function, at = _function(expansion)
    jacobian = jacobians(expansion)  # (rows, outputs, D)
    flat = torch.randn(2, expansion.layout.size, dtype=torch.float64)
    expected = torch.einsum("nod,kd->kno", jacobian, flat)
    for vectorise in (True, False):
        found = pushed_forward(function, at, expansion.layout.views(flat), vectorise=vectorise)
        torch.testing.assert_close(found.flatten(2), expected, rtol=1e-8, atol=1e-9)
    cotangent = torch.randn_like(function(at))
    back = expansion.layout.flatten(pulled_back(function, at, cotangent))
    torch.testing.assert_close(back, torch.einsum("nod,no->d", jacobian, cotangent.flatten(1)), rtol=1e-8, atol=1e-9)


def test_without_forward_derivatives_two_pullbacks_do(monkeypatch):
    expansion = case_expansion("mlp", rows=3)
    function, at = _function(expansion)
    directions = expansion.layout.views(torch.randn(2, expansion.layout.size, dtype=torch.float64))
    expected = pushed_forward(function, at, directions, vectorise=True)

    def refuse(*_, **__):
        raise NotImplementedError("no forward derivative")

    monkeypatch.setattr("knowable.inference.laplace.tangents.jvp", refuse)
    torch.testing.assert_close(pushed_forward(function, at, directions, vectorise=True), expected)


def test_a_parameter_that_does_nothing_has_no_gradient():
    at = {"used": torch.ones(2), "idle": torch.ones(3)}
    found = pulled_back(lambda weights: 2 * weights["used"], at, torch.ones(2))
    assert torch.equal(found["used"], torch.full((2,), 2.0)) and torch.equal(found["idle"], torch.zeros(3))
    found = pulled_back(lambda _: torch.ones(2), at, torch.ones(2))
    assert torch.equal(index_params(found, 0)["used"], torch.tensor(0.0))
