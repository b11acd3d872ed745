"""Checks of arguments.

Each returns the checked value, so that a dataclass or a function can validate and convert in one line. The wording is
the same everywhere: the argument, what was expected, what came.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch

from knowable.errors import InvalidArgument, InvalidType

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.{hint}")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """Return ``value`` if it is an instance of ``kinds``, or raise saying what was ``expected``."""
    if not isinstance(value, kinds):
        raise InvalidType(f"{name} must be {expected}, got {_show(value)}.")
    return value


def check_names(name: str, value: Any) -> list[str]:
    """Return ``value`` as a list if it is a sequence of strings, or raise."""
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(each, str) for each in value):
        raise InvalidType(f"{name} must be names in a list, got {_show(value)}.")
    return list(value)


def check_generator(value: Any) -> torch.Generator | None:
    """Return ``value`` if it is a generator or None, or raise saying how to make one."""
    if value is None or isinstance(value, torch.Generator):
        return value
    raise InvalidType(
        f"generator must be a torch.Generator, got {_show(value)}. Write torch.Generator().manual_seed(0)."
    )


def arguments_named(others: Mapping[str, str], *, too_many: str = "") -> Callable[[_Function], _Function]:
    """Make a method refuse arguments that it does not have with an error that names those it has.

    Args:
        others: Names of arguments in other libraries, and what they are called here or a sentence on what to do.
        too_many: What to do, where there are more arguments without a name than it takes.
    """

    def decorate(function: _Function) -> _Function:
        known = list(inspect.signature(function).parameters.values())[1:]  # without self
        names = [each.name for each in known]
        most = sum(each.kind is not inspect.Parameter.KEYWORD_ONLY for each in known)

        @functools.wraps(function)
        def call(self: Any, *args: Any, **settings: Any) -> Any:
            for name in settings:
                if name not in names:
                    near = [others[name]] if name in others else difflib.get_close_matches(name, names, n=1)
                    hint = f"Did you mean {near[0]!r}?" if near else f"Its arguments are {', '.join(names)}."
                    if is_dataclass(self) and others.get(name, name) in [each.name for each in fields(self)]:
                        hint = f"It is a setting of the method: {type(self).__name__}({others.get(name, name)}=...)."
                    if " " in others.get(name, ""):
                        hint = others[name]
                    raise InvalidType(f"{function.__name__}() has no argument {name!r}. {hint}")
            if len(args) > most:
                first = f"{function.__name__}() takes {most} arguments without a name, got {len(args)}."
                raise InvalidType(f"{first} {too_many}".strip())
            return function(self, *args, **settings)

        return cast(_Function, call)

    return decorate


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_memory(value: int | str | None, name: str = "max_memory") -> int | None:
    """Bytes from a number or from text such as ``"500MB"``."""
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].upper() not in _UNITS:
            raise InvalidArgument(f"{name} must be bytes or text such as '500MB', got {value!r}.")
        value = int(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidType(f"{name} must be bytes or text such as '500MB', got {type(value).__name__}.")
    if value <= 0:
        raise InvalidArgument(f"{name} must be > 0, got {value}.")
    return int(value)


def readable(value: Any) -> str:
    """``repr``, with large and small numbers as people write them.

    >>> readable(1e12), readable(0.1), readable("network")
    ('1e12', '0.1', "'network'")
    """
    text = repr(value)
    if isinstance(value, float) and math.isfinite(value):
        short = f"{value:g}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")
        if len(short) < len(text) - 2 and float(short) == value:  # 1.0 stays
            return short
    return text


def readable_fields(settings: Any) -> str:
    """A dataclass as the call that makes it, every number :func:`readable`."""
    shown = (f"{each.name}={readable(getattr(settings, each.name))}" for each in fields(settings) if each.repr)
    return f"{type(settings).__name__}({', '.join(shown)})"


def as_batch(shape: Iterable[int]) -> str:
    """The shape of what a network makes of a few rows, for messages: ``(rows, 3)``."""
    return f"(rows, {', '.join(map(str, list(shape)[1:]))}".rstrip() + ")"


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
