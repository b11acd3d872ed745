"""A forward pass in which every product with a weight matrix is noted.

Layers are recognised by what they compute (``F.linear``, ``F.conv1d``, ``F.conv2d``) on which tensor, and not by their
modules: so attention, recurrent layers, weights that are used several times and code of one's own are seen too.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from knowable.core.model.model import Model
from knowable.core.network.network import no_hidden_loops
from knowable.core.network.params import Buffers, Params
from knowable.inference.laplace.recurrent import gru_by_steps, gru_is_plain, lstm_by_steps, lstm_is_plain


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


# --- One use of a weight matrix in a network: s = W a + b at every row and position ----------------------------------
#
# The gradient of anything in W is then a sum of outer products of gradients in s with the a, which is all that
# curvature
# needs to know of a layer. Inputs and gradients come as ``(..., features)``, with rows and positions in front.


@dataclass(frozen=True)
class Use(ABC):
    """A product with a weight matrix, or the addition of a bias, of which at least one is asked about.

    Attributes:
        weight: Name of the weight, if it is asked about.
        bias: Name of the bias, if it is asked about.
        inputs: What went in.
        output: What came out, where gradients are taken.
        passed_on: What the network went on with: the same values.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    output: Tensor
    passed_on: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters asked about."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """The dimension of the output that holds its features."""

    @abstractmethod
    def _inputs_in_front(self) -> Tensor:
        """Inputs as ``(..., in)``."""

    @abstractmethod
    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """Values of the output's shape as ``(..., out)``: rows and positions in front, behind ``lead`` dimensions."""

    @property
    def count(self) -> int:
        """Number of rows and positions."""
        return self.in_front(self.output).shape[:-1].numel()

    def second_moment(self) -> Tensor:
        """Sum of the outer products of :meth:`activations`, ``(in, in)``."""
        with torch.no_grad():
            if self.weight is None:
                return self.output.new_full((1, 1), self.count)
            inputs = self._inputs_in_front()
            square = second_moment(inputs)
            if self.bias is None:
                return square
            sums, count = inputs.sum(tuple(range(inputs.dim() - 1))), inputs.new_full((1, 1), self.count)
            return torch.cat([torch.cat([square, sums.unsqueeze(1)], 1), torch.cat([sums.unsqueeze(0), count], 1)])

    def activations(self) -> Tensor:
        """What the weight is multiplied with, ``(..., in)``, with a 1 at the end for the bias."""
        with torch.no_grad():
            if self.weight is None:
                front = self.in_front(self.output).shape[:-1]
                return self.output.new_ones((*front, 1))
            inputs = self._inputs_in_front()
            return inputs if self.bias is None else F.pad(inputs, (0, 1), value=1.0)


@dataclass(frozen=True)
class LinearUse(Use):
    """``F.linear`` on inputs of any number of dimensions."""

    @property
    def feature_dim(self) -> int:
        """The last one."""
        return self.output.dim() - 1

    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """As they are."""
        return values

    def _inputs_in_front(self) -> Tensor:
        return self.inputs


@dataclass(frozen=True)
class ConvolutionUse(Use):
    """``F.conv1d`` or ``F.conv2d``: the same matrix at every position, on the patch around it.

    Attributes:
        kernel: Size of the kernel in each direction.
        stride: Its steps.
        padding: Zeros around the image, or ``"same"`` or ``"valid"``.
        dilation: Distance between the kernel's points.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]

    @property
    def feature_dim(self) -> int:
        """The channels."""
        return 1

    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """Values ``(batch, out, *positions)`` as ``(batch, positions, out)``."""
        return values.flatten(2 + lead).mT

    def _inputs_in_front(self) -> Tensor:
        """Patches, ``(batch, positions, in * kernel)``."""
        image = _padded(self.inputs, self.padding, self.kernel, self.dilation)
        kernel, stride, dilation = self.kernel, self.stride, self.dilation
        if len(kernel) == 1:  # an image of one line
            image, kernel, stride, dilation = image.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
        return F.unfold(image, kernel, dilation=dilation, stride=stride).mT


def _padded(image: Tensor, padding: tuple[int, ...] | str, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    if padding == "valid":
        return image
    if padding == "same":
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in around]
    else:
        sides = [(int(size), int(size)) for size in padding]
    return F.pad(image, [size for side in reversed(sides) for size in side])  # the last dimension comes first


# --- Second moments of many vectors ----------------------------------------------------------------------------------

_NARROWEST = 128  # of a block: products of thinner matrices are slow
_BLOCKS = 8  # at the most


def second_moment(values: Tensor) -> Tensor:
    r"""The sum of :math:`v v^\top` over vectors v that are ``values[..., :]``: ``(n, n)``.

    Args:
        values: ``(..., n)``; with three dimensions or more, the one before the last holds positions.
    """
    count = values.shape[-1]
    if values.dim() > 2 and values.shape[-2] > count:  # positions: many small matrices, none of which is copied
        return (values.mT @ values).flatten(0, -3).sum(0)
    in_order = values.stride(-1) == 1  # otherwise features come first in memory, as convolutions have them
    return _gram(values.reshape(-1, count).T if in_order else values.movedim(-1, 0).reshape(count, -1))


def _gram(wide: Tensor) -> Tensor:
    """``wide`` ``(n, vectors)`` times its transpose, of which only blocks on and below the diagonal are computed."""
    count = len(wide)
    found = wide.new_empty((count, count))
    start = 0
    for rows in wide.tensor_split(min(_BLOCKS, max(1, count // _NARROWEST))):
        stop = start + len(rows)
        torch.mm(rows, wide[:stop].T, out=found[start:stop, :stop])
        found[:start, start:stop] = found[start:stop, :start].T
        start = stop
    return found
