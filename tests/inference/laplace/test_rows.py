"""Tests of the rows' gradients: Jacobians by torch.func are the oracle."""

from __future__ import annotations

import pytest
import torch

from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion, gradients, jacobians


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_slow_jacobian(name):
    expansion = case_expansion(name)
    x, _ = expansion.data.tensors
    rows = expansion.rows(x)
    directions = torch.randn((3, *rows.output.shape), dtype=torch.float64)
    expected = torch.einsum("nod,kno->knd", jacobians(expansion), directions.flatten(2))
    torch.testing.assert_close(rows.flat(directions, expansion.layout), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_slope_is_the_gradient_of_the_log_likelihood(name):
    expansion = case_expansion(name)
    x, y = expansion.data.tensors
    value, slope = expansion.rows(x).slope(y, expansion.layout)
    output = expansion.model.forward(expansion.params, x, buffers=expansion.buffers)
    torch.testing.assert_close(value, expansion.model.score(output, y, expansion.params).sum())
    torch.testing.assert_close(slope, gradients(expansion).sum(0), rtol=1e-9, atol=1e-10)


def test_a_single_row_has_the_gradient_it_has_among_others():
    expansion = case_expansion("transformer")
    x, _ = expansion.data.tensors
    together, alone = expansion.rows(x), expansion.rows(x[2:3])
    directions = torch.randn((1, *together.output.shape), dtype=torch.float64)
    torch.testing.assert_close(
        alone.flat(directions[:, 2:3], expansion.layout)[:, 0], together.flat(directions, expansion.layout)[:, 2]
    )


def test_rows_that_cannot_be_batched_are_taken_one_by_one(monkeypatch):
    expansion = case_expansion("tied")
    x, _ = expansion.data.tensors
    rows = expansion.rows(x)
    directions = torch.randn((2, *rows.output.shape), dtype=torch.float64)
    expected = rows.others(directions)["embed.weight"]

    def refuse(*_, **__):
        raise RuntimeError("vmap: no")

    monkeypatch.setattr("knowable.inference.laplace.expansion.vmap", refuse)
    torch.testing.assert_close(rows.others(directions)["embed.weight"], expected)
