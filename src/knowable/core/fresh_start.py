"""Where a network begins when it begins anew."""

from __future__ import annotations

import copy
from typing import Any

import torch

from knowable.core.model import Model
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.types import Buffers, Params


def fresh_start(model: Model, seed: int, member: int) -> tuple[Params, Buffers]:
    """New initial values for member number ``member``: of the parameters that are not frozen, and of the buffers.

    Every module that can reset itself does, unless all its parameters are frozen. What no module resets (a bare
    parameter, a noise scale) is kept, with some noise on parameters.
    """
    frozen = model.frozen_names
    with own_randomness(derive_seed(seed, "initial", member)):
        net = copy.deepcopy(model.net)
        done: set[str] = set()
        for path, module in net.named_modules():
            own = {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))  # or attention's
            if own - frozen and _resets(reset):
                done |= own | {f"{path}.{name}" if path else name for name, _ in module.named_buffers(recurse=False)}
        fresh = {name: value.detach() for name, value in (*net.named_parameters(), *net.named_buffers())}
        values = model.params()
        for name, value in values.items():
            if name in model.hyper_names:
                continue
            values[name] = fresh[name].to(value) if name in done else value + 0.1 * torch.randn_like(value)
    return values, {name: fresh[name] if name in done else value for name, value in model.buffers().items()}


def _resets(reset: Any) -> bool:
    """Call a module's ``reset_parameters``; False if it has none, or one that wants arguments."""
    if not callable(reset):
        return False
    try:
        reset()
    except TypeError:
        return False
    return True
