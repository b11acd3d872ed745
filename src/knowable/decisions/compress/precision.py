"""How many bits a weight needs: it need not be written more precisely than it is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.network.params import Params
from knowable.core.support.checks import check_count
from knowable.errors import InvalidArgument

FEWEST, MOST = 2, 16  # bits of a fixed-point weight


@dataclass(frozen=True)
class Grid:
    """Multiples of ``step``, from -L to L of them with L = 2^(bits - 1) - 1.

    Attributes:
        bits: Bits of a weight.
        step: The distance between neighbours.
    """

    bits: int
    step: float

    @classmethod
    def over(cls, weight: Tensor, bits: int) -> Grid:
        """The grid whose last point is the weight of largest size."""
        largest = weight.abs().max() if weight.numel() else weight.new_zeros(())
        step = (largest / (2 ** (bits - 1) - 1)).item()
        return cls(bits, step if step > 0 else 1.0)

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest point to each weight, as a whole number."""
        return (weight.double() / self.step).round()

    def values(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights that whole numbers stand for."""
        return (codes.double() * self.step).to(dtype)

    def rounded(self, weight: Tensor) -> Tensor:
        """Each weight at its nearest point."""
        return self.values(self.codes(weight), weight.dtype)


def bits_needed(mean: Tensor, std: Tensor) -> int | None:
    r"""Bits for weights with these posterior means and standard deviations (Louizos, Ullrich and Welling, 2017).

    The step of the grid may be as large as the average spread of the weights that are kept,
    :math:`s = \sqrt{\mathrm{mean}(\sigma^2)}`: rounding then moves a weight by s/2 at most. With M the largest
    :math:`|\mu|` and :math:`2^{b-1} - 1` steps on either side of zero that is

    .. math:: b = \min \{ b \ge 2 : M / (2^{b-1} - 1) \le s \}.

    Returns:
        The bits, or None if 16 do not suffice: the weights then stay as they are.
    """
    if mean.numel() == 0:
        return FEWEST
    largest, spread = mean.double().abs().max().item(), std.double().square().mean().sqrt().item()
    return next((bits for bits in range(FEWEST, MOST + 1) if largest <= spread * (2 ** (bits - 1) - 1)), None)


def check_bits(bits: Any) -> str | int | None:
    """Return ``bits`` if it is None, ``"posterior"`` or a number of bits, or raise."""
    if bits is None or bits == "posterior":
        return bits
    if isinstance(bits, str):
        raise InvalidArgument(
            f"bits must be None, 'posterior' or a whole number from {FEWEST} to {MOST}; got {bits!r}."
        )
    return check_count("bits", bits, at_least=FEWEST, at_most=MOST)


def choose_grids(weights: Params, masks: Params, std: Params, bits: str | int | None) -> dict[str, Grid]:
    """A grid for each weight tensor; tensors that stay as they are have none.

    Args:
        weights: Posterior means.
        masks: True for the weights that stay.
        std: Posterior standard deviations.
        bits: None for no grid, ``"posterior"`` for :func:`bits_needed`, or the bits of all.
    """
    grids = {}
    for name, mask in masks.items() if bits is not None else ():
        kept = weights[name][mask]
        number = bits_needed(kept, std[name][mask]) if bits == "posterior" else bits
        if isinstance(number, int):
            grids[name] = Grid.over(kept, number)
    return grids
