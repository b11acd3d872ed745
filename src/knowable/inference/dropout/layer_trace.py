"""What a network does with its weights, and with the output of its own dropout layers, found by running it.

The network is run on two and on three rows while every operation is watched. A dimension that grows with the rows is
that of the examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from knowable.core.model.model import Model
from knowable.core.network.layer_operations import CONVOLUTIONS, LINEAR, METADATA, is_transposed, operands
from knowable.core.network.params import Params
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
class DropoutOutput:
    """One output of a dropout layer.

    Attributes:
        path: The layer.
        call: Which of its calls this was (a layer may be used at several places).
        channels: Of a layer that drops whole channels, how many there are; None of one that drops elements.
    """

    path: str
    call: int
    channels: int | None


@dataclass(frozen=True)
class LayerCall:
    """One use of one or several weights by a layer.

    Attributes:
        kind: ``"linear"``, ``"convolution"``, ``"recurrent"``, ``"attention"`` or ``"embedding"``.
        places: The weights that multiply inputs, and how.
        inputs: How many inputs each of these takes.
        entrance: Names of those that take the layer's own input (and not what it computes inside).
        by_rows: Whether the rows of the input are the examples.
        source: The output of a dropout layer that the input is, or None.
    """

    kind: str
    places: tuple[WeightAxis, ...]
    inputs: tuple[int, ...]
    entrance: tuple[str, ...]
    by_rows: bool
    source: DropoutOutput | None = None


@dataclass
class LayerTrace:
    """What was seen.

    Attributes:
        calls: Uses of weights by layers, in order.
        other_uses: Parameters that something else than a layer used.
        outputs: Outputs of the network's own dropout layers.
        escaped: Those that went, changed or unchanged, to something else than the input of a layer.
    """

    calls: list[LayerCall] = field(default_factory=list)
    other_uses: set[str] = field(default_factory=set)
    outputs: list[DropoutOutput] = field(default_factory=list)
    escaped: set[DropoutOutput] = field(default_factory=set)

    def calls_of(self, name: str) -> list[LayerCall]:
        """The uses of one weight."""
        return [call for call in self.calls if any(place.name == name for place in call.places)]

    def by_example(self, name: str) -> bool:
        """Whether the inputs of a weight can be masked example by example."""
        calls = self.calls_of(name)
        return name not in self.other_uses and all(
            call.kind in ("linear", "convolution") and call.by_rows for call in calls
        )


def trace_layers(model: Model, x: Tensor) -> LayerTrace:
    """Run the network in training mode on rows like those of ``x``, and watch."""
    network = model.network.copy()
    params = {**model.frozen_params(), **model.network_params(model.params())}
    watching: list[_LayerRecorder] = []
    for path, module in network.modules(training=True).items():
        if isinstance(module, ELEMENTWISE + BY_CHANNEL):
            module.p = 0.5  # one that is set to 0 would not be seen
            module.register_forward_hook(partial(_note_output, watching, path))
    found = []
    for rows in _ROWS:
        inputs = x[torch.arange(rows, device=x.device) % len(x)].clone()
        watching[:] = [_LayerRecorder(params, rows)]
        with own_randomness(0), torch.no_grad(), watching[0]:
            network(params, inputs, buffers=model.buffers(), training=True)
        found.append(watching[0].trace)
    return _joined(*found)


def _joined(first: LayerTrace, second: LayerTrace) -> LayerTrace:
    """The second trace, with rows that are examples only where they are in both."""
    same = len(first.calls) == len(second.calls)
    pairs = zip(first.calls, second.calls, strict=True) if same else ((None, call) for call in second.calls)
    second.calls = [replace(b, by_rows=b.by_rows and a is not None and a.by_rows) for a, b in pairs]
    return second


def _note_output(watching: list[_LayerRecorder], path: str, module: nn.Module, args: Any, output: Tensor) -> None:
    if module.training:  # a frozen part of the network is in evaluation mode
        channels = output.shape[1] if isinstance(module, BY_CHANNEL) else None
        watching[0].note_output(path, channels, output)


class _LayerRecorder(TorchFunctionMode):
    """Follows parameters and outputs of dropout layers through the operations of one forward pass."""

    def __init__(self, params: Params, rows: int):
        super().__init__()
        self.trace = LayerTrace()
        self._rows = rows
        self._names = {id(value): name for name, value in params.items()}
        self._origin: dict[int, DropoutOutput] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have the same id

    def note_output(self, path: str, channels: int | None, output: Tensor) -> None:
        """Take note of what a dropout layer gave out."""
        call = sum(each.path == path for each in self.trace.outputs)
        self.trace.outputs.append(DropoutOutput(path, call, channels))
        self._mark(output, self.trace.outputs[-1])

    def _mark(self, value: Tensor, origin: DropoutOutput) -> None:
        self._origin[id(value)] = origin
        self._alive.append(value)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, and look at it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ in METADATA and not isinstance(result, Tensor):
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._alive += given
        names = [self._names[id(leaf)] for leaf in given if id(leaf) in self._names]
        call = self._layer_call(func, args, kwargs, names)
        origins = [self._origin[id(leaf)] for leaf in given if id(leaf) in self._origin]
        if call is not None:
            self.trace.calls.append(call)
            self.trace.other_uses.update(names if call.kind == "embedding" else ())
            self.trace.escaped.update(origin for origin in origins if origin != call.source)
            return result
        self.trace.other_uses.update(names)
        if origins:
            self._follow(func.__name__, origins, result)
        return result

    def _follow(self, operation: str, origins: list[DropoutOutput], result: Any) -> None:
        origin = origins[0]
        if origin.channels is None:
            commutes = operation in _HOMOGENEOUS | _SHAPES | _MOVES | _PICKS
        else:
            commutes = operation in _HOMOGENEOUS | _SHAPES or "pool" in operation
        if commutes and len(origins) == 1 and isinstance(result, Tensor):
            self._mark(result, origin)
        else:
            self.trace.escaped.update(origins)

    # --- layers ------------------------------------------------------------------------------------------------------

    def _layer_call(self, func: Callable[..., Any], args: Any, kwargs: Any, names: list[str]) -> LayerCall | None:
        """What kind of layer this operation is, if it has a parameter of the network as its weight."""
        if not names:
            return None
        if func is LINEAR or func in CONVOLUTIONS:
            return self._linear_call(func, *operands(func, args, kwargs))
        weights = {name: leaf for leaf in tree_leaves((args, kwargs)) for name in self._matrix_name(leaf)}
        if func.__name__.startswith(_RECURRENT):
            first = tuple(name for name in weights if _takes_input(name.rpartition(".")[2]))
            return _inner_call("recurrent", weights, first, self._origin.get(id(args[0])))
        if func.__name__ == "multi_head_attention_forward":
            return _inner_call("attention", weights, tuple(name for name in weights if "out_proj" not in name))
        if func.__name__ == "embedding":
            return LayerCall("embedding", (), (), (), by_rows=False)
        return None

    def _linear_call(
        self, func: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
    ) -> LayerCall | None:
        name = self._names.get(id(weight))
        if name is None or id(x) in self._names:
            return None  # a weight that was computed, or a weight as the input
        by_rows = x.dim() > 1 and x.shape[0] == self._rows
        source = self._origin.get(id(x))
        if func is LINEAR:
            return LayerCall("linear", (WeightAxis(name),), (weight.shape[1],), (name,), by_rows, source)
        groups = rest.get("groups", 1)
        place = WeightAxis(name, axis=0) if is_transposed(func) else WeightAxis(name, groups=groups)
        inputs = weight.shape[0] if is_transposed(func) else weight.shape[1] * groups
        return LayerCall("convolution", (place,), (inputs,), (name,), by_rows, source)

    def _matrix_name(self, leaf: Any) -> list[str]:
        return [self._names[id(leaf)]] if id(leaf) in self._names and leaf.dim() == 2 else []


def _takes_input(weight: str) -> bool:
    """Whether a weight of a recurrent layer (or cell) takes the layer's own input."""
    return weight == "weight_ih" or weight.startswith("weight_ih_l0")


def _inner_call(
    kind: str, weights: Params, entrance: tuple[str, ...], source: DropoutOutput | None = None
) -> LayerCall:
    places = tuple(WeightAxis(name) for name in weights)
    return LayerCall(kind, places, tuple(value.shape[1] for value in weights.values()), entrance, False, source)


# --- Where dropout acts: inputs of a layer that are kept or dropped, and what that does to the layer's weights -------
#
# Dropping input j of a layer, and dividing what is kept by the probability of keeping it, is the same as multiplying
# column j of its weight matrix (Gal and Ghahramani, 2016):
#
# .. math:: M \Big(\frac{z}{1 - p} \odot x\Big) = \Big(M \operatorname{diag} \frac{z}{1 - p}\Big) x, \qquad
#     z_j \sim \mathrm{Bernoulli}(1 - p)
#
# So a site is a distribution over weights, whose mean is M.


@dataclass(frozen=True)
class WeightAxis:
    """A weight that takes the inputs of a site.

    Attributes:
        name: The parameter.
        axis: The dimension of the weight that runs over the inputs: 1, or 0 in transposed convolutions.
        groups: Groups of a convolution.
    """

    name: str
    axis: int = 1
    groups: int = 1


@dataclass(frozen=True)
class DropoutSite:
    """Inputs that are dropped independently of each other, at one rate.

    Attributes:
        places: The weights that take these inputs (one, unless several layers share them).
        units: How many inputs are dropped independently of each other: features, or channels of a convolution.
        rate: Probability of dropping each; 0 where noise of another kind is put on them.
        repeat: How many neighbouring inputs are dropped together (the pixels of a channel that was flattened).
        by_example: Whether a layer's input can be masked example by example: the weights act in linear layers and
            convolutions alone, on inputs whose rows are the examples.
    """

    places: tuple[WeightAxis, ...]
    units: int
    rate: float
    repeat: int = 1
    by_example: bool = False

    @property
    def name(self) -> str:
        """Name of the first weight: what reports call the site."""
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

    def most_by_unit(self, values: Tensor, place: WeightAxis) -> Tensor:
        """The largest of numbers of a weight's shape among those that belong to each unit, ``(units,)``."""
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
        """Back from plain values."""
        return cls(**{**saved, "places": tuple(WeightAxis(**place) for place in saved["places"])})
