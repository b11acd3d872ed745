"""What the chain loop needs of a sampler: a transition kernel over all chains at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.target import Target

State = dict[str, Tensor]
"""Everything the next transition depends on, tuned settings included, by name: what a checkpoint holds."""


@dataclass(frozen=True)
class WarmUp:
    """Which transitions of the warm-up these are.

    Attributes:
        first: Number of the first of them, from 0.
        total: Length of the whole warm-up.
    """

    first: int
    total: int


@dataclass(frozen=True)
class Block:
    """The outcome of n transitions of every chain.

    Attributes:
        positions: ``(n, chains, D)``.
        values: Log density of each, ``(n, chains)``.
        info: What diagnostics want, each ``(n, chains)``: ``acceptance`` (a probability), ``diverging`` (0 or 1),
            ``energy``, ``steps`` (gradients taken).
    """

    positions: Tensor
    values: Tensor
    info: dict[str, Tensor]

    @classmethod
    def stack(cls, transitions: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> Block:
        """From single transitions ``(position (chains, D), value (chains,), info)``."""
        positions, values, infos = zip(*transitions, strict=True)
        info = {name: torch.stack([each[name] for each in infos]) for name in infos[0]}
        return cls(torch.stack(positions), torch.stack(values), info)


class Kernel(ABC):
    """A transition of all chains that leaves a target distribution as it is, and how it is tuned before.

    The kernel itself holds settings only; what changes is in the state, which goes in and comes out.
    """

    @abstractmethod
    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """The state of chains that begin at ``position`` ``(chains, D)``."""

    @abstractmethod
    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` transitions of every chain, or those there is time for; with ``warmup`` they also tune the kernel."""

    def tuned(self, state: State) -> dict[str, float]:
        """The settings that the warm-up found, for the report."""
        return {}
