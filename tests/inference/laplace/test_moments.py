"""Tests of second moments: one product of matrices is the oracle."""

from __future__ import annotations

import pytest
import torch

from knowable.inference.laplace.curvature import second_moment


@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 3), (4, 1, 6), (2, 3, 9, 2), (11, 1, 300), (9, 1_100), (2, 3, 260)])
def test_the_sum_of_outer_products_is_that_of_one_product(shape):
    values = torch.randn(shape, dtype=torch.float64)
    flat = values.reshape(-1, shape[-1])
    torch.testing.assert_close(second_moment(values), flat.T @ flat)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 4, 150), (2, 3, 9, 2), (5, 3, 2, 400)])
def test_features_may_come_first_in_memory(shape):
    values = torch.randn((*shape[:-2], shape[-1], shape[-2]), dtype=torch.float64).mT
    flat = values.reshape(-1, shape[-1])
    torch.testing.assert_close(second_moment(values), flat.T @ flat)


def test_it_is_symmetric_to_the_last_bit():
    found = second_moment(torch.randn(50, 700))
    assert torch.equal(found, found.T)
