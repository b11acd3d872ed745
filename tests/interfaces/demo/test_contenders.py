"""Fits are watched: their warnings are kept, an interrupt stops everything, and other randomness is left alone."""

import warnings

import pytest
import torch

import knowable as kn
from knowable.datasets import linear
from knowable.interfaces.demo.contenders import Contender, Watch


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


def test_warnings_are_said_once_with_their_count():
    watch, data = Watch("Problem"), linear(20)
    for _ in range(3):
        watch.fit(Contender("loud", Warner(kn.ConvergenceWarning, kn.ConvergenceWarning), model), data, seed=0)
    watch.fit(Contender("quiet", Warner(), model), data, seed=0)
    watch.fit(Contender("once", Warner(kn.KnowableWarning), model), data, seed=0)
    assert [(notice.source, notice.text) for notice in watch.notices()] == [
        ("Problem, loud", "told ConvergenceWarning (in 3 of 3 fits)"),
        ("Problem, once", "told KnowableWarning"),
    ]


def test_a_fit_that_had_not_settled_is_told_even_if_it_did_not_warn():
    data, watch = linear(200, noise=0.1), Watch("Problem")
    hurried = Contender("hurried", kn.MaximumLikelihood(epochs=1200, learning_rate=1e-4), model)
    posterior = watch.fit(hurried, data, seed=0)
    assert posterior.diagnostics.converged is False
    assert [notice.text for notice in watch.notices()] == ["The objective had not settled: ended after 1200 steps."]


def test_warnings_of_others_are_passed_on():
    watch = Watch("Problem")
    with pytest.warns(FutureWarning, match="told FutureWarning"):
        watch.fit(Contender("m", Warner(FutureWarning), model), linear(20), seed=0)
    assert watch.notices() == []


def test_an_interrupted_fit_interrupts_the_demonstration():
    with pytest.raises(KeyboardInterrupt):
        Watch("Problem").fit(Contender("m", Warner(kn.Interrupted), model), linear(20), seed=0)


def test_the_same_seed_gives_the_same_fit_and_global_randomness_is_untouched():
    watch, data = Watch("Problem"), linear(20)
    contender = Contender("m", kn.MAP(epochs=5), model)
    before = torch.get_rng_state()
    first, second, other = (watch.fit(contender, data, seed=seed).mean()["weight"] for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_times_are_averaged_and_fits_listed():
    watch, data = Watch("Problem"), linear(20)
    contender = Contender("m", kn.MAP(epochs=5), model)
    posteriors = [watch.fit(contender, data, seed=0) for _ in range(2)]
    expected = sum(each.diagnostics.seconds for each in posteriors) / 2
    assert watch.mean_seconds("m") == pytest.approx(expected)
    exact = watch.fit(Contender("exact", kn.ExactLinear(), model), data, seed=0)
    rows = watch.listing({"m": posteriors[0], "exact": exact}).rows
    assert rows[0] == ("m", "cannot be told", "ended after 5 steps", "none")
    assert rows[1][1] == "yes" and rows[1][3].endswith("(exact)")
