"""Monte Carlo: draws from the posterior, by chains or by weights."""

from knowable.inference.sampling.annealed import AnnealedImportance
from knowable.inference.sampling.cyclical import CyclicalSGMCMC
from knowable.inference.sampling.hmc import HMC
from knowable.inference.sampling.importance import ImportanceSampling
from knowable.inference.sampling.mclmc import MCLMC
from knowable.inference.sampling.metropolis import Metropolis
from knowable.inference.sampling.nuts import NUTS
from knowable.inference.sampling.sghmc import SGHMC
from knowable.inference.sampling.sgld import SGLD
from knowable.inference.sampling.simulated_annealing import SimulatedAnnealing
from knowable.inference.sampling.svgd import SVGD
from knowable.inference.sampling.tempered import TemperedChains

__all__ = [
    "ImportanceSampling",
    "AnnealedImportance",
    "Metropolis",
    "HMC",
    "NUTS",
    "MCLMC",
    "SimulatedAnnealing",
    "TemperedChains",
    "SGLD",
    "SGHMC",
    "CyclicalSGMCMC",
    "SVGD",
]
