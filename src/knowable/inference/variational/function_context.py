"""Where functions are compared: the pool of context points from which every step takes a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knowable.core.checks import check_choice
from knowable.core.data import Data, as_input
from knowable.core.model import Model
from knowable.errors import InvalidArgument, InvalidData, InvalidType, Unsupported

CONTEXTS = ("auto", "box", "data")
POOL = 1024
"""Most points of a pool that is drawn; a tensor of the user's is taken whole."""
_BOX_INPUTS = 16  # up to so many inputs "auto" is a box

DrawPoints = Callable[[int, torch.Generator], Tensor]
"""Draws so many context points: ``(count, generator) -> x``."""


def check_context(context: Any) -> None:
    """Refuse what is neither a name, nor points, nor a function that draws them."""
    if isinstance(context, str):
        check_choice("context", context, CONTEXTS)
    elif isinstance(context, Tensor):
        if context.dim() == 0 or len(context) == 0:
            raise InvalidArgument(f"context must have one row for each point, got shape {tuple(context.shape)}.")
    elif not callable(context) or isinstance(context, type):
        raise InvalidType(
            f"context must be 'auto', 'box', 'data', a tensor of inputs or a function (count, generator) -> inputs; "
            f"got {context!r:.60}."
        )


def context_pool(
    context: str | Tensor | DrawPoints, data: Data, model: Model, *, margin: float, generator: torch.Generator
) -> Tensor:
    """The points at which functions are compared, ``(P, ...)``.

    Args:
        context: The user's choice, see :class:`~knowable.inference.variational.function_space.FunctionSpaceVI`.
        data: The training data.
        model: The model, which must take the points as inputs.
        margin: How far a box reaches beyond the data, as a share of its width.
        generator: Fixes what is drawn; on the CPU.
    """
    if isinstance(context, str):
        points = _points_by_name(context, data, margin, generator)
    else:
        points = context if isinstance(context, Tensor) else _drawn(context, generator)
        points = as_input(points, model, name="context")
    model.network.probe(points, model.network_params(model.params()), model.buffers())
    return points


def _points_by_name(context: str, data: Data, margin: float, generator: torch.Generator) -> Tensor:
    first = next(iter(data))[0]
    if context == "auto":
        flat = first.is_floating_point() and first.dim() == 2 and first.shape[1] <= _BOX_INPUTS
        context = "box" if flat else "data"
    if context == "data":
        return some_rows(data, POOL, generator)
    if not first.is_floating_point():
        raise Unsupported("context='box' needs inputs that are numbers; these are whole ones. Use context='data'.")
    low, high = box(data)
    width = high - low
    uniform = torch.rand((POOL, *low.shape), generator=generator, dtype=first.dtype).to(first.device)
    return low - margin * width + (1 + 2 * margin) * width * uniform


def box(data: Data) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of every input."""
    ends = [(batch[0].amin(0), batch[0].amax(0)) for batch in data]
    return torch.stack([low for low, _ in ends]).amin(0), torch.stack([high for _, high in ends]).amax(0)


def some_rows(data: Data, count: int, generator: torch.Generator) -> Tensor:
    """Inputs of ``count`` rows chosen at random without replacement (all, if there are fewer), in one pass."""
    kept, keys = None, torch.zeros(0)
    for batch in data:  # those with the largest random keys of all rows seen so far
        x = batch[0]
        keys = torch.cat([keys, torch.rand(len(x), generator=generator)])
        kept = x if kept is None else torch.cat([kept, x])
        if len(keys) > count:
            keys, best = keys.topk(count)
            kept = kept[best.to(kept.device)]
    assert kept is not None  # data has rows
    return kept


def _drawn(context: DrawPoints, generator: torch.Generator) -> Any:
    points = context(POOL, generator)
    if not isinstance(points, Tensor) or points.dim() == 0 or len(points) == 0:
        raise InvalidData(f"context must return a tensor with a row for each point, got {points!r:.60}.")
    return points
