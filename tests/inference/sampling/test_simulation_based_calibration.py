"""Simulation-based calibration (Talts et al., 2018) of the exact gradient samplers on a small Bayesian network.

Weights are drawn from the prior, data from the network with these weights, and chains from the posterior given the
data. Then the true value of any quantity is one more draw of it: its rank among the chain's draws is uniform. Every
replication is one chain of a single batched run, each with data of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.func import grad_and_value, vmap

from knowable.core.chains.loop import run_chains
from knowable.core.chains.settings import ChainStorage
from knowable.core.chains.target import Target
from knowable.core.compiling.recorder import BatchedGradient
from knowable.core.network.params import Layout
from knowable.inference.sampling import HMC, MCLMC, NUTS
from knowable.inference.sampling.sampler import Sampler, coordinate_monitor

REPLICATIONS = 400
RANKED = 13  # draws that a true value is ranked among, far apart in the chain
THIN = 15
NOISE = 0.4
HIDDEN = 3
LAYOUT = Layout.of({"w": torch.zeros(HIDDEN), "b": torch.zeros(HIDDEN), "v": torch.zeros(HIDDEN), "c": torch.zeros(())})
X = torch.linspace(-2, 2, 8, dtype=torch.float64)


def network(flat: Tensor) -> Tensor:
    """A 1-3-1 tanh network at the inputs ``X``."""
    p = LAYOUT.views(flat)
    return torch.tanh(X.unsqueeze(-1) * p["w"] + p["b"]) @ p["v"] + p["c"]


def log_joint(flat: Tensor, y: Tensor, sharpness: float = 1.0) -> Tensor:
    """Log p(y, θ) up to a constant; ``sharpness`` other than 1 is wrong on purpose."""
    fit = -0.5 * ((y - network(flat)) / NOISE).square().sum()
    return sharpness * fit - 0.5 * flat.square().sum()


class ManyPosteriors(Target):
    """One posterior for each chain: the same network, data of its own."""

    def __init__(self, y: Tensor, sharpness: float):
        super().__init__(LAYOUT)
        self.y = y

        def each(flat: Tensor, y: Tensor) -> Tensor:
            return log_joint(flat, y, sharpness)

        self._gradient: Callable = vmap(grad_and_value(each))
        self._values: Callable = vmap(each)
        self._function = BatchedGradient(lambda flat: flat.sum(), mode="eager")  # counts calls; nothing is compiled

    @property
    def function(self) -> BatchedGradient:
        return self._function

    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = self._gradient(position, self.y)
        return value.detach(), gradient.detach()

    def _value(self, position: Tensor) -> Tensor:
        return self._values(position, self.y).detach()


def p_values(sampler: Sampler, seed: int, *, sharpness: float = 1.0) -> Tensor:
    """Chi-square p-values of the rank histograms: three function values, and the log likelihood."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn((REPLICATIONS, LAYOUT.size), generator=generator, dtype=torch.float64)
    outputs = vmap(network)(truth)
    y = outputs + NOISE * torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    result = run_chains(  # begun at exact draws, so that the warm-up is for the tuning alone
        sampler.kernel(LAYOUT.size), ManyPosteriors(y, sharpness), truth.clone(), sampler, warmup=200,
        monitor=coordinate_monitor(LAYOUT.size), seed=seed,
    )  # fmt: skip
    drawn = vmap(vmap(network))(result.draws)  # (replications, draws, inputs)
    quantities = [(drawn[..., i], outputs[:, i]) for i in (0, 3, 7)]
    fit = -(y.unsqueeze(1) - drawn).square().sum(-1), -(y - outputs).square().sum(-1)
    found = []
    for values, true in [*quantities, fit]:
        ranks = (values < true.unsqueeze(1)).sum(1)  # 0 ... RANKED
        counts = torch.bincount(ranks // 2, minlength=(RANKED + 1) // 2)
        found.append(stats.chisquare(counts.numpy()).pvalue)
    return torch.tensor(found)


SETTINGS = {"chains": REPLICATIONS, "draws": RANKED, "storage": ChainStorage(thin=THIN)}
SAMPLERS = {
    "hmc": HMC(**SETTINGS, mass="diagonal", target_acceptance=0.9),
    "nuts": NUTS(**SETTINGS, mass="diagonal", max_depth=7),
    "mclmc": MCLMC(**SETTINGS, mass="diagonal"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SAMPLERS)
def test_true_values_rank_evenly_among_draws(name, seed):
    # four correlated p-values, each below 1e-4 with that probability if the sampler is right
    assert p_values(SAMPLERS[name], seed).min() > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_posterior_that_is_too_narrow_is_noticed():
    assert p_values(SAMPLERS["hmc"], 0, sharpness=2.0).min() < 1e-6
