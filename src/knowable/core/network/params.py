"""Parameters as a dict, as one flat buffer with views, and as a stack of draws."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from knowable.errors import InvalidArgument, InvalidType


@dataclass(frozen=True)
class Layout:
    """The order, names and shapes that turn a dict of tensors into one flat vector and back.

    >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(2)})
    >>> layout.size
    8
    >>> layout.views(torch.arange(8.0))["b"]
    tensor([6., 7.])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, params: Params) -> Layout:
        """The layout of ``params`` in its own order."""
        return cls(tuple(params), tuple(value.shape for value in params.values()))

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Total number of elements."""
        return sum(self.sizes)

    def flatten(self, params: Params) -> Tensor:
        """Concatenate to ``(..., size)``; leading dimensions beyond each parameter's shape are kept."""
        if not self.names:
            return torch.zeros(0)
        return torch.cat(
            [params[name].flatten(params[name].dim() - len(shape)) if shape else params[name].unsqueeze(-1)
             for name, shape in zip(self.names, self.shapes, strict=True)],
            dim=-1,
        )  # fmt: skip

    def places_of(self, names: Iterable[str]) -> Tensor:
        """Where the elements of some parameters are in the flat vector, in the order of ``names``."""
        spans = dict(zip(self.names, torch.arange(self.size).split(self.sizes), strict=True))
        return torch.cat([spans[name] for name in names])

    def views(self, flat: Tensor) -> Params:
        """Views of ``flat`` ``(..., size)`` as a dict; leading dimensions are kept. No copy."""
        pieces = flat.split(self.sizes, dim=-1)
        lead = flat.shape[:-1]
        return {
            name: piece.view(lead + shape) for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }


def stack_params(draws: Sequence[Params]) -> Params:
    """Stack K dicts into one with a leading dimension K."""
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def expand_params(params: Params, n: int) -> Params:
    """The same values n times along a new leading dimension, without copying."""
    return {name: value.expand(n, *value.shape) for name, value in params.items()}


def index_params(stack: Params, index: int | slice | Tensor) -> Params:
    """Pick draws from a stack."""
    return {name: value[index] for name, value in stack.items()}


def number_of_draws(stack: Params) -> int:
    """The leading dimension of a stack."""
    return next(iter(stack.values())).shape[0]


def pack(
    params: Params, names: tuple[str, ...], shapes: tuple[torch.Size, ...], out: int, *, transposed: bool = False
) -> Tensor:
    """Parameters as matrices ``(..., out, in)``: the first one reshaped, a second one (the bias) as the last column.

    A first one that is ``transposed`` is held as ``(in, out)``.
    """
    first = params[names[0]]
    lead = first.shape[: first.dim() - len(shapes[0])]
    matrix = first.mT if transposed else first.reshape(*lead, out, shapes[0].numel() // out)
    return matrix if len(names) == 1 else torch.cat([matrix, params[names[1]].unsqueeze(-1)], dim=-1)


def unpack(
    matrix: Tensor, names: tuple[str, ...], shapes: tuple[torch.Size, ...], *, transposed: bool = False
) -> Params:
    """The inverse of :func:`pack`."""
    parts = (matrix,) if len(names) == 1 else (matrix[..., :-1], matrix[..., -1])
    parts = (parts[0].mT if transposed else parts[0], *parts[1:])
    lead = matrix.shape[:-2]
    return {name: part.reshape((*lead, *shape)) for name, part, shape in zip(names, parts, shapes, strict=True)}


def joined_params(parts: Iterable[Params]) -> Params:
    """One dict of the parameters of several disjoint ones."""
    return {name: value for part in parts for name, value in part.items()}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under names that begin with ``prefix``."""
    return {prefix + name: value for name, value in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def select_names(argument: str, choice: str | Iterable[str], names: Iterable[str], net: nn.Module) -> set[str]:
    """Resolve names, globs or ``"last_layer"`` over parameter names; ``argument`` is what error messages call it."""
    names = list(names)
    patterns = [choice] if isinstance(choice, str) else list(choice) if isinstance(choice, Iterable) else [choice]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidType(f"{argument} must be a name, a glob, 'last_layer' or a list of these; got {choice!r}.")
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern == "last_layer":
            chosen |= last_layer_names(net, names)
            continue
        found = fnmatch.filter(names, pattern)
        if not found and pattern != "*":
            raise InvalidArgument(
                f"{argument}={pattern!r} matches no parameter. The parameters are: {', '.join(names[:12])}"
                f"{', ...' if len(names) > 12 else ''}."
            )
        chosen |= set(found)
    return chosen


def last_layer_names(net: nn.Module, names: Iterable[str]) -> set[str]:
    """Parameters of the last module (in order of registration) that has any of its own, and the likelihood's."""
    own = [list(module.parameters(recurse=False)) for module in net.modules()]
    own = [params for params in own if params]
    if not own:
        raise InvalidArgument("random='last_layer' needs a network with at least one layer that has parameters.")
    wanted = {id(param) for param in own[-1]}  # by identity: a tied weight goes by the name of its first use
    chosen = {name for name, param in net.named_parameters() if id(param) in wanted}
    return {name for name in names if name in chosen or name.startswith("likelihood.")}


Params = dict[str, Tensor]
"""Parameters by name. A stack of K draws is the same dict with a leading dimension of size K in every tensor."""

Buffers = dict[str, Tensor]
"""A network's buffers by name (running statistics of batch normalisation and the like)."""
