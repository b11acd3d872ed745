"""Kernels whose chains are known in advance, and a density to run them on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import DensityTarget, Target
from knowable.core.network.params import Layout


def normal_target(dimension: int = 2) -> DensityTarget:
    return DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": torch.zeros(dimension)}))


@dataclass
class Counting(Kernel):
    """Chain c is at c + 1000 t after t transitions, and says so in its values and its info.

    It can be made to stop at a transition, as a keyboard or a failing machine would.
    """

    stops_at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    warmups: list[WarmUp] = field(default_factory=list)

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        numbers = torch.arange(len(position), dtype=position.dtype)
        return {
            "position": numbers.unsqueeze(1).expand(position.shape).clone(),
            "count": torch.zeros((), dtype=torch.int64),
        }

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        if warmup is not None:
            self.warmups.append(warmup)
        state, found = dict(state), []
        for _ in range(n):
            if self.stops_at is not None and int(state["count"]) >= self.stops_at:
                raise self.error("stopped on purpose")
            state["count"] = state["count"] + 1
            state["position"] = state["position"] + 1000
            value = state["position"][:, 0]
            found.append((state["position"], value, {"acceptance": torch.ones(len(value)), "number": value}))
        return state, Block.stack(found)


@dataclass(frozen=True)
class Autoregressive(Kernel):
    """x' = rho x + sqrt(1 - rho²) z: a chain on the standard normal that mixes as slowly as one likes."""

    rho: float = 0.0

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        return {"position": position, "value": -0.5 * position.square().sum(1)}

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        position, found = state["position"], []
        for _ in range(n):
            noise = torch.randn(position.shape, generator=generator, dtype=position.dtype)
            position = self.rho * position + (1 - self.rho**2) ** 0.5 * noise
            found.append((position, -0.5 * position.square().sum(1), {}))
        return {"position": position, "value": found[-1][1]}, Block.stack(found)
