"""Fits with known answers, for the tests of the report of a run."""

import dataclasses

import pandas
import torch
from torch import nn

import knowable as kn
from knowable.tabular.classifier import BayesianClassifier
from knowable.tabular.fit_report import FittedRun, Outcomes
from knowable.tabular.regressor import BayesianRegressor

SLOPES, NOISE = torch.tensor([2.0, -1.0, 0.0]), 0.5


def linear_fit(seed=0, rows=160, noise=0.2, **changes):
    """Exact linear regression on three inputs, of which the last says nothing; the fourth quarter is held out.

    ``noise`` is that of the model, for standardised targets.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = x @ SLOPES.double() + NOISE * torch.randn(rows, generator=generator, dtype=torch.float64)
    frame = pandas.DataFrame({name: x[:, place].numpy() for place, name in enumerate("abc")})
    estimator = BayesianRegressor(
        kn.ExactLinear(), likelihood=kn.Gaussian(noise=noise), prior=kn.Normal(10.0), random_state=0
    )
    return _run(estimator, frame, "height", y.numpy(), y, "lines.csv", changes)


def class_fit(seed=0, rows=240, **changes):
    """A variational fit of a linear classifier on a number and a category."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randn(rows, generator=generator)
    group = torch.randint(3, (rows,), generator=generator)
    y = ((number + (group == 2) + 0.3 * torch.randn(rows, generator=generator)) > 0.3).long()
    frame = pandas.DataFrame({"number": number.double().numpy(), "group": [("one", "two", "three")[g] for g in group]})
    estimator = BayesianClassifier(kn.MeanFieldVI(epochs=150), network=nn.Linear, prior=kn.Normal(3.0), random_state=0)
    labels = [("left", "right")[label] for label in y]
    return _run(estimator, frame, "side", labels, y, "groups.csv", changes)


def _run(estimator, frame, target, outcomes, y, data, changes):
    """The estimator fitted to the first three quarters of the rows, with the others to score."""
    cut = 3 * len(frame) // 4
    table = frame.assign(**{target: outcomes})
    estimator.fit(frame.iloc[:cut], table[target].iloc[:cut])
    run = FittedRun(
        estimator,
        data=data,
        table=table,
        inputs=frame.iloc[cut:].reset_index(drop=True),
        y=y[cut:],
        lines=tuple(range(cut + 2, len(frame) + 2)),
        outcomes=Outcomes.of(y[:cut], 2 if target == "side" else 0),
        seconds=0.1,
    )
    return dataclasses.replace(run, **changes)
