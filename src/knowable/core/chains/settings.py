"""How chains are run, whatever the sampler, and what a run leaves behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from knowable.core.chains.draw_store import DTYPES
from knowable.core.posterior.diagnostics import NOT_BAYES
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number, check_type, parse_memory
from knowable.errors import InvalidArgument, InvalidType

STARTS = ("ensemble", "map", "prior", "network")


@dataclass(frozen=True, kw_only=True)
class ChainStorage:
    """How the draws of chains are kept.

    Args:
        thin: Keep every ``thin``-th transition.
        dtype: Number format of the draws kept: ``"same"`` as the network, ``"float32"`` or ``"bfloat16"``.
        max_memory: Most memory that draws may take, in bytes or as text (``"1GB"``); where more draws come, every
            second one is dropped.
        file: A file on disk that holds the draws instead of memory; its size is not limited.

    Example:
        >>> import knowable as kn
        >>> kn.NUTS(storage=kn.ChainStorage(thin=2, dtype="bfloat16"))
        NUTS(storage=ChainStorage(thin=2, dtype='bfloat16'))
    """

    thin: int = 1
    dtype: str = "same"
    max_memory: int | str = "1GB"
    file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_count("thin", self.thin)
        check_choice("dtype", self.dtype, DTYPES)
        parse_memory(self.max_memory)
        if self.file is not None and not isinstance(self.file, str | os.PathLike):
            raise InvalidType(f"file must be the name of a file, got {self.file!r}.")

    @property
    def max_bytes(self) -> int | None:
        """Most bytes of memory for the draws; None where a file holds them."""
        return None if self.file is not None else parse_memory(self.max_memory)

    def __repr__(self) -> str:
        """The settings that differ from the defaults."""
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"ChainStorage({', '.join(changed)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class ChainSettings:
    """How chains are run. Every default works; change what you must.

    Args:
        chains: Chains that advance together.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        max_gradients: Where ``draws`` is None: gradients of each chain, warm-up included, after which the run ends even
            where the chains have not mixed; None is no limit.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is the sampler's own.
        start: Where the chains of a network begin: ``"ensemble"`` (each at its own trained network: Sommer et al.,
            2025), ``"map"`` (all at one trained network), ``"prior"`` (draws from the prior), ``"network"`` (the
            network's own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How draws are kept: thinning, number format, memory, a file on disk.
    """

    chains: int = 16
    draws: int | None = None
    max_gradients: int | None = None
    warmup: int | None = None
    start: str | Posterior = "ensemble"
    temperature: float = 1.0
    storage: ChainStorage = ChainStorage()

    moved: ClassVar[Mapping[str, str]] = {
        "thin": "storage=kn.ChainStorage(thin=...)",
        "store": "storage=kn.ChainStorage(dtype=...)",
        "max_memory": "storage=kn.ChainStorage(max_memory=...)",
        "spill": "storage=kn.ChainStorage(file=...)",
    }

    def __post_init__(self) -> None:
        check_count("chains", self.chains)
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.max_gradients is not None:
            check_count("max_gradients", self.max_gradients)
            if self.draws is not None:
                raise InvalidArgument(
                    f"max_gradients is a limit where draws is None, got draws={self.draws} as well. Give one of them."
                )
        if self.warmup is not None:
            check_count("warmup", self.warmup, at_least=0)
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(
                    f"start must be one of {', '.join(map(repr, STARTS))} or a posterior, got {self.start!r}."
                )
            check_choice("start", self.start, STARTS)
        check_number("temperature", self.temperature, above=0)
        check_type("storage", self.storage, ChainStorage, "kn.ChainStorage(...)")

    def temperature_note(self) -> tuple[str, ...]:
        """What a report says where the target is not Bayes."""
        if self.temperature == 1.0:
            return ()
        return (f"temperature={self.temperature:g}: {NOT_BAYES} (temperature=1 is).",)


# --- when chains count as mixed, and what a run leaves behind -------------------------------------------------------


FEW = 100  # draws of a chain: where the user asks for fewer, convergence is not judged


@dataclass(frozen=True)
class Mixing:
    """When chains count as mixed, and how long they may try."""

    rhat: float = 1.01  # largest R-hat allowed
    ess: float = 400.0  # least bulk and tail effective sample size, over all chains
    first: int = 250  # draws of each chain before R-hat is computed first; then at twice as many each time
    most: int = 8000  # draws of each chain after which the run ends, mixed or not

    def reached(self, found: dict[str, float], draws: int | None) -> bool | None:
        """Whether chains with this R-hat and these effective sample sizes have mixed; None: too few draws to tell.

        Where the work was fixed before, which leaves ``draws`` of each chain, the thresholds are laxer.
        """
        if found["rhat"] != found["rhat"] or (draws or FEW) < FEW:
            return None
        enough = min(found["ess_bulk"], found["ess_tail"])
        if draws is not None:
            return found["rhat"] <= max(self.rhat, 1.05) and enough >= min(self.ess, 100.0)
        return found["rhat"] <= self.rhat and enough >= self.ess


@dataclass(frozen=True)
class ChainResult:
    """What a run of chains leaves behind."""

    draws: Tensor  # (chains, draws, D)
    monitored: Tensor  # the monitored quantities of every transition that was to be kept, (chains, n, M)
    values: Tensor  # log densities of the draws, (chains, draws)
    info: dict[str, Tensor]  # acceptance, divergences, energies and steps of the transitions to them, (chains, draws)
    terms: dict[str, float]  # numbers for the report
    state: Any  # the kernel's last state
    converged: bool | None  # whether chains have mixed; None: too few draws to tell, or predictions agree all the same
    interrupted: bool
    message: str
    seconds: float
    out_of_time: bool = False  # whether a time limit ended the run


def info_terms(info: dict[str, Tensor]) -> dict[str, float]:
    """Numbers for the report: acceptance rate, divergences, gradients of a transition, E-BFMI."""
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
