"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational.bottleneck import InformationBottleneck
from knowable.inference.variational.bottleneck_posterior import RandomCode
from knowable.inference.variational.function_priors import (
    GPyTorchKernel,
    LinearKernel,
    MaternKernel,
    NetworkPrior,
    RBFKernel,
)
from knowable.inference.variational.function_space import FunctionSpaceVI
from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.mean_field import MeanFieldVI

__all__ = [
    "MeanFieldVI",
    "gradient_variance",
    "FunctionSpaceVI",
    "RBFKernel",
    "MaternKernel",
    "LinearKernel",
    "GPyTorchKernel",
    "NetworkPrior",
    "InformationBottleneck",
    "RandomCode",
]
