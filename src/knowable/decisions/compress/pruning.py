"""Which weights go: those of which the posterior cannot say that they differ from zero."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import nn

from knowable.core.checks import check_choice, check_number
from knowable.core.model import Model
from knowable.core.params import select_names
from knowable.core.posterior import Posterior
from knowable.core.types import Buffers, Params
from knowable.errors import InvalidArgument


def prunable_names(posterior: Posterior, where: str | Iterable[str] | None = None) -> list[str]:
    """Weights that may go: the network's random ones, by default those of two and more dimensions.

    Args:
        posterior: The posterior.
        where: Names or globs of weights, to choose others.
    """
    model = posterior.model
    shapes = {name: value.shape for name, value in model.network_params(posterior.signal_to_noise()).items()}
    if where is None:
        chosen = {name for name, shape in shapes.items() if len(shape) >= 2}
    else:
        chosen = select_names("where", where, list(shapes), model.net)
    if not chosen:
        raise InvalidArgument("posterior has no random weight matrix or kernel to prune. Name others by where=.")
    return [name for name in shapes if name in chosen]


def find_masks(
    posterior: Posterior,
    *,
    threshold: float | None = None,
    by: str = "log_alpha",
    where: str | Iterable[str] | None = None,
) -> dict[str, torch.Tensor]:
    r"""True for the weights that stay.

    With :math:`\alpha = \sigma^2 / \mu^2` (Molchanov, Ashukha and Vetrov, 2017), a weight goes if
    :math:`\log \alpha = -2 \log(|\mu| / \sigma)` is above the threshold.

    Args:
        posterior: The posterior.
        threshold: None is the posterior's own, ``posterior.log_alpha_threshold``.
        by: ``"log_alpha"``: weights with a log alpha above the threshold go. ``"snr"``: weights with a signal-to-noise
            ratio below the threshold go.
        where: Names or globs of the weights that may go; None is all matrices and kernels.
    """
    check_choice("by", by, ("log_alpha", "snr"))
    if threshold is None:
        log_alpha = float(posterior.log_alpha_threshold)
        threshold = log_alpha if by == "log_alpha" else math.exp(-log_alpha / 2)
    threshold = check_number("threshold", threshold, at_least=0.0 if by == "snr" else None)
    ratios = posterior.signal_to_noise()
    names = prunable_names(posterior, where)
    if by == "snr":
        return {name: ratios[name] >= threshold for name in names}
    return {name: -2 * ratios[name].log() <= threshold for name in names}


def mean_params(posterior: Posterior) -> Params:
    """The network's parameters at the posterior mean, frozen ones included."""
    model = posterior.model
    return {**model.frozen_params(), **model.network_params(posterior.mean())}


def network_at(model: Model, params: Params, buffers: Buffers) -> nn.Module:
    """A copy of the model's network with these values, in evaluation mode."""
    made = copy.deepcopy(model.net).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if name in params:
                value.copy_(params[name])
        for name, value in made.named_buffers():
            if name in buffers:
                value.copy_(buffers[name])
    return made.requires_grad_(False)
