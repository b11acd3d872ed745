"""Tests of what kernels hand to the chain loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.chains.kernel import Block, Info, Kernel, State, WarmUp, restored_state, state_tensors


def test_single_transitions_become_a_block_with_the_transitions_first():
    transitions = [
        (State(torch.full((3, 2), float(k)), torch.full((3,), 10.0 * k)), Info(steps=torch.ones(3))) for k in range(4)
    ]
    block = Block.stack(transitions)
    assert block.positions.shape == (4, 3, 2) and block.values.shape == (4, 3)
    assert block.positions[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert block.values[:, 2].tolist() == [0, 10, 20, 30]
    assert block.info.steps.shape == (4, 3) and block.info.acceptance is None


def test_a_block_does_not_follow_later_changes_of_the_position():
    position = torch.zeros(3, 2)
    block = Block.stack([(State(position, torch.zeros(3)), Info())])
    position += 1
    assert block.positions.abs().max() == 0


def test_a_kernel_says_nothing_of_tuning_unless_it_has_something_to_say():
    class Still(Kernel):
        def init(self, target, position, *, generator):
            return State(position, position[:, 0])

        def advance(self, target, state, n, *, generator, warmup=None):
            return state, Block.stack([(state, Info())] * n)

    assert Still().tuned(State(torch.zeros(1, 1), torch.zeros(1))) == {}
    with pytest.raises(TypeError, match="abstract"):
        Kernel()  # type: ignore[abstract]


def test_a_warm_up_knows_where_it_is():
    assert (WarmUp(3, 10).first, WarmUp(3, 10).total) == (3, 10)


# --- states in checkpoints -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    total: Tensor
    rate: float
    more: Tensor | None = None


@dataclass(frozen=True)
class Whole(State):
    part: Part
    perhaps: Part | None = None
    count: int = 0
    done: bool = False


WHOLE = Whole(torch.zeros(3, 2), torch.ones(3), Part(torch.arange(3), 1 / 3), count=7, done=True)


@pytest.mark.parametrize("state", [WHOLE, replace(WHOLE, perhaps=Part(torch.ones(2), 0.5, torch.zeros(1)))], ids=str)
def test_a_state_is_restored_from_its_tensors_to_the_bit(state):
    tensors = state_tensors(state)
    assert tensors["part.rate"].dtype == torch.float64 and tensors["count"].dtype == torch.int64
    found = restored_state(Whole, tensors)
    again = state_tensors(found)
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert (found.count, found.done, found.part.rate) == (7, True, 1 / 3)
    assert (found.perhaps is None) == (state.perhaps is None) and found.part.more is None


@pytest.mark.parametrize(
    "change", [{"part.old": torch.zeros(())}, {"part.rate": None}, {"window.count": torch.ones(())}]
)
def test_the_state_of_another_version_is_refused(change):
    tensors = {k: v for k, v in {**state_tensors(WHOLE), **change}.items() if v is not None}
    with pytest.raises(kn.InvalidArgument, match=r"older version of knowable.*new folder"):
        restored_state(Whole, tensors)
