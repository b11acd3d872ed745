"""Which weights get which family: globs over the names of parameters, the first that matches wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from knowable.core.model import Model
from knowable.core.params import select_names
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.variational.family import Family


@dataclass(frozen=True)
class Group:
    """Weights that share one distribution.

    Attributes:
        family: Of what kind it is.
        names: The weights, in the model's order.
    """

    family: Family
    names: tuple[str, ...]


def check_families(argument: str, families: Any) -> None:
    """Refuse what is not a mapping from globs to families; ``argument`` is what messages call it."""
    if not isinstance(families, Mapping):
        raise InvalidType(
            f"{argument} must map names or globs to families, such as {{'head.*': FullRank()}}; got {families!r:.60}."
        )
    if not families:
        raise InvalidArgument(f"{argument} must name at least one glob, got an empty mapping. Leave it out.")
    for glob, family in families.items():
        if not isinstance(glob, str):
            raise InvalidType(f"{argument} must map names or globs to families; {glob!r} is not a name.")
        if isinstance(family, type) and issubclass(family, Family):
            raise InvalidType(f"{argument}[{glob!r}] must be an instance: write {family.__name__}() with parentheses.")
        if not isinstance(family, Family):
            raise InvalidType(f"{argument}[{glob!r}] must be a family such as FullRank(), got {family!r:.60}.")


def group_weights(families: Mapping[str, Family], others: Family, model: Model) -> list[Group]:
    """Cut the random weights of a model into groups, one for each glob.

    Args:
        families: Globs, or ``"last_layer"``, in order of precedence.
        others: The family of the weights that none of them names, all together.
        model: The model.

    Raises:
        InvalidArgument: If a glob matches none of the random weights.
    """
    left = list(model.random_names)
    groups = []
    for glob, family in families.items():
        chosen = select_names("families", glob, model.random_names, model.net)
        names = tuple(name for name in left if name in chosen)
        left = [name for name in left if name not in chosen]
        if names:
            groups.append(Group(family, names))
    return [*groups, Group(others, tuple(left))] if left else groups
