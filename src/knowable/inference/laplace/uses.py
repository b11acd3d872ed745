r"""One use of a weight matrix in a network: s = W a + b at every row and position.

The gradient of anything in W is then a sum of outer products of gradients in s with the a, which is all that curvature
needs to know of a layer. Inputs and gradients come as ``(..., features)``, with rows and positions in front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.inference.laplace.moments import second_moment


@dataclass(frozen=True)
class Use(ABC):
    """A product with a weight matrix, or the addition of a bias, of which at least one is asked about.

    Attributes:
        weight: Name of the weight, if it is asked about.
        bias: Name of the bias, if it is asked about.
        inputs: What went in.
        output: What came out, where gradients are taken.
        passed_on: What the network went on with: the same values.
    """

    weight: str | None
    bias: str | None
    inputs: Tensor
    output: Tensor
    passed_on: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters asked about."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    @abstractmethod
    def feature_dim(self) -> int:
        """The dimension of the output that holds its features."""

    @abstractmethod
    def _inputs_in_front(self) -> Tensor:
        """Inputs as ``(..., in)``."""

    @abstractmethod
    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """Values of the output's shape as ``(..., out)``: rows and positions in front, behind ``lead`` dimensions."""

    @property
    def count(self) -> int:
        """Number of rows and positions."""
        return self.in_front(self.output).shape[:-1].numel()

    def second_moment(self) -> Tensor:
        """Sum of the outer products of :meth:`activations`, ``(in, in)``."""
        with torch.no_grad():
            if self.weight is None:
                return self.output.new_full((1, 1), self.count)
            inputs = self._inputs_in_front()
            square = second_moment(inputs)
            if self.bias is None:
                return square
            sums, count = inputs.sum(tuple(range(inputs.dim() - 1))), inputs.new_full((1, 1), self.count)
            return torch.cat([torch.cat([square, sums.unsqueeze(1)], 1), torch.cat([sums.unsqueeze(0), count], 1)])

    def activations(self) -> Tensor:
        """What the weight is multiplied with, ``(..., in)``, with a 1 at the end for the bias."""
        with torch.no_grad():
            if self.weight is None:
                front = self.in_front(self.output).shape[:-1]
                return self.output.new_ones((*front, 1))
            inputs = self._inputs_in_front()
            return inputs if self.bias is None else F.pad(inputs, (0, 1), value=1.0)


@dataclass(frozen=True)
class LinearUse(Use):
    """``F.linear`` on inputs of any number of dimensions."""

    @property
    def feature_dim(self) -> int:
        """The last one."""
        return self.output.dim() - 1

    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """As they are."""
        return values

    def _inputs_in_front(self) -> Tensor:
        return self.inputs


@dataclass(frozen=True)
class ConvolutionUse(Use):
    """``F.conv1d`` or ``F.conv2d``: the same matrix at every position, on the patch around it.

    Attributes:
        kernel: Size of the kernel in each direction.
        stride: Its steps.
        padding: Zeros around the image, or ``"same"`` or ``"valid"``.
        dilation: Distance between the kernel's points.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]

    @property
    def feature_dim(self) -> int:
        """The channels."""
        return 1

    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """Values ``(batch, out, *positions)`` as ``(batch, positions, out)``."""
        return values.flatten(2 + lead).mT

    def _inputs_in_front(self) -> Tensor:
        """Patches, ``(batch, positions, in * kernel)``."""
        image = _padded(self.inputs, self.padding, self.kernel, self.dilation)
        kernel, stride, dilation = self.kernel, self.stride, self.dilation
        if len(kernel) == 1:  # an image of one line
            image, kernel, stride, dilation = image.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
        return F.unfold(image, kernel, dilation=dilation, stride=stride).mT


def _padded(image: Tensor, padding: tuple[int, ...] | str, kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    if padding == "valid":
        return image
    if padding == "same":
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in around]
    else:
        sides = [(int(size), int(size)) for size in padding]
    return F.pad(image, [size for side in reversed(sides) for size in side])  # the last dimension comes first
