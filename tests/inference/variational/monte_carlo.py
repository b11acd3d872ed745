"""The slow, obvious way to a network's output: very many draws of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

import knowable as kn

DRAWS = 100_000


def output_moments(posterior: kn.Posterior, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the network's outputs at ``x`` over 100,000 draws of the weights."""
    network, total, squares = posterior.model.network, 0.0, 0.0
    centre = network(posterior.model.network_params(posterior.mean()), x, buffers=posterior.buffers).double()
    for _ in range(20):
        stack = posterior.model.network_params(posterior.sample(DRAWS // 20, generator))
        outputs = network.over_draws(stack, x, buffers=posterior.buffers, vectorise=True).double() - centre
        total, squares = total + outputs.sum(0), squares + outputs.square().sum(0)
    mean = total / DRAWS
    return (centre + mean).detach(), (squares / DRAWS - mean.square()).sqrt().detach()
