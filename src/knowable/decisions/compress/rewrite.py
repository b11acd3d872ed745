"""A network with zeros among its weights becomes a smaller one with the same outputs.

The network is traced, its units are numbered (:mod:`knowable.decisions.compress.wiring`), constants are followed
forward and needs backward, and what neither varies nor is needed is cut out of all layers it runs through. Nothing is
approximated: what is not understood stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.decisions.compress.carriers import carry_constants
from knowable.decisions.compress.constants import constant_inputs, find_constants
from knowable.decisions.compress.layer_weights import LayerWeights
from knowable.decisions.compress.liveness import Liveness, find_living
from knowable.decisions.compress.operations import Constants, Join, Layer, Merge, Pass
from knowable.decisions.compress.plan import Edit, Plan, apply_edits, insert_columns
from knowable.decisions.compress.sizes import is_in_place
from knowable.decisions.compress.surgery import Cut, cut_channels, cut_layer, unread_columns
from knowable.decisions.compress.tracing import record_shapes, shape_of, trace
from knowable.decisions.compress.wiring import Wiring


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
            among the original's (:mod:`knowable.decisions.compress.carriers`).
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
