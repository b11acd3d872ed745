"""The one collector of the library's warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from knowable.errors import KnowableWarning

Warned = tuple[type[Warning], str]
"""A warning as its category and its text."""


@contextmanager
def collect_warnings(found: list[Warned]) -> Iterator[None]:
    """Append the library's own warnings to ``found``, each text once, and pass on those of other libraries."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            own = [(each.category, str(each.message)) for each in caught if issubclass(each.category, KnowableWarning)]
            found += [each for each in dict.fromkeys(own) if each not in found]
    for each in caught:
        if not issubclass(each.category, KnowableWarning):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
