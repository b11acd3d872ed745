"""Tests of the bookkeeping of trees: which parts end with which leaf."""

from __future__ import annotations

import torch

from knowable.inference.sampling import trees


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


def test_a_leapfrog_step_is_reversible_and_nearly_conserves_energy(generator):
    q, p = (torch.randn((5, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    mass, step = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.full((5, 1), 0.1, dtype=torch.float64)

    def leap(q, p, step):
        new, half = trees.move(q, p, -q, step, mass)
        return new, half + 0.5 * step * -new

    there = leap(q, p, step)
    back = leap(*there, -step)
    torch.testing.assert_close(back[0], q)
    torch.testing.assert_close(back[1], p)

    def energy(q, p):
        return 0.5 * (q.square() + mass * p.square()).sum(1)

    errors = [(energy(*leap(q, p, each * step)) - energy(q, p)).abs().mean() for each in (1.0, 0.5)]
    assert 5 < errors[0] / errors[1] < 12  # third order for one step: a factor of 8
