"""What a sampler is: a method whose posterior is made of chains, and that also runs on a bare density."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.chains.convergence import prediction_error, share_between_chains
from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.draw_store import DTYPES, rows_within
from knowable.core.chains.groups import Apart
from knowable.core.chains.kernel import Kernel
from knowable.core.chains.loop import run_chains
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.core.chains.run import Monitor
from knowable.core.chains.settings import ChainResult, ChainSettings, Mixing
from knowable.core.chains.target import DensityTarget, ModelTarget, Target, worthwhile_group
from knowable.core.compiling.engine import Engine
from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params, expand_params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.monte_carlo import flops_per_row
from knowable.core.storage.folder import Checkpoint, as_checkpoint, part_of, tensor_fingerprint
from knowable.core.support.checks import check_count
from knowable.core.support.progress import ProgressSetting
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.inference.sampling.initial_positions import (
    Start,
    check_density,
    first_positions,
    full_precision,
    in_full_precision,
    near_modes,
    scattered,
    starting_points,
)

_MONITORED = 200  # scalar quantities whose R-hat is monitored
_INPUTS = 32  # rows at which a network's outputs are monitored
_SCORED = 100  # draws of a chain, at most, that the error of predictions is computed from
_BYTES = 32 * 2**20  # of draws that go through the network together
_TIME_SHARE = 0.95  # of a time limit, for the chains


@dataclass(frozen=True, repr=False, kw_only=True)
class Sampler(ChainSettings, Method):
    """A method that runs chains. A concrete sampler defines its :meth:`kernel`."""

    supports_row_weights = True

    default_warmup: ClassVar[int] = 500
    mixing: ClassVar[Mixing] = Mixing()
    network_mixing: ClassVar[Mixing] = Mixing(rhat=1.05, ess=200.0, first=250, most=1000)

    @abstractmethod
    def kernel(self, dimension: int) -> Kernel:
        """The transition of all chains, for positions of ``dimension`` numbers."""

    def _divides(self, job: FitJob) -> bool:
        rows = job.rows
        return rows.in_memory and self._group_size(job.model, rows.tensors[0], rows.size) < self.chains

    def _group_size(self, model: Model, x: Any, size: int) -> int:
        """How many chains draw together once they are tuned; all where they cannot be apart."""
        start = model.params()
        kernel = self.kernel(sum(start[name].numel() for name in model.random_names))
        if not kernel.splits or self.chains == 1:
            return self.chains
        return worthwhile_group(self.chains, size * flops_per_row(model, x))

    def _fit(self, job: FitJob) -> ChainPosterior:
        """Draw from the posterior of a network."""
        model, seed, engine = job.model, job.seed, in_full_precision(self, job.engine)
        self._check_memory(model)
        rows = shown = job.rows
        if not rows.in_memory:
            with own_randomness(derive_seed(seed, "reading")):  # a loader may shuffle
                x, y, *weights = rows.own_tensors
            rows = shown = Data((x, y), len(x) if rows.divided else rows.size, weights[0] if weights else None)
        if job.rows.divided:
            shown = job.rows.kept or Data(job.rows.first)
        else:
            job = replace(job, rows=rows)
        size = self._group_size(model, rows.tensors[0], job.rows.size)
        start = starting_points(job, self.start, self.chains)
        target = ModelTarget(
            model, rows, points=start.points, buffers=start.buffers, temperature=self.temperature, mode=engine.mode,
            processes=engine.processes, size=job.rows.size if job.rows.divided else None,
        )  # fmt: skip
        identity = {**job.identity, "engine": repr(engine)}
        if job.checkpoint is not None:
            identity["positions"] = tensor_fingerprint(start.positions)
        monitor = FunctionMonitor(model, shown.tensors[0], shown.tensors[1], start, target.layout)

        def posterior(draws: Tensor, **more: Any) -> ChainPosterior:
            stack = target.layout.views(draws.reshape(-1, target.layout.size))
            return ChainPosterior(
                model, stack, len(draws), points=start.points, buffers=start.buffers, seed=seed, **more
            )

        result = self._run(
            target, start.positions, mixing=self.network_mixing, seed=seed, progress=job.progress, posterior=posterior,
            monitor=monitor, prediction_terms=monitor.prediction_terms,
            checkpoint=part_of(job.checkpoint, "chains"), identity=identity,
            apart=Apart(size, engine) if size < self.chains else None,
        )  # fmt: skip
        return posterior(
            result.draws, info=result.info, best=self._best(target, result), diagnostics=self._diagnostics(result)
        )

    def sample(
        self,
        log_density: Callable[[Params], Tensor],
        init_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        progress: ProgressSetting = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        engine: Engine | None = None,
    ) -> Samples:
        """Draw from a bare density.

        Args:
            log_density: Log density of one dict of parameters, up to a constant, as a scalar tensor that autograd can
                differentiate. Parameters that are confined (a scale) are the caller's to transform.
            init_params: One dict of start values, near which chains begin, or near the modes they climb to from there;
                or a list with one dict for each chain, where they then begin.
            seed: Fixes everything random.
            progress: Show a bar (None: only on a terminal), or a function of a :class:`~knowable.Progress`.
            checkpoint: A folder to save to now and then; a run that finds its own state there goes on from it.
            engine: How the gradient is computed.

        Returns:
            The draws, their diagnostics, and ``to_arviz()``.
        """
        seed, engine = check_count("seed", seed, at_least=0), full_precision(self, engine)
        layout, first = first_positions(init_params, self.chains)
        target = DensityTarget(log_density, layout, temperature=self.temperature, mode=engine.mode)
        with own_randomness(derive_seed(seed, "start")):  # a density may draw random numbers of its own
            check_density(target, first)
            given = first
            if isinstance(init_params, Mapping):
                first = self._scattered(target, given, seed)
            known = tensor_fingerprint(given, first, *target.value_and_grad(first))
        identity = {"method": repr(self), "parameters": repr(layout), "engine": repr(engine), "density": known}
        result = self._run(
            target, first, mixing=self.mixing, seed=seed, progress=progress, monitor=coordinate_monitor(layout.size),
            checkpoint=as_checkpoint(checkpoint), identity=identity,
        )  # fmt: skip
        draws, best = layout.views(result.draws), self._best(target, result)
        figures = ChainDiagnostics.of(draws, self._diagnostics(result))
        return Samples(draws, result.values * self.temperature, figures, info=result.info, best=best)

    def begins_near_modes(self, dimension: int) -> bool:
        """Whether the chains of a bare density begin near its modes, in so many dimensions."""
        return False

    def _scattered(self, target: Target, first: Tensor, seed: int) -> Tensor:
        """Where the chains of a bare density begin, ``(chains, D)``, from the one position given, ``(1, D)``."""
        found = scattered(target, first, self.chains, seed)
        if not self.begins_near_modes(found.shape[1]):
            return found
        return near_modes(target, found, generator=generator_for(seed, "modes", device=found.device))

    def _check_memory(self, model: Model) -> None:
        """Refuse a memory budget that holds next to nothing before any work is done."""
        start = model.params()
        size = sum(start[name].numel() for name in model.random_names)
        rows_within(self.storage.max_bytes, self.chains, size, DTYPES[self.storage.dtype] or model.dtype)

    def _run(self, target: Target, start: Tensor, **options: Any) -> ChainResult:
        warmup = self.default_warmup if self.warmup is None else self.warmup
        with share_of_time(_TIME_SHARE):  # the rest is for diagnostics
            return run_chains(
                self.kernel(target.layout.size), target, start, self, warmup=warmup, label=type(self).__name__,
                **options,
            )  # fmt: skip

    def _diagnostics(self, result: ChainResult) -> Diagnostics:
        return Diagnostics(
            method=repr(self), terms=result.terms, converged=result.converged, interrupted=result.interrupted,
            message=result.message, seconds=result.seconds, notes=self.temperature_note(),
            out_of_time=result.out_of_time,
        )  # fmt: skip

    def _best(self, target: Target, result: ChainResult) -> Params | None:
        """The most probable parameters found, where the sampler searches for them."""
        return None


class FunctionMonitor:
    """What predictions are made of, whose R-hat is monitored: what is identified of the outputs at a few rows.

    Where the likelihood has parameters of its own, also the log likelihoods of those rows: a noise on which chains do
    not agree shows in them, and degrees of freedom of which nothing but "many" is known do not.
    """

    def __init__(self, model: Model, x: Tensor, y: Tensor, start: Start, layout: Layout):
        self.model, self.start, self.layout = model, start, layout
        self.x, self.y = (each[:: max(1, len(x) // _INPUTS)][:_INPUTS] for each in (x, y))

    def __call__(self, positions: Tensor) -> Tensor:
        """``(n, chains, D)`` to ``(n, chains, M)``."""
        params, outputs = self._outputs(positions)
        monitored = self._identified(outputs, positions)
        if not any(name.startswith(LIKELIHOOD_PREFIX) for name in self.layout.names):
            return monitored
        scores = self._scores(params, outputs, positions)
        return torch.cat([monitored, scores.to(monitored)], dim=-1)

    def prediction_terms(self, draws: Tensor) -> dict[str, float]:
        """How well draws ``(chains, draws, D)`` tell what is predicted at those rows, of evenly spaced ones."""
        draws = draws[:, :: -(-draws.shape[1] // _SCORED)]
        at_once = max(1, _BYTES // (draws[:, 0].numel() * self.start.positions.element_size()))
        scores, identified = [], []
        for some in draws.split(at_once, dim=1):
            some = some.to(self.start.positions)
            params, outputs = self._outputs(some)
            scores.append(self._scores(params, outputs, some).cpu())
            identified.append(self._identified(outputs, some).cpu())
        return {
            "prediction_error": prediction_error(torch.cat(scores, dim=1)),
            "between_chains": share_between_chains(torch.cat(identified, dim=1)),
        }

    def _outputs(self, positions: Tensor) -> tuple[Params, Tensor]:
        """The parameters of positions ``(a, b, D)``, and the network's outputs, ``(a * b, rows, ...)``."""
        stack = self.layout.views(positions.flatten(0, 1))
        params = {**stack, **expand_params(self.start.points, positions.shape[0] * positions.shape[1])}
        with torch.no_grad():
            outputs = self.model.network.over_draws(
                self.model.network_params(params), self.x, buffers=self.start.buffers, vectorise=True
            )
        return params, outputs

    def _identified(self, outputs: Tensor, positions: Tensor) -> Tensor:
        found = self.model.likelihood.identified(outputs).reshape(*positions.shape[:2], -1)
        return found[..., :: max(1, found.shape[-1] // _MONITORED)]

    def _scores(self, params: Params, outputs: Tensor, positions: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.scores(outputs, self.y, params).reshape(*positions.shape[:2], -1)


def coordinate_monitor(dimension: int) -> Monitor:
    """The coordinates themselves, or evenly spaced ones where there are very many."""
    step = max(1, dimension // (10 * _MONITORED))
    return lambda positions: positions[..., ::step].clone()
