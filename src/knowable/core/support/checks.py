"""Checks of arguments.

Each returns the checked value, so that a dataclass or a function can validate and convert in one line. The wording is
the same everywhere: the argument, what was expected, what came.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch

from knowable.errors import InvalidArgument, InvalidType


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """Return ``value`` as a finite float within the bounds, or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidType(f"{name} must be a number, got {_show(value)}.")
    number = float(value)
    wanted = _bounds(above, at_least, below, at_most)
    too_low = (above is not None and number <= above) or (at_least is not None and number < at_least)
    too_high = (below is not None and number >= below) or (at_most is not None and number > at_most)
    if not math.isfinite(number) or too_low or too_high:
        raise InvalidArgument(f"{name} must be a finite number{wanted}, got {value!r}.")
    return number


def check_count(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None) -> int:
    """Return ``value`` as an int within the bounds, or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidType(f"{name} must be a whole number, got {_show(value)}.")
    count = int(value)
    if count < at_least or (at_most is not None and count > at_most):
        raise InvalidArgument(f"{name} must be a whole number{_bounds(None, at_least, None, at_most)}, got {value!r}.")
    return count


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return ``value`` if it is one of the named choices, or raise with the list (and the nearest one)."""
    choices = list(choices)
    if value in choices:
        return value
    import difflib

    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.{hint}")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """Return ``value`` if it is an instance of ``kinds``, or raise saying what was ``expected``."""
    if not isinstance(value, kinds):
        raise InvalidType(f"{name} must be {expected}, got {_show(value)}.")
    return value


def check_generator(value: Any) -> torch.Generator | None:
    """Return ``value`` if it is a generator or None, or raise saying how to make one."""
    if value is None or isinstance(value, torch.Generator):
        return value
    raise InvalidType(
        f"generator must be a torch.Generator, got {_show(value)}. Write torch.Generator().manual_seed(0)."
    )


def _bounds(above: float | None, at_least: float | None, below: float | None, at_most: float | None) -> str:
    parts = [
        f" {sign} {bound:g}"
        for sign, bound in ((">", above), (">=", at_least), ("<", below), ("<=", at_most))
        if bound is not None
    ]
    return " and".join(parts)


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else f"a {type(value).__name__}"
