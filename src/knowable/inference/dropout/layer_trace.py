"""Which layers of a network take which inputs, and where the output of its own dropout layers goes.

The network is run on two and on three rows. A dimension that grows with the rows is that of the examples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows
from knowable.core.network.layer_operations import is_transposed
from knowable.core.network.params import Params
from knowable.core.network.weight_uses import WeightTracer, WeightUse
from knowable.core.support.randomness import own_randomness

ELEMENTWISE = (nn.Dropout,)
BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ROWS = (2, 3)
_RECURRENT = ("lstm", "gru", "rnn_")  # how the names of the operations begin
# Operations that commute with a mask: f(z x) = z f(x) for every z >= 0, whatever is computed afterwards.
_HOMOGENEOUS = frozenset({"relu", "relu_", "leaky_relu", "leaky_relu_", "prelu", "clone", "contiguous", "to"})
_SHAPES = frozenset({"flatten", "reshape", "view"})
_MOVES = frozenset({"unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim"})
_PICKS = frozenset({"__getitem__", "select", "narrow"})


@dataclass(frozen=True)
class WeightAxis:
    """How a weight takes its layer's inputs."""

    name: str
    axis: int = 1  # the dimension that runs over the inputs; 0 in transposed convolutions
    groups: int = 1  # of a convolution


@dataclass(frozen=True)
class DropoutSite:
    r"""Inputs of a layer that are dropped independently of each other, at one rate.

    Dropping input j, and dividing what is kept by the probability of keeping it, is the same as multiplying column j of
    the layer's weight matrix (Gal and Ghahramani, 2016):

    .. math:: M \Big(\frac{z}{1 - p} \odot x\Big) = \Big(M \operatorname{diag} \frac{z}{1 - p}\Big) x, \qquad
        z_j \sim \mathrm{Bernoulli}(1 - p)

    So a site is a distribution over weights, whose mean is M. Its inputs can be masked example by example
    (``by_example``) if the weights act in linear layers and convolutions alone, on inputs whose rows are the examples.
    """

    places: tuple[WeightAxis, ...]  # the weights that take these inputs (one, unless several layers share them)
    units: int  # features or channels that are dropped independently of each other
    rate: float  # probability of dropping each; 0 where noise of another kind is put on them
    repeat: int = 1  # neighbouring inputs that are dropped together (the pixels of a channel that was flattened)
    by_example: bool = False

    @property
    def name(self) -> str:
        """Name of the first weight, which stands for the site in reports."""
        return self.places[0].name

    def on_weight(self, mask: Tensor, place: WeightAxis, weight: Tensor) -> Tensor:
        """Factors on a weight, for masks ``(..., units)``: what broadcasts against ``(..., *weight.shape)``."""
        inputs = self.on_inputs(mask)
        lead, trailing = inputs.shape[:-1], (1,) * (weight.dim() - 2)
        if place.axis == 0:
            return inputs.reshape(*lead, -1, 1, *trailing)
        if place.groups == 1:
            return inputs.reshape(*lead, 1, -1, *trailing)
        by_group = inputs.reshape(*lead, place.groups, -1)  # (..., groups, inputs of each)
        by_output = by_group.repeat_interleave(weight.shape[0] // place.groups, dim=-2)
        return by_output.reshape(*by_output.shape, *trailing)

    def on_inputs(self, mask: Tensor) -> Tensor:
        """Factors on the inputs ``(..., inputs)``, for masks ``(..., units)``."""
        return mask.repeat_interleave(self.repeat, dim=-1) if self.repeat > 1 else mask

    def max_by_unit(self, values: Tensor, place: WeightAxis) -> Tensor:
        """The maximum over the entries of each unit, ``(units,)``, of values that have a weight's shape."""
        if place.axis == 0:
            inputs = values.flatten(1).amax(1)
        else:  # (groups, outputs of each, inputs of each, positions)
            by_group = values.reshape(place.groups, -1, values.shape[1], values[0, 0].numel())
            inputs = by_group.amax((1, 3)).flatten()
        return inputs.view(self.units, self.repeat).amax(1)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> DropoutSite:
        """The inverse of :meth:`to_json`."""
        return cls(**{**saved, "places": tuple(WeightAxis(**place) for place in saved["places"])})


# --- tracing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DropoutOutput:
    """One output of a dropout layer."""

    path: str
    call: int  # number of the call (a layer may be called several times)
    channels: int | None  # of a layer that drops whole channels; None of one that drops elements


@dataclass(frozen=True)
class LayerCall:
    """One use of one or several weights by a layer."""

    kind: str  # "linear", "convolution", "recurrent", "attention" or "embedding"
    axes: dict[str, WeightAxis]  # the weights that multiply inputs, by name
    inputs: dict[str, int]  # how many inputs each of these takes
    first: tuple[str, ...]  # names of those that take the layer's own input (and not its hidden state)
    by_rows: bool  # whether the rows of the input are the examples
    source: DropoutOutput | None = None  # the output of a dropout layer that is the input


@dataclass
class LayerTrace:
    """The layers of a network in a forward pass."""

    calls: list[LayerCall] = field(default_factory=list)  # uses of weights by layers, in order
    other_uses: set[str] = field(default_factory=set)  # parameters that operations other than layers use
    outputs: list[DropoutOutput] = field(default_factory=list)  # of the network's own dropout layers
    escaped: set[DropoutOutput] = field(default_factory=set)  # outputs that reach an operation other than a layer

    def calls_of(self, name: str) -> list[LayerCall]:
        """The uses of one weight."""
        return [call for call in self.calls if name in call.axes]

    def by_example(self, name: str) -> bool:
        """Whether the inputs of a weight can be masked example by example."""
        suits = [call.kind in ("linear", "convolution") and call.by_rows for call in self.calls_of(name)]
        return name not in self.other_uses and all(suits)


def trace_layers(model: Model, x: Tensor) -> LayerTrace:
    """Trace the layers of the network in training mode, on rows like those of ``x``."""
    network, x = model.network.copy(), as_rows(x)
    params = {**model.frozen_params(), **model.network_params(model.params())}
    active: list[_LayerRecorder] = []
    for path, module in network.modules(training=True).items():
        if isinstance(module, ELEMENTWISE + BY_CHANNEL):
            module.p = 0.5  # with a rate of 0 it would return its input
            module.register_forward_hook(partial(_record_output, active, path))
    found = []
    for rows in _ROWS:
        inputs = x[torch.arange(rows, device=x.device) % len(x)].clone()
        recorder = _LayerRecorder(params, rows)
        active[:] = [recorder]
        with own_randomness(0), torch.no_grad(), WeightTracer(params, listener=recorder.record):
            network(params, inputs, buffers=model.buffers(), training=True)
        found.append(recorder.trace)
    return _joined(*found)


def _joined(first: LayerTrace, second: LayerTrace) -> LayerTrace:
    """The second trace, with rows that are examples only where they are in both."""
    same = len(first.calls) == len(second.calls)
    pairs = zip(first.calls, second.calls, strict=True) if same else ((None, call) for call in second.calls)
    second.calls = [replace(b, by_rows=b.by_rows and a is not None and a.by_rows) for a, b in pairs]
    return second


def _record_output(active: list[_LayerRecorder], path: str, module: nn.Module, args: Any, output: Tensor) -> None:
    if module.training:  # a frozen part of the network is in evaluation mode
        channels = output.shape[1] if isinstance(module, BY_CHANNEL) else None
        active[0].record_output(path, channels, output)


class _LayerRecorder:
    """Makes a trace from the operations of one forward pass, following the outputs of dropout layers."""

    def __init__(self, params: Params, rows: int):
        self.trace = LayerTrace()
        self._params, self._rows = params, rows
        self._origin: dict[int, DropoutOutput] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have the same id

    def record_output(self, path: str, channels: int | None, output: Tensor) -> None:
        """Record the output of a dropout layer."""
        call = sum(each.path == path for each in self.trace.outputs)
        self.trace.outputs.append(DropoutOutput(path, call, channels))
        self._mark(output, self.trace.outputs[-1])

    def record(self, use: WeightUse) -> None:
        """Record an operation."""
        self._alive += use.tensors
        origins = [self._origin[id(each)] for each in use.tensors if id(each) in self._origin]
        call = self._layer_call(use) if use.names else None
        if call is not None:
            self.trace.calls.append(call)
            self.trace.other_uses.update(use.names if call.kind == "embedding" else ())
            self.trace.escaped.update(origin for origin in origins if origin != call.source)
            return
        self.trace.other_uses.update(use.names)
        if origins:
            self._follow(use, origins)

    def _mark(self, value: Tensor, origin: DropoutOutput) -> None:
        self._origin[id(value)] = origin
        self._alive.append(value)

    def _follow(self, use: WeightUse, origins: list[DropoutOutput]) -> None:
        if origins[0].channels is None:
            commutes = use.kind in _HOMOGENEOUS | _SHAPES | _MOVES | _PICKS
        else:
            commutes = use.kind in _HOMOGENEOUS | _SHAPES or "pool" in use.kind
        if commutes and len(origins) == 1 and isinstance(use.output, Tensor):
            self._mark(use.output, origins[0])
        else:
            self.trace.escaped.update(origins)

    def _layer_call(self, use: WeightUse) -> LayerCall | None:
        """The layer that this operation is, if it has a parameter of the network as its weight."""
        if use.kind in ("linear", "convolution"):
            return self._linear_call(use)
        weights = [name for name in use.names if self._params[name].dim() == 2]
        axes = {name: WeightAxis(name) for name in weights}
        inputs = {name: self._params[name].shape[1] for name in weights}
        if use.kind.startswith(_RECURRENT):
            first = tuple(name for name in axes if _takes_input(name.rpartition(".")[2]))
            return LayerCall("recurrent", axes, inputs, first, False, self._origin.get(id(use.inputs)))
        if use.kind == "multi_head_attention_forward":
            return LayerCall("attention", axes, inputs, tuple(name for name in axes if "out_proj" not in name), False)
        return LayerCall("embedding", {}, {}, (), by_rows=False) if use.kind == "embedding" else None

    def _linear_call(self, use: WeightUse) -> LayerCall | None:
        name, x = use.weight, use.inputs
        if name is None or any(x is value for value in self._params.values()):
            return None  # a weight that was computed, or a weight as the input
        shape, groups = self._params[name].shape, use.settings.get("groups", 1)
        transposed = is_transposed(use.operation)
        axis = WeightAxis(name, axis=0) if transposed else WeightAxis(name, groups=groups)
        inputs = shape[0] if transposed else shape[1] * groups
        by_rows = use.rows_first(self._rows) and x.dim() > 1
        return LayerCall(use.kind, {name: axis}, {name: inputs}, (name,), by_rows, self._origin.get(id(x)))


def _takes_input(weight: str) -> bool:
    """Whether a weight of a recurrent layer (or cell) takes the layer's own input."""
    return weight == "weight_ih" or weight.startswith("weight_ih_l0")
