"""Several inputs as one: a tree of tensors that all have the rows first, with the interface of a tensor of rows.

A network may take one tensor, several (a tuple, passed as positional arguments), named ones (a dict, passed as
keywords), or a nested mix. One tensor stays one tensor. Anything else becomes :class:`Inputs`, which can be counted,
sliced, indexed, split, joined and moved as a tensor of rows can, so that code that asks no more of ``x`` takes both;
``x: Tensor`` in this library means either. What only a single tensor can do is refused with a clear error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from knowable.core.support.tensors import check_finite, check_rows, to_tensor
from knowable.errors import InvalidData, Unsupported


class Inputs:
    """Rows of several inputs: a tuple or a dict of tensors, or of further tuples and dicts.

    ``vmap`` and recorded graphs take it apart into its tensors (it is a node of ``torch.utils._pytree``).

    >>> both = Inputs({"ids": torch.tensor([[1, 2], [3, 4]]), "mask": torch.ones(2, 2)})
    >>> len(both), both[:1]
    (2, Inputs(ids (1, 2) int64, mask (1, 2) float32))
    """

    def __init__(self, tree: Any):
        self.leaves, self._spec = tree_flatten(tree)

    @classmethod
    def of(cls, leaves: Sequence[Tensor], spec: TreeSpec) -> Inputs:
        """Inputs of the structure ``spec`` from their tensors."""
        made = cls.__new__(cls)
        made.leaves, made._spec = list(leaves), spec
        return made

    @property
    def tree(self) -> Any:
        """The tuple or dict of tensors."""
        return tree_unflatten(self.leaves, self._spec)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """``function`` of every tensor."""
        return Inputs.of([function(each) for each in self.leaves], self._spec)

    # --- what a tensor of rows can do --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.leaves[0])

    @property
    def shape(self) -> torch.Size:
        """The number of rows alone."""
        return self.leaves[0].shape[:1]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.leaves[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any of the tensors asks for a gradient."""
        return any(each.requires_grad for each in self.leaves)

    def is_floating_point(self) -> bool:
        """Whether any of the tensors is; those alone follow a change of dtype."""
        return any(each.is_floating_point() for each in self.leaves)

    def __getitem__(self, rows: Any) -> Inputs:
        return self.mapped(lambda each: each[rows])

    def __iter__(self) -> Iterator[Inputs]:
        return (self[row] for row in range(len(self)))

    def index_select(self, dim: int, index: Tensor) -> Inputs:
        """See ``torch.index_select``, as for all of these."""
        return self.mapped(lambda each: each.index_select(dim, index))

    def split(self, size: int | list[int]) -> tuple[Inputs, ...]:
        """Parts of ``size`` rows."""
        return self._parts([each.split(size) for each in self.leaves])

    def tensor_split(self, sections: int) -> tuple[Inputs, ...]:
        """So many parts of nearly equal size."""
        return self._parts([each.tensor_split(sections) for each in self.leaves])

    def _parts(self, parts: list[tuple[Tensor, ...]]) -> tuple[Inputs, ...]:
        return tuple(Inputs.of(leaves, self._spec) for leaves in zip(*parts, strict=True))

    def unsqueeze(self, dim: int) -> Inputs:
        """A single row as a batch."""
        return self.mapped(lambda each: each.unsqueeze(dim))

    def to(self, where: torch.device | torch.dtype) -> Inputs:
        """Moved to a device; to another dtype only what is floating point."""
        if isinstance(where, torch.dtype):
            return self.mapped(lambda each: each.to(where) if each.is_floating_point() else each)
        return self.mapped(lambda each: each.to(where))

    def double(self) -> Inputs:
        """In double precision, what is floating point."""
        return self.to(torch.float64)

    def clone(self) -> Inputs:
        """Copies of all tensors."""
        return self.mapped(Tensor.clone)

    def detach(self) -> Inputs:
        """Without gradients."""
        return self.mapped(Tensor.detach)

    def contiguous(self) -> Inputs:
        """Each tensor in one piece of memory."""
        return self.mapped(Tensor.contiguous)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """``torch.cat`` of rows; every other function of torch needs one tensor."""
        found = next((each for each in args if isinstance(each, Inputs)), None)
        if func is torch.cat and found is None and not kwargs and len(args) == 1:
            return _joined(args[0])
        raise Unsupported(_one_tensor(func.__name__, "x" if found is None else found))

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise Unsupported(_one_tensor(name, self))
        raise AttributeError(name)

    def __repr__(self) -> str:
        return f"Inputs({_listed(self)})"


register_pytree_node(
    Inputs,
    lambda inputs: (inputs.leaves, inputs._spec),
    lambda leaves, spec: Inputs.of(list(leaves), spec),
    serialized_type_name="knowable.Inputs",
)


def _one_tensor(what: str, x: Any) -> str:
    return f"This needs x as one tensor of numbers ({what}), but the network has several inputs: {x!r}."


def _joined(parts: Sequence[Inputs]) -> Inputs:
    if any(each._spec != parts[0]._spec for each in parts):
        raise InvalidData(f"Batches have different inputs: {', '.join(sorted({repr(each) for each in parts})[:2])}.")
    try:
        return Inputs.of([torch.cat(each) for each in zip(*(p.leaves for p in parts), strict=True)], parts[0]._spec)
    except RuntimeError as error:
        raise InvalidData(
            f"Batches of different shapes cannot be joined: {parts[0]!r} and {parts[-1]!r}. Pad all rows alike."
        ) from error


# --- from what users pass, to what networks take ----------------------------------------------------------------------


def is_several(x: Any) -> bool:
    """Whether ``x`` is several inputs and not one: a mapping, or a tuple that holds arrays, mappings or tuples of them.

    A list is an array of rows.
    """
    if isinstance(x, Tensor):
        return False
    if isinstance(x, Mapping | Inputs):
        return True
    return isinstance(x, tuple) and any(is_several(each) or getattr(each, "ndim", 0) > 0 for each in x)


def tupled(x: Any) -> Any:
    """What a loader has made lists of, as the tuples that they were."""
    if isinstance(x, Mapping):
        return {key: tupled(each) for key, each in x.items()}
    holds = isinstance(x, tuple | list) and any(isinstance(each, Tensor | Mapping | tuple | list) for each in x)
    return tuple(tupled(each) for each in x) if holds else x


def as_rows(x: Any, name: str = "x") -> Tensor:
    """One tensor, or :class:`Inputs`, from what a user passes; all of it must have the same number of rows."""
    if isinstance(x, Inputs):
        return cast(Tensor, x)
    if not is_several(x):
        return to_tensor(x, name)
    named: dict[str, Tensor] = {}
    made = Inputs(_converted(x, name, named))
    if not named:
        raise InvalidData(f"{name} has no inputs: it is empty.")
    counts = {key: check_rows(each, key).shape[0] for key, each in named.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{key} with {count}" for key, count in counts.items())
        raise InvalidData(f"All inputs must have the same number of rows, got {each}.")
    return cast(Tensor, made)


def _converted(x: Any, name: str, named: dict[str, Tensor]) -> Any:
    if isinstance(x, Mapping):
        return {key: _converted(each, f"{name}[{key!r}]", named) for key, each in x.items()}
    if is_several(x):
        return tuple(_converted(each, f"{name}[{place}]", named) for place, each in enumerate(x))
    named[name] = to_tensor(x, name)
    return named[name]


def check_inputs(x: Tensor, name: str) -> Tensor:
    """Refuse inputs without rows, and missing and infinite values."""
    if isinstance(x, Tensor):
        return check_finite(check_rows(x, name), name)
    for path, each in _paths(x.tree):
        check_finite(each, name + "".join(f"[{key!r}]" for key in path))
    return x


def tensors_of(*values: Any) -> list[Tensor]:
    """All tensors, with those of :class:`Inputs` in their places."""
    return tree_leaves(values)


Structure = tuple[TreeSpec | None, ...] | None
"""Which of some arguments are :class:`Inputs`, and of which structure; None where all are tensors."""


def flattened(values: Sequence[Any]) -> tuple[Sequence[Tensor], Structure]:
    """Arguments as tensors alone, and what :func:`taking_flat` needs to put :class:`Inputs` together again."""
    if not any(isinstance(each, Inputs) for each in values):
        return values, None
    specs = tuple(each._spec if isinstance(each, Inputs) else None for each in values)
    return tensors_of(*values), specs


def taking_flat(function: Callable[..., Any], structure: Structure) -> Callable[..., Any]:
    """``function`` of tensors alone, which are put together to the arguments that it takes."""
    if structure is None:
        return function

    def of_tensors(*flat: Tensor) -> Any:
        given = iter(flat)
        return function(
            *(next(given) if each is None else Inputs.of([next(given) for _ in range(each.num_leaves)], each)
              for each in structure)
        )  # fmt: skip

    return of_tensors


def described(x: Tensor) -> str:
    """Shapes and dtypes, for messages."""
    return f"x of shape {tuple(x.shape)} and dtype {x.dtype}" if isinstance(x, Tensor) else f"x with {_listed(x)}"


def _listed(x: Inputs) -> str:
    shapes = (f"{'.'.join(map(str, path))} {tuple(each.shape)} {each.dtype}" for path, each in _paths(x.tree))
    return ", ".join(shapes).replace("torch.", "")


def _paths(tree: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """All tensors, each behind the keys that lead to it."""
    if isinstance(tree, dict | tuple):
        for key, each in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from (((key, *path), leaf) for path, leaf in _paths(each))
    else:
        yield (), tree


def call(module: nn.Module, x: Any) -> Any:
    """What ``module`` returns for one tensor, for a tuple as its arguments, for a dict as its keyword arguments."""
    if isinstance(x, Tensor):
        return module(x)
    tree = x.tree if isinstance(x, Inputs) else x
    return module(**tree) if isinstance(tree, Mapping) else module(*tree) if isinstance(tree, tuple) else module(tree)


def check_arguments(module: nn.Module, x: Tensor) -> None:
    """Refuse several inputs that are not the arguments of the module's ``forward``."""
    if isinstance(x, Tensor):
        return
    signature, tree = inspect.signature(module.forward), x.tree
    named = [name for name, each in signature.parameters.items() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    takes = f"forward of {type(module).__name__} takes ({', '.join(signature.parameters)})"
    unknown = [key for key in tree if key not in named] if isinstance(tree, dict) else []
    meant = [near[0] for key in unknown if (near := get_close_matches(str(key), set(named) - tree.keys(), n=1))]
    try:
        signature.bind(*([] if isinstance(tree, dict) else tree), **_keywords(tree))
        if not meant:  # a forward with **kwargs takes any name, a misspelt one too
            return
        error = f"did you mean {', '.join(map(repr, meant))}?"
    except TypeError as refused:
        error = f"{refused}."
    if not isinstance(tree, dict):
        raise InvalidData(f"{takes}, but x is a tuple of {len(tree)} inputs, which are passed in this order: {error}")
    what = f"{', '.join(map(repr, unknown))}, which it does not take" if unknown else ", ".join(map(repr, tree))
    advice = " If one of them is the target, say so: kn.Data(..., target=...)." if unknown else ""
    raise InvalidData(f"{takes}, but x has {what}: {error}{advice}")


def _keywords(tree: Any) -> dict[str, Any]:
    return {str(key): each for key, each in tree.items()} if isinstance(tree, dict) else {}
