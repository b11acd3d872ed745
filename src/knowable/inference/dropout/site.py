r"""Where dropout acts: inputs of a layer that are kept or dropped, and what that does to the layer's weights.

Dropping input j of a layer, and dividing what is kept by the probability of keeping it, is the same as multiplying
column j of its weight matrix (Gal and Ghahramani, 2016):

.. math:: M \Big(\frac{z}{1 - p} \odot x\Big) = \Big(M \operatorname{diag} \frac{z}{1 - p}\Big) x, \qquad
    z_j \sim \mathrm{Bernoulli}(1 - p)

So a site is a distribution over weights, whose mean is M.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A weight that takes the inputs of a site.

    Attributes:
        name: The parameter.
        axis: The dimension of the weight that runs over the inputs: 1, or 0 in transposed convolutions.
        groups: Groups of a convolution.
    """

    name: str
    axis: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Site:
    """Inputs that are dropped independently of each other, at one rate.

    Attributes:
        places: The weights that take these inputs (one, unless several layers share them).
        units: How many inputs are dropped independently of each other: features, or channels of a convolution.
        rate: Probability of dropping each; 0 where noise of another kind is put on them.
        repeat: How many neighbouring inputs are dropped together (the pixels of a channel that was flattened).
        by_example: Whether a layer's input can be masked example by example: the weights act in linear layers and
            convolutions alone, on inputs whose rows are the examples.
    """

    places: tuple[Place, ...]
    units: int
    rate: float
    repeat: int = 1
    by_example: bool = False

    @property
    def name(self) -> str:
        """Name of the first weight: what reports call the site."""
        return self.places[0].name

    def on_weight(self, mask: Tensor, place: Place, weight: Tensor) -> Tensor:
        """Factors on a weight, for masks ``(..., units)``: what broadcasts against ``(..., *weight.shape)``."""
        inputs = self.on_inputs(mask)
        lead, trailing = inputs.shape[:-1], (1,) * (weight.dim() - 2)
        if place.axis == 0:
            return inputs.reshape(*lead, -1, 1, *trailing)
        if place.groups == 1:
            return inputs.reshape(*lead, 1, -1, *trailing)
        by_group = inputs.reshape(*lead, place.groups, -1)  # (..., groups, inputs of each)
        by_output = by_group.repeat_interleave(weight.shape[0] // place.groups, dim=-2)
        return by_output.reshape(*by_output.shape, *trailing)

    def on_inputs(self, mask: Tensor) -> Tensor:
        """Factors on the inputs ``(..., inputs)``, for masks ``(..., units)``."""
        return mask.repeat_interleave(self.repeat, dim=-1) if self.repeat > 1 else mask

    def most_by_unit(self, values: Tensor, place: Place) -> Tensor:
        """The largest of numbers of a weight's shape among those that belong to each unit, ``(units,)``."""
        if place.axis == 0:
            inputs = values.flatten(1).amax(1)
        else:  # (groups, outputs of each, inputs of each, positions)
            by_group = values.reshape(place.groups, -1, values.shape[1], values[0, 0].numel())
            inputs = by_group.amax((1, 3)).flatten()
        return inputs.view(self.units, self.repeat).amax(1)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Site:
        """Back from plain values."""
        return cls(**{**saved, "places": tuple(Place(**place) for place in saved["places"])})
