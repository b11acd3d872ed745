from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import knowable as kn
from knowable.inference.variational.mean_field_objective import MeanFieldObjective
from knowable.inference.variational.variational_method import VariationalMethod
from knowable.testing import LinearGaussian


@dataclass(frozen=True, repr=False)
class Plain(VariationalMethod):
    """The least that a variational method says of itself."""

    def objective(self, model, x, size, *, start=None):
        return MeanFieldObjective(model, x, size, initial_scale=self.initial_scale, start=start)


def test_a_method_defines_its_objective_and_gets_the_rest(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    posterior = Plain(epochs=100).fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.DiagonalNormal)
    assert posterior.diagnostics.method == "Plain(epochs=100)" and posterior.seed == seed
    assert {"loss", "kl", "elbo", "expected_log_likelihood"} <= posterior.diagnostics.terms.keys()
    assert posterior.log_evidence.kind == "bound"


def test_start_is_passed_on(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    posterior = Plain(epochs=1, learning_rate=1e-9, start=exact).fit(problem.model(), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-6, atol=1e-6)
    at_mode = Plain(epochs=150, learning_rate=0.1, start="map").fit(problem.model(), problem.data)
    assert (problem.as_flat(at_mode.mean()) - problem.mean).abs().max() < 0.5


@pytest.mark.parametrize(
    "knobs",
    [
        {"draws": 0},
        {"beta": 0.0},
        {"kl_warmup": -1},
        {"epochs": 10, "kl_warmup": 6},
        {"start": "mode"},
        {"start": 3},
        {"initial_scale": 0.0},
        {"families": kn.families.FullRank()},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises(kn.KnowableError, match=list(knobs)[-1]):
        Plain(**knobs)
