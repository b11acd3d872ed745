"""Tests of the two layers that rewriting may add."""

from __future__ import annotations

import pytest
import torch

from knowable.decisions.compress.graph import Columns, Shift


def test_columns_are_those_of_the_last_dimension():
    x = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(Columns(torch.tensor([2, 0]))(x), x[..., [2, 0]])
    assert str(Columns(torch.tensor([2, 0]))) == "Columns(2)"


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 1), ((2, 3, 4, 4), 1), ((2, 5, 3), 2)])
def test_a_shift_adds_to_its_own_dimension(shape, dim):
    x, shift = torch.randn(shape), torch.tensor([1.0, -2.0, 0.5])
    expected = (x.movedim(dim, -1) + shift).movedim(-1, dim)
    assert torch.equal(Shift(shift, dim)(x), expected)
    assert str(Shift(shift, dim)) == f"Shift(3, dim={dim})"
