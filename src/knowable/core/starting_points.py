"""Where the chains of a network begin.

The default is a vectorised deep ensemble: one network trained for each chain, all in one batched step, from different
initial weights. Chains then spend their time on the posterior and not on finding it (Sommer et al., 2025).
"""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.checkpoint import Checkpoint
from knowable.core.data import Data
from knowable.core.method import Method, identity_of
from knowable.core.model import Model
from knowable.core.objective import Objective
from knowable.core.params import Layout, expand_params, index_params, stack_params
from knowable.core.point_estimate import fit_point
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, generator_for, own_randomness
from knowable.core.target import ModelTarget
from knowable.core.training import Training, train
from knowable.core.types import Buffers, Params
from knowable.errors import InvalidArgument, Unsupported

_STEPS = 1000  # of training before the chains begin


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
        best = fit_point(
            method, model, data, training=training, use_prior=True, validation=validation, seed=seed,
            progress=progress, checkpoint=_part(checkpoint, "points"),
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
    target = ModelTarget(model, data, points=points, buffers=buffers, mode=mode)
    ensemble = EnsembleObjective(model, target, initial_weights(model, layout, chains, seed))
    result = train(
        ensemble, data, training, validation=validation, seed=seed, progress=progress,
        checkpoint=_part(checkpoint, "start"), label=f"starting {chains} chains",
        identity=identity_of(method, model, data, validation),
    )  # fmt: skip
    _stop_if(result.interrupted)
    return Start(ensemble.positions.detach().clone(), points, buffers)


class EnsembleObjective(Objective):
    r"""Sum over members of -log p(D, θ_k) / N: K networks trained side by side in one batched step.

    The network is in evaluation mode: what is trained is the very function whose posterior will be sampled.
    """

    def __init__(self, model: Model, target: ModelTarget, positions: Tensor):
        super().__init__(model, target.size)
        self.target = target
        self.positions = nn.Parameter(positions)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch, summed over members so that each learns at its own pace, and its terms."""
        log_joint = _LogJoints.apply(self.positions, self.target, x, y)
        return -log_joint.sum() / self.size, {"log_joint": log_joint.detach().mean()}

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture of all members."""
        model, target = self.model, self.target
        stack = {**expand_params(target.points, len(self.positions)), **target.layout.views(self.positions.detach())}
        outputs = model.network.over_draws(
            model.network_params(stack), x, buffers=target.buffers, vectorise=True
        )  # (K, batch, ...)
        each = [model.score(output, y, index_params(stack, k)) for k, output in enumerate(outputs)]
        return torch.stack(each).logsumexp(0) - math.log(len(each))


class _LogJoints(torch.autograd.Function):
    """Log joints of all members on one batch, whose gradients come with them from the recorded graph."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, target: ModelTarget, x: Tensor, y: Tensor) -> Tensor:
        value, gradient = target.batch_value_and_grad(positions.detach(), x, y)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return slopes[0].unsqueeze(-1) * gradient, None, None, None


def initial_weights(model: Model, layout: Layout, members: int, seed: int) -> Tensor:
    """Fresh initial weights ``(members, D)``: every module that can reset itself does; the rest is kept with noise."""
    draws = []
    for member in range(members):
        with own_randomness(derive_seed(seed, "initial", member)):
            net = copy.deepcopy(model.net)
            done: set[str] = set()
            for path, module in net.named_modules():
                reset = getattr(module, "reset_parameters", None)
                if _resets(reset):
                    done |= {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            fresh = {name: value.detach() for name, value in net.named_parameters()}
            values = model.params()
            for name in layout.names:
                if name in done:
                    values[name] = fresh[name].to(values[name])
                else:  # a bare parameter or a noise scale
                    values[name] = values[name] + 0.1 * torch.randn_like(values[name])
            draws.append(layout.flatten(values).detach())
    return torch.stack(draws)


def _resets(reset: Any) -> bool:
    """Call a module's ``reset_parameters``; False if it has none, or one that wants arguments."""
    if not callable(reset):
        return False
    try:
        reset()
    except TypeError:
        return False
    return True


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


def _part(checkpoint: Checkpoint | None, name: str) -> Checkpoint | None:
    return None if checkpoint is None else Checkpoint(Path(os.fspath(checkpoint.path)) / name, checkpoint.seconds)


def _stop_if(interrupted: bool) -> None:
    if interrupted:
        raise KeyboardInterrupt  # there are no draws yet to return
