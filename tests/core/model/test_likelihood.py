"""Tests of what all likelihoods share: the alignment of targets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knowable.core.model.likelihood import Likelihood
from knowable.core.prediction.prediction import align_target, check_finite_target, sum_over_event
from knowable.errors import InvalidData


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 4), trailing=st.lists(st.integers(1, 3), max_size=3), ones=st.integers(0, 2))
def test_a_target_that_differs_only_in_dimensions_of_size_one_is_reshaped(rows, trailing, ones):
    shape = (rows, *(size for size in trailing if size != 1), *(1,) * ones)
    y = torch.arange(float(torch.Size(shape).numel())).view(shape)
    aligned = align_target(y, tuple(trailing))
    assert aligned.shape == (rows, *trailing)
    assert torch.equal(aligned.flatten(), y.flatten())


@pytest.mark.parametrize("rows", [1, 5])
def test_a_vector_and_a_column_are_the_same_target_and_never_broadcast(rows):
    vector = torch.arange(float(rows))
    output = torch.zeros(rows, 1)
    assert (align_target(vector, (1,)) - output).shape == (rows, 1)
    assert (align_target(vector.unsqueeze(1), ()) - output.squeeze(1)).shape == (rows,)


@pytest.mark.parametrize(
    ("shape", "trailing"), [((5, 3), (1,)), ((5,), (2,)), ((5, 2, 3), (3, 2)), ((5, 5), ()), ((5, 2), (2, 2))]
)
def test_a_target_of_another_shape_is_refused_with_both_shapes(shape, trailing):
    wanted = rf"target has shape \{shape}.*has shape \{(shape[0], *trailing)}".replace(")", r"\)")
    with pytest.raises(InvalidData, match=wanted):
        align_target(torch.zeros(shape), trailing, name="target")


def test_everything_behind_the_batch_is_summed():
    values = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(sum_over_event(values), values.sum((1, 2, 3)))
    torch.testing.assert_close(sum_over_event(values, batch_dims=2), values.sum((2, 3)))
    assert torch.equal(sum_over_event(values[0, 0, 0]), values[0, 0, 0])


def test_a_finite_target_passes_as_it_is():
    y = torch.randn(3, 2)
    assert check_finite_target(y) is y
    assert check_finite_target(torch.arange(3)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_target_that_is_not_finite_is_refused_with_its_rows(bad):
    y = torch.zeros(9, 2)
    y[[1, 4], 1] = bad
    with pytest.raises(InvalidData, match=r"y has missing or infinite values in row 1, 4 \(counting from 0\)"):
        check_finite_target(y)
    with pytest.raises(InvalidData, match=r"target .* in row 0, 1, 2, 3, 4 and 4 more"):
        check_finite_target(torch.full((9,), bad), name="target")


class _Plain(Likelihood):
    """The defaults of the base class."""

    def check_target(self, y, output, *, name="y"):
        return y

    def log_prob(self, output, y, params):
        return output.sum(1)

    def predict(self, outputs, params, log_weights):
        raise NotImplementedError


def test_a_likelihood_has_no_parameters_unless_it_says_so_and_aligns_like_the_output():
    assert _Plain().params() == {}
    assert _Plain().priors() == {}
    aligned = _Plain().align(torch.arange(3), torch.zeros(3, 1, dtype=torch.float64))
    assert aligned.shape == (3, 1)
    assert aligned.dtype == torch.float64
