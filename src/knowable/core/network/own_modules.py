"""Modules that PyTorch lacks: a residual sum of layers, and the error function as an activation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knowable.errors import InvalidData


class Residual(nn.Sequential):
    r"""Layers whose output is added to their input: :math:`x \mapsto x + f(x)`.

    It is used like ``nn.Sequential``, inside one:

    >>> from torch import nn
    >>> net = nn.Sequential(
    ...     nn.Linear(3, 64), Residual(nn.ReLU(), nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 1)
    ... )
    >>> net(torch.ones(2, 3)).shape
    torch.Size([2, 1])
    """

    def forward(self, input: Tensor) -> Tensor:  # the name that nn.Sequential gives it
        """The input plus what the layers make of it."""
        output = super().forward(input)
        if output.shape != input.shape:
            raise InvalidData(
                f"Residual adds its input to the output of its layers, so both need one shape; they have "
                f"{tuple(input.shape)} and {tuple(output.shape)}. Change the sizes of its layers."
            )
        return input + output


class Erf(nn.Module):
    """The error function as an activation: like tanh, with a closed form for infinitely wide networks."""

    def forward(self, x: Tensor) -> Tensor:
        """erf(x), element by element."""
        return torch.erf(x)
