"""Handwritten digits, 8 by 8 pixels."""

from __future__ import annotations

import torch

from knowable.datasets.dataset import Dataset

FULL_INK = 16.0
"""Each pixel of the original counts the inked cells of a 4 by 4 block."""

_CITATION = """@misc{alpaydin1998digits,
  author    = {Alpaydin, E. and Kaynak, C.},
  title     = {Optical Recognition of Handwritten Digits},
  publisher = {UCI Machine Learning Repository},
  year      = {1998},
  doi       = {10.24432/C50P49},
}"""


def digits() -> Dataset:
    """1,797 handwritten digits as 64 pixels each (Alpaydin and Kaynak, 1998), from the copy inside scikit-learn.

    Pixels run row by row from the top left; 0 is paper and 1 is full ink. Nothing is downloaded.

    Example:
        >>> digits()
        Dataset('digits', rows=1797, features=64, classes=10)
    """
    from sklearn.datasets import load_digits  # slow to import, so only here

    pixels, labels = load_digits(return_X_y=True)
    return Dataset(
        name="digits",
        x=torch.as_tensor(pixels, dtype=torch.get_default_dtype()) / FULL_INK,
        y=torch.as_tensor(labels, dtype=torch.long),
        x_names=tuple(f"pixel {row},{column}" for row in range(8) for column in range(8)),
        y_name="digit",
        x_units=("share of full ink",) * 64,
        classes=tuple(str(digit) for digit in range(10)),
        description=(
            "Handwritten digits of 13 people, scanned, reduced to 8 by 8 pixels by counting ink in blocks of 4 by 4."
        ),
        citation=_CITATION,
    )
