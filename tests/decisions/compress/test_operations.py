"""Tests of what happens to constants on their way."""

from __future__ import annotations

import torch

from knowable.decisions.compress.graph import applied, combined, same, unknown, zeros_only

NAN = torch.nan
VALUES = torch.tensor([0.0, 2.0, -1.0, NAN], dtype=torch.double)


def _shown(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def test_constants_stay_or_only_zeros_do_or_none():
    assert _shown(same(VALUES)) == [0.0, 2.0, -1.0, None]
    assert _shown(zeros_only(VALUES)) == [0.0, None, None, None]
    assert _shown(unknown(VALUES)) == [None] * 4


def test_a_function_applies_to_what_is_known_and_its_infinities_are_unknown():
    assert _shown(applied(torch.square)(VALUES)) == [0.0, 4.0, 1.0, None]
    assert _shown(applied(torch.log)(VALUES))[0] is None
    assert _shown(applied(torch.ones_like)(VALUES)) == [1.0, 1.0, 1.0, None]  # it may not be for what is not known
    before = VALUES.clone()
    applied(torch.relu_)(VALUES)
    assert torch.equal(
        before,
        VALUES,
    ) or torch.equal(before.nan_to_num(9), VALUES.nan_to_num(9))


def test_two_constants_make_one_and_zero_times_anything_is_zero():
    other = torch.tensor([NAN, 3.0, NAN, 0.0], dtype=torch.double)
    assert _shown(combined(torch.add, product=False)(VALUES, other)) == [None, 5.0, None, None]
    assert _shown(combined(torch.mul, product=True)(VALUES, other)) == [0.0, 6.0, None, 0.0]
    assert _shown(combined(torch.div, product=False)(other, VALUES)) == [None, 1.5, None, None]
