"""What the kill tests run in processes of their own: a fit that resumes, and saves without end."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch._dynamo  # the first optimiser of a process loads it: here once for all of them
from torch import nn

import knowable as kn


def problem() -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """A small network and data, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(60, 2)
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(60)
    return kn.Model(net, kn.Gaussian()), (x, y)


def method() -> kn.MeanFieldVI:
    """Mini-batches of 10: 6 steps an epoch, so that windows of 100 steps end in the middle of epochs."""
    return kn.MeanFieldVI(epochs=70, batch_size=10)


def fit(checkpoint: str | None = None) -> kn.Posterior:
    """The fit; with a checkpoint it saves at the end of every window of steps."""
    torch.set_num_threads(1)
    model, data = problem()
    place = None if checkpoint is None else kn.Checkpoint(checkpoint, seconds=0)
    return method().fit(model, data, seed=7, progress=False, checkpoint=place)


def fit_and_save(checkpoint: str, artifact: str) -> None:
    """Fit, resuming what is there, and save the posterior."""
    fit(checkpoint).save(artifact)


def fit_until_interrupted(checkpoint: str, artifact: str) -> None:
    """A fit that would take hours; an interrupt from the keyboard ends it, and what it has learned is saved."""
    torch.set_num_threads(1)
    model, data = problem()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = kn.MAP(epochs=10_000_000, batch_size=10).fit(
            model, data, progress=False, checkpoint=kn.Checkpoint(checkpoint, seconds=0)
        )
    assert [each.category for each in caught] == [kn.Interrupted]
    posterior.save(artifact)


def save_without_end(artifact: str) -> None:
    """Save posteriors one after the other, each filled with its number."""
    torch.set_num_threads(1)
    model, _ = problem()
    Path(artifact + ".ready").touch()
    number = 0
    while os.getppid() > 1:
        number += 1
        start = model.params()
        filled = {name: torch.full_like(value, float(number)) for name, value in start.items()}
        posterior = kn.DiagonalNormal(model, filled, {k: torch.ones_like(v) for k, v in filled.items()}, seed=number)
        posterior.save(artifact, overwrite=True)
