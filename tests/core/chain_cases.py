"""Kernels whose chains are known in advance, and a density to run them on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Info, Kernel, State, WarmUp, restored_state, state_tensors
from knowable.core.chains.target import DensityTarget, Target
from knowable.core.network.params import Layout


def normal_target(dimension: int = 2) -> DensityTarget:
    return DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": torch.zeros(dimension)}))


@dataclass(frozen=True)
class CountingState(State):
    count: int = 0


@dataclass(frozen=True)
class CountingInfo(Info):
    number: Tensor | None = None


@dataclass
class Counting(Kernel):
    """Chain c is at c + 1000 t after t transitions, and says so in its values and its info.

    It can be made to stop at a transition, as a keyboard or a failing machine would.
    """

    stops_at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    warmups: list[WarmUp] = field(default_factory=list)

    state_type = CountingState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> CountingState:
        numbers = torch.arange(len(position), dtype=position.dtype)
        return CountingState(numbers.unsqueeze(1).expand(position.shape).clone(), numbers)

    def advance(
        self, target: Target, state: CountingState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[CountingState, Block]:
        if warmup is not None:
            self.warmups.append(warmup)
        found = []
        for _ in range(n):
            if self.stops_at is not None and state.count >= self.stops_at:
                raise self.error("stopped on purpose")
            position = state.position + 1000
            state = replace(state, position=position, value=position[:, 0], count=state.count + 1)
            found.append((state, CountingInfo(acceptance=torch.ones(len(position)), number=state.value)))
        return state, Block.stack(found)


@dataclass(frozen=True)
class Autoregressive(Kernel):
    """x' = rho x + sqrt(1 - rho²) z: a chain on the standard normal that mixes as slowly as one likes."""

    rho: float = 0.0

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        return State(position, -0.5 * position.square().sum(1))

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        found = []
        for _ in range(n):
            noise = torch.randn(state.position.shape, generator=generator, dtype=state.position.dtype)
            position = self.rho * state.position + (1 - self.rho**2) ** 0.5 * noise
            state = State(position, -0.5 * position.square().sum(1))
            found.append((state, Info()))
        return state, Block.stack(found)


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are the same to the bit."""
    a, b = state_tensors(one), state_tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def copied(state: Any) -> Any:
    """A state with tensors of its own."""
    return restored_state(type(state), {name: value.clone() for name, value in state_tensors(state).items()})
