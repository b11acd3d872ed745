from __future__ import annotations

import pytest
import torch

from knowable.core.prediction.prediction import as_numbers, refuse_where
from knowable.errors import InvalidData


def test_a_column_and_a_vector_are_the_same_target():
    y = torch.arange(4)
    column = as_numbers(y, torch.zeros(2, 1), (1,), name="y")
    vector = as_numbers(y[:, None], torch.zeros(2), (), name="y")
    assert column.shape == (4, 1) and vector.shape == (4,)
    assert torch.equal(column[:, 0], vector) and column.dtype == torch.float32


def test_a_target_of_another_width_is_refused_with_both_shapes():
    with pytest.raises(InvalidData, match=r"labels has shape \(4, 3\).*\(4, 2\)"):
        as_numbers(torch.zeros(4, 3), torch.zeros(2, 2), (2,), name="labels")


def test_a_single_number_is_refused():
    with pytest.raises(InvalidData, match="one row for each example, got the single number 3"):
        as_numbers(torch.tensor(3.0), torch.zeros(2), (), name="y")


@pytest.mark.parametrize("missing", [float("nan"), float("inf"), 1e300])  # the last is infinite in float32
def test_missing_infinite_and_overflowing_values_are_refused_with_their_row(missing: float):
    y = torch.tensor([0.0, 1.0, missing], dtype=torch.float64)
    with pytest.raises(InvalidData, match="row 2"):
        as_numbers(y, torch.zeros(2), (), name="y")


def test_the_first_bad_element_is_named_with_row_position_and_value():
    y = torch.tensor([[0.0, 1.0], [7.0, -3.0]])
    with pytest.raises(
        InvalidData, match=r"y must be small, got 7 in row 1, position \(0,\) \(counting from 0\). Shrink it."
    ):
        refuse_where(y.abs() > 1, y, name="y", expected="small", advice="Shrink it.")
    with pytest.raises(InvalidData, match="got 123456789 in row 0 "):
        refuse_where(torch.tensor([True]), torch.tensor([123456789]), name="y", expected="small", advice="")


def test_nothing_bad_raises_nothing():
    y = torch.zeros(3)
    assert refuse_where(y > 0, y, name="y", expected="0", advice="") is None
