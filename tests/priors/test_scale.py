from __future__ import annotations

import math

import pytest
import torch

from knowable.core.scale import check_scale, log_of
from knowable.errors import InvalidArgument, InvalidType


def test_numbers_become_positive_floats_and_tensors_pass_untouched():
    assert check_scale("scale", 2) == 2.0 and isinstance(check_scale("scale", 2), float)
    learned = torch.tensor(0.5, requires_grad=True)
    assert check_scale("scale", learned) is learned


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_not_positive_and_finite_is_refused_by_name(value: float):
    with pytest.raises(InvalidArgument, match="width must be a finite number > 0"):
        check_scale("width", value)


def test_a_scale_that_is_no_number_is_refused():
    with pytest.raises(InvalidType, match="scale must be a number, got str 'wide'"):
        check_scale("scale", "wide")


def test_the_logarithm_keeps_its_kind_and_its_gradient():
    assert log_of(2.0) == math.log(2.0)
    learned = torch.tensor(0.5, requires_grad=True)
    log_of(learned).backward()
    assert learned.grad.item() == 2.0
