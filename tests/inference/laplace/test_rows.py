"""Tests of the rows' gradients: Jacobians by torch.func are the oracle."""

from __future__ import annotations

import pytest
import torch

from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion, jacobians


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_the_slow_jacobian(name):
    expansion = case_expansion(name)
    x, _ = expansion.data.tensors
    rows = expansion.rows(x)
    cotangent = torch.randn_like(rows.output)
    expected = torch.einsum("nod,no->nd", jacobians(expansion), cotangent.flatten(1))
    torch.testing.assert_close(rows.flat(cotangent, expansion.layout), expected, rtol=1e-9, atol=1e-10)


def test_a_single_row_has_the_gradient_it_has_among_others():
    expansion = case_expansion("transformer")
    x, _ = expansion.data.tensors
    together, alone = expansion.rows(x), expansion.rows(x[2:3])
    cotangent = torch.randn_like(together.output)
    torch.testing.assert_close(
        alone.flat(cotangent[2:3], expansion.layout)[0], together.flat(cotangent, expansion.layout)[2]
    )


def test_rows_that_cannot_be_batched_are_taken_one_by_one(monkeypatch):
    expansion = case_expansion("tied")
    x, _ = expansion.data.tensors
    rows = expansion.rows(x)
    cotangent = torch.randn_like(rows.output)
    expected = rows.others(cotangent)["embed.weight"]

    def refuse(*_, **__):
        raise RuntimeError("vmap: no")

    monkeypatch.setattr("knowable.inference.laplace.rows.vmap", refuse)
    torch.testing.assert_close(rows.others(cotangent)["embed.weight"], expected)
