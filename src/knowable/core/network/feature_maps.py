"""Fixed feature maps, to be followed by a linear layer: polynomials, sines and cosines, radial basis functions.

A linear layer on fixed features is a linear model, whose posterior and evidence are exact
(:class:`~knowable.inference.exact.linear.ExactLinear`); beside a network it is an ordinary layer for every method. The
features of a trained network need no map: ``Model(net, ..., random="last_layer", frozen=...)``.

>>> import knowable as kn
>>> net = kn.features.Polynomial(3).linear()
>>> net(torch.zeros(5, 1)).shape
torch.Size([5, 1])
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.support.checks import check_count, check_number
from knowable.core.support.tensors import check_finite, to_tensor
from knowable.errors import InvalidArgument

__all__ = ["RBF", "FeatureMap", "Fourier", "Polynomial"]

_MOST = 100_000  # features
_HIGHEST = 100  # degree of a polynomial


class FeatureMap(nn.Module):
    """Functions of the inputs ``(..., inputs)`` as columns ``(..., out_features)``. No weights: nothing is learned.

    There is no column of ones among them: the bias of the linear layer that follows is its weight.

    Attributes:
        inputs: Number of inputs.
        out_features: Number of features.
    """

    def __init__(self, inputs: int):
        super().__init__()
        self.inputs = check_count("inputs", inputs)

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Number of features."""

    @abstractmethod
    def _features(self, x: Tensor) -> Tensor:
        """The features of checked inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """The features, ``(..., out_features)``."""
        if x.shape[-1:] != (self.inputs,):
            say = f"Say inputs={x.shape[-1]}, or reshape" if x.dim() else "Reshape"
            raise InvalidArgument(
                f"{self} takes {self.inputs} input{'s' * (self.inputs > 1)}, got x of shape {tuple(x.shape)}. {say} x "
                f"to (rows, {self.inputs})."
            )
        return self._features(x)

    def linear(self, outputs: int = 1, *, bias: bool = True) -> nn.Sequential:
        """This map and a linear layer on it: the network of a linear model.

        Args:
            outputs: Number of outputs.
            bias: Whether there is a constant term.
        """
        return nn.Sequential(self, nn.Linear(self.out_features, check_count("outputs", outputs), bias=bias))

    def _constant(self, name: str, value: Tensor) -> None:
        """A tensor that moves with the module and is made from its arguments, so that it needs no saving."""
        self.register_buffer(name, value, persistent=False)


class Polynomial(FeatureMap):
    r"""All powers and products of the inputs up to a degree: of two inputs x and z: x, z, x², xz, z², ...

    Args:
        degree: Highest total degree k, at least 1. There are :math:`\binom{d + k}{k} - 1` features of d inputs.
        inputs: Number of inputs d.

    Example:
        >>> Polynomial(3)(torch.tensor([[2.0]]))
        tensor([[2., 4., 8.]])
    """

    def __init__(self, degree: int, *, inputs: int = 1):
        super().__init__(inputs)
        self.degree = check_count("degree", degree, at_most=_HIGHEST)
        if self.out_features > _MOST:
            raise InvalidArgument(
                f"degree={degree} in {inputs} inputs makes {self.out_features:,} features; at most {_MOST:,} are "
                f"possible. Lower the degree, or use fewer inputs."
            )
        for power in range(1, degree + 1):  # which inputs are multiplied
            factors = list(combinations_with_replacement(range(inputs), power))
            self._constant(f"factors{power}", torch.tensor(factors))

    @property
    def out_features(self) -> int:
        """Number of features."""
        return math.comb(self.inputs + self.degree, self.degree) - 1

    def _features(self, x: Tensor) -> Tensor:
        powers = (self.get_buffer(f"factors{power}") for power in range(1, self.degree + 1))
        return torch.cat([x[..., factors].prod(-1) for factors in powers], dim=-1)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.degree}, inputs={self.inputs}"


class Fourier(FeatureMap):
    r"""Sines and cosines of each input: :math:`\sin(2\pi j x / T), \cos(2\pi j x / T)` for j from 1 to J.

    Args:
        order: Number J of harmonics. There are 2 J d features of d inputs.
        inputs: Number of inputs d.
        period: Length T after which every function repeats. For functions that do not repeat it is longer than the
            range of the inputs, with the frequencies as multiples of 1 / T.

    Example:
        >>> Fourier(1, period=4.0)(torch.tensor([[1.0]])).round(decimals=3).abs()
        tensor([[1., 0.]])
    """

    frequencies: Tensor

    def __init__(self, order: int, *, inputs: int = 1, period: float = 1.0):
        super().__init__(inputs)
        self.order, self.period = check_count("order", order, at_most=_MOST), check_number("period", period, above=0)
        self._constant("frequencies", torch.arange(1, order + 1, dtype=torch.float64) * (2 * math.pi / self.period))

    @property
    def out_features(self) -> int:
        """Number of features."""
        return 2 * self.order * self.inputs

    def _features(self, x: Tensor) -> Tensor:
        angles = (x.unsqueeze(-1) * self.frequencies.to(x.dtype)).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{self.order}, inputs={self.inputs}, period={self.period}"


class RBF(FeatureMap):
    r"""Radial basis functions: a bump around each centre, :math:`\exp(-|x - c_m|^2 / (2 w^2))`.

    Args:
        centres: The centres c, ``(M, inputs)``; for one input also ``(M,)``.
        width: Standard deviation w of the bumps.

    Example:
        >>> RBF([0.0, 1.0], width=0.5)(torch.tensor([[1.0]]))
        tensor([[0.1353, 1.0000]])
    """

    places: Tensor

    def __init__(self, centres: Tensor | Sequence[Any], *, width: float = 1.0):
        places = check_finite(to_tensor(centres, "centres").double(), "centres")
        places = places.unsqueeze(1) if places.dim() == 1 else places
        if places.dim() != 2 or not places.numel():
            raise InvalidArgument(f"centres must have shape (M, inputs) or (M,), got {tuple(places.shape)}.")
        super().__init__(places.shape[1])
        self.centres = tuple(map(tuple, places.tolist()))
        self.width = check_number("width", width, above=0)
        self._constant("places", places.clone())

    @property
    def out_features(self) -> int:
        """Number of features."""
        return len(self.centres)

    def _features(self, x: Tensor) -> Tensor:
        away = x.unsqueeze(-2) - self.places.to(x.dtype)
        return torch.exp(-0.5 * away.square().sum(-1) / self.width**2)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{len(self.centres)} centres, width={self.width}"
