"""What the kill tests of chains run in processes of their own: a fit that resumes and saves its posterior."""

from __future__ import annotations

import torch
import torch._dynamo  # the first optimiser of a process loads it: here once for all of them
from torch import nn

import knowable as kn
from knowable.core.chains import run as chain_run
from knowable.core.chains.settings import ChainStorage
from knowable.inference.sampling import initial_positions
from knowable.inference.sampling.hmc import HMC


def problem() -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """A small network and data, the same in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(40, 2)
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(40)
    return kn.Model(net, kn.Gaussian()), (x, y)


def method() -> HMC:
    """An ensemble, a warm-up that tunes step and mass, and draws of which memory keeps a part."""
    return HMC(chains=3, draws=99, warmup=60, steps=3, storage=ChainStorage(max_memory=40 * 3 * 18 * 4))


def fit(checkpoint: str | None = None) -> kn.Posterior:
    """The fit; with a checkpoint it saves after every few transitions."""
    torch.set_num_threads(1)
    chain_run._BLOCK, initial_positions._STEPS = 8, 150
    model, data = problem()
    place = None if checkpoint is None else kn.Checkpoint(checkpoint, seconds=0)
    return method().fit(model, data, seed=7, progress=False, checkpoint=place)


def fit_and_save(checkpoint: str, artifact: str) -> None:
    """Fit, resuming what is there, and save the posterior."""
    fit(checkpoint).save(artifact)
