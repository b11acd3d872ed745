"""Where the chains of a network begin.

The default is a vectorised deep ensemble: one network trained for each chain, all in one batched step, from different
initial weights. Chains then spend their time on the posterior and not on finding it (Sommer et al., 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.checkpoint import Checkpoint, part_of
from knowable.core.data import Data
from knowable.core.deadline import share_of_time
from knowable.core.ensemble_objective import EnsembleObjective
from knowable.core.fresh_start import fresh_start
from knowable.core.method import Method, identity_of
from knowable.core.model import Model
from knowable.core.params import Layout, stack_params
from knowable.core.point_estimate import fit_point
from knowable.core.posterior import Posterior
from knowable.core.randomness import generator_for
from knowable.core.training import Training, train
from knowable.core.types import Buffers, Params
from knowable.errors import InvalidArgument, Unsupported

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


def starting_points(
    method: Method,
    start: str | Posterior,
    chains: int,
    model: Model,
    data: Data,
    *,
    validation: Data | None = None,
    seed: int = 0,
    progress: bool | None = None,
    checkpoint: Checkpoint | None = None,
    mode: str = "auto",
) -> Start:
    """First positions for ``chains`` chains; the names of ``start`` are those of :class:`Sampling`."""
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
            best = fit_point(
                method, model, data, training=training, use_prior=True, validation=validation, seed=seed,
                progress=progress, checkpoint=part_of(checkpoint, "points"),
            )  # fmt: skip
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
        mode="eager" if mode == "eager" else "traced",
    )  # fmt: skip
    with share_of_time(_SHARE):
        result = train(
            ensemble, data, training, validation=validation, seed=seed, progress=progress,
            checkpoint=part_of(checkpoint, "start"), label=f"starting {chains} chains",
            identity=identity_of(method, model, data, validation),
        )  # fmt: skip
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


def _training(data: Data) -> Training:
    """About a thousand steps, whatever the size of the data."""
    settings = Training()
    per_epoch = data.batches_per_epoch(settings.rows_per_step(data.size))
    return Training(epochs=max(1, round(_STEPS / per_epoch)))


def _stop_if(interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt  # there are no draws yet to return
