"""What people write first, and what they are told."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

import knowable as kn

NET = nn.Linear(4, 1)
X, Y = torch.randn(50, 4), torch.randn(50, 1)
IMAGES = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3))


def fit(likelihood: kn.Likelihood, net: nn.Module = NET, x: torch.Tensor = X, y: torch.Tensor = Y, **options):
    return kn.MAP(epochs=1).fit(kn.Model(net, likelihood), (x, y), **options)


def images() -> kn.Posterior:
    return fit(kn.Categorical(), IMAGES, torch.randn(30, 1, 8, 8), torch.arange(30) % 3)


CALLS = {
    "one output for classes": (lambda: fit(kn.Categorical(), y=torch.zeros(50).long()), r"has shape \(rows, 1\)"),
    "one output for two": (lambda: fit(kn.HeteroscedasticGaussian()), r"has shape \(rows, 1\)"),
    "one output for three": (lambda: fit(kn.Gaussian(outputs=3)), r"has shape \(rows, 1\)"),
    "one image": (lambda: images().predict(torch.randn(1, 8, 8)), r"x\[None\], of shape \(1, 1, 8, 8\)"),
    "one grey image": (lambda: images().predict(torch.randn(8, 8)), r"x\[None, None\], of shape \(1, 1, 8, 8\)"),
    "no channels": (lambda: images().predict(torch.randn(9, 8, 8)), r"x.unsqueeze\(1\), of shape \(9, 1, 8, 8\)"),
    "one row": (lambda: fit(kn.Gaussian()).predict(X[0]), r"one row. Write x\[None\], of shape \(1, 4\)"),
    "a number for a prior": (lambda: kn.Model(NET, kn.Gaussian(), 2.0), r"Write kn.Normal\(2.0\)"),
    "a device for a method": (lambda: kn.MAP(device="cuda"), r"net.to\(device\)"),
    "a device for a fit": (lambda: fit(kn.Gaussian(), device="cuda"), r"net.to\(device\)"),
    "verbose": (lambda: fit(kn.Gaussian(), verbose=True), "Did you mean 'progress'"),
    "a verbose method": (lambda: kn.MAP(verbose=True), r"progress=True"),
    "a seed for a method": (lambda: kn.MAP(seed=1), r"fit\(model, data, seed=0\)"),
    "no folder": (lambda: kn.load("nosuch"), "There is no folder 'nosuch'"),
    "texts that are all different": (
        lambda: kn.BayesianRegressor().fit(pd.DataFrame({"a": [f"x{k}" for k in range(30)]}), range(30)),
        "Turn texts into numbers or a few categories, or say kinds={'a': 'categorical'}",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_goes_wrong_is_said_in_terms_of_what_was_passed(call: str):
    wrong, words = CALLS[call]
    with pytest.raises(kn.KnowableError, match=words):
        wrong()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MFVI", "MeanFieldVI"), ("mfvi", "MeanFieldVI"), ("BayesByBackprop", "MeanFieldVI"), ("NUTSS", "NUTS")],
)
def test_names_of_other_libraries_lead_to_those_of_this_one(name: str, meant: str):
    with pytest.raises(AttributeError, match=f"Did you mean kn.{meant}?"):
        getattr(kn, name)
    assert not hasattr(kn, "__wrapped__")


def test_every_name_that_is_suggested_is_there():
    from knowable import _nearest

    for name in (
        "BBB",
        "VI",
        "ADVI",
        "FullRankADVI",
        "NormalizingFlowVI",
        "IVON",
        "VOGN",
        "Ensemble",
        "Dropout",
        "LLLA",
    ):
        assert hasattr(kn, _nearest(name).removeprefix(" Did you mean kn.").removesuffix("?"))


def test_large_and_small_numbers_are_readable():
    assert repr(kn.Normal(1e12)) == "Normal(scale=1e12, loc=0.0)"
    assert repr(kn.Normal(0.1)) == "Normal(scale=0.1, loc=0.0)"
    assert repr(kn.Gaussian(1e-12)) == "Gaussian(noise=1e-12, outputs=1)"
    assert repr(kn.MAP(learning_rate=1e12)) == "MAP(learning_rate=1e12)"
    assert repr(kn.StudentTPrior()) == eval(f"repr(kn.{kn.StudentTPrior()!r})")
