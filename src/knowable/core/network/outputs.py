"""Which tensor of what a network returns is meant: by name, by place, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from torch import Tensor

from knowable.errors import InvalidArgument, InvalidType

Output = str | int | Callable[[Any], Tensor]


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
