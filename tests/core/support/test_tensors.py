"""Tests of how whatever holds numbers becomes a tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from knowable.core.support.tensors import check_finite, check_rows, to_tensor
from knowable.errors import InvalidData, InvalidType

NUMBERS = [[1.0, 2.0], [3.0, 4.0]]


def _read_only() -> np.ndarray:
    array = np.array(NUMBERS)
    array.setflags(write=False)
    return array


SOURCES = {
    "a tensor": lambda: torch.tensor(NUMBERS),
    "a tensor with gradient": lambda: torch.tensor(NUMBERS, requires_grad=True),
    "lists": lambda: NUMBERS,
    "an array": lambda: np.array(NUMBERS),
    "single precision": lambda: np.array(NUMBERS, dtype=np.float32),
    "whole numbers": lambda: np.array(NUMBERS, dtype=np.uint8),
    "a transposed array": lambda: np.array(NUMBERS).T.copy().T,
    "a reversed array": lambda: np.array(NUMBERS[::-1])[::-1],
    "a read-only array": _read_only,
    "a masked array without a mask": lambda: np.ma.masked_array(NUMBERS),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_numbers_become_a_tensor_of_the_same_values(source):
    tensor = to_tensor(source(), "x")
    assert isinstance(tensor, torch.Tensor)
    assert torch.equal(tensor.double(), torch.tensor(NUMBERS).double())
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(np.float32(1), torch.float32), (np.float64(1), torch.float64), (np.int64(1), torch.int64), (True, torch.bool)],
)
def test_the_dtype_is_kept_and_a_single_number_stays_one(value, dtype):
    tensor = to_tensor(value, "x")
    assert tensor.dtype == dtype
    assert tensor.shape == ()


def test_writing_to_a_tensor_made_of_a_read_only_array_does_not_reach_the_array():
    array = _read_only()
    to_tensor(array, "x")[0, 0] = 9.0
    assert array[0, 0] == 1.0


def test_masked_entries_become_missing_values():
    masked = np.ma.masked_array([[1, 2], [3, 4]], mask=[[False, False], [True, False]])
    tensor = to_tensor(masked, "x")
    assert torch.equal(tensor.isnan(), torch.tensor([[False, False], [True, False]]))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("text", r"x must be a tensor, an array or a data frame of numbers, got str: it holds text"),
        ([["a", "b"]], r"got list: it holds text"),
        (np.array([1, None], dtype=object), r"got ndarray: it holds Python objects"),
        (np.array(["2020-01-01"], dtype="M8[D]"), r"got ndarray: it holds datetime64"),
        (np.array([1j]), r"got ndarray: it holds complex128"),
        ([[1.0], [1.0, 2.0]], r"got list: "),
        (None, r"got NoneType"),
        ({"a": 1.0}, r"got dict"),
        (object(), r"got object"),
    ],
)
def test_what_holds_no_numbers_is_refused(value, wanted):
    with pytest.raises(InvalidType, match=wanted):
        to_tensor(value, "x")


# --- data frames ---


def test_frames_of_every_kind_of_number_become_numbers():
    import pandas as pd

    frames = {
        "floats": pd.DataFrame({"a": [1.0, 3.0], "b": [2.0, 4.0]}),
        "whole numbers": pd.DataFrame({"a": [1, 3], "b": [2, 4]}),
        "mixed": pd.DataFrame({"a": [1, 3], "b": [2.0, 4.0]}),
        "nullable": pd.DataFrame({"a": pd.array([1, 3], dtype="Int64"), "b": [2.0, 4.0]}),
        "nullable floats": pd.DataFrame({"a": pd.array([1, 3], dtype="Float64"), "b": pd.array([2, 4], dtype="Int8")}),
    }
    for name, frame in frames.items():
        assert torch.equal(to_tensor(frame, "x").double(), torch.tensor(NUMBERS).double()), name


def test_truth_values_become_zeros_and_ones_beside_numbers():
    import pandas as pd

    tensor = to_tensor(pd.DataFrame({"a": [1.5, 2.5], "b": [True, False]}), "x")
    assert tensor.tolist() == [[1.5, 1.0], [2.5, 0.0]]


def test_missing_whole_numbers_become_missing_values():
    import pandas as pd

    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [2.0, 4.0]})
    assert torch.equal(to_tensor(frame, "x").isnan(), torch.tensor([[False, False], [True, False]]))
    assert to_tensor(frame["a"], "y").isnan().tolist() == [False, True]


@pytest.mark.parametrize("values", [["Ulm", "Bonn"], np.array(["2020-01-01"] * 2, dtype="M8[s]")])
def test_a_column_that_is_not_numbers_is_refused_by_its_name(values):
    import pandas as pd

    frame = pd.DataFrame({"height": [1.0, 2.0], "place": values})
    for wrong in (frame, frame["place"], frame.astype({"place": "category"})):
        with pytest.raises(InvalidType, match=r"x column 'place' holds .*, not numbers\. Encode it first or drop it"):
            to_tensor(wrong, "x")


# --- rows and missing values ---


def test_rows_are_asked_for():
    x = torch.zeros(2, 3)
    assert check_rows(x, "x") is x
    with pytest.raises(InvalidData, match=r"x must have rows \(a first dimension\), got the single number 3\.0"):
        check_rows(torch.tensor(3.0), "x")
    with pytest.raises(InvalidData, match=r"x is empty: shape \(0, 3\) has no rows"):
        check_rows(torch.zeros(0, 3), "x")


@pytest.mark.parametrize(
    ("shape", "place", "wanted"),
    [
        ((5,), (3,), r"x has 1 missing or infinite value, the first in row 3 \(counting from 0\)\. Drop or fill it"),
        ((5, 2), (3, 1), r"row 3, column 1 \("),
        ((5, 2, 2), (3, 1, 0), r"row 3, column \(1, 0\) \("),
    ],
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_named_by_its_place(shape, place, wanted, bad):
    x = torch.zeros(shape)
    assert check_finite(x, "x") is x
    x[place] = bad
    with pytest.raises(InvalidData, match=wanted):
        check_finite(x, "x")


def test_several_values_are_counted():
    x = torch.zeros(5, 2)
    x[1:3] = torch.nan
    with pytest.raises(
        InvalidData, match=r"x has 4 missing or infinite values, the first in row 1, column 0 .* fill them"
    ):
        check_finite(x, "x")


@pytest.mark.parametrize(
    "x", [torch.full((9,), 3e38), torch.tensor([3e38, -3e38]), torch.arange(3), torch.tensor([True])]
)
def test_values_that_are_finite_pass_whatever_their_sum(x):
    assert check_finite(x, "x") is x
