"""Normal targets for many short chains, whose stationary variance under a discretisation is known."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.chains.target import Target
from knowable.core.compiling.recorder import BatchedGradient
from knowable.core.network.params import Layout


class Gaussian(Target):
    """Independent normals of these scales, with normal noise of variance V on the gradient of every step."""

    def __init__(self, scales: list[float], *, noise: float = 0.0, temperature: float = 1.0):
        scale = torch.tensor(scales, dtype=torch.float64)
        super().__init__(Layout.of({"x": scale}), temperature)
        self.scale, self.noise = scale, noise

    @property
    def function(self) -> BatchedGradient:
        """The density alone, without the noise."""
        return BatchedGradient(lambda flat: -0.5 * (flat / self.scale).square().sum(), mode="traced")

    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        gradient = -position / self.scale**2 + self.noise**0.5 * torch.randn_like(position)
        return self._value(position), gradient

    def _value(self, position: Tensor) -> Tensor:
        return -0.5 * (position / self.scale).square().sum(-1)


def stationary_variance(sampler, target: Gaussian, *, transitions: int, chains: int = 20_000) -> Tensor:
    """Variance ``(D,)`` over many chains that began in the target."""
    kernel, generator = sampler.kernel(len(target.scale)), torch.Generator().manual_seed(0)
    start = torch.randn(chains, len(target.scale), dtype=torch.float64) * target.scale
    state = kernel.init(target, start, generator=generator)
    for _ in range(transitions):
        state, _ = kernel.advance(target, state, 1, generator=generator)
    return state.position.var(0)


def expect_variance(found: Tensor, expected: Tensor, chains: int = 20_000) -> None:
    """Within 4.5 standard errors of a normal's variance from independent chains."""
    assert ((found / expected - 1).abs() < 4.5 * (2 / (chains - 1)) ** 0.5).all(), f"{found} is not {expected}"
