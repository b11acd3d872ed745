"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.mean_field import MeanFieldVI
from knowable.inference.variational.moment import MomentVI
from knowable.inference.variational.moment_posterior import MomentNormal
from knowable.inference.variational.natural import NaturalVI

__all__ = ["MeanFieldVI", "MomentNormal", "MomentVI", "NaturalVI", "gradient_variance"]
