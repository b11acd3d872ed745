"""A posterior made of chains: atoms of equal weight that remember which chain they came from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from knowable.core.chains.diagnostics import ChainDiagnostics, moments_of
from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.network.params import (
    Params,
    expand_params,
    index_params,
    number_of_draws,
    with_prefix,
    without_prefix,
)
from knowable.core.posterior.arviz import data_tree
from knowable.core.posterior.particles import Particles, normalised_log_weights
from knowable.core.posterior.posterior import Posterior
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
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
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
        """R-hat and effective sample sizes at ``x`` of what matters for predictions.

        That is the network's outputs, or class probabilities where the outputs are logits.
        """
        draws = self.function_draws(x)
        found = self.model.likelihood.identified(draws.flatten(0, 1)).unflatten(0, draws.shape[:2])
        return ChainDiagnostics.of({"f": found}, self.diagnostics)

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
        return self.model.network_params({**some, **expand_params(self.points, number_of_draws(some))})

    def _draws_to_export(self, samples: int | None) -> tuple[Posterior, int, int, dict[str, Tensor]]:
        """All draws, or as many of each chain, evenly spaced, as ``samples`` allows."""
        length = len(self) // self.chains
        kept = length if samples is None else min(length, max(1, samples // self.chains))
        place = torch.arange(kept) * length // kept  # in each chain; draws are in main memory
        chosen = (torch.arange(self.chains).unsqueeze(1) * length + place).flatten()
        thinned = copy.copy(self)
        thinned.stack, thinned._kept = index_params(self.stack, chosen), None
        thinned.log_weights = normalised_log_weights(None, len(chosen), self.model)
        return thinned, len(chosen), self.chains, {name: value[:, place] for name, value in self.info.items()}

    def _tensors(self) -> dict[str, Tensor]:
        kept = {**super()._tensors(), "chains": torch.tensor(self.chains)}
        return kept | with_prefix("info.", self.info) | with_prefix("best.", self.best or {})

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> ChainPosterior:
        stack, info, best = (without_prefix(each, tensors) for each in ("stack.", "info.", "best."))
        return cls(model, stack, int(tensors["chains"]), info=info, best=best or None, **common)

    def _mean_random(self) -> Params:
        return {name: self._moments(value)[0] for name, value in self.draws.items()}

    def _std_random(self) -> Params:
        return {name: self._moments(value)[1] for name, value in self.draws.items()}

    def _moments(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (each.to(self.model.device, self.model.dtype) for each in moments_of(draws, correction=0))
        return mean, std

    def __repr__(self) -> str:
        what = f"{self.chains} chain{'s' * (self.chains > 1)} x {len(self) // self.chains} draws"
        return Posterior.__repr__(self).replace("(", f"({what}, ", 1)


# --- Draws from a bare density, as its sampler leaves them -----------------------------------------------------------


class Samples:
    """Draws of all chains.

    Attributes:
        draws: By name, each ``(chains, draws, *shape)``.
        log_density: Of every draw, ``(chains, draws)``, without the constant the density lacks.
        diagnostics: R-hat and effective sample sizes (``.rhat``, ``.ess``), and the sampler's own figures.
        info: What the sampler said of the transition to each draw, ``(chains, draws)``: acceptance, divergence, energy.
        best: The most probable parameters a search found, where the sampler searches (``SimulatedAnnealing``).
        log_weights: ``(chains, draws)``, where draws are weighted (``ImportanceSampling``).
    """

    def __init__(
        self,
        draws: Params,
        log_density: Tensor,
        diagnostics: ChainDiagnostics,
        *,
        info: dict[str, Tensor] | None = None,
        best: Params | None = None,
        log_weights: Tensor | None = None,
    ):
        self.draws, self.log_density, self.diagnostics = draws, log_density, diagnostics
        self.info = info or {}
        self.best, self.log_weights = best, log_weights
        wanted = next(iter(draws.values())).shape[:2]
        found = {**draws, "log_density": log_density, **self.info, "log_weights": log_weights}
        for name, value in found.items():
            if value is not None and value.shape[:2] != wanted:
                raise InvalidArgument(
                    f"{name} has shape {tuple(value.shape)} for {wanted[0]} chains of {wanted[1]} draws: it must begin "
                    f"with {tuple(wanted)}."
                )

    def mean(self) -> Params:
        """Mean of every parameter over all draws, by their weights where they have some."""
        return {name: self._moments(value)[0] for name, value in self.draws.items()}

    def std(self) -> Params:
        """Standard deviation of every parameter over all draws, by their weights where they have some."""
        return {name: self._moments(value)[1] for name, value in self.draws.items()}

    def _moments(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = moments_of(draws, self.log_weights)
        dtype = torch.promote_types(draws.dtype, torch.float32)  # draws may be stored in a shorter one
        return mean.to(dtype), std.to(dtype)

    def to_arviz(self) -> Any:
        """An ArviZ ``DataTree`` with the groups ``posterior`` and ``sample_stats``."""
        weights = {} if self.log_weights is None else {"log_weight": self.log_weights}
        return data_tree({"posterior": self.draws}, {"lp": self.log_density, **weights, **self.info})

    def __repr__(self) -> str:
        chains, count = next(iter(self.draws.values())).shape[:2]
        shapes = ", ".join(f"{name}{list(value.shape[2:]) or ''}" for name, value in self.draws.items())
        return f"Samples({chains} chains x {count} draws of {shapes}; {self.diagnostics.message})"
