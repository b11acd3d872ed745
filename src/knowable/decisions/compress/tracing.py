"""A network as a graph of operations, by torch.fx, with the shape of everything that flows through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from knowable.core.gates import Gates
from knowable.decisions.compress.added_layers import Columns, Shift

_ROWS = 2  # of the example, to learn shapes


def trace(net: nn.Module) -> fx.GraphModule | None:
    """The graph of ``net`` over its own modules (not copies), or None if its forward cannot be followed.

    Layers of ``torch.nn`` are nodes of the graph. A part of the network whose forward cannot be followed (it branches
    on values, say) is one node too; only where that part is the whole network there is no graph.
    """
    tracer = _LayerTracer()
    try:
        graph = tracer.trace(net)
    except Exception:  # what a user's forward raises when it is given a proxy may be anything
        return None
    module = fx.GraphModule(net, graph, class_name=type(net).__name__)
    graph.eliminate_dead_code()  # leftovers of parts that could not be followed
    return module


def record_shapes(module: fx.GraphModule, example: Tensor) -> None:
    """Put the shape of every tensor into ``node.meta["shape"]`` (None for what is not a tensor)."""
    with torch.no_grad():
        _Shapes(module).run(example[:_ROWS])


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The shape found by :func:`record_shapes`."""
    return node.meta.get("shape")


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Gates | Columns | Shift) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        n.meta["shape"] = tuple(found.shape) if isinstance(found, Tensor) else None
        return found
