r"""A layer's output as a random code: where it is taken, how it is drawn, and what it says of the input.

The layer's output is the mean of a normal code, whose variance is computed beside it:

.. math:: z \mid x \sim \mathcal{N}\big(\mu(x), \operatorname{diag} \sigma^2(x)\big)

A :class:`Tap` stands at that place in a copy of the network and puts the code where the mean was. The user's network is
never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.checks import check_choice
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.errors import InvalidArgument, Unsupported

SCALES = ("head", "split")
MARGINALS = ("standard", "learned")
HEAD_WEIGHT, HEAD_BIAS = "head_weight", "head_bias"
MARGINAL_LOC, MARGINAL_LOG_SCALE = "marginal_loc", "marginal_log_scale"

Noise = Callable[[Tensor], Tensor]
"""Standard normal noise for a code of that shape (or for one row of it, shared by all)."""


@dataclass(frozen=True)
class CodePlace:
    """Which activations are the code.

    Attributes:
        layer: Path of a module.
        entrance: Whether they are the module's input and not its output.
        scale: ``"head"`` (they are the mean; the log variance is a linear function of them) or ``"split"`` (the first
            half of the features is the mean, the second half the log variance).
    """

    layer: str
    entrance: bool
    scale: str

    @classmethod
    def of(cls, model: Model, layer: str | None, scale: str) -> CodePlace:
        """The output of a named layer, or else the input of the last layer that has parameters."""
        modules = model.network.modules(training=False)
        if layer is not None:
            return cls(check_choice("layer", layer, [path for path in modules if path]), False, scale)
        if scale == "split":
            raise InvalidArgument("scale='split' needs a layer= whose output is mean and log variance side by side.")
        own = [path for path, module in modules.items() if list(module.parameters(recurse=False))]
        if not own:
            raise InvalidArgument("layer must be named: the network has no layer with parameters.")
        return cls(own[-1], True, scale)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the {'input' if self.entrance else 'output'} of {self.layer or 'the network'!r}"


class Tap:
    """What stands in a network where the code is: it turns activations into a code, and remembers its moments.

    Outside of :meth:`drawing` the code is its mean.

    Args:
        place: Where it stands.

    Attributes:
        calls: How often it was passed.
        shape: Shape of one row's code, at the last pass.
        moments: Mean and log variance of the code at the last pass, inside of :meth:`drawing`.
    """

    def __init__(self, place: CodePlace):
        self.place = place
        self.calls = 0
        self.shape = torch.Size()
        self.moments: tuple[Tensor, Tensor] | None = None
        self._tensors: Params | None = None
        self._noise: Noise | None = None

    @contextmanager
    def drawing(self, tensors: Params, noise: Noise | None) -> Iterator[None]:
        """Let the passes in this block compute moments, and draw codes by ``noise`` where there is any."""
        self._tensors, self._noise = tensors, noise
        try:
            yield
        finally:
            self._tensors = self._noise = self.moments = None

    def __call__(self, value: Any) -> Tensor:
        """The code in place of ``value``."""
        mean = code_mean(self._checked(value), self.place.scale)
        self.calls, self.shape = self.calls + 1, mean.shape[1:]
        if self._tensors is None:
            return mean
        log_variance = code_log_variance(value, self._tensors, self.place.scale)
        self.moments = mean, log_variance
        return mean if self._noise is None else mean + torch.exp(0.5 * log_variance) * self._noise(mean)

    def _checked(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise Unsupported(
                f"A code must be one tensor of numbers with a row for each example and features in it, but "
                f"{self.place.name} is {found}. Name another layer."
            )
        if self.place.scale == "split" and value.shape[feature_axis(value)] % 2:
            raise Unsupported(
                f"scale='split' needs an even number of features, but {self.place.name} has shape {tuple(value.shape)}."
            )
        return value

    def hook_output(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        """To be called after a module."""
        return self(output)

    def hook_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """To be called before a module."""
        if not args:
            raise Unsupported(f"No code can be put in for {self.place.name}, which is passed by name. Name a layer=.")
        return (self(args[0]), *args[1:])


def tapped(model: Model, place: CodePlace) -> tuple[Model, Tap]:
    """The same model with a tap in its network."""
    network, tap = model.network.copy(), Tap(place)
    for training in (True, False):
        module = network.modules(training=training)[place.layer]
        if place.entrance:
            module.register_forward_pre_hook(tap.hook_input)
        else:
            module.register_forward_hook(tap.hook_output)
    made = copy.copy(model)
    made.network = network
    return made, tap


def code_shape(model: Model, tap: Tap, x: Tensor) -> torch.Size:
    """Shape of one row's code, after a look at whether the network passes its tap once."""
    tap.calls = 0
    with torch.no_grad():
        model.network(model.network_params(model.params()), x[:2], buffers=model.buffers())
    if tap.calls != 1:
        raise Unsupported(
            f"The network must compute {tap.place.name} once in a forward pass, for that is the code; it does so "
            f"{tap.calls} times. Name another layer."
        )
    return tap.shape


def feature_axis(value: Tensor) -> int:
    """The dimension of a code's features: the channels of images, the last one otherwise."""
    return 1 if value.dim() >= 4 else value.dim() - 1


def code_mean(value: Tensor, scale: str) -> Tensor:
    """Mean of the code, from a layer's output."""
    return value if scale == "head" else value.chunk(2, dim=feature_axis(value))[0]


def code_log_variance(value: Tensor, tensors: Params, scale: str) -> Tensor:
    """Log variance of the code, from a layer's output."""
    axis = feature_axis(value)
    if scale == "split":
        return value.chunk(2, dim=axis)[1]
    return F.linear(value.movedim(axis, -1), tensors[HEAD_WEIGHT], tensors[HEAD_BIAS]).movedim(-1, axis)


def rate_of(mean: Tensor, log_variance: Tensor, tensors: Params) -> Tensor:
    r"""KL of each row's code to the marginal r, in nats, ``(rows,)``: how much the code says of its input.

    .. math:: \tfrac12 \sum_k \Big(\frac{\sigma_k^2 + (\mu_k - m_k)^2}{v_k} - 1 - \log\frac{\sigma_k^2}{v_k}\Big)

    with r(z) = N(m, diag v), the standard normal unless ``tensors`` has a marginal.
    """
    if MARGINAL_LOC in tensors:
        log_scale = tensors[MARGINAL_LOG_SCALE]
        mean = (mean - tensors[MARGINAL_LOC]) * torch.exp(-log_scale)
        log_variance = log_variance - 2 * log_scale
    each = log_variance.exp() + mean.square() - 1 - log_variance
    return 0.5 * each.flatten(1).sum(1)
