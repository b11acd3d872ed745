"""Dropout and other networks that are random in themselves."""

from knowable.inference.dropout.augmentation import (
    AugmentedPosterior,
    Flip,
    InputNoise,
    Shift,
    TestTimeAugmentation,
)
from knowable.inference.dropout.batch_norm import BatchStatistics, MonteCarloBatchNorm
from knowable.inference.dropout.masked_weights import MaskedWeights
from knowable.inference.dropout.mc_dropout import ConcreteDropout, MCDropout
from knowable.inference.dropout.noise_dropout import GaussianDropout, VariationalDropout
from knowable.inference.dropout.noisy_units import NoisyUnits
from knowable.inference.dropout.sparse_variational_dropout import NoisyWeights, SparseVariationalDropout
from knowable.inference.dropout.structured_dropout import StructuredDropout

__all__ = [
    "MCDropout",
    "ConcreteDropout",
    "GaussianDropout",
    "VariationalDropout",
    "SparseVariationalDropout",
    "StructuredDropout",
    "MonteCarloBatchNorm",
    "TestTimeAugmentation",
    "InputNoise",
    "Shift",
    "Flip",
    "MaskedWeights",
    "NoisyWeights",
    "NoisyUnits",
    "BatchStatistics",
    "AugmentedPosterior",
]
