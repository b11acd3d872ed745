"""Dropout and other networks that are random in themselves."""

from knowable.inference.dropout.augmentation import Augmentation, Flip, InputNoise, Shift
from knowable.inference.dropout.augmented import AugmentedPosterior, TestTimeAugmentation
from knowable.inference.dropout.batch_norm import BatchStatistics, MonteCarloBatchNorm
from knowable.inference.dropout.concrete_dropout import ConcreteDropout
from knowable.inference.dropout.masked_weights import MaskedWeights
from knowable.inference.dropout.mc_dropout import MCDropout

__all__ = [
    "MCDropout",
    "ConcreteDropout",
    "MonteCarloBatchNorm",
    "TestTimeAugmentation",
    "Augmentation",
    "InputNoise",
    "Shift",
    "Flip",
    "MaskedWeights",
    "BatchStatistics",
    "AugmentedPosterior",
]
