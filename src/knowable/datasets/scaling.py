"""Standardised units and the way back, for data and for predictive distributions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.affine_prediction import restored
from knowable.core.prediction import RegressionPrediction
from knowable.datasets.dataset import Dataset
from knowable.errors import InvalidData


@dataclass(frozen=True, eq=False)
class Scaler:
    r"""The affine maps :math:`x' = (x - m_x) / s_x` and :math:`y' = (y - m_y) / s_y`.

    Attributes:
        x_mean: Mean of each feature, ``(features,)``.
        x_scale: Standard deviation of each feature, 1 where a feature is constant, ``(features,)``.
        y_mean: Mean of the outcome; 0 for classes, which are not scaled.
        y_scale: Standard deviation of the outcome; 1 for classes or a constant outcome.
    """

    x_mean: Tensor
    x_scale: Tensor
    y_mean: float = 0.0
    y_scale: float = 1.0

    @classmethod
    def of(cls, data: Dataset) -> Scaler:
        """Measure means and standard deviations (divided by n) on ``data``."""
        if len(data) == 0:
            raise InvalidData("Cannot standardise a data set without rows.")
        x_mean, x_scale = data.x.mean(0), data.x.std(0, correction=0)
        x_scale = torch.where(_varies(x_scale, x_mean), x_scale, torch.ones_like(x_scale))
        if data.classes:
            return cls(x_mean, x_scale)
        y_mean, y_scale = data.y.mean(), data.y.std(correction=0)
        return cls(x_mean, x_scale, y_mean.item(), y_scale.item() if _varies(y_scale, y_mean) else 1.0)

    def apply(self, data: Dataset) -> Dataset:
        """``data`` in standardised units; its truth, stated in original units, is dropped."""
        return replace(data, x=self.scale_x(data.x), y=self.scale_y(data.y), truth=None)

    def scale_x(self, x: Tensor) -> Tensor:
        """Inputs in standardised units."""
        return (x - self.x_mean) / self.x_scale

    def restore_x(self, x: Tensor) -> Tensor:
        """Inputs back in original units."""
        return x * self.x_scale + self.x_mean

    def scale_y(self, y: Tensor) -> Tensor:
        """Outcomes in standardised units (class labels come back untouched)."""
        return (y - self.y_mean) / self.y_scale if y.is_floating_point() else y

    def restore_y(self, y: Tensor) -> Tensor:
        """Outcomes back in original units (class labels come back untouched)."""
        return y * self.y_scale + self.y_mean if y.is_floating_point() else y

    def restore(self, prediction: RegressionPrediction) -> RegressionPrediction:
        """The predictive distribution of the outcome in its original units.

        Exact, not a change of two moments: densities gain the Jacobian 1 / s_y and every quantile moves with the map.
        """
        return restored(prediction, self.y_mean, self.y_scale)


def _varies(scale: Tensor, mean: Tensor) -> Tensor:
    """Whether a spread is more than the rounding error of the values it was measured on."""
    return scale > 10 * torch.finfo(scale.dtype).eps * mean.abs()
