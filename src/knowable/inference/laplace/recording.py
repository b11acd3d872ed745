"""A forward pass in which every product with a weight matrix is noted.

Layers are recognised by what they compute (``F.linear``, ``F.conv1d``, ``F.conv2d``) on which tensor, and not by their
modules: so attention, recurrent layers, weights that are used several times and code of one's own are seen too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from knowable.core.model import Model
from knowable.core.network import no_hidden_loops
from knowable.core.types import Buffers, Params
from knowable.inference.laplace.recurrent import gru_by_steps, gru_is_plain, lstm_by_steps, lstm_is_plain
from knowable.inference.laplace.uses import ConvolutionUse, LinearUse, Use


class Recording:
    """One batch through the network at given parameters, and the gradients at every use of a weight matrix.

    Where gradients do not flow from the noted uses into their own weights (``cut``), what gradient a parameter still
    has comes from uses that could not be noted (:meth:`unnoted`).

    Args:
        model: The model.
        names: The network's parameters that are asked about.
        params: Values of all parameters.
        x: The batch.
        buffers: The network's buffers.
        cut: Whether gradients stop at the noted uses.
    """

    def __init__(
        self, model: Model, names: tuple[str, ...], params: Params, x: Tensor, buffers: Buffers, *, cut: bool = True
    ):
        network = model.network_params(params)
        self._leaves = {name: network[name].detach().requires_grad_() for name in names}
        recorder = Recorder({id(value): name for name, value in self._leaves.items()}, cut=cut)
        with torch.enable_grad(), recorder:
            self.output = model.network({**network, **self._leaves}, x, buffers=buffers)
        self.uses = recorder.uses
        self._batches = not self.convolves  # and until an operation refuses

    @property
    def convolves(self) -> bool:
        """Whether a noted use is a convolution, whose way back is as quick for one direction as for many at once."""
        return any(isinstance(use, ConvolutionUse) for use in self.uses)

    def gradients(self, directions: Tensor) -> list[Tensor]:
        """Gradients of the outputs' products with each of K ``directions`` ``(K, *output)`` at each use.

        They are ``(K, ..., features)``, with rows and positions in front.
        """
        places = [use.output for use in self.uses]
        found = self._pulled_back(directions, places) if places and self.output.requires_grad else [None] * len(places)
        shapes = [(len(directions), *use.output.shape) for use in self.uses]
        zeros = (
            directions.new_zeros(shape) if each is None else each for each, shape in zip(found, shapes, strict=True)
        )
        return [use.in_front(each.detach(), lead=1) for use, each in zip(self.uses, zeros, strict=True)]

    def _pulled_back(self, directions: Tensor, places: list[Tensor]) -> Sequence[Tensor | None]:
        """All directions in one pass, unless the network has an operation for which that does not pay or work."""
        if len(directions) > 1 and self._batches:
            try:
                with no_hidden_loops():
                    return torch.autograd.grad(
                        self.output, places, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
                    )
            except RuntimeError:
                self._batches = False
        each = [
            torch.autograd.grad(self.output, places, direction, retain_graph=True, allow_unused=True)
            for direction in directions
        ]
        return [None if one[0] is None else _stacked(one) for one in zip(*each, strict=True)]

    def is_output(self, use: Use) -> bool:
        """Whether what comes out of this use is the network's output."""
        return self.output is use.passed_on

    def unnoted(self) -> set[str]:
        """Parameters that act on the output in other ways than by the noted uses, of a recording that is cut there."""
        found = self._in_leaves(torch.ones_like(self.output))
        return {name for name, each in found.items() if each is not None}

    def in_parameters(self, direction: Tensor) -> Params:
        """Gradients of the output's product with ``direction``, of a recording that is not cut."""
        found = self._in_leaves(direction)
        return {name: torch.zeros_like(self._leaves[name]) if each is None else each for name, each in found.items()}

    def _in_leaves(self, direction: Tensor) -> dict[str, Tensor | None]:
        if not self.output.requires_grad:
            return dict.fromkeys(self._leaves)
        leaves = list(self._leaves.values())
        found = torch.autograd.grad(self.output, leaves, direction, retain_graph=True, allow_unused=True)
        return dict(zip(self._leaves, found, strict=True))


class Recorder(TorchFunctionMode):
    """Notes uses of the tensors in ``names`` (by identity) while it is active.

    Without names it notes nothing, and only takes apart what PyTorch computes in one piece (recurrent layers, attention
    on its fast path), which then can be differentiated in every way.
    """

    def __init__(self, names: Mapping[int, str] | None = None, *, cut: bool = True):
        super().__init__()
        self.names, self.cut = names or {}, cut
        self.uses: list[Use] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every function of torch that the network calls."""
        kwargs = kwargs or {}
        if func == F.linear:
            return self._linear(*args, **kwargs)
        if func in (F.conv1d, F.conv2d):
            return self._convolution(func, *args, **kwargs)
        apart = _taken_apart(func, args)
        if apart is None:
            return func(*args, **kwargs)
        with self:
            return apart(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        names = self._names(weight, bias)
        if not any(names):
            return F.linear(input, weight, bias)
        output = F.linear(input, *self._held(names, weight, bias))
        return self._noted(LinearUse, names, input, output)

    def _convolution(
        self, function: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Tensor:  # fmt: skip
        names = self._names(weight, bias)
        if groups != 1 or not any(names):
            return function(input, weight, bias, stride, padding, dilation, groups)
        output = function(input, *self._held(names, weight, bias), stride, padding, dilation)
        kernel = tuple(weight.shape[2:])
        extent = {
            "kernel": kernel, "stride": _each(stride, kernel), "dilation": _each(dilation, kernel),
            "padding": padding if isinstance(padding, str) else _each(padding, kernel),
        }  # fmt: skip
        return self._noted(ConvolutionUse, names, input, output, **extent)

    def _held(
        self, names: tuple[str | None, str | None], weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias, without the way back into those that are noted if it is cut."""
        if not self.cut:
            return weight, bias
        weight = weight if names[0] is None else weight.detach()
        return weight, bias if bias is None or names[1] is None else bias.detach()

    def _names(self, weight: Tensor, bias: Tensor | None) -> tuple[str | None, str | None]:
        return self.names.get(id(weight)), None if bias is None else self.names.get(id(bias))

    def _noted(
        self, kind: type[Use], names: tuple[str | None, str | None], inputs: Tensor, output: Tensor, **extent: Any
    ) -> Tensor:
        """Note the use. The network goes on with a copy, which it may change in place."""
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        passed_on = output.clone()
        self.uses.append(kind(*names, inputs.detach(), output, passed_on, **extent))
        return passed_on


def _stacked(each: Sequence[Tensor]) -> Tensor:
    """A stack, which of one tensor is no copy."""
    return each[0].unsqueeze(0) if len(each) == 1 else torch.stack(tuple(each))


def _each(value: Any, like: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * len(like)


def _taken_apart(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The same function as several calls, where there is one."""
    if func == F.multi_head_attention_forward:
        return _ATTENTION
    if func == torch.lstm and lstm_is_plain(args):
        return lstm_by_steps
    if func == torch.gru and gru_is_plain(args):
        return gru_by_steps
    return None


def _without_detour(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that does not ask modes such as ours before it begins.

    Such a function hands itself as a whole to the active mode, which would then never see what it calls.
    """
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_ATTENTION = _without_detour(F.multi_head_attention_forward)
