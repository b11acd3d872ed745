"""Tests of the leapfrog step."""

from __future__ import annotations

import torch

from knowable.inference.sampling.hmc import leapfrog


def test_a_leapfrog_step_is_reversible_and_nearly_conserves_energy(generator):
    q, p = (torch.randn((5, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    mass, step = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.full((5, 1), 0.1, dtype=torch.float64)

    def leap(q, p, step):
        return leapfrog(lambda q: (-0.5 * q.square().sum(1), -q), q, p, -q, step, mass)[:2]

    there = leap(q, p, step)
    back = leap(*there, -step)
    torch.testing.assert_close(back[0], q)
    torch.testing.assert_close(back[1], p)

    def energy(q, p):
        return 0.5 * (q.square() + mass * p.square()).sum(1)

    errors = [(energy(*leap(q, p, each * step)) - energy(q, p)).abs().mean() for each in (1.0, 0.5)]
    assert 5 < errors[0] / errors[1] < 12  # third order for one step: a factor of 8
