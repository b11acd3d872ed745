"""Variational inference: the posterior as an optimisation."""

from knowable.inference.variational import families
from knowable.inference.variational.bottleneck import InformationBottleneck, RandomCode
from knowable.inference.variational.discrete import BernoulliNormal, DiscreteVI
from knowable.inference.variational.flow import FlowPosterior, FlowVI
from knowable.inference.variational.full_rank import FullRankVI
from knowable.inference.variational.function_space.function_space import FunctionSpaceVI
from knowable.inference.variational.function_space.priors import (
    GPyTorchKernel,
    LinearKernel,
    MaternKernel,
    NetworkPrior,
    RBFKernel,
)
from knowable.inference.variational.gradient_variance import gradient_variance
from knowable.inference.variational.low_rank import LowRankVI
from knowable.inference.variational.matrix_normal import MatrixNormalVI
from knowable.inference.variational.mean_field import MeanFieldVI
from knowable.inference.variational.mixture import MixtureVI
from knowable.inference.variational.moment.moment import MomentNormal, MomentVI
from knowable.inference.variational.natural import NaturalVI
from knowable.inference.variational.training_free import TrainingFreeBayes

__all__ = [
    "MeanFieldVI",
    "LowRankVI",
    "FullRankVI",
    "MatrixNormalVI",
    "FlowVI",
    "MixtureVI",
    "NaturalVI",
    "MomentVI",
    "DiscreteVI",
    "FunctionSpaceVI",
    "InformationBottleneck",
    "TrainingFreeBayes",
    "BernoulliNormal",
    "FlowPosterior",
    "GPyTorchKernel",
    "LinearKernel",
    "MaternKernel",
    "MomentNormal",
    "NetworkPrior",
    "RBFKernel",
    "RandomCode",
    "families",
    "gradient_variance",
]
