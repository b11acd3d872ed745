"""Which tensor of what a network returns is meant: by name, by place, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor

from knowable.errors import InvalidArgument, InvalidData, InvalidType

Output = str | int | Callable[[Any], Tensor]


class Heads:
    """Several named outputs of a network as one tensor ``(batch, values)``: each flattened, one after the other.

    A likelihood for each of them takes it apart again by :meth:`split`.

    Attributes:
        given: Where each is in what the network returns, as the user said it; None: by its name.
        shapes: The shape of each output of a row, by name, as the network gave them last.
    """

    def __init__(self, names: Sequence[str], given: Any = None):
        if given is not None and not callable(given) and not (isinstance(given, Mapping) and set(given) == set(names)):
            says = f"names {', '.join(map(repr, given))}" if isinstance(given, Mapping) else f"is {given!r}"
            raise InvalidArgument(
                f"output must be a dict that says where each of {', '.join(map(repr, names))} is, or a function that "
                f"returns such a dict of tensors; it {says}."
            )
        self.names, self.given = tuple(names), given
        self.shapes: dict[str, torch.Size] = {}
        if isinstance(given, Mapping):
            for each in given.values():
                check_output(each)

    def __call__(self, returned: Any) -> Tensor:
        """What the network returned, as one tensor."""
        if callable(self.given):
            returned = self.given(returned)
        where = self.given if isinstance(self.given, Mapping) else {name: name for name in self.names}
        found = {name: self._head(name, picked(returned, where[name])) for name in self.names}
        if len({len(each) for each in found.values()}) > 1:
            rows = ", ".join(f"{name!r} {len(each)}" for name, each in found.items())
            raise InvalidData(f"All heads of the network must have one row per row of x, got rows {rows}.")
        self.shapes = {name: each.shape[1:] for name, each in found.items()}
        return torch.cat([each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in found.values()], 1)

    def split(self, output: Tensor) -> dict[str, Tensor]:
        """The outputs by name, from ``(..., batch, values)``."""
        return split_columns(output, self.shapes)

    def _head(self, name: str, found: Any) -> Tensor:
        if not isinstance(found, Tensor) or found.dim() == 0:
            raise InvalidType(f"The network's output {name!r} must be a tensor with the rows first, got {found!r}.")
        return found

    def __repr__(self) -> str:
        return repr(self.given)


def split_columns(values: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Parts of ``(..., batch, columns)`` by name, each in its shape."""
    sizes = [shape.numel() for shape in shapes.values()]
    if sum(sizes) != values.shape[-1]:
        raise InvalidData(
            f"Rows of {values.shape[-1]} values cannot be split into {', '.join(shapes)}, which take {sum(sizes)}. "
            f"Heads must have the same shape in all batches."
        )
    parts = zip(shapes.items(), values.split(sizes, -1), strict=True)
    return {name: each.reshape(*each.shape[:-1], *shape) for (name, shape), each in parts}


def as_said(output: Output | None) -> Any:
    """The output as the user said it."""
    return output.given if isinstance(output, Heads) else output


def check_output(output: Any) -> Output | None:
    """Refuse what cannot pick a tensor."""
    if output is not None and (isinstance(output, bool) or not (isinstance(output, str | int) or callable(output))):
        raise InvalidType(
            f"output must be a name, a place or a function of what the network returns, got {type(output).__name__}."
        )
    return cast("Output | None", output)


def picked(returned: Any, output: Output) -> Any:
    """The part of what a network returned: by key or attribute, by place, or by a function."""
    if not isinstance(output, str | int):
        return output(returned)
    if isinstance(output, int):
        if isinstance(returned, tuple | list) and -len(returned) <= output < len(returned):
            return returned[output]
    elif isinstance(returned, Mapping):
        if output in returned:
            return returned[output]
    elif not isinstance(returned, Tensor) and hasattr(returned, output):
        return getattr(returned, output)
    raise InvalidArgument(f"output={output!r} is not there: the network returns {_contents(returned)}.")


def refuse_output(found: Any) -> None:
    """Refuse a network that returns anything but one tensor, saying what there is to choose from."""
    if isinstance(found, Tensor):
        return
    choices = _choices(found)
    advice = f"Say which: Model(..., output={choices[0]!r})." if choices else "Pick one: Model(..., output=function)."
    raise InvalidType(f"The network must return one tensor, got {_contents(found)}. {advice}")


def _contents(returned: Any) -> str:
    choices = _choices(returned)
    kind = "one tensor" if isinstance(returned, Tensor) else type(returned).__name__
    return f"{kind} with {', '.join(map(repr, choices))}" if choices else kind


def _choices(returned: Any) -> list[str | int]:
    """Names, or places, of what a network returned."""
    if isinstance(returned, Mapping):
        return [str(key) for key in returned]
    if is_dataclass(returned):
        return [each.name for each in fields(returned)]
    names = getattr(returned, "_fields", None)
    if isinstance(returned, tuple) and names:
        return list(names)
    return list(range(len(returned))) if isinstance(returned, tuple | list) else []
