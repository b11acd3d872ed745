"""Data: small real sets that ship with the package, and synthetic problems whose truth is known."""

from knowable.datasets.dataset import Dataset, Truth
from knowable.datasets.digits import digits
from knowable.datasets.motorcycle import motorcycle
from knowable.datasets.scaling import Scaler
from knowable.datasets.synthetic import blobs, heteroscedastic_sine, linear, sine_with_gap, two_moons

__all__ = [
    # real
    "digits",
    "motorcycle",
    # synthetic, with known truth
    "blobs",
    "heteroscedastic_sine",
    "linear",
    "sine_with_gap",
    "two_moons",
    # what they return
    "Dataset",
    "Scaler",
    "Truth",
]
