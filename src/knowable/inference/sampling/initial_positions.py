r"""Where chains begin: on a network, and on a bare density.

On a network the default is a vectorised deep ensemble (Sommer et al., 2025). On a bare density chains begin near the
position given, or near the modes where the density is about normal around them: the inverse Hessian there gives the
scales. But a mode need not be where the mass is (a funnel's is deep in its neck), so draws from a Student t with that
centre and curvature are importance-weighted first; where their effective sample size is too small, chains begin at the
position given, with a mass matrix of 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.chains.target import Target
from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.method import FitJob
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params, stack_params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import generator_for
from knowable.core.support.time_limit import share_of_time, time_left
from knowable.core.training.loop import train
from knowable.core.training.settings import TrainingSettings
from knowable.errors import InvalidArgument, InvalidType, ModelWarning, Unsupported
from knowable.inference.ensembles.side_by_side import EnsembleObjective
from knowable.inference.point.point import fit_point, fresh_start, warn_of_replaced_weights
from knowable.inference.sampling.importance_weights import effective_sample_size, smooth_weights
from knowable.inference.sampling.mode import StudentTProposal, climb, laplace_proposal

_STEPS = 1000  # of training before the chains begin
_TIME_SHARE = 0.3  # of a time limit, for that training
_DRAWS = 400  # importance-weighted draws around the mode
_DF = 5.0  # of the Student t: tails heavy enough to see what the curvature misses
_LEAST_EFFECTIVE = 0.05  # effective sample size, as a share of the draws
_SEARCH = 200  # steps of the search for the mode
_MOST_DIMENSIONS = 100  # for which the Hessian is worth its time

# --- the chains of a network -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """First positions of the chains and what stays fixed."""

    positions: Tensor  # (chains, D), the random parameters
    points: Params  # values of the parameters that are point estimates
    buffers: Buffers  # the network's buffers


def starting_points(job: FitJob, start: str | Posterior, chains: int) -> Start:
    """First positions for ``chains`` chains; see ``start`` of :class:`~knowable.core.chains.settings.ChainSettings`."""
    model, data, seed, method = job.model, job.rows, job.seed, job.method
    if model.hyper_names:
        raise Unsupported(
            f"{type(method).__name__} cannot learn the prior's own scale ({model.hyper_names[0]}). Give the prior a "
            f"fixed scale, or use MeanFieldVI, which learns it."
        )
    layout = Layout.of({name: model.params()[name] for name in model.random_names})
    per_epoch = data.batches_per_epoch(TrainingSettings().rows_per_step(data.size))
    training = TrainingSettings(epochs=max(1, round(_STEPS / per_epoch)))
    points, buffers = {name: model.params()[name] for name in model.point_names}, model.buffers()
    known: Params = model.params()
    if start == "map" or (points and not isinstance(start, Posterior)):
        with share_of_time(_TIME_SHARE):
            best = fit_point(job.part("points", engine=job.engine.plain), training)
        if best.diagnostics.interrupted:
            raise KeyboardInterrupt  # there are no draws yet to return
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
    with share_of_time(_TIME_SHARE):
        own = job.part("start", engine=job.engine.plain, label=f"starting {chains} chains")
        result = train(ensemble, data, training, **own.options)
    if result.interrupted:
        raise KeyboardInterrupt  # there are no draws yet to return
    return Start(ensemble.positions.detach().clone(), points, buffers)


def initial_weights(model: Model, layout: Layout, members: int, seed: int) -> Tensor:
    """Fresh initial weights ``(members, D)``."""
    warn_of_replaced_weights(model, seed, "To begin the chains at the network's own: start='network'.")
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


# --- the chains of a bare density ------------------------------------------------------------------------------------


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
        noise = torch.rand((chains, first.shape[1]), generator=generator, dtype=first.dtype, device=first.device)
        found = first + spread * (2 * noise - 1)
        value, gradient = target.value_and_grad(found)
        if torch.isfinite(value).all() and torch.isfinite(gradient).all():
            _warn_of_flat_directions(target, gradient)
            return found
        spread /= 2
    return first.expand(chains, -1).clone()


def _warn_of_flat_directions(target: Target, gradient: Tensor) -> None:
    """Warn of parameters with which the density does not change at several positions."""
    slopes = target.layout.views(gradient)
    flat = [name for name, slope in slopes.items() if len(gradient) > 1 and slope.numel() and not slope.any()]
    if flat:
        warnings.warn(
            f"log_density does not change with {', '.join(flat[:5])} near init_params: its gradient is 0 for all "
            f"{len(gradient)} chains. If that is so everywhere it is no distribution, and chains wander for ever: "
            f"give every parameter a prior.",
            ModelWarning,
            stacklevel=4,
        )


def full_precision(method: Any, engine: Engine | None) -> Engine:
    """The engine for a bare density."""
    engine = as_engine(engine)
    if engine.elsewhere:
        raise Unsupported("A bare density is sampled in this process. Leave the engine's workers out.")
    return in_full_precision(method, engine)


def in_full_precision(method: Any, engine: Engine) -> Engine:
    """The engine of a sampler, which must compute in the network's own precision."""
    if engine.precision != "full":
        raise Unsupported(
            f"{type(method).__name__} needs exact gradients and densities: precision={engine.precision!r} would change "
            f"the posterior. To save memory, chains have storage=kn.ChainStorage(dtype='bfloat16')."
        )
    return engine


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


def searches_modes(dimension: int) -> bool:
    """Whether modes are searched in so many dimensions; under a time limit none of it is spent on them."""
    return dimension <= _MOST_DIMENSIONS and time_left() is None


def normal_around_mode(target: Target, position: Tensor, *, generator: torch.Generator) -> StudentTProposal | None:
    """The Student t at the mode found from the best of ``position`` ``(C, D)``; None if it does not fit."""
    best = position[_finite(target.value(position)).argmax()]
    proposal = laplace_proposal(target, best.unsqueeze(0), df=_DF, search=_SEARCH)
    if not torch.isfinite(proposal.factor).all():
        return None
    drawn, log_q = proposal.draw(_DRAWS, generator)
    log_weights = _finite(target.value(drawn.to(position)).double() - log_q)
    if log_weights.max() == -math.inf:
        return None
    smoothed, k = smooth_weights(log_weights)
    good = k <= 0.7 and effective_sample_size(smoothed) >= _LEAST_EFFECTIVE * _DRAWS
    return proposal if good else None


def near_modes(target: Target, position: Tensor, *, generator: torch.Generator) -> Tensor:
    """Positions ``(C, D)`` that are spread around the mode to which each chain climbs from its own.

    All stay where they are if the density is not about normal around the best mode. Modes that no chain reaches from
    its position are missed.
    """
    normal = normal_around_mode(target, position, generator=generator)
    if normal is None:
        return position
    modes = torch.stack([climb(target, each, _SEARCH) for each in position]).to(position)
    noise = normal.draw(len(position), generator)[0] - normal.loc
    found = modes + noise.to(position)
    value, gradient = target.value_and_grad(found)
    good = torch.isfinite(value) & torch.isfinite(gradient).all(-1)
    return torch.where(good.unsqueeze(-1), found, modes)


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(-math.inf, -math.inf, -math.inf)
