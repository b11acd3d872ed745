"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational.discrete import DiscreteVI
from knowable.inference.variational.discrete_posterior import BernoulliNormal
from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.mean_field import MeanFieldVI

__all__ = ["BernoulliNormal", "DiscreteVI", "MeanFieldVI", "gradient_variance"]
