"""Every sampler, stopped in the middle and taken up again, gives the draws it would have given."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.storage.folder import Checkpoint
from knowable.inference.sampling.sampler import Sampler
from knowable.testing.densities import bimodal

CHAINS = {"chains": 3, "draws": 120, "warmup": 90}
SAMPLERS = [
    kn.Metropolis(**CHAINS, steps=3),
    kn.HMC(**CHAINS),
    kn.NUTS(**CHAINS),
    kn.MCLMC(**CHAINS, length=3.0),
    kn.MCLMC(**CHAINS, adjusted=False),
    kn.SimulatedAnnealing(**CHAINS),
    kn.TemperedChains(**CHAINS, rungs=3),
    kn.SGLD(**CHAINS, steps=3),
    kn.SGHMC(**CHAINS, steps=3),
    kn.CyclicalSGMCMC(**CHAINS, cycle_steps=12),
    kn.SVGD(chains=8, warmup=120),
]


class _Stopped(Exception):
    """Stands for a crash."""


class StopsAfter(Checkpoint):
    """A checkpoint that is written at every opportunity, and ends the run after some of them."""

    saves_left = 3

    def save(self, content, tensors):
        super().save(content, tensors)
        self.saves_left -= 1
        if self.saves_left == 0:
            raise _Stopped


def draw(sampler: Sampler, checkpoint: Checkpoint | None = None) -> kn.Samples:
    density = bimodal()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ConvergenceWarning)  # three short chains need not have mixed
        return sampler.sample(
            density.log_density, density.start(), seed=2, checkpoint=checkpoint, engine=kn.Engine(mode="traced")
        )


# the conformance suite does the same for every sampler that counts gradients
@pytest.mark.parametrize("saves", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sampler",
    [each if isinstance(each, kn.Metropolis) else pytest.param(each, marks=pytest.mark.slow) for each in SAMPLERS],
    ids=repr,
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(sampler: Sampler, saves: int, tmp_path: Path):
    whole = draw(sampler)
    stopping = StopsAfter(tmp_path / "state", seconds=0)
    stopping.saves_left = saves
    with pytest.raises(_Stopped):
        draw(sampler, stopping)
    resumed = draw(sampler, Checkpoint(tmp_path / "state", seconds=0))
    assert torch.equal(whole.draws["x"], resumed.draws["x"])
    assert torch.equal(whole.log_density, resumed.log_density)
    assert whole.diagnostics.terms == resumed.diagnostics.terms


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path):
    sampler = kn.HMC(chains=2, draws=5, warmup=5)
    draw(sampler, Checkpoint(tmp_path / "state"))
    with pytest.raises(kn.InvalidArgument, match="belongs to another fit"):
        draw(replace(sampler, draws=6), Checkpoint(tmp_path / "state"))
