"""Data that cannot be used: every message says where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from tests.integration.wrong_calls import (
    LABELS,
    Case,
    Recurrent,
    Stream,
    X,
    Y,
    at,
    fit,
    fit_classes,
    frame,
    linear_model,
    refuses,
)

DATA: dict[str, Case] = {
    "no data": (
        lambda: kn.MAP(epochs=1).fit(linear_model(), None),
        kn.InvalidType,
        r"data must be a pair \(x, y\), a Dataset or a DataLoader; got NoneType",
    ),
    "a file name": (lambda: fit("train.csv"), kn.InvalidType, "data must be a pair .*; got str"),
    "x alone": (lambda: fit(X), kn.InvalidType, "data must be a pair .*; got Tensor"),
    "three parts": (lambda: fit((X, Y, Y)), kn.InvalidType, "data must be a pair .*; got 3 items"),
    "a missing value in x": (
        lambda: fit((at(X, 7, torch.nan, 1), Y)),
        kn.InvalidData,
        r"x has 1 missing or infinite value, the first in row 7, column 1 \(counting from 0\)",
    ),
    "an infinite value in x": (
        lambda: fit((at(X, 7, torch.inf), Y)),
        kn.InvalidData,
        "x has 1 missing or infinite value.*row 7, column 0",
    ),
    "an infinite value in y": (
        lambda: fit((X, at(Y, 11, -torch.inf))),
        kn.InvalidData,
        r"y has missing or infinite values in row 11 \(counting from 0\)",
    ),
    "more rows in x": (
        lambda: fit((X, Y[:7])),
        kn.InvalidData,
        r"x and y must have the same number of rows, got x \(20, 2\) and y \(7, 1\)",
    ),
    "no rows": (lambda: fit((X[:0], Y[:0])), kn.InvalidData, r"x is empty: shape \(0, 2\) has no rows"),
    "one number as x": (lambda: fit((3.0, 1.0)), kn.InvalidData, "x must have rows"),
    "one number as y": (lambda: fit((X, 1.0)), kn.InvalidData, r"same number of rows, got x \(20, 2\) and y \(\)"),
    "text in x": (
        lambda: fit((np.array([["a", "b"]] * 20), Y)),
        kn.InvalidType,
        "x must be a tensor, an array or a data frame of numbers, got ndarray",
    ),
    "objects in x": (
        lambda: fit((np.array([[1.0, None]] * 20), Y)),
        kn.InvalidType,
        "x must be .* of numbers, got ndarray: it holds Python objects",
    ),
    "text in y": (lambda: fit((X, ["low", "high"] * 10)), kn.InvalidType, "y must be .* of numbers, got list"),
    "ragged rows": (
        lambda: fit(([[1.0], [1.0, 2.0]], [1.0, 2.0])),
        kn.InvalidType,
        "x must be .* of numbers, got list",
    ),
    "a text column": (
        lambda: fit((frame(height=[1.0] * 20, city=["Ulm"] * 20), Y)),
        kn.InvalidType,
        "x column 'city' holds .*, not numbers. Encode it first or drop it",
    ),
    "a column of categories": (
        lambda: fit((frame(height=[1.0] * 20, city=np.array(["2020-01-01"] * 20, "M8[s]")), Y)),
        kn.InvalidType,
        "x column 'city' holds datetime64",
    ),
    "too few columns": (lambda: fit((X[:, :1], Y)), kn.InvalidData, r"cannot take x of shape \(20, 1\)"),
    "one row without a batch": (lambda: fit((X[0], Y[:2, 0])), kn.InvalidData, r"\(2,\)|one row per row"),
    "too many targets": (
        lambda: fit((X, torch.zeros(20, 3))),
        kn.InvalidData,
        r"y has shape \(20, 3\), but the network's output .* has shape \(20, 1\)",
    ),
    "a label out of range": (
        lambda: fit_classes(y=torch.arange(20) % 4),
        kn.InvalidData,
        r"y must be a whole number from 0 to 2 \(the network has 3 classes\), got 3 in row 3",
    ),
    "a negative label": (
        lambda: fit_classes(y=LABELS - 1),
        kn.InvalidData,
        r"y must be .* from 0 to 2 .*, got -1 in row 0",
    ),
    "a label between two": (
        lambda: fit_classes(y=LABELS + 0.5),
        kn.InvalidData,
        r"y must be a whole number .*, got 0.5 in row 0.*Gaussian\(\)",
    ),
    "one-hot labels": (
        lambda: fit_classes(y=torch.eye(3)[LABELS]),
        kn.InvalidData,
        r"y has shape \(20, 3\).*pass y\.argmax\(1\)",
    ),
    "one output for classes": (
        lambda: fit((X, LABELS), kn.Model(nn.Linear(2, 1), kn.Categorical())),
        kn.InvalidData,
        r"Categorical needs .* shape \(rows, 1\)\. .*Bernoulli\(\)",
    ),
    "two in a yes or no": (
        lambda: fit((X, LABELS), kn.Model(nn.Linear(2, 1), kn.Bernoulli())),
        kn.InvalidData,
        r"y must be 0 or 1, got 2 in row 2.*Categorical\(\)",
    ),
    "a negative count": (
        lambda: fit((X, -torch.ones(20)), kn.Model(nn.Linear(2, 1), kn.Poisson())),
        kn.InvalidData,
        "y must be a whole number, 0 or more, got -1 in row 0",
    ),
    "one output for mean and scale": (
        lambda: fit((X, Y), kn.Model(nn.Linear(2, 1), kn.HeteroscedasticGaussian())),
        kn.InvalidData,
        r"\(rows, 1\)|output",
    ),
    "noise for more outputs than there are": (
        lambda: fit((X, Y), kn.Model(nn.Linear(2, 1), kn.Gaussian(outputs=2))),
        kn.InvalidData,
        r"noise for each of 2 outputs, but the network's output has shape \(rows, 1\)",
    ),
    "a network that returns a tuple": (
        lambda: fit(model=kn.Model(Recurrent(lambda out: (out, None)), kn.Gaussian(0.1))),
        kn.InvalidType,
        r"The network must return one tensor, got tuple with 0, 1. Say which: Model\(..., output=0\)",
    ),
    "a network with the batch second": (
        lambda: fit(model=kn.Model(Recurrent(lambda out: out.T), kn.Gaussian(0.1))),
        kn.InvalidData,
        "one row per row of x: .*batch_first=True",
    ),
    "a network with the batch second, of two outputs": (
        lambda: fit((X, X), model=kn.Model(Recurrent(lambda out: out.expand(-1, 2).T), kn.Gaussian(0.1))),
        kn.InvalidData,
        "one row per row of x",
    ),
    "an iterable dataset": (
        lambda: fit(Stream()),
        kn.InvalidArgument,
        r"number of rows is unknown.* Pass Data\(DataLoader\(\.\.\.\), size=N\)",
    ),
    "a loader of one": (
        lambda: fit(DataLoader(Stream())),
        kn.InvalidArgument,
        r"number of rows is unknown.* Pass Data\(loader, size=N\)",
    ),
    "a loader without a batch": (
        lambda: fit(DataLoader(TensorDataset(X, Y), batch_size=32, drop_last=True)),
        kn.InvalidData,
        "batch",
    ),
    "a loader of inputs alone": (
        lambda: fit(DataLoader(TensorDataset(X))),
        kn.InvalidData,
        r"Each batch of the data must be a pair \(x, y\)",
    ),
    "a wrong size": (
        lambda: fit(kn.Data((X, Y), 19)),
        kn.InvalidArgument,
        "data.size is 19, but its tensors have 20 rows",
    ),
    "a missing value in the validation data": (
        lambda: fit(validation=(at(X, 2, torch.nan), Y)),
        kn.InvalidData,
        "validation.*row 2, column 0|row 2, column 0.*validation",
    ),
    "a share as validation": (lambda: fit(validation=0.1), kn.InvalidType, "validation must be a pair .*; got float"),
}


@pytest.mark.parametrize(("call", "error", "wanted"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_used_are_refused(call, error, wanted):
    refuses(call, error, wanted)


# --- calls that are right -------------------------------------------------------------------------------------------


def test_a_vector_and_a_column_of_targets_are_the_same_and_never_broadcast():
    # broadcast (20,) against (20, 1) would give 400 terms, and the loss another value
    net = nn.Linear(2, 1)
    losses = [
        kn.MAP(epochs=3).fit(kn.Model(net, kn.Gaussian(0.1)), (X, y)).diagnostics.history[-1]["loss"]
        for y in (Y, Y.squeeze(1), Y.squeeze(1).numpy(), Y.squeeze(1).tolist())
    ]
    assert len(set(losses)) == 1
    prediction = kn.MAP(epochs=1).fit(kn.Model(net, kn.Gaussian(0.1)), (X, Y)).predict(X)
    assert prediction.log_prob(Y.squeeze(1)).shape == (20,)
    assert dict(kn.evaluate(prediction, Y)) == dict(kn.evaluate(prediction, Y.squeeze(1)))


def test_a_network_without_an_output_dimension_takes_a_column_of_targets():
    model = kn.Model(Recurrent(lambda out: out.squeeze(1)), kn.Gaussian(0.1))
    prediction = fit(model=model).predict(X)
    assert prediction.mean.shape == Y.shape == (20, 1)
    assert prediction.log_prob(Y).shape == (20,)
