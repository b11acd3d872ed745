"""Tests of what the methods share that fit independent normals: their settings, and where they begin."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.inference.variational.gaussian_vi import GaussianVI
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import flat_moments

METHODS = pytest.mark.parametrize("method", [kn.NaturalVI, kn.MomentVI])


@METHODS
def test_fit_may_start_from_another_posterior(seed, method):
    problem = LinearGaussian.make(n=30, seed=seed)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    fitted = method(epochs=1, learning_rate=1e-9, start=exact, initial_scale=0.3)
    loc, std = flat_moments(problem, fitted.fit(problem.model(seed=5), problem.data))
    torch.testing.assert_close(loc, problem.mean, rtol=1e-6, atol=1e-6)
    if method is kn.MomentVI:  # a natural step moves scales by a share of the curvature, whatever the learning rate
        torch.testing.assert_close(std, torch.full_like(std, 0.3), rtol=1e-6, atol=1e-6)


@METHODS
def test_fit_may_start_from_the_mode(method, monkeypatch):
    problem = LinearGaussian.make(n=30)
    settings = {"epochs": 50, "learning_rate": 0.02}
    starts = []
    original = method.objective

    def spy(self, model, x, size, *, start=None):
        starts.append(start)
        return original(self, model, x, size, start=start)

    monkeypatch.setattr(method, "objective", spy)
    method(**settings, start="map").fit(problem.model(), problem.data)
    torch.testing.assert_close(starts[0], kn.MAP(**settings).fit(problem.model(), problem.data).mean())


@METHODS
def test_interrupted_fit_of_the_mode_is_an_interruption(method, monkeypatch):
    problem = LinearGaussian.make(n=30)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("knowable.core.training_run.TrainingRun.epoch_of_steps", interrupted)
    with pytest.raises(KeyboardInterrupt), pytest.warns(kn.Interrupted):
        method(epochs=5, start="map").fit(problem.model(), problem.data)


@METHODS
def test_anything_but_bayes_is_noted(method):
    problem = LinearGaussian.make(n=10)
    cold = method(epochs=1, beta=0.5).fit(problem.model(), problem.data)
    assert cold.diagnostics.notes == ("beta=0.5: the target is not the Bayes posterior (beta=1 is).",)
    assert "beta=0.5" in cold.diagnostics.method
    assert method(epochs=1).fit(problem.model(), problem.data).diagnostics.notes == ()


@METHODS
@pytest.mark.parametrize(
    "knobs",
    [{"beta": 0.0}, {"beta": math.inf}, {"kl_warmup": -1}, {"kl_warmup": 60, "epochs": 100}, {"initial_scale": 0.0},
     {"start": "mode"}, {"epochs": 0}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(method, knobs):
    with pytest.raises(kn.InvalidArgument, match=next(iter(knobs))):
        method(**knobs)


@METHODS
def test_start_of_another_kind_is_refused(method):
    with pytest.raises(kn.InvalidType, match="start must be"):
        method(start=3)


def test_base_has_no_objective_of_its_own():
    with pytest.raises(TypeError, match="abstract"):
        GaussianVI()  # type: ignore[abstract]
