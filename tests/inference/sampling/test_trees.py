"""Tests of the bookkeeping of trees: which parts end with which leaf."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling import trees
from knowable.inference.sampling.metric import MetricState, Window


def test_each_leaf_ends_the_parts_that_a_recursion_would_end():
    # the slow way: part [a, b] of size 2^k with a a multiple of 2^k ends at leaf b
    remembered: dict[int, int] = {}  # level -> leaf
    for leaf in range(2**8):
        level, parts = int(trees._LEVEL[leaf]), int(trees._PARTS[leaf])
        expected = [leaf + 1 - 2**k for k in range(1, 9) if (leaf + 1) % 2**k == 0]
        if leaf % 2 == 0:
            assert not expected
            remembered[level] = leaf
        else:
            assert [remembered[level - i] for i in range(parts)] == expected


class Recorded(trees.UTurns):
    """Turns that are written down, for every leaf, with its momentum."""

    def within(self, leaf, active, speed, momentum, total):
        turning = super().within(leaf, active, speed, momentum, total)
        self.log = leaf.copy(), momentum.clone(), turning.copy()
        return turning


def state_at(target: DensityTarget, position: Tensor) -> MetricState:
    value, gradient = target.value_and_grad(position)
    mass = torch.ones(position.shape[1], dtype=torch.float64)
    return MetricState(position, value, gradient, mass, Window.open(position, dense=False))


def turned_back(momenta: list[Tensor]) -> bool:
    """The slow way: any part of 2^k leaves, aligned and complete, that turns as a whole or at its middle."""
    size = len(momenta)
    if size == 1:
        return False
    left, right = momenta[: size // 2], momenta[size // 2 :]
    return (
        against(left + right)
        or against([*left, right[0]])
        or against([left[-1], *right])
        or turned_back(left)
        or turned_back(right)
    )


def against(momenta: list[Tensor]) -> bool:
    span = torch.stack(momenta).sum(0)
    return bool(momenta[0] @ span <= 0) or bool(momenta[-1] @ span <= 0)


def test_turns_are_noticed_where_a_recursion_would_notice_them(generator):
    scale = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    layout = Layout.of({"x": torch.zeros(3, dtype=torch.float64)})
    target = DensityTarget(lambda p: -0.5 * (p["x"] / scale).square().sum(), layout)
    position = scale * torch.randn((6, 3), generator=generator, dtype=torch.float64)
    grown = trees.Trees(target, state_at(target, position), 30, 10, generator=generator)
    grown.turns = turns = Recorded(position, 10)
    subtrees: list[list[Tensor]] = [[] for _ in range(6)]
    looked = noticed = 0
    while not grown.finished:
        active = grown.counters.active.copy()
        grown.advance(0.08)
        leaf, momentum, turning = turns.log
        for chain in range(6):
            if not active[chain]:
                continue
            here = subtrees[chain] = [] if leaf[chain] == 0 else subtrees[chain]
            here.append(momentum[chain])
            parts = [here[-(2**k) :] for k in range(1, 11) if len(here) % 2**k == 0]
            expected = any(turned_back(part) for part in parts)
            assert bool(turning[chain]) == expected, (chain, leaf[chain])
            looked, noticed = looked + 1, noticed + expected
    assert looked > 500 and noticed > 20


def test_a_tree_that_closes_a_circle_does_not_go_on(generator):
    # every direction has the same period: a trajectory may double from less than half a circle to a whole number
    layout = Layout.of({"x": torch.zeros(50, dtype=torch.float64)})
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), layout)
    position = torch.randn((64, 50), generator=generator, dtype=torch.float64)
    state = state_at(target, position)
    for step in (2 * math.pi / 15, 2 * math.pi / 16, 2 * math.pi / 17):
        grown = trees.Trees(target, state, 20, 10, generator=generator)
        while not grown.finished:
            grown.advance(step)
        assert grown.block().info.steps.max() <= 31


def test_every_fifth_trajectory_has_small_steps_where_asked(generator):
    layout = Layout.of({"x": torch.zeros(2, dtype=torch.float64)})
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), layout)
    position = torch.randn((3, 2), generator=generator, dtype=torch.float64)
    state = state_at(target, position)
    for small in (False, True):
        grown = trees.Trees(target, state, 12, 6, generator=generator, small_step_depth=6 if small else None)
        used: dict[int, set[float]] = {}
        while not grown.finished:
            at = grown.counters
            number, active = at.transitions.copy(), at.active.copy()
            grown.advance(0.4)
            ongoing = active & at.active & (at.transitions == number)
            for chain in ongoing.nonzero()[0]:
                used.setdefault(int(number[chain]), set()).add(round(abs(grown.step[chain].item()), 12))
        expected = {number: {0.1} if small and number % 5 == 0 else {0.4} for number in used}
        assert used == expected and {0, 5} <= used.keys()
