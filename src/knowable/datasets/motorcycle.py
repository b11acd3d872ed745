"""Simulated motorcycle accidents: the classic series with noise that changes along the input."""

from __future__ import annotations

import csv
from importlib import resources

import torch

from knowable.datasets.dataset import Dataset

_CITATION = """@article{silverman1985spline,
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
        citation=_CITATION,
    )
