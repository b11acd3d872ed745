"""Tests of second derivatives."""

from __future__ import annotations

import torch
from torch import nn

from knowable.inference.laplace.hessian import hessian


def test_a_quadratic_has_its_matrix():
    matrix = torch.randn(5, 5, dtype=torch.float64)
    found = hessian(lambda flat: flat @ matrix @ flat, torch.randn(5, dtype=torch.float64))
    torch.testing.assert_close(found, matrix + matrix.T)


def test_data_are_passed_on_and_the_result_is_double():
    x = torch.randn(4, 3)
    found = hessian(lambda flat, x: (x @ flat).cos().sum(), torch.zeros(3), x)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, -(x.T @ x).double())


def test_constants_and_linear_functions_have_none():
    flat = torch.randn(3)
    assert torch.equal(hessian(lambda _: torch.ones(()), flat), torch.zeros(3, 3, dtype=torch.float64))
    assert torch.equal(hessian(lambda each: each.sum(), flat), torch.zeros(3, 3, dtype=torch.float64))


def test_attention_has_second_derivatives():
    layer = nn.MultiheadAttention(2, 1, batch_first=True).double()
    x = torch.randn(1, 3, 2, dtype=torch.float64)

    def function(flat):
        values = x * flat
        return layer(values, values, values, need_weights=False)[0].square().sum()

    flat = torch.ones(2, dtype=torch.float64)
    expected = torch.autograd.functional.hessian(
        lambda f: layer(x * f, x * f, x * f, need_weights=True)[0].square().sum(), flat
    )
    torch.testing.assert_close(hessian(function, flat), expected)
