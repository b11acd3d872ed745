"""Draws from a bare density, as its sampler leaves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.chain_diagnostics import ChainDiagnostics, moments_of
from knowable.core.types import Params
from knowable.errors import InvalidArgument, MissingExtra


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
        self._check_shapes()

    def _check_shapes(self) -> None:
        """Everything must belong to the same draws."""
        wanted = next(iter(self.draws.values())).shape[:2]
        found = {**self.draws, "log_density": self.log_density, **self.info}
        if self.log_weights is not None:
            found["log_weights"] = self.log_weights
        for name, value in found.items():
            if value.shape[:2] != wanted:
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
        return to_arviz(self.draws, {"lp": self.log_density, **weights, **self.info})

    def __repr__(self) -> str:
        chains, count = next(iter(self.draws.values())).shape[:2]
        shapes = ", ".join(f"{name}{list(value.shape[2:]) or ''}" for name, value in self.draws.items())
        return f"Samples({chains} chains x {count} draws of {shapes}; {self.diagnostics.message})"


_STATISTICS = {"acceptance": "acceptance_rate", "diverging": "diverging", "energy": "energy", "steps": "n_steps"}


def to_arviz(draws: Params, info: dict[str, Tensor]) -> Any:
    """Draws ``(chains, draws, *shape)`` and statistics ``(chains, draws)`` of them as an ArviZ ``DataTree``."""
    try:
        from arviz_base import from_dict
    except ImportError:
        raise MissingExtra("to_arviz needs ArviZ: pip install 'knowable[diag]'.") from None
    groups = {"posterior": {name: _array(value) for name, value in draws.items()}}
    statistics = {_STATISTICS.get(name, name): _array(value) for name, value in info.items()}
    if "diverging" in statistics:
        statistics["diverging"] = statistics["diverging"].astype(bool)
    if statistics:
        groups["sample_stats"] = statistics
    return from_dict(groups)


def _array(value: Tensor) -> Any:
    return value.detach().cpu().to(torch.float32 if value.dtype == torch.bfloat16 else value.dtype).numpy()
