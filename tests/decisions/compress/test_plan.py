"""Tests of plans: what they say and what they refuse. That they make the same network again: see rewriting."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.decisions.compress.rewrite import Edit, Plan, rewrite
from tests.decisions.compress.cases import Looking, make


def test_a_plan_comes_back_from_json():
    plan = Plan({"0": (2, 3, True)}, {"1": 4}, {"2": 5}, [Edit("view", "relu", (1, 3)), Edit("add", "x", shift=(1, 6))])
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_parameters_behind_chosen_columns_have_a_new_name():
    plan = Plan(columns={"body.fc": 3})
    assert plan.new_name("body.fc.weight") == "body.fc.1.weight"
    assert plan.new_name("body.other.weight") == "body.other.weight"
    assert plan.new_name("weight") == "weight"


def test_a_plan_for_another_network_is_refused(generator):
    net, x = make("residual", generator=generator)
    with torch.no_grad():
        net.four.weight.zero_()
        net.four.bias.zero_()
    plan = rewrite(net, x).plan
    assert [(edit.node, edit.flatten, edit.shift) for edit in plan.edits] == [("add_1", None, None)]
    with pytest.raises(kn.InvalidArgument, match="its graph has no 'add_1'"):
        plan.apply(nn.Linear(2, 2))
    with pytest.raises(kn.InvalidArgument, match="its forward cannot be followed"):
        plan.apply(Looking())
    with pytest.raises(kn.InvalidArgument, match="'1' is a ReLU"):
        Plan(columns={"1": 2}).apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
