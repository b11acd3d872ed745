"""Every method by name: for strings, the command line, citations and the conformance suite.

A method describes itself (see :class:`~knowable.core.method.Method`), and is here because its family exports it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from knowable.core.method import Method, method_name
from knowable.errors import InvalidArgument
from knowable.inference import dropout, ensembles, exact, functional, laplace, point, sampling, variational

_FAMILIES = (point, exact, functional, laplace, variational, dropout, sampling, ensembles)


@dataclass(frozen=True)
class MethodEntry:
    """A method's class and what it says of itself."""

    cls: type[Method]

    @property
    def name(self) -> str:
        """Snake-case name, as on the command line."""
        return method_name(self.cls)

    @property
    def cls_name(self) -> str:
        """Name of its class."""
        return self.cls.__name__

    @property
    def family(self) -> str:
        """Which kind of inference it is."""
        return self.cls.family

    @property
    def summary(self) -> str:
        """One line."""
        return self.cls.summary

    @property
    def references(self) -> tuple[str, ...]:
        """Keys into the bibliography."""
        return self.cls.references

    @property
    def aliases(self) -> tuple[str, ...]:
        """Shorter names."""
        return self.cls.aliases

    @property
    def bibtex(self) -> tuple[str, ...]:
        """The papers to cite."""
        return tuple(bibliography()[key] for key in self.references)


METHODS: dict[str, MethodEntry] = {
    entry.name: entry
    for family in _FAMILIES
    for exported in map(vars(family).get, family.__all__)
    if isinstance(exported, type) and issubclass(exported, Method)
    for entry in [MethodEntry(exported)]
}


def find_method(name: str) -> MethodEntry:
    """The entry for a name, an alias or a class name."""
    wanted = str(name).strip().lower().replace("-", "_")
    for entry in METHODS.values():
        if wanted in (entry.name, entry.cls_name.lower(), *entry.aliases):
            return entry
    known = [each for entry in METHODS.values() for each in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"method {name!r} is not known.{hint} The methods are: {', '.join(METHODS)}.")


def cite(*names: str) -> str:
    """BibTeX for one or several methods, each paper once.

    >>> "blundell2015" in cite("mfvi")
    True
    """
    keys = dict.fromkeys(key for name in names for key in find_method(name).references)
    return "\n\n".join(bibliography()[key] for key in keys)


@cache
def bibliography() -> dict[str, str]:
    """The entries of ``references.bib`` by their keys."""
    text = resources.files("knowable").joinpath("references.bib").read_text(encoding="utf-8")
    return {re.split(r"[{,]", entry, maxsplit=2)[1]: entry for entry in text.strip().split("\n\n")}
