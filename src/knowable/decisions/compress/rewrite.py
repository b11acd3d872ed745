"""A network with zeros among its weights becomes a smaller one with the same outputs.

The network is traced and its units are numbered (:mod:`knowable.decisions.compress.dependencies`); units that are
constant, or that the output does not depend on (:mod:`knowable.decisions.compress.liveness`), are cut out of all layers
they run through. Nothing is approximated: layers of unknown kinds stay as they are.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.decisions.compress.dependencies import UnitDependencies
from knowable.decisions.compress.graph import (
    BinaryOp,
    ChannelShift,
    Constants,
    FlattenOp,
    LayerOp,
    UnitwiseOp,
    is_in_place,
    record_shapes,
    shape_of,
    trace,
)
from knowable.decisions.compress.liveness import Liveness, NetworkAnalysis, find_living, merge_constant_channels
from knowable.decisions.compress.surgery import (
    Cut,
    cut_channels,
    cut_layer,
    put_columns,
    resize_layer,
    unread_columns,
)
from knowable.errors import InvalidArgument

_MOST_UNITS = 2**20  # of a layer in a saved plan


@dataclass
class Rewritten:
    """A smaller network (a graph module where more than layers have changed), its plan, and what was left and why."""

    net: nn.Module
    plan: RewritePlan = field(default_factory=lambda: RewritePlan())
    notes: list[str] = field(default_factory=list)


def rewrite(net: nn.Module, example: Tensor, *, merge_constants: bool = True) -> Rewritten:
    """Remove dead units from a copy of a network with zeros; ``example`` is a batch of inputs, for shapes.

    With ``merge_constants``, constant channels before padded convolutions may be merged into one, with weights that are
    not among the original's (:func:`~knowable.decisions.compress.liveness.merge_constant_channels`).
    """
    own = copy.deepcopy(net).eval()
    module = trace(own)
    if module is None:
        return Rewritten(own, notes=[f"{type(net).__name__} cannot be traced by torch.fx: no unit was removed"])
    record_shapes(module, example)
    plan = RewritePlan(edits=_without_constant_branches(module))
    analysis = NetworkAnalysis.of(module)
    living = find_living(analysis)
    living = merge_constant_channels(analysis, living) if merge_constants else living
    flattenings = _flattenings(analysis.dependencies, living)
    _cut(analysis, living, plan)
    apply_edits(module, flattenings)
    plan.edits += flattenings
    made = module if plan.edits else own
    _select_columns(made, analysis.dependencies, plan)
    return Rewritten(made, plan, list(dict.fromkeys(analysis.dependencies.notes)))


def _without_constant_branches(module: fx.GraphModule) -> list[GraphEdit]:
    """Terms of sums that are the same for every input become constants (or vanish if zero), with what computes them."""
    edits: list[GraphEdit] = []
    while True:
        analysis = NetworkAnalysis.of(module)
        found = (_constant_term(node, analysis) for node in analysis.dependencies.operations)
        edit, values = next((each for each in found if each is not None), (None, None))
        if edit is None or values is None:
            return edits
        apply_edits(module, [edit])
        edits.append(edit)
        if edit.shift is not None:
            module.get_buffer(f"{edit.shift_path}.shift").copy_(values)


def _constant_term(node: Node, analysis: NetworkAnalysis) -> tuple[GraphEdit, Constants] | None:
    dependencies = analysis.dependencies
    operation = dependencies.operations[node]
    if not isinstance(operation, BinaryOp) or not operation.adds:
        return None
    if dependencies.overwritten or node not in dependencies.units_of:
        return None
    if any(user.op != "call_module" and is_in_place(user, dependencies.module) for user in node.users):
        return None
    for term, other in (operation.sources, operation.sources[::-1]):
        values = analysis.constants[term]
        if bool(values.isfinite().all()) and shape_of(other) == shape_of(node):
            shift = (dependencies.units_of[node].dim, len(values)) if values.any() else None
            return GraphEdit(node.name, other.name, shift=shift), values
    return None


def _cut(analysis: NetworkAnalysis, living: Liveness, plan: RewritePlan) -> None:
    """Make every layer smaller, in place."""
    dependencies = analysis.dependencies
    for node, operation in dependencies.operations.items():
        if not isinstance(operation, LayerOp | UnitwiseOp) or operation.path is None:
            continue
        if node not in dependencies.units_of:
            continue
        path, outputs = operation.path, _cut_of(dependencies.units_of[node].units, living)
        module: Any = dependencies.module.get_submodule(path)
        if isinstance(operation, LayerOp):
            constants = analysis.constant_inputs(node, operation)
            known = node in dependencies.inputs
            every = torch.ones(len(constants), dtype=torch.bool)
            inputs = _cut_of(dependencies.inputs[node].units, living) if known else Cut(every, every)
            cut_layer(module, outputs, inputs, constants)
            plan.layers[path] = (int(outputs.kept.sum()), int(inputs.kept.sum()), module.bias is not None)
        elif not outputs.kept.all():
            cut_channels(module, outputs.kept)
            plan.channels[path] = int(outputs.kept.sum())


def _cut_of(units: Tensor, living: Liveness) -> Cut:
    return Cut(living.kept[units], living.needed[units])


def _flattenings(dependencies: UnitDependencies, living: Liveness) -> list[GraphEdit]:
    """Replace views whose written sizes no longer hold by flattenings, which have no sizes."""
    found = []
    for node, operation in dependencies.operations.items():
        if not isinstance(operation, FlattenOp) or operation.sizes is None:
            continue
        sizes, units = operation.sizes, dependencies.units_of.get(node)
        computed = 0 in sizes[1:] or len(sizes) != len(shape_of(node) or ())
        fewer = units is not None and not living.kept[units.units].all() and sizes[units.dim : units.dim + 1] != (-1,)
        if computed or fewer:
            found.append(GraphEdit(node.name, operation.source.name, (operation.start, operation.end)))
    return found


def _select_columns(net: nn.Module, dependencies: UnitDependencies, plan: RewritePlan) -> None:
    for _, layer in dependencies.layers():
        module = dependencies.module.get_submodule(layer.path)
        index = unread_columns(module) if isinstance(module, nn.Linear) and layer.path else None
        if index is not None:
            insert_columns(net, layer.path, index)
            plan.columns[layer.path] = len(index)


@torch.no_grad()
def largest_difference(original: nn.Module, rewritten: nn.Module, example: Tensor) -> float:
    """The largest difference of two networks' outputs on ``example``, relative to the largest output or 1."""
    left, right = original(example), rewritten(example)
    return ((left - right).abs().max() / left.abs().max().clamp_min(1.0)).item()


# --- the plan: how the smaller network differs from the original, but for its numbers --------------------------------


@dataclass(frozen=True)
class GraphEdit:
    """A change of the graph: the node named ``node`` is replaced by ``source``, flattened or with constants added."""

    node: str
    source: str
    flatten: tuple[int, int] | None = None  # first and last dimension
    shift: tuple[int, int] | None = None  # dimension and number of the constants

    @property
    def shift_path(self) -> str:
        """Path of the module that adds the constants."""
        return f"shift_{self.node}"


@dataclass
class RewritePlan:
    """How to turn the original network into the smaller one: changed layers by path, edits of the graph in order."""

    layers: dict[str, tuple[int, int, bool]] = field(default_factory=dict)  # outputs, inputs, whether it has a bias
    channels: dict[str, int] = field(default_factory=dict)  # channels left, of modules that treat each by itself
    columns: dict[str, int] = field(default_factory=dict)  # inputs selected in front of a linear layer
    edits: list[GraphEdit] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> RewritePlan:
        """The inverse of :meth:`to_json`."""
        edits = [
            GraphEdit(
                each["node"], each["source"], *(each[kind] and tuple(each[kind]) for kind in ("flatten", "shift"))
            )
            for each in content["edits"]
        ]
        layers = {path: (int(out), int(into), bool(bias)) for path, (out, into, bias) in content["layers"].items()}
        shifts = [each.shift[1] for each in edits if each.shift]
        counts = [*content["channels"].values(), *content["columns"].values(), *shifts]
        if any(type(each) is not int or not 0 <= each <= _MOST_UNITS for each in counts):
            raise ValueError("a count in the plan is none, or too large")
        return cls(layers, dict(content["channels"]), dict(content["columns"]), edits)

    def new_name(self, name: str) -> str:
        """The name in the smaller network of a parameter of the original."""
        path, _, last = name.rpartition(".")
        return f"{path}.1.{last}" if path in self.columns else name

    def apply(self, net: nn.Module) -> nn.Module:
        """The smaller network with weights yet to be filled in; ``net`` is changed."""
        module = trace(net.eval()) if self.edits else None
        if self.edits and module is None:
            raise InvalidArgument("net is not the network that was compressed: torch.fx cannot trace its forward.")
        if module is not None:
            apply_edits(module, self.edits)
        made = net if module is None else module
        for path, (outputs, inputs, bias) in self.layers.items():
            if not 0 <= outputs * inputs <= made.get_submodule(path).get_parameter("weight").numel():
                raise ValueError(f"layer {path!r} would become larger")
            resize_layer(made.get_submodule(path), outputs, inputs, bias)
        for path, count in self.channels.items():
            cut_channels(made.get_submodule(path), torch.arange(count))
        for path, count in self.columns.items():
            insert_columns(made, path, torch.arange(count))
        return made


def apply_edits(module: fx.GraphModule, edits: list[GraphEdit]) -> None:
    """Change the graph, and delete modules that it no longer calls.

    Where a node is replaced by its source, all in-place modules are made out-of-place: the source may have other
    readers.
    """
    if any(edit.flatten is None for edit in edits):
        for each in module.modules():
            if getattr(each, "inplace", False) is True:
                each.inplace = False  # type: ignore[assignment]
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


def _replacement(module: fx.GraphModule, old: fx.Node, source: fx.Node, edit: GraphEdit) -> fx.Node:
    with module.graph.inserting_after(old):
        if edit.flatten is not None:
            made = module.graph.call_function(torch.flatten, (source, *edit.flatten))
        elif edit.shift is not None:
            dim, count = edit.shift
            module.add_submodule(edit.shift_path, ChannelShift(next(module.parameters()).new_zeros(count), dim))
            made = module.graph.call_module(edit.shift_path, (source,))
        else:
            return source
    made.meta.update(old.meta)
    return made


def insert_columns(net: nn.Module, path: str, index: Tensor) -> None:
    """Select inputs in front of the linear layer at ``path``."""
    layer = net.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        raise InvalidArgument(f"net is not the network that was compressed: {path!r} is a {type(layer).__name__}.")
    assert path, "a network of one layer has no parent module to hold the selection"
    net.set_submodule(path, put_columns(layer, index.to(layer.weight.device)))
