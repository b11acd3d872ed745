"""A normalising flow: a standard normal, pushed through invertible layers and then scaled and moved to its place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from knowable.core.flow_layers import Bijection, PlanarLayer
from knowable.core.planar_stack import through_planes


class NormalisingFlow(nn.Module):
    r"""The distribution of :math:`\theta = m + s \odot f_L(\cdots f_1(\epsilon))`, with ε standard normal.

    .. math:: \log q(\theta) = \log N(\epsilon \mid 0, I) - \sum_l \log\det f_l - \sum_d \log s_d

    The layers act on numbers of about size one, whatever the weights' own scale is. Without layers it is a mean-field
    normal, and with new ones too: they begin as the identity.

    Args:
        loc: m, ``(D,)``.
        scale: s, ``(D,)``.
        layers: The maps, first to last.
    """

    def __init__(self, loc: Tensor, scale: Tensor, layers: Sequence[Bijection]):
        super().__init__()
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(scale.detach().log())
        self.layers: Sequence[Bijection] = nn.ModuleList(layers)  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Length of the vectors, D."""
        return len(self.loc)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(n, D)`` made of standard normal ``noise`` ``(n, D)``, and their log densities ``(n,)``."""
        values, log_det = noise, noise.new_zeros(())
        for layer in self.layers:
            values, change = layer(values)
            log_det = log_det + change
        return self._placed(noise, values, log_det)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same as calling it, in fewer passes over memory where there are; its gradient has no further one."""
        planes = [layer for layer in self.layers if isinstance(layer, PlanarLayer)]
        if not planes or len(planes) < len(self.layers):
            return self(noise)
        return self._placed(noise, *through_planes(noise, planes))

    def _placed(self, noise: Tensor, values: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        """Draws at their own place and scale, and their log densities."""
        placed = torch.addcmul(self.loc, values, self.log_scale.exp())
        return placed, _standard_normal(noise) - log_det - self.log_scale.sum()

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The noise ``(n, D)`` that ``values`` ``(n, D)`` are made of, and their log densities ``(n,)``."""
        noise, log_det = (values - self.loc) * (-self.log_scale).exp(), self.log_scale.sum()
        for layer in reversed(self.layers):
            noise, change = layer.inverse(noise)
            log_det = log_det + change
        return noise, _standard_normal(noise) - log_det


def _standard_normal(noise: Tensor) -> Tensor:
    """Log density of each row."""
    return -0.5 * noise.square().sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
