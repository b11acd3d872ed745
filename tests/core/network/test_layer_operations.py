"""Tests of what the operations of layers are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from knowable.core.network.layer_operations import CONVOLUTIONS, LINEAR, METADATA, is_transposed, operands

X, W, B = torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4)


def test_linear_maps_and_convolutions_are_known_by_both_of_their_names():
    assert LINEAR is F.linear
    assert {F.conv1d, F.conv2d, F.conv3d, torch.conv2d, F.conv_transpose2d} <= CONVOLUTIONS
    assert F.linear not in CONVOLUTIONS


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, W, B), {}), ((X, W), {"bias": B}), ((), {"input": X, "weight": W, "bias": B})],
    ids=["by position", "mixed", "by name"],
)
def test_operands_are_found_however_they_are_given(args, kwargs):
    x, weight, bias, rest = operands(LINEAR, args, kwargs)
    assert x is X and weight is W and bias is B and rest == {}


def test_a_bias_may_be_missing():
    assert operands(LINEAR, (X, W), {})[2] is None


@pytest.mark.parametrize("operation", [F.conv1d, F.conv_transpose1d])
def test_the_other_arguments_lead_to_the_same_call(operation, generator):
    groups = 2
    x = torch.randn((2, 4, 9), generator=generator)
    weight = torch.randn((4, 2, 3), generator=generator)
    stride_and_padding = (2, 1, 0) if is_transposed(operation) else (2, 1, 2)  # the third: output padding, dilation
    args = (x, weight, None, *stride_and_padding, groups)
    _, _, bias, rest = operands(operation, args, {})
    assert rest["groups"] == groups and rest["stride"] == 2
    assert torch.equal(operation(x, weight, bias, **rest), operation(*args))


def test_questions_about_a_tensor_are_no_operations():
    assert {"__get__", "size", "dim"} <= METADATA and "add" not in METADATA
