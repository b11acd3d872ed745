"""Data: small real sets that ship with the package, and synthetic problems whose truth is known."""

from knowable.datasets.dataset import Dataset, Scaler, Truth
from knowable.datasets.images import LabelledImages, shapes
from knowable.datasets.real import digits, motorcycle
from knowable.datasets.synthetic import blobs, heteroscedastic_sine, linear, sine_with_gap, two_moons

__all__ = [
    # real
    "digits",
    "motorcycle",
    # synthetic, with known truth
    "blobs",
    "heteroscedastic_sine",
    "linear",
    "shapes",
    "sine_with_gap",
    "two_moons",
    # what they return
    "Dataset",
    "LabelledImages",
    "Scaler",
    "Truth",
]
