"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.mean_field import MeanFieldVI

__all__ = ["MeanFieldVI", "gradient_variance"]
