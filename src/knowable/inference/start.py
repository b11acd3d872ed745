"""Initial weights: those of another posterior, of a trained network, of a saved state, or new ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.model.prior import HYPER_PREFIX
from knowable.core.network.params import Buffers, Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import InvalidArgument, InvalidType

_OWN = (LIKELIHOOD_PREFIX, HYPER_PREFIX)


@dataclass(frozen=True)
class StartValues:
    """Where to begin.

    Attributes:
        params: A value for every parameter of the model.
        buffers: The network's buffers.
        unset: Parameters of the likelihood and the prior that were not given: they have the model's start values.
    """

    params: Params
    buffers: Buffers
    unset: tuple[str, ...]


def start_values(argument: str, model: Model, start: Any) -> StartValues:
    """Read weights for ``model`` from ``start``; ``argument`` is what messages call it.

    Args:
        argument: Name of the argument.
        model: The model that will begin there.
        start: ``"network"`` (the network's own weights), a posterior (its means), a network, or a mapping from names
            to values such as ``net.state_dict()``, which may also hold parameters of the likelihood.
    """
    known = _known(argument, model, start)
    params, buffers = model.params(), model.buffers()
    aliases = model.net.state_dict().keys()  # tied weights have several names
    for name, value in known.items():
        if name in params or name in buffers:
            place = params if name in params else buffers
            place[name] = _fitting(argument, name, value, place[name])
        elif name in model.frozen_names:
            _check_frozen(argument, model, name, value)
        elif name not in aliases and not (isinstance(start, Posterior) and name.startswith(_OWN)):
            raise InvalidArgument(
                f"{argument} has a value for {name!r}, which the model does not have. Its parameters are: "
                f"{', '.join(list(params)[:12])}{', ...' if len(params) > 12 else ''}."
            )
    missing = [name for name in params if name not in known and not name.startswith(_OWN)]
    if missing:
        raise InvalidArgument(f"{argument} has no value for {', '.join(missing[:5])}.")
    unset = tuple(name for name in params if name not in known and name.startswith(_OWN))
    return StartValues(params, buffers, unset)


def means_for(argument: str, model: Model, posterior: Posterior) -> Params:
    """The posterior's means, for another model with the same parameters; ``argument`` is what messages call it."""
    means = posterior.mean()
    for name, value in model.params().items():
        if name not in means or means[name].shape != value.shape:
            found = f"shape {tuple(means[name].shape)}" if name in means else "nothing"
            raise InvalidArgument(
                f"{argument} is a posterior with {found} for {name!r}; the model wants shape {tuple(value.shape)}."
            )
    return {name: means[name].to(value).clone() for name, value in model.params().items()}  # training changes them


def _known(argument: str, model: Model, start: Any) -> Mapping[str, Tensor]:
    if isinstance(start, Posterior):
        return {**start.mean(), **start.buffers}
    if isinstance(start, nn.Module):
        return start.state_dict()
    if isinstance(start, str) and start == "network":
        return {name: value for name, value in model.params().items() if not name.startswith(_OWN)}
    if not isinstance(start, Mapping) or not all(isinstance(each, Tensor) for each in start.values()):
        raise InvalidType(
            f"{argument} must be 'network', a posterior, a network or a mapping from names to tensors such as "
            f"net.state_dict(); got {start!r:.60}."
        )
    return start


def _fitting(argument: str, name: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise InvalidArgument(
            f"{argument}[{name!r}] has shape {tuple(value.shape)}, the model's {tuple(like.shape)}: give the weights "
            f"of the same network."
        )
    if not torch.isfinite(value).all():
        raise InvalidArgument(f"{argument}[{name!r}] has missing or infinite values.")
    return value.detach().to(like).clone()


def _check_frozen(argument: str, model: Model, name: str, value: Tensor) -> None:
    held = model.frozen_params().get(name)
    if held is not None and not torch.equal(value.detach().to(held), held):
        raise InvalidArgument(
            f"{argument}[{name!r}] differs from the network's own value, at which the model holds it frozen. Load the "
            f"weights into the network before building the model: net.load_state_dict(...)."
        )


# --- new initial weights ---------------------------------------------------------------------------------------------


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
