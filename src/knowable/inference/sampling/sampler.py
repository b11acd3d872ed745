"""What a sampler is: a method whose posterior is made of chains, and that also runs on a bare density."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.draw_store import STORES, rows_within
from knowable.core.chains.kernel import Kernel
from knowable.core.chains.loop import run_chains
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.core.chains.run import Monitor
from knowable.core.chains.settings import ChainResult, Mixing, Sampling
from knowable.core.chains.target import DensityTarget, ModelTarget, Target
from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params, stack_params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.predicting import parse_memory
from knowable.core.storage.checkpoint import Checkpoint, as_checkpoint, part_of
from knowable.core.storage.folder import tensor_fingerprint
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import TrainingSettings
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.inference.ensembles.side_by_side import EnsembleObjective
from knowable.inference.point.point import fit_point
from knowable.inference.start import fresh_start

_WATCHED = 200  # scalar quantities whose mixing is watched
_INPUTS = 32  # rows at which a network's outputs are watched


@dataclass(frozen=True, repr=False)
class Sampler(Method, Sampling):
    """A method that runs chains. A concrete sampler defines its :meth:`kernel`."""

    default_warmup: ClassVar[int] = 500
    mixing: ClassVar[Mixing] = Mixing()
    network_mixing: ClassVar[Mixing] = Mixing(rhat=1.05, ess=200.0, first=250, most=1000)

    @abstractmethod
    def kernel(self, dimension: int) -> Kernel:
        """The transition of all chains, for positions of ``dimension`` numbers."""

    def _fit(self, job: FitJob) -> ChainPosterior:
        """Draw from the posterior of a network."""
        model, seed, engine = job.model, job.seed, job.engine
        _refuse_short_numbers(self, engine)
        self._check_memory(model)
        rows = self._rows(job.rows, seed)
        job = replace(job, rows=rows)
        start = starting_points(job, self.start, self.chains)
        target = ModelTarget(
            model, rows, points=start.points, buffers=start.buffers, temperature=self.temperature, mode=engine.mode
        )
        result = self._run(
            target, start.positions, FunctionMonitor(model, self._watched_rows(rows), start, target.layout),
            self.network_mixing, seed, job.progress, part_of(job.checkpoint, "chains"),
            {
                **job.identity, "engine": repr(engine),
                "positions": tensor_fingerprint(start.positions),
            },
        )  # fmt: skip
        return self._posterior(model, target, start, result, seed)

    def sample(
        self,
        log_density: Callable[[Params], Tensor],
        init_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        progress: bool | None = None,
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
            progress: Show a bar (None: only on a terminal).
            checkpoint: A folder to save to now and then; a run that finds its own state there goes on from it.
            engine: How the gradient is computed.

        Returns:
            The draws, their diagnostics, and ``to_arviz()``.
        """
        seed, engine = check_count("seed", seed, at_least=0), as_engine(engine)
        if not callable(log_density):
            raise InvalidType(f"log_density must be a function of a dict of tensors, got {type(log_density).__name__}.")
        _refuse_short_numbers(self, engine)
        layout, first = first_positions(init_params, self.chains)
        target = DensityTarget(log_density, layout, temperature=self.temperature, mode=engine.mode)
        with own_randomness(derive_seed(seed, "start")):  # a density may draw random numbers of its own
            check_density(target, first)
            given = first
            first = self.scattered(target, given, seed) if isinstance(init_params, Mapping) else given
            known = tensor_fingerprint(given, first, *target.value_and_grad(first))
        saver = as_checkpoint(checkpoint)
        result = self._run(
            target, first, coordinate_monitor(layout.size), self.mixing, seed, progress, saver,
            {
                "method": repr(self), "parameters": repr(layout), "engine": repr(engine), "density": known,
            },
        )  # fmt: skip
        draws = layout.views(result.draws)
        run = self._diagnostics(result)
        return Samples(
            draws,
            result.values * self.temperature,
            ChainDiagnostics.of(draws, run),
            info=result.info,
            best=self._best(target, result),
        )

    def scattered(self, target: Target, first: Tensor, seed: int) -> Tensor:
        """Where the chains of a bare density begin, ``(chains, D)``, from the one position given, ``(1, D)``."""
        return scattered(target, first, self.chains, seed)

    def _rows(self, rows: Data, seed: int) -> Data:
        """The data as the sampler reads it: all of it in memory, for every gradient takes all rows."""
        if rows.in_memory:
            return rows
        with own_randomness(derive_seed(seed, "reading")):  # a loader may shuffle
            return Data(rows.tensors, rows.size)

    def _watched_rows(self, rows: Data) -> Tensor:
        """Inputs to watch the network's outputs at."""
        return rows.tensors[0]

    def _check_memory(self, model: Model) -> None:
        """Refuse a memory budget that holds next to nothing before any work is done."""
        start = model.params()
        size = sum(start[name].numel() for name in model.random_names)
        if self.spill is None:
            rows_within(parse_memory(self.max_memory), self.chains, size, STORES[self.store] or model.dtype)

    # --- the pieces --------------------------------------------------------------------------------------------------

    def _run(
        self, target: Target, start: Tensor, monitor: Monitor, mixing: Mixing, seed: int, progress: bool | None,
        checkpoint: Checkpoint | None, identity: dict[str, Any],
    ) -> ChainResult:  # fmt: skip
        with share_of_time(0.95):  # the rest is for diagnostics
            return run_chains(
                self.kernel(target.layout.size), target, start, self, monitor=monitor, mixing=mixing, seed=seed,
                warmup=self.default_warmup if self.warmup is None else self.warmup, progress=progress,
                checkpoint=checkpoint, label=type(self).__name__, identity=identity,
            )  # fmt: skip

    def _posterior(
        self, model: Model, target: Target, start: Start, result: ChainResult, seed: int
    ) -> ChainPosterior:  # fmt: skip
        stack = target.layout.views(result.draws.reshape(-1, target.layout.size))
        return ChainPosterior(
            model, stack, result.draws.shape[0], info=result.info, best=self._best(target, result), points=start.points,
            buffers=start.buffers, seed=seed, diagnostics=self._diagnostics(result),
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
    """The network's outputs at a few inputs and the likelihood's own parameters: what is watched for mixing."""

    def __init__(self, model: Model, x: Tensor, start: Start, layout: Layout):
        self.model, self.start, self.layout = model, start, layout
        self.x = x[:: max(1, len(x) // _INPUTS)][:_INPUTS]

    def __call__(self, positions: Tensor) -> Tensor:
        """``(n, chains, D)`` to ``(n, chains, M)``."""
        n, chains, _ = positions.shape
        stack = self.layout.views(positions.flatten(0, 1))
        fixed = {name: value.expand(n * chains, *value.shape) for name, value in self.start.points.items()}
        params = {**stack, **fixed}
        with torch.no_grad():
            outputs = self.model.network.over_draws(
                self.model.network_params(params), self.x, buffers=self.start.buffers, vectorise=True
            )
        watched = outputs.reshape(n, chains, -1)
        watched = watched[..., :: max(1, watched.shape[-1] // _WATCHED)]
        own = [value.reshape(n, chains, -1) for name, value in stack.items() if name.startswith("likelihood.")]
        return torch.cat([watched, *own], dim=-1)


def coordinate_monitor(dimension: int) -> Monitor:
    """The coordinates themselves, or evenly spaced ones where there are very many."""
    step = max(1, dimension // (10 * _WATCHED))
    return lambda positions: positions[..., ::step].clone()


def first_positions(init_params: Any, chains: int) -> tuple[Layout, Tensor]:
    """The layout and the start values, ``(1, D)`` or ``(chains, D)``, from one dict or one for each chain."""
    several = isinstance(init_params, Sequence) and not isinstance(init_params, str)
    each: list[Any] = list(init_params) if several else [init_params]
    if several and len(each) != chains:
        raise InvalidArgument(
            f"init_params has {len(each)} dicts for {chains} chains: give one, or one for each chain."
        )
    if not each or not all(isinstance(one, Mapping) and one for one in each):
        raise InvalidType(
            f"init_params must be a dict of tensors such as {{'x': torch.zeros(3)}}, got {type(init_params).__name__}."
        )
    found = [{name: _start_value(name, value) for name, value in one.items()} for one in each]
    dtypes = {
        now[name].dtype
        for one, now in zip(each, found, strict=True)
        for name, value in one.items()
        if isinstance(value, Tensor | np.ndarray)  # bare Python numbers do not decide
    }
    dtype = torch.float32 if dtypes == {torch.float32} else torch.float64
    found = [{name: value.to(dtype) for name, value in one.items()} for one in found]
    layout = Layout.of(found[0])
    if layout.size == 0:
        raise InvalidArgument("init_params has no numbers in it: its tensors are empty.")
    for one in found:
        if Layout.of(one) != layout:
            raise InvalidArgument("init_params must have the same names and shapes for every chain.")
        for name, value in one.items():
            if not torch.isfinite(value).all():
                raise InvalidArgument(f"init_params[{name!r}] must be finite numbers, got {value}.")
    return layout, torch.stack([layout.flatten(one) for one in found])


def _start_value(name: str, value: Any) -> Tensor:
    try:
        tensor = value.detach().clone() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidType(f"init_params[{name!r}] must be a tensor or numbers, got {type(value).__name__}.") from None
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float64)


def scattered(target: Target, first: Tensor, chains: int, seed: int) -> Tensor:
    """Start positions for all chains, near the one there is, where the density is finite."""
    generator = generator_for(seed, "scatter", device=first.device)
    spread = 1.0
    while spread > 1e-3:
        noise = (
            2 * torch.rand((chains, first.shape[1]), generator=generator, dtype=first.dtype, device=first.device) - 1
        )
        found = first + spread * noise
        value, gradient = target.value_and_grad(found)
        if torch.isfinite(value).all() and torch.isfinite(gradient).all():
            return found
        spread /= 2
    return first.expand(chains, -1).clone()


def check_density(target: Target, first: Tensor) -> None:
    """Refuse a density that is not finite, or not smooth, where it begins."""
    value, gradient = target.value_and_grad(first)
    if not torch.isfinite(value).all():
        raise InvalidArgument(
            f"log_density is {value[~torch.isfinite(value)][0].item()} at init_params (-inf also stands for a matrix "
            f"that cannot be factorised). Start where it is finite."
        )
    if not torch.isfinite(gradient).all():
        raise InvalidArgument("log_density has no finite gradient at init_params. Start where it is smooth.")


def _refuse_short_numbers(method: Method, engine: Engine) -> None:
    if engine.precision != "full":
        raise Unsupported(
            f"{type(method).__name__} needs exact gradients: precision={engine.precision!r} would change the "
            f"posterior. To save memory keep draws as store='bfloat16'."
        )


# --- Where the chains of a network begin -----------------------------------------------------------------------------
#
# The default is a vectorised deep ensemble: one network trained for each chain, all in one batched step, from different
# initial weights. Chains then spend their time on the posterior and not on finding it (Sommer et al., 2025).

_STEPS = 1000  # of training before the chains begin
_SHARE = 0.3  # of the time, where it is limited


@dataclass(frozen=True)
class Start:
    """First positions of the chains and what stays fixed.

    Attributes:
        positions: ``(chains, D)``, the random parameters.
        points: Values of the parameters that are point estimates.
        buffers: The network's buffers.
    """

    positions: Tensor
    points: Params
    buffers: Buffers


def starting_points(job: FitJob, start: str | Posterior, chains: int) -> Start:
    """First positions for ``chains`` chains; the names of ``start`` are those of :class:`Sampling`."""
    model, data, seed, method = job.model, job.rows, job.seed, job.method
    if model.hyper_names:
        raise Unsupported(
            f"{type(method).__name__} cannot learn the prior's own scale ({model.hyper_names[0]}). Give the prior a "
            f"fixed scale, or use MeanFieldVI, which learns it."
        )
    layout = Layout.of({name: model.params()[name] for name in model.random_names})
    training = _training(data)
    points, buffers = {name: model.params()[name] for name in model.point_names}, model.buffers()
    known: Params = model.params()
    if start == "map" or (points and not isinstance(start, Posterior)):
        with share_of_time(_SHARE):
            best = fit_point(job.part("points", engine=Engine()), training)
        _stop_if(best.diagnostics.interrupted)
        known = best.mean()
        points, buffers = {name: known[name] for name in points}, best.buffers
    if isinstance(start, Posterior):
        drawn = _draws_of(start, chains, model, seed)
        points = {name: drawn[name][0] for name in points}
        return Start(layout.flatten(drawn), points, start.buffers)
    if start in ("map", "network"):
        return Start(layout.flatten(known).expand(chains, -1).clone(), points, buffers)
    if start == "prior":
        return Start(layout.flatten(_prior_draws(model, chains, seed)), points, buffers)
    ensemble = EnsembleObjective(
        model, data.size, initial_weights(model, layout, chains, seed), points=points, buffers=buffers,
        mode="eager" if job.engine.mode == "eager" else "traced",
    )  # fmt: skip
    with share_of_time(_SHARE):
        own = job.part("start", engine=Engine(), label=f"starting {chains} chains")
        result = train(ensemble, data, training, **own.options)
    _stop_if(result.interrupted)
    return Start(ensemble.positions.detach().clone(), points, buffers)


def initial_weights(model: Model, layout: Layout, members: int, seed: int) -> Tensor:
    """Fresh initial weights ``(members, D)``."""
    return torch.stack([layout.flatten(fresh_start(model, seed, member)[0]) for member in range(members)])


def _prior_draws(model: Model, chains: int, seed: int) -> Params:
    start = model.params()
    wanted = {name: start[name] for name in model.random_names}
    generator = generator_for(seed, "prior", device=model.device)
    return stack_params([model.prior.sample(wanted, generator=generator) for _ in range(chains)])


def _draws_of(posterior: Posterior, chains: int, model: Model, seed: int) -> Params:
    drawn = posterior.sample(chains, generator_for(seed, "start", device=model.device))
    for name, value in model.params().items():
        if name not in drawn or drawn[name].shape[1:] != value.shape:
            found = f"shape {tuple(drawn[name].shape[1:])}" if name in drawn else "nothing"
            raise InvalidArgument(
                f"start is a posterior with {found} for {name!r}; the model wants shape {tuple(value.shape)}."
            )
    return {name: drawn[name].to(value) for name, value in model.params().items()}


def _training(data: Data) -> TrainingSettings:
    """About a thousand steps, whatever the size of the data."""
    settings = TrainingSettings()
    per_epoch = data.batches_per_epoch(settings.rows_per_step(data.size))
    return TrainingSettings(epochs=max(1, round(_STEPS / per_epoch)))


def _stop_if(interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt  # there are no draws yet to return
