"""Weights whose layers have their inputs masked, example by example, in an unmodified network.

A mask is any random factor on an input: zeros and ones of dropout, or noise that is learned.

A :class:`MaskedWeight` looks like the weight to the module that holds it. When it reaches ``F.linear`` or a
convolution, the input of that operation is multiplied by a mask with a row for each example: what dropout layers do in
training. Any other operation gets the weight with one mask for the whole batch on its columns. The weight itself may be
a :class:`~knowable.core.gaussian_weight.GaussianWeight`, which then meets the masked input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from knowable.core.layer_operations import CONVOLUTIONS, LINEAR, METADATA, operands
from knowable.core.types import Params
from knowable.inference.dropout.site import Place, Site


class SiteMasks:
    """The masks of one site in one forward pass: drawn when they are first needed, the same at every later use.

    Args:
        site: The site.
        draw: ``draw(rows)`` gives masks ``(rows, units)``.
        scale: What masks are multiplied with: 1 / (1 - rate) of those that are zeros and ones.

    Attributes:
        mask: The masks as they were drawn, ``(rows, units)``; None before they are.
    """

    def __init__(self, site: Site, draw: Callable[[int], Tensor], scale: float | Tensor = 1.0):
        self.site, self._draw, self._scale = site, draw, scale
        self.mask: Tensor | None = None
        self._factor: Tensor | None = None

    def factor(self, rows: int) -> Tensor:
        """Factors on the inputs, ``(rows, inputs)``."""
        if self.mask is None or self._factor is None or len(self.mask) != rows:
            self.mask = self._draw(rows)
            self._factor = self.site.on_inputs(self.mask * self._scale)
        return self._factor

    def masked(self, weight: Tensor, place: Place) -> Tensor:
        """A weight with one mask for all examples on it."""
        if self.mask is None or len(self.mask) != 1:
            self.mask = self._draw(1)
        return weight * self.site.on_weight(self.mask[0] * self._scale, place, weight)


class MaskedWeight(torch.Tensor):
    """A weight with masks for the inputs of its layer; see the module's text.

    Attributes:
        loc: The weight.
        place: How it takes its inputs.
        masks: The masks of its site.
    """

    loc: Tensor
    place: Place
    masks: SiteMasks

    @staticmethod
    def __new__(cls, loc: Tensor, place: Place, masks: SiteMasks) -> MaskedWeight:  # noqa: D102
        with torch._C.DisableTorchFunctionSubclass():  # a weight that is random itself is not drawn yet
            self = loc.as_subclass(cls)
        self.loc, self.place, self.masks = loc, place, masks
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace operations on the weight."""
        kwargs = kwargs or {}
        if func.__name__ in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is LINEAR or func in CONVOLUTIONS:
            x, weight, bias, rest = operands(func, args, kwargs)
            if isinstance(weight, MaskedWeight) and not isinstance(x, MaskedWeight):
                return func(_masked_input(func, x, weight.masks), weight.loc, bias, **rest)
        return func(*tree_map(_with_one_mask, args), **tree_map(_with_one_mask, kwargs))


def masked_params(params: Params, masks: Sequence[SiteMasks], *, by_example: bool) -> Params:
    """Parameters under masks: example by example where the site allows it and it is asked for, else one for all."""
    given = dict(params)
    for each in masks:
        for place in each.site.places:
            value = params[place.name]
            own = by_example and each.site.by_example
            given[place.name] = MaskedWeight(value, place, each) if own else each.masked(value, place)
    return given


def _masked_input(func: Callable[..., Any], x: Tensor, masks: SiteMasks) -> Tensor:
    factor = masks.factor(len(x))  # (rows, inputs)
    between = (1,) * (x.dim() - 2)
    shape = (len(x), *between, -1) if func is LINEAR else (len(x), -1, *between)
    return x * factor.view(shape)


def _with_one_mask(leaf: Any) -> Any:
    return leaf.masks.masked(leaf.loc, leaf.place) if isinstance(leaf, MaskedWeight) else leaf
