"""How chains are run, whatever moves them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import Tensor

from knowable.core.chains.draw_store import STORES
from knowable.core.chains.kernel import State
from knowable.core.posterior.diagnostics import NOT_BAYES
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.predicting import parse_memory
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.errors import InvalidType

STARTS = ("ensemble", "map", "prior", "network")


@dataclass(frozen=True)
class Sampling:
    """How chains are run. Every default works; change what you must.

    Args:
        chains: Chains that advance together.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is the sampler's own.
        thin: Keep every that-many-th transition.
        start: Where the chains of a network begin: ``"ensemble"`` (each at its own trained network: Sommer et al.,
            2025), ``"map"`` (all at one trained network), ``"prior"`` (draws from the prior), ``"network"`` (the
            network's own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        store: What draws are kept as: ``"same"`` as the network, ``"float32"`` or ``"bfloat16"``.
        max_memory: The most that kept draws may take, in bytes or as text (``"1GB"``); where it does not suffice,
            every second draw is let go.
        spill: A file on disk to hold the draws instead of memory.
    """

    chains: int = 16
    draws: int | None = None
    warmup: int | None = None
    thin: int = 1
    start: str | Posterior = "ensemble"
    temperature: float = 1.0
    store: str = "same"
    max_memory: int | str = "1GB"
    spill: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_count("chains", self.chains)
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.warmup is not None:
            check_count("warmup", self.warmup, at_least=0)
        check_count("thin", self.thin)
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(
                    f"start must be one of {', '.join(map(repr, STARTS))} or a posterior, got {self.start!r}."
                )
            check_choice("start", self.start, STARTS)
        check_number("temperature", self.temperature, above=0)
        check_choice("store", self.store, STORES)
        parse_memory(self.max_memory)
        if self.spill is not None and not isinstance(self.spill, str | os.PathLike):
            raise InvalidType(f"spill must be the name of a file, got {self.spill!r}.")

    def temperature_note(self) -> tuple[str, ...]:
        """What a report says where the target is not Bayes."""
        if self.temperature == 1.0:
            return ()
        return (f"temperature={self.temperature:g}: {NOT_BAYES} (temperature=1 is).",)


# --- What a run of chains leaves behind, and when its chains count as mixed ------------------------------------------

FEW = 100  # draws of a chain: where the user asks for fewer, nothing is said of mixing


@dataclass(frozen=True)
class Mixing:
    """When chains count as mixed, and how long they may try.

    Attributes:
        rhat: Largest R-hat allowed.
        ess: Least bulk and tail effective sample size, over all chains.
        first: Draws of each chain before the first look; the next looks are at twice as many each time.
        most: Draws of each chain after which it gives up.
    """

    rhat: float = 1.01
    ess: float = 400.0
    first: int = 250
    most: int = 8000

    def reached(self, found: dict[str, float], draws: int | None) -> bool | None:
        """Whether this is what was ``found``; None if there are too few draws to tell.

        Where so many ``draws`` were asked for, only what is clearly wrong is said.
        """
        if found["rhat"] != found["rhat"] or (draws or FEW) < FEW:
            return None
        enough = min(found["ess_bulk"], found["ess_tail"])
        if draws is not None:
            return found["rhat"] <= max(self.rhat, 1.05) and enough >= min(self.ess, 100.0)
        return found["rhat"] <= self.rhat and enough >= self.ess


@dataclass(frozen=True)
class ChainResult:
    """What a run of chains leaves behind.

    Attributes:
        draws: ``(chains, draws, D)``.
        monitored: The watched quantities of every transition that was to be kept, ``(chains, n, M)``.
        values: Log densities of the draws, ``(chains, draws)``.
        info: What the kernel said of them, ``(chains, draws)``.
        terms: Numbers for the report.
        state: The kernel's last state.
        converged: Whether the chains have mixed; None where there are too few draws to tell.
        out_of_time: Whether a limit of time ended the run.
    """

    draws: Tensor
    monitored: Tensor
    values: Tensor
    info: dict[str, Tensor]
    terms: dict[str, float]
    state: State
    converged: bool | None
    interrupted: bool
    message: str
    seconds: float
    out_of_time: bool = False


def info_terms(info: dict[str, Tensor]) -> dict[str, float]:
    """Numbers for the report, of what the kernel said of each draw ``(chains, draws)``."""
    terms = {}
    if "acceptance" in info:
        terms["acceptance"] = info["acceptance"].double().mean().item()
    if "diverging" in info:
        terms["divergences"] = info["diverging"].double().sum().item()
    if "steps" in info:
        terms["steps"] = info["steps"].double().mean().item()
    if "energy" in info and info["energy"].shape[1] > 1:
        energy = info["energy"].double()  # E-BFMI (Betancourt, 2016): below 0.3 momenta explore the energies poorly
        terms["ebfmi"] = (energy.diff(dim=1).square().mean(1) / energy.var(1).clamp_min(1e-300)).min().item()
    return terms
