"""Warnings of fits are kept, an interrupt stops everything, and other randomness is left alone."""

import warnings

import pytest
import torch

import knowable as kn
from knowable.datasets import linear
from knowable.interfaces.demo.fits import Fits


class Warner:
    """A method that fits nothing and warns."""

    def __init__(self, *categories):
        self.categories = categories

    def fit(self, model, data, *, seed, progress):
        for category in self.categories:
            warnings.warn(f"told {category.__name__}", category, stacklevel=2)
        return kn.MaximumLikelihood(epochs=1).fit(model, data, seed=seed, progress=False)


def model():
    return kn.Model(torch.nn.Linear(5, 1), kn.Gaussian(noise=1.0))


def test_warnings_are_said_once_for_each_method():
    fits, data = Fits("Problem"), linear(20)
    fits.fit("loud", Warner(kn.ConvergenceWarning, kn.ConvergenceWarning), model, data, seed=0)
    fits.fit("quiet", Warner(), model, data, seed=0)
    assert [(notice.source, notice.text) for notice in fits.notices()] == [("Problem, loud", "told ConvergenceWarning")]


def test_a_fit_that_did_not_converge_is_told_even_if_it_did_not_warn():
    data, fits = linear(200, noise=0.1), Fits("Problem")
    posterior = fits.fit("hurried", kn.MaximumLikelihood(epochs=1200, learning_rate=1e-4), model, data, seed=0)
    assert posterior.diagnostics.converged is False
    assert [notice.text for notice in fits.notices()] == ["The fit did not converge: ended after 1200 steps."]


def test_warnings_of_others_are_passed_on():
    fits = Fits("Problem")
    with pytest.warns(FutureWarning, match="told FutureWarning"):
        fits.fit("m", Warner(FutureWarning), model, linear(20), seed=0)
    assert fits.notices() == []


def test_an_interrupted_fit_interrupts_the_demonstration():
    with pytest.raises(KeyboardInterrupt):
        Fits("Problem").fit("m", Warner(kn.Interrupted), model, linear(20), seed=0)


def test_the_same_seed_gives_the_same_fit_and_global_randomness_is_untouched():
    fits, data = Fits("Problem"), linear(20)
    before = torch.get_rng_state()
    first, second, other = (
        fits.fit("m", kn.MAP(epochs=5), model, data, seed=seed).mean()["weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_fits_are_listed_with_their_evidence():
    fits, data = Fits("Problem"), linear(20)
    fits.fit("m", kn.MAP(epochs=5), model, data, seed=0)
    fits.fit("exact", kn.ExactLinear(), model, data, seed=0)
    rows = fits.listing().rows
    assert rows[0] == ("m", "unknown", "ended after 5 steps", "none")
    assert rows[1][1] == "yes" and rows[1][3].endswith("(exact)")
