"""A network with zeros among its weights becomes a smaller one with the same outputs.

The network is traced, its units are numbered (:mod:`knowable.decisions.compress.wiring`), constants are followed
forward and needs backward, and what neither varies nor is needed is cut out of all layers it runs through. Nothing is
approximated: what is not understood stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.decisions.compress.graph import (
    Constants,
    Join,
    Layer,
    Merge,
    Pass,
    Shift,
    is_in_place,
    record_shapes,
    shape_of,
    trace,
)
from knowable.decisions.compress.liveness import Liveness, carry_constants, constant_inputs, find_constants, find_living
from knowable.decisions.compress.surgery import (
    Cut,
    LayerWeights,
    cut_channels,
    cut_layer,
    put_columns,
    resize_layer,
    unread_columns,
)
from knowable.decisions.compress.wiring import Wiring
from knowable.errors import InvalidArgument

# --- What a rewritten network differs in from the original: enough to make it again, but for its numbers -------------


@dataclass(frozen=True)
class Edit:
    """A change of the graph: the node of this name is replaced.

    Attributes:
        node: Its name.
        source: The name of the node it acts on.
        flatten: The dimensions to flatten instead of what it did.
        shift: Which dimension has constants added to it instead, and how many there are. With neither, ``source``
            takes the node's place.
    """

    node: str
    source: str
    flatten: tuple[int, int] | None = None
    shift: tuple[int, int] | None = None

    @property
    def shift_path(self) -> str:
        """Where the module is that adds the constants."""
        return f"shift_{self.node}"


@dataclass
class Plan:
    """How to turn the original network into the smaller one.

    Attributes:
        layers: Outputs, inputs and whether there is a bias, for layers whose shape has changed, by path.
        channels: Number of channels left, for modules that treat each by itself, by path.
        columns: How many inputs are chosen in front of a linear layer, by path.
        edits: Changes of the graph, in order.
    """

    layers: dict[str, tuple[int, int, bool]] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`."""
        edits = [
            Edit(each["node"], each["source"], *(each[kind] and tuple(each[kind]) for kind in ("flatten", "shift")))
            for each in content["edits"]
        ]
        layers = {path: (int(out), int(into), bool(bias)) for path, (out, into, bias) in content["layers"].items()}
        return cls(layers, dict(content["channels"]), dict(content["columns"]), edits)

    def new_name(self, name: str) -> str:
        """What a parameter of the original is called in the smaller network."""
        path, _, last = name.rpartition(".")
        return f"{path}.1.{last}" if path in self.columns else name

    def apply(self, net: nn.Module) -> nn.Module:
        """The smaller network with weights yet to be filled in; ``net`` is changed."""
        module = trace(net.eval()) if self.edits else None
        if self.edits and module is None:
            raise InvalidArgument("net is not the network that was compressed: its forward cannot be followed.")
        if module is not None:
            apply_edits(module, self.edits)
        made = net if module is None else module
        for path, (outputs, inputs, bias) in self.layers.items():
            resize_layer(made.get_submodule(path), outputs, inputs, bias)
        for path, count in self.channels.items():
            cut_channels(made.get_submodule(path), torch.arange(count))
        for path, count in self.columns.items():
            insert_columns(made, path, torch.arange(count))
        return made


def apply_edits(module: fx.GraphModule, edits: list[Edit]) -> None:
    """Change the graph, and forget what it no longer calls.

    Where a node gives way to another, nothing is done in place any more: what was written over the one would be written
    over the other, which may have readers.
    """
    if any(edit.flatten is None for edit in edits):
        _nothing_in_place(module)
    for edit in edits:
        nodes = {node.name: node for node in module.graph.nodes}
        if edit.node not in nodes or edit.source not in nodes:
            raise InvalidArgument(f"net is not the network that was compressed: its graph has no {edit.node!r}.")
        old, new = nodes[edit.node], _replacement(module, nodes[edit.node], nodes[edit.source], edit)
        old.replace_all_uses_with(new)
        module.graph.erase_node(old)
        if new.name != edit.source:
            new.name = edit.node  # later edits may name it
        module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def _replacement(module: fx.GraphModule, old: fx.Node, source: fx.Node, edit: Edit) -> fx.Node:
    with module.graph.inserting_after(old):
        if edit.flatten is not None:
            made = module.graph.call_function(torch.flatten, (source, *edit.flatten))
        elif edit.shift is not None:
            dim, count = edit.shift
            like = next(module.parameters())
            module.add_submodule(edit.shift_path, Shift(torch.zeros(count, dtype=like.dtype, device=like.device), dim))
            made = module.graph.call_module(edit.shift_path, (source,))
        else:
            return source
    made.meta.update(old.meta)
    return made


def _nothing_in_place(module: Any) -> None:
    for each in module.modules():
        if getattr(each, "inplace", False) is True:
            each.inplace = False


def insert_columns(net: nn.Module, path: str, index: Tensor) -> None:
    """Put a choice of inputs in front of the linear layer at ``path``."""
    layer = net.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise InvalidArgument(f"net is not the network that was compressed: {path!r} is a {type(layer).__name__}.")
    if not path:
        raise AssertionError("a network that is one layer has nowhere to put a choice of inputs")
    net.set_submodule(path, put_columns(layer, index.to(layer.weight.device)))


# --- A network with zeros among its weights becomes a smaller one with the same outputs ------------------------------
#
# The network is traced, its units are numbered (:mod:`knowable.decisions.compress.wiring`), constants are followed
# forward and needs backward, and what neither varies nor is needed is cut out of all layers it runs through. Nothing is
# approximated: what is not understood stays as it is.


@dataclass
class Rewritten:
    """A smaller network.

    Attributes:
        net: The network: of the original's class where only layers have changed, else a graph module.
        plan: How it differs from the original.
        notes: What was left as it is, and why.
    """

    net: nn.Module
    plan: Plan = field(default_factory=Plan)
    notes: list[str] = field(default_factory=list)


def rewrite(net: nn.Module, example: Tensor, *, carry: bool = True) -> Rewritten:
    """Take dead units out of a network.

    Args:
        net: The network with its zeros; a copy is rewritten.
        example: A batch of inputs, for shapes.
        carry: Whether constant channels before padded convolutions may be joined into one, with weights that are not
            among the original's (:mod:`knowable.decisions.compress.liveness`).
    """
    own = copy.deepcopy(net).eval()
    module = trace(own)
    if module is None:
        return Rewritten(own, notes=[f"{type(net).__name__} cannot be traced by torch.fx: no unit was removed"])
    record_shapes(module, example)
    plan = Plan(edits=_without_constant_branches(module))
    wiring, weights, constants = _analysed(module)
    living = find_living(wiring, weights, constants)
    living = carry_constants(wiring, weights, constants, living) if carry else living
    flattenings = _flattenings(wiring, living)
    _cut(wiring, living, weights, constants, plan)
    apply_edits(module, flattenings)
    plan.edits += flattenings
    made = module if plan.edits else own
    _choose_columns(made, wiring, plan)
    return Rewritten(made, plan, list(dict.fromkeys(wiring.notes)))


def _analysed(module: fx.GraphModule) -> tuple[Wiring, dict[str, LayerWeights], dict[Node, Constants]]:
    wiring = Wiring.of(module)
    weights = {layer.path: LayerWeights.of(module.get_submodule(layer.path)) for _, layer in wiring.layers()}
    return wiring, weights, find_constants(wiring, weights)


def _without_constant_branches(module: fx.GraphModule) -> list[Edit]:
    """Terms of sums that are the same for every input become constants, or go if they are zero, with what led there."""
    edits: list[Edit] = []
    while True:
        wiring, _, constants = _analysed(module)
        found = (_constant_term(node, wiring, constants) for node in wiring.operations)
        edit, values = next((each for each in found if each is not None), (None, None))
        if edit is None or values is None:
            return edits
        apply_edits(module, [edit])
        edits.append(edit)
        if edit.shift is not None:
            module.get_buffer(f"{edit.shift_path}.shift").copy_(values)


def _constant_term(node: Node, wiring: Wiring, constants: dict[Node, Constants]) -> tuple[Edit, Constants] | None:
    operation = wiring.operations[node]
    if not isinstance(operation, Join) or not operation.adds or wiring.tainted or node not in wiring.wires:
        return None
    if any(user.op != "call_module" and is_in_place(user, wiring.module) for user in node.users):
        return None
    for term, other in (operation.sources, operation.sources[::-1]):
        if bool(constants[term].isfinite().all()) and shape_of(other) == shape_of(node):
            values, dim = constants[term], wiring.wires[node].dim
            return Edit(node.name, other.name, shift=(dim, len(values)) if values.any() else None), values
    return None


def _cut(
    wiring: Wiring,
    living: Liveness,
    weights: dict[str, LayerWeights],
    constants: dict[Node, Constants],
    plan: Plan,
) -> None:
    """Make every layer smaller, in place."""

    def cut_of(units: Tensor) -> Cut:
        return Cut(living.kept[units], living.needed[units])

    for node, operation in wiring.operations.items():
        if not isinstance(operation, Layer | Pass) or operation.path is None or node not in wiring.wires:
            continue
        path, outputs = operation.path, cut_of(wiring.wires[node].units)
        module: Any = wiring.module.get_submodule(path)
        if isinstance(operation, Pass):
            if not outputs.kept.all():
                cut_channels(module, outputs.kept)
                plan.channels[path] = int(outputs.kept.sum())
            continue
        count = weights[path].reads.shape[1]
        inputs = cut_of(wiring.inputs[node].units) if node in wiring.inputs else Cut.nothing(count)
        cut_layer(module, outputs, inputs, constant_inputs(node, operation, wiring, constants, count))
        plan.layers[path] = (int(outputs.kept.sum()), int(inputs.kept.sum()), module.bias is not None)


def _flattenings(wiring: Wiring, living: Liveness) -> list[Edit]:
    """Views whose written sizes no longer hold become flattenings, which have no sizes."""
    found = []
    for node, operation in wiring.operations.items():
        if isinstance(operation, Merge) and operation.sizes is not None:
            sizes, wires = operation.sizes, wiring.wires.get(node)
            asked = 0 in sizes[1:] or len(sizes) != len(shape_of(node) or ())
            lost = (
                wires is not None and not living.kept[wires.units].all() and sizes[wires.dim : wires.dim + 1] != (-1,)
            )
            if asked or lost:
                found.append(Edit(node.name, operation.source.name, (operation.start, operation.end)))
    return found


def _choose_columns(net: nn.Module, wiring: Wiring, plan: Plan) -> None:
    for _, layer in wiring.layers():
        module = wiring.module.get_submodule(layer.path)
        index = unread_columns(module) if isinstance(module, nn.Linear) and layer.path else None
        if index is not None:
            insert_columns(net, layer.path, index)
            plan.columns[layer.path] = len(index)


def largest_difference(left: Tensor, right: Tensor) -> float:
    """The largest difference between two outputs, relative to the largest output or 1."""
    return ((left - right).abs().max() / left.abs().max().clamp_min(1.0)).item()


@torch.no_grad()
def agrees(original: nn.Module, rewritten: nn.Module, example: Tensor) -> float:
    """How far two networks differ on ``example``; see :func:`largest_difference`."""
    return largest_difference(original(example), rewritten(example))
