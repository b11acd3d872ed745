"""Posteriors whose worst inputs are known."""

from __future__ import annotations

import torch
from torch import nn

import knowable as kn


def linear_classifier(weights: torch.Tensor, bias: torch.Tensor | None = None) -> kn.Posterior:
    """Logits W x + b with the given weights: one atom for each of ``(K, classes, inputs)``."""
    draws, classes, inputs = weights.shape
    net = nn.Linear(inputs, classes).to(weights.dtype)
    model = kn.Model(net, kn.Categorical())
    bias = torch.zeros(draws, classes, dtype=weights.dtype) if bias is None else bias
    return kn.Particles(model, {"weight": weights, "bias": bias})


def linear_regression(weights: torch.Tensor) -> kn.Posterior:
    """A mean w x with noise 0.1: one atom for each of ``(K, inputs)``."""
    net = nn.Linear(weights.shape[1], 1).to(weights.dtype)
    stack = {"weight": weights.unsqueeze(1), "bias": torch.zeros(len(weights), 1, dtype=weights.dtype)}
    return kn.Particles(kn.Model(net, kn.Gaussian(0.1)), stack)


def small_ensemble(seed: int = 0, members: int = 3) -> tuple[kn.Posterior, torch.Tensor, torch.Tensor]:
    """Random tanh networks of three classes, points, and the labels that the ensemble gives them."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = kn.Model(net, kn.Categorical())
    stack = {
        name: torch.randn((members, *value.shape), generator=generator, dtype=value.dtype)
        for name, value in model.params().items()
    }
    posterior = kn.Particles(model, stack)
    x = torch.randn((40, 4), generator=generator, dtype=torch.float64)
    return posterior, x, posterior.predict(x).labels
