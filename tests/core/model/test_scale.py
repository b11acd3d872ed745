"""Tests of the scale field that priors share."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.core.model.normal import check_scale, log_of
from knowable.errors import InvalidArgument, InvalidType


def test_a_positive_number_becomes_a_float():
    assert check_scale("scale", 2) == 2.0
    assert type(check_scale("scale", 2)) is float


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_and_finite_is_refused(value):
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got"):
        check_scale("scale", value)


def test_a_scale_that_is_not_a_number_is_refused():
    with pytest.raises(InvalidType, match="scale must be a number, got str"):
        check_scale("scale", "wide")


def test_a_learned_scale_passes_as_the_same_tensor():
    scale = torch.tensor(0.3, requires_grad=True).exp()
    assert check_scale("scale", scale) is scale


def test_the_logarithm_is_of_the_same_kind_as_the_scale():
    assert log_of(2.0) == math.log(2.0)
    assert torch.equal(log_of(torch.tensor(2.0)), torch.tensor(2.0).log())
