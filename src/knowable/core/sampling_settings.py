"""How chains are run, whatever moves them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.diagnostics import NOT_BAYES
from knowable.core.draw_store import STORES
from knowable.core.posterior import Posterior
from knowable.core.predicting import parse_memory
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
