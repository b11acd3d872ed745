"""Tests of Jacobians: those of torch.func, row by row, are the oracle."""

from __future__ import annotations

import pytest
import torch

from knowable.core.network.jacobian import jacobian_vector_products, vector_jacobian_product
from knowable.core.network.params import index_params
from knowable.testing.networks import ONE_INPUT
from tests.inference.laplace.oracle import case_expansion, jacobians


def _function(expansion):
    network, (x, _) = expansion.model.network_params(expansion.params), expansion.data.tensors

    def function(weights):
        return expansion.model.network({**network, **weights}, x, buffers=expansion.buffers)

    return function, {name: network[name] for name in expansion.layout.names}


@pytest.mark.parametrize("name", ONE_INPUT)
def test_products_are_those_of_the_slow_jacobian(name):
    expansion = case_expansion(name, rows=3)
    function, at = _function(expansion)
    jacobian = jacobians(expansion)  # (rows, outputs, D)
    flat = torch.randn(2, expansion.layout.size, dtype=torch.float64)
    expected = torch.einsum("nod,kd->kno", jacobian, flat)
    for vectorise in (True, False):
        found = jacobian_vector_products(function, at, expansion.layout.views(flat), vectorise=vectorise)
        torch.testing.assert_close(found.flatten(2), expected, rtol=1e-8, atol=1e-9)
    cotangent = torch.randn_like(function(at))
    back = expansion.layout.flatten(vector_jacobian_product(function, at, cotangent))
    torch.testing.assert_close(back, torch.einsum("nod,no->d", jacobian, cotangent.flatten(1)), rtol=1e-8, atol=1e-9)


def test_without_forward_derivatives_two_backward_passes_do(monkeypatch):
    expansion = case_expansion("mlp", rows=3)
    function, at = _function(expansion)
    directions = expansion.layout.views(torch.randn(2, expansion.layout.size, dtype=torch.float64))
    expected = jacobian_vector_products(function, at, directions, vectorise=True)

    def refuse(*_, **__):
        raise NotImplementedError("no forward derivative")

    monkeypatch.setattr("knowable.core.network.jacobian.jvp", refuse)
    torch.testing.assert_close(jacobian_vector_products(function, at, directions, vectorise=True), expected)


def test_a_parameter_that_does_nothing_has_no_gradient():
    at = {"used": torch.ones(2), "idle": torch.ones(3)}
    found = vector_jacobian_product(lambda weights: 2 * weights["used"], at, torch.ones(2))
    assert torch.equal(found["used"], torch.full((2,), 2.0)) and torch.equal(found["idle"], torch.zeros(3))
    found = vector_jacobian_product(lambda _: torch.ones(2), at, torch.ones(2))
    assert torch.equal(index_params(found, 0)["used"], torch.tensor(0.0))


@pytest.mark.parametrize("name", ONE_INPUT)
def test_gradients_are_those_of_the_slow_jacobian(name):
    expansion = case_expansion(name)
    x, _ = expansion.data.tensors
    jacobian = expansion.jacobian(x)
    directions = torch.randn((3, *jacobian.output.shape), dtype=torch.float64)
    expected = torch.einsum("nod,kno->knd", jacobians(expansion), directions.flatten(2))
    torch.testing.assert_close(jacobian.flat(directions, expansion.layout), expected, rtol=1e-9, atol=1e-10)


def test_a_single_row_has_the_gradient_it_has_among_others():
    expansion = case_expansion("transformer")
    x, _ = expansion.data.tensors
    together, alone = expansion.jacobian(x), expansion.jacobian(x[2:3])
    directions = torch.randn((1, *together.output.shape), dtype=torch.float64)
    torch.testing.assert_close(
        alone.flat(directions[:, 2:3], expansion.layout)[:, 0], together.flat(directions, expansion.layout)[:, 2]
    )


def test_rows_that_cannot_be_batched_are_taken_one_by_one(monkeypatch):
    expansion = case_expansion("tied")
    x, _ = expansion.data.tensors
    jacobian = expansion.jacobian(x)
    directions = torch.randn((2, *jacobian.output.shape), dtype=torch.float64)
    expected = jacobian.others(directions)["embed.weight"]

    def refuse(*_, **__):
        raise RuntimeError("vmap: no")

    monkeypatch.setattr("knowable.core.network.jacobian.vmap", refuse)
    torch.testing.assert_close(jacobian.others(directions)["embed.weight"], expected)
