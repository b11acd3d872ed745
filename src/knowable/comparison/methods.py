"""The methods that are compared, each under a name of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from knowable.core.method import Method
from knowable.errors import InvalidArgument, InvalidType
from knowable.registry import METHODS, MethodEntry, find_method

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Candidate:
    """A method with the name it goes by."""

    name: str
    method: Method | str  # the method, or the name that an estimator knows it by

    @property
    def settings(self) -> str:
        """What makes it this method: the same in every process."""
        return plain_repr(self.method)

    @property
    def entry(self) -> MethodEntry | None:
        """What the registry knows of it."""
        named = self.method if isinstance(self.method, str) else type(self.method).__name__
        return next((entry for entry in METHODS.values() if named in (entry.name, entry.cls_name)), None)


def as_candidates(methods: Any, resolve: Callable[[Any], Method | str]) -> tuple[Candidate, ...]:
    """Methods by name or as objects, in a list; or in a dict that names them.

    Raises:
        InvalidType: If there is something else in it.
        InvalidArgument: If there is none, or two have the same name.
    """
    if isinstance(methods, str | Method):
        methods = [methods]
    if not isinstance(methods, Iterable):
        raise InvalidType(f"methods must be a list of methods or of their names, got {type(methods).__name__}.")
    if isinstance(methods, Mapping):
        found = [Candidate(str(name), resolve(method)) for name, method in methods.items()]
    else:
        found = [_named(resolve(method)) for method in methods]
    if not found:
        raise InvalidArgument("methods is empty. Name some: methods=['map', 'mean_field_vi', 'deep_ensemble'].")
    names = [candidate.name for candidate in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"methods has {twice!r} twice. Give them names: methods={{'one': ..., 'other': ...}}.")
    return tuple(found)


def as_method(method: Any, argument: str = "methods") -> Method:
    """A method from its name, or itself; errors name the ``argument``."""
    if isinstance(method, Method):
        return method
    if isinstance(method, type) and issubclass(method, Method):
        raise InvalidType(f"{argument} has a class in it: write {method.__name__}() with parentheses.")
    if not isinstance(method, str):
        raise InvalidType(
            f"{argument} must hold methods such as MeanFieldVI() or their names, got {type(method).__name__}."
        )
    return find_method(method).cls()


def plain_repr(value: Any) -> str:
    """A representation without addresses in memory, so that two processes agree on it."""
    return _ADDRESS.sub("", repr(value))


def _named(method: Method | str) -> Candidate:
    """Under its registered name where all its settings are the defaults, else under what it prints as."""
    if isinstance(method, str):
        return Candidate(method, method)
    shown = repr(method)
    entry = Candidate(shown, method).entry
    return Candidate(entry.name if entry is not None and shown == f"{entry.cls_name}()" else shown, method)
