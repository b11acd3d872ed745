"""Handwritten digits, 8 by 8 pixels."""

from __future__ import annotations

import csv
from importlib import resources

import torch

from knowable.datasets.dataset import Dataset

FULL_INK = 16.0
"""Each pixel of the original counts the inked cells of a 4 by 4 block."""

_DIGITS_CITATION = """@misc{alpaydin1998digits,
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
        citation=_DIGITS_CITATION,
    )


# --- Simulated motorcycle accidents: the classic series with noise that changes along the input ----------------------

_MOTORCYCLE_CITATION = """@article{silverman1985spline,
  author  = {Silverman, B. W.},
  title   = {Some Aspects of the Spline Smoothing Approach to Non-Parametric Regression Curve Fitting},
  journal = {Journal of the Royal Statistical Society. Series B (Methodological)},
  volume  = {47},
  number  = {1},
  pages   = {1--52},
  year    = {1985},
}"""


def motorcycle() -> Dataset:
    """Head acceleration of a dummy in simulated motorcycle accidents, against time since impact (Silverman, 1985).

    133 measurements: time in milliseconds and acceleration in g, as published. The measurements are almost without
    noise before the impact reaches the head, and very noisy after it; several times occur more than once.

    Example:
        >>> motorcycle()
        Dataset('motorcycle', rows=133, features=1, outcome='head acceleration')
    """
    text = resources.files("knowable.datasets").joinpath("mcycle.csv").read_text(encoding="ascii")
    rows = [(float(row["time_ms"]), float(row["acceleration_g"])) for row in csv.DictReader(text.splitlines())]
    times, accelerations = zip(*rows, strict=True)
    return Dataset(
        name="motorcycle",
        x=torch.tensor(times).unsqueeze(1),
        y=torch.tensor(accelerations),
        x_names=("time after impact",),
        y_name="head acceleration",
        x_units=("ms",),
        y_units="g",
        description=(
            "Head acceleration of a dummy in a series of simulated motorcycle accidents used to test crash helmets. "
            "The noise is small before about 14 ms and large after it."
        ),
        citation=_MOTORCYCLE_CITATION,
    )
