"""What a rewritten network differs in from the original: enough to make it again, but for its numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from knowable.decisions.compress.added_layers import Shift
from knowable.decisions.compress.surgery import cut_channels, put_columns, resize_layer
from knowable.decisions.compress.tracing import trace
from knowable.errors import InvalidArgument


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
