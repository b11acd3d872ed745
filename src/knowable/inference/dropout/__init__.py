"""Dropout and other networks that are random in themselves."""

from knowable.inference.dropout.augmentation import Augmentation, Flip, InputNoise, Shift
from knowable.inference.dropout.augmented import AugmentedPosterior, TestTimeAugmentation
from knowable.inference.dropout.batch_norm import BatchStatistics, MonteCarloBatchNorm
from knowable.inference.dropout.concrete_dropout import ConcreteDropout
from knowable.inference.dropout.gaussian_dropout import GaussianDropout
from knowable.inference.dropout.masked_weights import MaskedWeights
from knowable.inference.dropout.mc_dropout import MCDropout
from knowable.inference.dropout.noisy_weights import NoisyWeights
from knowable.inference.dropout.sparse_variational_dropout import SparseVariationalDropout
from knowable.inference.dropout.variational_dropout import VariationalDropout

__all__ = [
    "MCDropout",
    "ConcreteDropout",
    "GaussianDropout",
    "VariationalDropout",
    "SparseVariationalDropout",
    "MonteCarloBatchNorm",
    "TestTimeAugmentation",
    "Augmentation",
    "InputNoise",
    "Shift",
    "Flip",
    "MaskedWeights",
    "NoisyWeights",
    "BatchStatistics",
    "AugmentedPosterior",
]
