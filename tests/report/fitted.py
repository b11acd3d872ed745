"""Fits with known answers, for the tests of the report of a run."""

import pandas
import torch
from torch import nn

import knowable as kn
from knowable.registry import find_method
from knowable.report.fit_report import FittedTable, Rows
from knowable.report.quality import Outcomes

SLOPES, NOISE = torch.tensor([2.0, -1.0, 0.0]), 0.5


def linear_fit(seed=0, rows=160, **changes):
    """Exact linear regression on three inputs, of which the last says nothing; the fourth quarter is held out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = x @ SLOPES.double() + NOISE * torch.randn(rows, generator=generator, dtype=torch.float64)
    model = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(noise=NOISE), kn.Normal(10.0))
    cut = 3 * rows // 4
    posterior = kn.ExactLinear().fit(model, (x[:cut], y[:cut]))
    frame = pandas.DataFrame({name: x[:, place].numpy() for place, name in enumerate("abc")})
    settings = {
        "name": "lines.csv",
        "target": "height",
        "classes": (),
        "kinds": dict.fromkeys("abc", "numeric"),
        "predict": lambda part: posterior.predict(encode(part)),
        "encode": encode,
        "posterior": posterior,
        "method": find_method("exact_linear"),
        "settings": "ExactLinear()",
        "why": "",
        "seed": 0,
        "seconds": 0.1,
        "trained_on": cut,
        "outcomes": Outcomes.of(y[:cut]),
        "table": frame.assign(height=y.numpy()),
        "held_out": Rows(frame.iloc[cut:].reset_index(drop=True), y[cut:], tuple(range(cut + 2, rows + 2))),
    }
    return FittedTable(**{**settings, **changes})


def class_fit(seed=0, rows=240, **changes):
    """A variational fit of a linear classifier on a number and a category."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randn(rows, generator=generator)
    group = torch.randint(3, (rows,), generator=generator)
    y = ((number + (group == 2) + 0.3 * torch.randn(rows, generator=generator)) > 0.3).long()
    frame = pandas.DataFrame({"number": number.numpy(), "group": [("one", "two", "three")[g] for g in group]})
    model = kn.Model(nn.Linear(4, 2), kn.Categorical(), kn.Normal(3.0))
    cut = 3 * rows // 4
    posterior = kn.MeanFieldVI(epochs=150).fit(model, (encode_groups(frame.iloc[:cut]), y[:cut]), progress=False)
    settings = {
        "name": "groups.csv",
        "target": "side",
        "classes": ("left", "right"),
        "kinds": {"number": "numeric", "group": "categorical"},
        "predict": lambda part: posterior.predict(encode_groups(part)),
        "encode": encode_groups,
        "posterior": posterior,
        "method": find_method("mean_field_vi"),
        "settings": "MeanFieldVI(epochs=150)",
        "why": "MeanFieldVI was chosen for you: it is quick.",
        "seed": 0,
        "seconds": 0.1,
        "trained_on": cut,
        "outcomes": Outcomes.of(y[:cut], 2),
        "table": frame.assign(side=[("left", "right")[label] for label in y]),
        "held_out": Rows(frame.iloc[cut:].reset_index(drop=True), y[cut:], tuple(range(cut + 2, rows + 2))),
    }
    return FittedTable(**{**settings, **changes})


def encode(frame):
    """Three numbers as they are."""
    return torch.from_numpy(frame[list("abc")].to_numpy(dtype=float).copy())


def encode_groups(frame):
    """A number, and one column for each group."""
    number = torch.tensor(frame["number"].to_numpy(dtype=float).copy(), dtype=torch.float32)
    groups = [torch.tensor((frame["group"] == name).to_numpy().copy()).float() for name in ("one", "two", "three")]
    return torch.stack([number, *groups], 1)
