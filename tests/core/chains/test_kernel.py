"""Tests of what kernels hand to the chain loop."""

from __future__ import annotations

import pytest
import torch

from knowable.core.chains.kernel import Block, Kernel, WarmUp


def test_single_transitions_become_a_block_with_the_transitions_first():
    transitions = [
        (torch.full((3, 2), float(k)), torch.full((3,), 10.0 * k), {"steps": torch.ones(3)}) for k in range(4)
    ]
    block = Block.stack(transitions)
    assert block.positions.shape == (4, 3, 2) and block.values.shape == (4, 3)
    assert block.positions[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert block.values[:, 2].tolist() == [0, 10, 20, 30]
    assert block.info["steps"].shape == (4, 3)


def test_a_block_does_not_follow_later_changes_of_the_position():
    position = torch.zeros(3, 2)
    block = Block.stack([(position, torch.zeros(3), {})])
    position += 1
    assert block.positions.abs().max() == 0


def test_a_kernel_says_nothing_of_tuning_unless_it_has_something_to_say():
    class Still(Kernel):
        def init(self, target, position, *, generator):
            return {"position": position}

        def advance(self, target, state, n, *, generator, warmup=None):
            return state, Block.stack([(state["position"], torch.zeros(1), {})] * n)

    assert Still().tuned({}) == {}
    with pytest.raises(TypeError, match="abstract"):
        Kernel()  # type: ignore[abstract]


def test_a_warm_up_knows_where_it_is():
    assert (WarmUp(3, 10).first, WarmUp(3, 10).total) == (3, 10)
