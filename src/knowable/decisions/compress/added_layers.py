"""The two layers a rewritten network may have beyond those of the original."""

from __future__ import annotations

from torch import Tensor, nn


class Columns(nn.Module):
    """Takes some of the last dimension's entries: those that the layer behind it reads.

    Args:
        index: Which, in order, ``(count,)``.
    """

    index: Tensor

    def __init__(self, index: Tensor):
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        """The chosen entries of the last dimension."""
        return x.index_select(-1, self.index)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{len(self.index)}"


class Shift(nn.Module):
    """Adds a constant to each channel: what is left of a branch that is the same for every input.

    Args:
        shift: The constants, ``(channels,)``.
        dim: The dimension of the channels.
    """

    shift: Tensor

    def __init__(self, shift: Tensor, dim: int):
        super().__init__()
        self.register_buffer("shift", shift)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The input, each channel shifted."""
        return x + self.shift.view(-1, *[1] * (x.dim() - self.dim - 1))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{len(self.shift)}, dim={self.dim}"
