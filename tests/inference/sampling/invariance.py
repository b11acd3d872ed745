"""A kernel leaves its target as it is: chains that begin at exact draws are exact draws after any transitions.

The sharpest test of an exact kernel there is: no warm-up, no mixing, thousands of independent chains at once.
"""

from __future__ import annotations

import torch

from knowable.core.chains.kernel import Kernel
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.testing.densities import Density
from tests.inference.sampling.moments import limit


def expect_invariance(kernel: Kernel, density: Density, seed: int, *, chains: int = 4000, transitions: int = 4) -> None:
    """Fail if means or second moments of exact draws have moved after a few transitions, by their standard errors."""
    generator = torch.Generator().manual_seed(seed)
    target = DensityTarget(density.log_density, Layout.of(density.start()), mode="traced")
    first = density.draw(chains, generator)
    state = kernel.init(target, first, generator=generator)
    state, block = kernel.advance(target, state, transitions, generator=generator)
    last = block.positions[-1]
    assert (last != first).any(1).double().mean() > 0.3  # it moves
    sd = density.covariance.diagonal().sqrt()
    values = torch.cat([last - density.mean, (last - density.mean).square() / sd - sd, last * last.roll(1, 1)], dim=1)
    expected = torch.zeros(values.shape[1], dtype=torch.float64)
    expected[2 * len(sd) :] = (density.covariance + density.mean.outer(density.mean)).roll(1, 1).diagonal()
    scores = (values.mean(0) - expected) / (values.std(0) / chains**0.5)
    assert (scores.abs() < limit(len(scores))).all(), scores
