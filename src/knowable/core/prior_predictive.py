"""The prior as a posterior given no data: atoms drawn from the prior."""

from __future__ import annotations

import torch

from knowable.core.model import Model
from knowable.core.params import stack_params
from knowable.core.particles import Particles


def prior_posterior(model: Model, samples: int, *, generator: torch.Generator | None = None) -> Particles:
    """``samples`` draws of the random parameters from the prior; the others at their start values."""
    start = model.params()
    random = {name: start[name] for name in model.random_names}
    hyper = {name: start[name] for name in model.hyper_names}
    draws = [model.prior.sample({**random, **hyper}, generator=generator) for _ in range(samples)]
    stack = stack_params([{name: draw[name] for name in random} for draw in draws])
    return Particles(model, stack, points={name: start[name] for name in model.point_names})
