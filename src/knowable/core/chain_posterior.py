"""A posterior made of chains: atoms of equal weight that remember which chain they came from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.chain_diagnostics import ChainDiagnostics, moments_of
from knowable.core.data import as_input
from knowable.core.model import Model
from knowable.core.params import number_of_draws
from knowable.core.particles import Particles
from knowable.core.posterior import Posterior
from knowable.core.samples import to_arviz
from knowable.core.types import Params
from knowable.errors import InvalidArgument

_BLOCK = 64  # draws run through the network together


class ChainPosterior(Particles):
    """The draws of all chains, chain by chain.

    Args:
        model: The model.
        stack: Random parameters, each ``(chains * draws, ...)``, one chain after the other.
        chains: How many chains.
        info: What the sampler said of each draw, ``(chains, draws)``.
        best: The most probable weights a search found, where the sampler searches.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "chains"

    def __init__(
        self,
        model: Model,
        stack: Params,
        chains: int,
        *,
        info: dict[str, Tensor] | None = None,
        best: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, stack, **common)
        if chains < 1 or len(self) % chains:
            raise InvalidArgument(f"stack has {len(self)} draws, which {chains} chains cannot share equally.")
        self.chains = chains
        self.info = info or {}
        self.best = best

    @property
    def draws(self) -> Params:
        """The random parameters as ``(chains, draws, ...)``."""
        return {name: value.unflatten(0, (self.chains, -1)) for name, value in self.stack.items()}

    def weight_diagnostics(self) -> ChainDiagnostics:
        """R-hat and effective sample sizes of every weight.

        Weights of a network can be exchanged without changing its function, so that chains may disagree here and
        still agree on every prediction: look at :meth:`function_diagnostics` first.
        """
        return ChainDiagnostics.of(self.draws, self.diagnostics)

    def function_diagnostics(self, x: Any) -> ChainDiagnostics:
        """R-hat and effective sample sizes of the network's outputs at ``x``: what matters for predictions."""
        return ChainDiagnostics.of({"f": self.function_draws(x)}, self.diagnostics)

    def function_draws(self, x: Any) -> Tensor:
        """The network's outputs for every draw, ``(chains, draws, rows, ...)``."""
        x = as_input(x, self.model)
        outputs = []
        with torch.no_grad():
            for first in range(0, number_of_draws(self.stack), _BLOCK):
                stack = self._atoms_between(first, first + _BLOCK)
                outputs.append(self.model.network.over_draws(stack, x, buffers=self.buffers, vectorise=True))
        return torch.cat(outputs).unflatten(0, (self.chains, -1))

    def _atoms_between(self, first: int, last: int) -> Params:
        some = self._atoms(torch.arange(first, min(last, len(self)), device=self.model.device))
        count = number_of_draws(some)
        fixed = {name: value.expand(count, *value.shape) for name, value in self.points.items()}
        return self.model.network_params({**some, **fixed})

    def to_arviz(self, x: Any = None) -> Any:
        """An ArviZ ``DataTree``: the weights, or the network's outputs ``f`` at ``x`` where that is given."""
        return to_arviz(self.draws if x is None else {"f": self.function_draws(x)}, self.info)

    def _tensors(self) -> dict[str, Tensor]:
        kept = {**super()._tensors(), "chains": torch.tensor(self.chains)}
        kept |= {f"info.{name}": value for name, value in self.info.items()}
        return kept | {f"best.{name}": value for name, value in (self.best or {}).items()}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> ChainPosterior:
        def part(prefix: str) -> Params:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        return cls(
            model, part("stack."), int(tensors["chains"]), info=part("info."), best=part("best.") or None, **common
        )

    def _mean_random(self) -> Params:
        return {name: self._moments(value)[0] for name, value in self.draws.items()}

    def _std_random(self) -> Params:
        return {name: self._moments(value)[1] for name, value in self.draws.items()}

    def _moments(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = moments_of(draws, correction=0)
        return mean.to(self.model.dtype), std.to(self.model.dtype)

    def __repr__(self) -> str:
        what = f"{self.chains} chain{'s' * (self.chains > 1)} x {len(self) // self.chains} draws"
        return Posterior.__repr__(self).replace("(", f"({what}, ", 1)
