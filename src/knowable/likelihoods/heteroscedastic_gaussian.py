"""The heteroscedastic Gaussian likelihood: the network says how large the noise is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.network.params import Params
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction, align_target, as_numbers, sum_over_event
from knowable.core.support.checks import as_batch
from knowable.errors import InvalidData


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""Regression with normal noise whose size depends on the input (Nix and Weigend, 1994).

    .. math:: p(y \mid f) = \mathcal{N}(y \mid f_{1:d},\ \exp(f_{d+1:2d})^2)

    The last dimension of the network's output is :math:`2d`: first the :math:`d` means, then the :math:`d` logarithms
    of the standard deviation. Of images, move them there: ``(batch, height, width, 2)`` is ``output.movedim(1, -1)`` of
    a convolution with two channels.
    """

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        y = y if y.is_floating_point() else y.to(output.dtype)
        return align_target(y, (*output.shape[1:-1], output.shape[-1] // 2))

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return check_halves(y, output, "HeteroscedasticGaussian", "means", name=name)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        mean, log_scale = output.chunk(2, dim=-1)
        squares = ((y - mean) * torch.exp(-log_scale)).square()
        return sum_over_event(-0.5 * squares - log_scale - 0.5 * math.log(2 * math.pi))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        mean, log_scale = outputs.chunk(2, dim=-1)
        return RegressionPrediction(NormalComponents(mean, log_scale.exp()), log_weights)

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        """1 / scale² of the means and 2 of the log scales, which do not inform about each other."""
        _, log_scale = output.chunk(2, dim=-1)
        return DiagonalInformation(torch.cat([torch.exp(-2.0 * log_scale), torch.full_like(log_scale, 2.0)], dim=-1))


def check_halves(y: Tensor, output: Tensor, likelihood: str, first: str, *, name: str) -> Tensor:
    """Return ``y`` with a number for each pair in the last dimension of ``output``, or raise saying what is wrong."""
    image = " Of images both are in the last dimension: return output.movedim(1, -1)." if output.dim() == 4 else ""
    if output.dim() < 2 or output.shape[-1] % 2:
        raise InvalidData(
            f"{likelihood} needs a network whose last dimension is even ({first}, then log scales), but its output has "
            f"shape {as_batch(output.shape)}. For d targets give the last layer 2 * d outputs.{image}"
        )
    trailing = (*output.shape[1:-1], output.shape[-1] // 2)
    try:
        y = align_target(y, trailing, name=name)
    except InvalidData as error:
        raise InvalidData(f"{error}{image}") from None
    return as_numbers(y, output, trailing, name=name)
