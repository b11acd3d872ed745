"""Why a network does not take its inputs, in a sentence: the layer, what it expects, what it got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from knowable.core.network.inputs import tensors_of

_TRIED = 3  # rows
_MOST_COLUMNS = 64  # whose smallest and largest values are tried


def rows_to_try(module: nn.Module, x: Tensor) -> Tensor:
    """Positions of the rows on which the network is tried: the first, and where it looks up embeddings the extremes.

    An index that is out of range is then among the smallest or the largest of its column.
    """
    first = torch.arange(min(_TRIED, len(x)), device=x.device)
    if x.shape == () or not any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in module.modules()):
        return first
    given = [each for each in tensors_of(x) if each.dtype != torch.bool]
    columns = [each.detach().reshape(len(x), -1)[:, :_MOST_COLUMNS] for each in given]
    extremes = [place for each in columns for place in (each.argmax(0), each.argmin(0))]
    return torch.cat([first, *extremes]).unique()


def why_refused(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor, rows: Tensor) -> str:
    """The first layer that does not fit what it is given, or what would make ``x`` fit; empty where it is not known.

    Args:
        module: The module that ``run`` runs.
        run: The network as a function of its inputs.
        x: All inputs.
        rows: Positions of those it was tried on.
    """
    if isinstance(x, Tensor) and x.dim() > 0 and not _takes(run, x[:_TRIED]):
        shape = ", ".join(map(str, x.shape))
        if _takes(run, x.unsqueeze(0), rows=1):
            return f"It looks like one row. Write x[None], of shape (1, {shape}); or X[:1] and not X[0]."
        if _takes(run, x[:_TRIED].unsqueeze(1), rows=min(_TRIED, len(x))):
            lacking = "a single column" if x.dim() == 1 else "rows that lack their first dimension"
            return f"It looks like {lacking}. Write x.unsqueeze(1), of shape {(len(x), 1, *x.shape[1:])}."
        if _takes(run, x[None, None], rows=1):
            return f"It looks like one row without its first dimension. Write x[None, None], of shape (1, 1, {shape})."
    if len(x) > len(rows) and _takes(run, x, rows=len(x)):
        return (
            f"It takes all {len(x)} rows together, but not {len(rows)} of them: rows are computed by themselves and in "
            f"batches. The nodes of one graph belong into one row: x of shape (1, nodes, ...), labels of shape (1, "
            f"nodes), and an output of shape (1, classes, nodes)."
        )
    return _first_complaint(module, run, x, rows)


def _takes(run: Callable[[Tensor], Any], x: Tensor, rows: int | None = None) -> bool:
    """Whether the network runs on ``x``, and its output has as many rows where that is asked."""
    try:
        with torch.no_grad():
            output = run(x)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return rows is None or (isinstance(output, Tensor) and output.shape[:1] == (rows,))


def _first_complaint(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor, rows: Tensor) -> str:
    said: list[str] = []

    def listen(path: str) -> Callable[..., None]:
        def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if not said and args and isinstance(args[0], Tensor):
                said.extend(_complaint(path, layer, args[0], x, rows))

        return before

    hooks = [each.register_forward_pre_hook(listen(path)) for path, each in module.named_modules()]
    try:
        _takes(run, x[rows])
    finally:
        for hook in hooks:
            hook.remove()
    return said[0] if said else ""


def _complaint(path: str, layer: nn.Module, given: Tensor, x: Tensor, rows: Tensor) -> list[str]:
    name = f"{type(layer).__name__} {path!r}" if path else f"the {type(layer).__name__}"
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return _unknown_index(name, layer.num_embeddings, given, x, rows)
    wanted, got = _features(layer, given)
    if wanted is None or wanted == got:
        return []
    what = "channel" if isinstance(layer, _ConvNd) else "feature"
    return [f"{name} expects {wanted} {what}{'s' if wanted != 1 else ''}, got {got}."]


def _features(layer: nn.Module, given: Tensor) -> tuple[int | None, int]:
    """How many features a layer expects, and how many it is given."""
    if isinstance(layer, nn.Linear) and given.dim() > 0:
        return layer.in_features, given.shape[-1]
    if isinstance(layer, nn.RNNBase) and given.dim() > 0:
        return layer.input_size, given.shape[-1]
    if isinstance(layer, _BatchNorm) and given.dim() > 1:
        return layer.num_features, given.shape[1]
    if isinstance(layer, _ConvNd) and given.dim() == len(layer.kernel_size) + 2:
        return layer.in_channels, given.shape[1]
    return None, 0


def _unknown_index(name: str, count: int, given: Tensor, x: Tensor, rows: Tensor) -> list[str]:
    if given.is_floating_point():
        return [f"{name} takes whole numbers, got {given.dtype}. Call .long() on them in the network's forward."]
    bad = ((given < 0) | (given >= count)).nonzero()
    if not len(bad):
        return []
    place = tuple(bad[0].tolist())
    value = int(given[place])
    same = given.shape[0] == len(rows)
    in_row = (x[rows[place[0]]] == value).nonzero().flatten().tolist() if same and len(x.shape) == 2 else []
    row = f" in row {rows[place[0]].item()}" if same else ""
    column = f", column {in_row[0]}" if len(in_row) == 1 else ""
    where = f"{row}{column} (counting from 0)" if row else ""
    return [f"{name} has {count} embeddings, for the indices 0 to {count - 1}, and x asks for {value}{where}."]
