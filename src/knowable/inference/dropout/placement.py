"""Where in a network dropout acts, and at which rate: by its own dropout layers, or before its layers if it has none.

Three cases:

- The user names weights (``where``): their inputs are dropped. The network's own dropout layers are turned off.
- The network has dropout layers of its own. A dropout layer that feeds only linear layers, convolutions or recurrent
  layers is moved to their inputs, which is the same function (but see below), and becomes a distribution over their
  weights. Other dropout layers, and calls of ``F.dropout`` in the network's own code, stay where they are and are drawn
  as random numbers (:mod:`~knowable.inference.dropout.shared_noise`).
- It has none: inputs of every linear layer, convolution, attention and recurrent layer are dropped, except those of the
  network's first layer.

A weight that acts at several positions of an example (pixels, tokens, steps in time) has one mask for all of them:
spatial dropout for convolutions, one mask for a sequence in recurrent networks. An ``nn.Dropout`` before such a layer,
which would drop each position independently, is replaced by one mask for all positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.network import Network
from knowable.core.network.params import select_names
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.dropout.layer_trace import DropoutOutput, DropoutSite, LayerCall, LayerTrace, trace_layers
from knowable.inference.dropout.shared_noise import random_axes, turn_on_noise

DEFAULT_RATE = 0.1
_FEWEST_CHANNELS = 4  # an image with fewer keeps them
_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class Placement:
    """Where dropout acts in one network."""

    sites: tuple[DropoutSite, ...]  # inputs of layers that are dropped: a distribution over weights
    own_rates: dict[str, float]  # of the network's own dropout layers, by path (0: turned off)
    noisy: bool = False  # whether something else in the network draws random numbers

    def network(self, model: Model, *, noise: bool = False) -> Network:
        """The model's network with its own dropout layers at their rates.

        With ``noise``, other random operations of the network are random in evaluation mode too.
        """
        network = model.network.copy()
        for training in (True, False):
            modules = network.modules(training=training)
            for path, rate in self.own_rates.items():
                _set_rate(modules[path], rate)
        if noise and self.noisy:
            turn_on_noise(network)
        return network

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"sites": [site.to_json() for site in self.sites], "own_rates": self.own_rates, "noisy": self.noisy}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Placement:
        """The inverse of :meth:`to_json`."""
        sites = tuple(DropoutSite.from_json(site) for site in saved["sites"])
        return cls(sites, dict(saved["own_rates"]), saved["noisy"])


def place_dropout(
    model: Model, x: Tensor, *, rate: float | None, where: str | Iterable[str] | None, learned: bool = False
) -> Placement:
    """Decide where dropout acts in a network, on rows like ``x``; only random weights are dropped.

    ``rate=None`` leaves the network's own layers at theirs, and is 0.1 elsewhere; calls of ``F.dropout`` keep their
    rate. If rates are ``learned`` there must be a site.
    """
    trace = trace_layers(model, x)
    own = _own_rates(model.network)
    if where is not None:
        names = _named_weights(where, trace, model)
    else:  # all but those that take the network's input, unless there are no others
        first = trace.calls[0].first if trace.calls else ()
        names = [name for name in _weights(trace, model) if name not in first] or _weights(trace, model)
        sites, moved = _own_sites(trace, model, {path: rate or p for path, p in own.items()})
        kept = {path: 0.0 if path in moved else rate or p for path, p in own.items()}
        placement = _with_noise(model, x, sites, kept)
        if placement.sites or (placement.noisy and not learned):
            return placement
    sites = _sites_at(_some(names), trace, rate or DEFAULT_RATE)
    return _with_noise(model, x, sites, dict.fromkeys(own, 0.0))


def place_noise(model: Model, x: Tensor, *, where: str | Iterable[str] | None) -> Placement:
    """Decide where learned noise acts: on the inputs of all layers, the network's own inputs among them.

    The network's own dropout layers are off. The channels of images stay if there are fewer than four of them, unless
    ``where`` names the first convolution.
    """
    trace = trace_layers(model, x)
    names = _weights(trace, model) if where is None else _named_weights(where, trace, model)
    if where is None:
        kept = _channels_of_images(trace)
        names = [name for name in names if name not in kept] or names
    return Placement(tuple(_sites_at(_some(names), trace, 0.0)), dict.fromkeys(_own_rates(model.network), 0.0))


def _with_noise(model: Model, x: Tensor, sites: list[DropoutSite], own_rates: dict[str, float]) -> Placement:
    """A placement that knows whether the network draws random numbers besides those of the sites."""
    noisy = Placement(tuple(sites), own_rates, noisy=True)
    params = model.network_params(model.params())
    found = random_axes(noisy.network(model, noise=True), params, x, model.buffers())
    return replace(noisy, noisy=bool(found))


# --- sites before layers ---------------------------------------------------------------------------------------------


def _weights(trace: LayerTrace, model: Model) -> list[str]:
    """Random weights whose inputs can be dropped, in order of use."""
    random = set(model.random_names)
    names = [name for call in trace.calls for name in call.axes if name in random]
    return list(dict.fromkeys(names))


def _named_weights(where: str | Iterable[str], trace: LayerTrace, model: Model) -> list[str]:
    names = _weights(trace, model)
    chosen = select_names("where", where, names, model.net)
    return [name for name in names if name in chosen]


def _some(names: list[str]) -> list[str]:
    if not names:
        raise Unsupported(
            "There is nothing to drop: no random parameter is the weight of a linear, convolution, attention or "
            "recurrent layer. Put nn.Dropout into the network, or use a method for any weights, such as MeanFieldVI."
        )
    return names


def _channels_of_images(trace: LayerTrace) -> tuple[str, ...]:
    """The first convolution, if it is the first layer and takes few channels."""
    first = trace.calls[0] if trace.calls else None
    few = first is not None and first.kind == "convolution" and min(first.inputs.values()) < _FEWEST_CHANNELS
    return first.first if first is not None and few else ()


def _sites_at(names: list[str], trace: LayerTrace, rate: float) -> list[DropoutSite]:
    """A site of its own for every weight."""
    found = []
    for name in names:
        call = trace.calls_of(name)[0]
        found.append(DropoutSite((call.axes[name],), call.inputs[name], rate, by_example=trace.by_example(name)))
    return found


# --- the network's own dropout layers --------------------------------------------------------------------------------


def _own_rates(network: Network) -> dict[str, float]:
    """Rates of the dropout layers that are on in training, by path."""
    modules = network.modules(training=True)
    rates = {path: _rate(module) for path, module in modules.items() if module.training}
    for path, rate in rates.items():
        if rate >= 1.0:
            raise InvalidArgument(
                f"net has a dropout layer {path!r} with rate {rate:g}, which drops everything. Use a rate below 1."
            )
    return {path: rate for path, rate in rates.items() if rate > 0.0}


def _own_sites(trace: LayerTrace, model: Model, rates: dict[str, float]) -> tuple[list[DropoutSite], set[str]]:
    """Sites for the network's own dropout layers, and which of the layers are replaced by them."""
    outputs = {path: [each for each in trace.outputs if each.path == path] for path in rates}
    sites: list[DropoutSite] = []
    moved = set()
    for path, rate in rates.items():
        if isinstance(model.network.modules(training=True)[path], nn.RNNBase):  # dropout between its layers
            moved.add(path)
            names = [name for name in _weights(trace, model) if name.rpartition(".")[0] == path]
            sites += _sites_at([name for name in names if "weight_ih_l" in name and "_l0" not in name], trace, rate)
        elif outputs[path] and all(_can_move(output, trace) for output in outputs[path]):
            moved.add(path)
            sites += [site for output in outputs[path] for site in _site_of(output, trace, model, rate)]
    return sites, moved


def _can_move(output: DropoutOutput, trace: LayerTrace) -> bool:
    """Whether a mask on this output is the same as a mask on the inputs of the layers that take it."""
    calls = [call for call in trace.calls if call.source == output]
    return (
        bool(calls)
        and output not in trace.escaped
        and all(len(trace.calls_of(name)) == 1 and name not in trace.other_uses for c in calls for name in c.first)
        and len({_units(call, output) for call in calls}) == 1
        and None not in {_units(call, output) for call in calls}
    )


def _units(call: LayerCall, output: DropoutOutput) -> tuple[int, int] | None:
    """Number of inputs of a layer that are dropped independently, and number of neighbours dropped together."""
    inputs = call.inputs[call.first[0]]
    if output.channels is None:
        return inputs, 1
    return (output.channels, inputs // output.channels) if inputs % output.channels == 0 else None


def _site_of(output: DropoutOutput, trace: LayerTrace, model: Model, rate: float) -> list[DropoutSite]:
    """The site of an output: one mask for all layers that take it. Empty if none of their weights is random."""
    calls = [call for call in trace.calls if call.source == output]
    random = set(model.random_names)
    places = [call.axes[name] for call in calls for name in call.first if name in random]
    units = _units(calls[0], output)
    if not places or units is None:
        return []
    by_example = all(trace.by_example(place.name) for place in places)
    return [DropoutSite(tuple(places), units[0], rate, units[1], by_example)]


def _rate(module: nn.Module) -> float:
    """The rate of a module's dropout; 0 if it has none."""
    if isinstance(module, _LAYERS):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention):
        return float(module.dropout)
    if isinstance(module, nn.RNNBase):
        return float(module.dropout) if module.num_layers > 1 else 0.0
    return 0.0


def _set_rate(module: nn.Module, rate: float) -> None:
    if isinstance(module, _LAYERS):
        module.p = rate
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        module.dropout = rate
