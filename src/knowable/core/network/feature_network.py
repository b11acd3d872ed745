"""A network whose inputs bring along what its frozen part computes of them.

The results of the calls that no trained weight has a part in (:mod:`knowable.core.network.shared_part`) are computed
once for all rows of a data set. A batch is then the rows and their features, and a step computes the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from knowable.core.network.inputs import Inputs, as_rows
from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params
from knowable.core.network.shared_part import Features, Place, Result, SharedPart
from knowable.core.support.randomness import own_randomness
from knowable.errors import Unsupported

_FEW = 8  # rows on which it is found out what can be kept


class FeatureNetwork(Network):
    """A network of inputs with features: ``Inputs({"x": x, "features": (...)})``, as :meth:`inputs` makes them."""

    def __init__(self, network: Network, recipe: Recipe):
        super().__init__(network.net, network._frozen, network._held, network.output, network.autocast)
        self._input_dtype, self._recipe, self._part = network._input_dtype, recipe, SharedPart(self)

    def __call__(self, params: Params, x: Tensor, *, buffers: Buffers | None = None, training: bool = False) -> Tensor:
        """Run what depends on ``params``."""
        tree = cast(Inputs, x).tree
        with self._part.replaying(self._recipe.results(tree["features"], len(x))):
            return super().__call__(params, as_rows(tree["x"]), buffers=buffers, training=training)

    @staticmethod
    def inputs(x: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Rows and their features as one."""
        return cast(Tensor, Inputs({"x": x.tree if isinstance(x, Inputs) else x, "features": tuple(features)}))

    def copy(self) -> Network:
        """Refused: who asks for it changes the network inside, and its features with it."""
        raise Unsupported(
            "cache_features=True is not for methods that change the network itself (dropout, noise or a code inside "
            "it): what they change may be in the part that is kept. Leave cache_features out."
        )

    def holding(self, frozen: Collection[str], held: Params) -> Network:
        """The same network with other parameters frozen, and with these values."""
        return FeatureNetwork(super().holding(frozen, held), self._recipe)

    def _check_arguments(self, x: Tensor) -> None:
        pass

    def _shared_part(self, params: Params, x: Tensor) -> SharedPart | None:
        return None  # it is with the inputs


class FrozenFeatures:
    """What the frozen part of a network computes of rows.

    Args:
        network: The network.
        params: Values of the parameters that are trained.
        x: Some rows, on which it is found out what can be kept, and whether the network is the same with it.
        buffers: The network's buffers.

    Attributes:
        network: The network that takes features.

    Raises:
        Unsupported: If nothing can be kept, with the reason.
    """

    def __init__(self, network: Network, params: Params, x: Tensor, buffers: Buffers):
        _refuse_trained_normalisation(network)
        self._part, self._params, self._buffers = SharedPart(network.copy()), params, buffers
        some = x[torch.arange(_FEW, device=x.device) % len(x)]
        few = some[: _FEW // 2]
        self._recipe = _recipe(self._results(some), self._results(few))
        self.network = FeatureNetwork(network, self._recipe)
        whole, part = self.of(some), self.of(few)
        same = all(_close(one[: len(few)], other) for one, other in zip(whole, part, strict=True))
        given = FeatureNetwork.inputs(some, whole)
        for training in (True, False):
            same &= _close(self._output(network, some, training), self._output(self.network, given, training))
        if not same:
            raise Unsupported(
                "cache_features=True needs a frozen part that computes each row by itself, in training as in "
                "evaluation mode. Here it depends on the other rows of the batch, on the mode, or on what other parts "
                "of the network left behind. Leave cache_features out."
            )

    def of(self, x: Tensor) -> list[Tensor]:
        """The features of rows."""
        return self._recipe.tensors(self._results(x), len(x))

    def _results(self, x: Tensor) -> Features:
        """In training mode, where dropout that is not in a frozen module is random and ends what can be kept."""
        found = self._part.features(self._params, self._params, x, self._buffers, training=True)
        if found is None:
            raise Unsupported(
                "cache_features=True finds nothing to keep: no layer with weights comes before all trained weights and "
                "all random numbers (dropout that is not part of a frozen module is active in training). Freeze the "
                "layers that are not trained, Model(..., frozen=[...]), or leave cache_features out."
            )
        return found

    def _output(self, network: Network, x: Tensor, training: bool) -> Tensor:
        buffers = {name: value.clone() for name, value in self._buffers.items()}
        with torch.no_grad(), own_randomness(0):
            return network(self._params, x, buffers=buffers, training=training)


def _refuse_trained_normalisation(network: Network) -> None:
    names = network.statistics_names
    if names:
        raise Unsupported(
            f"cache_features=True is not for networks with batch normalisation that is trained "
            f"({names[0].rpartition('.')[0]!r}). Freeze it, Model(..., frozen=[...]), or leave cache_features out."
        )


# --- where features belong --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """A part of what a call returns: one of the features, or the same for all rows, or wanted for its shape alone."""

    feature: int | None = None  # its number
    value: Any = None  # the same for all rows
    shape: torch.Size | None = None  # of one row


@dataclass(frozen=True)
class Recipe:
    """The calls whose results are features."""

    calls: dict[Place, tuple[list[_Leaf], TreeSpec, Result]]

    def results(self, tensors: Sequence[Tensor], rows: int) -> Features:
        """What the calls return for some rows with these features."""

        def filled(leaf: _Leaf) -> Any:
            if leaf.feature is not None:
                return tensors[leaf.feature]
            return leaf.value if leaf.shape is None else leaf.value.expand(rows, *leaf.shape)

        return {
            place: replace(result, output=tree_unflatten([filled(leaf) for leaf in leaves], spec))
            for place, (leaves, spec, result) in self.calls.items()
        }

    def tensors(self, results: Features, rows: int) -> list[Tensor]:
        """The features among the results of the calls."""
        found: dict[int, Tensor] = {}
        if results.keys() != self.calls.keys():
            raise _differs("other layers run")
        for place, (leaves, spec, _) in self.calls.items():
            values, own = tree_flatten(results[place].output)
            if own != spec:
                raise _differs(f"layer {place[0]!r} returns something else")
            for leaf, value in zip(leaves, values, strict=True):
                if leaf.feature is not None and value.shape[0] == rows:
                    found[leaf.feature] = value
                elif leaf.feature is not None or (leaf.shape is None and not _equal(leaf.value, value)):
                    raise _differs(f"layer {place[0]!r} returns something else")
        return [found[number] for number in range(len(found))]


def _recipe(many: Features, few: Features) -> Recipe:
    """What is a feature, from the results for two numbers of rows."""
    calls: dict[Place, tuple[list[_Leaf], TreeSpec, Result]] = {}
    count = 0
    if many.keys() != few.keys():
        raise _differs("other layers run")
    for place, result in many.items():
        leaves = []
        values, spec = tree_flatten(result.output)
        for one, other, read in zip(values, tree_leaves(few[place].output), result.read, strict=True):
            by_row = isinstance(one, Tensor) and one.dim() > 0 and (len(one), len(other)) == (_FEW, _FEW // 2)
            if by_row and read:
                leaves.append(_Leaf(feature=count))
                count += 1
            elif by_row:
                leaves.append(_Leaf(value=one[:1], shape=one.shape[1:]))
            elif _equal(one, other):
                leaves.append(_Leaf(value=one))
            else:
                raise _differs(f"layer {place[0]!r} returns something that is not one row for each row")
        calls[place] = leaves, spec, replace(result, output=None)
    return Recipe(calls)


def _differs(what: str) -> Unsupported:
    return Unsupported(
        f"cache_features=True needs a frozen part that does the same with every row, but {what} for some rows. Leave "
        f"cache_features out."
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _close(one: Tensor, other: Tensor) -> bool:
    """The same to rounding."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-3 if one.dtype.itemsize < 4 else 1e-4, atol=1e-5, equal_nan=True)
