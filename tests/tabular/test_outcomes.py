"""A guess without inputs."""

import math

import pytest
import torch
from scipy import stats

from knowable.errors import DamagedArtifact, InvalidType
from knowable.evaluation.evaluate import evaluate
from knowable.tabular.fit_report import Outcomes
from tests.interfaces.cases import class_prediction, regression_prediction


def test_numbers_are_guessed_by_a_normal_with_their_moments(generator):
    y = torch.randn(50, generator=generator, dtype=torch.float64) * 3 + 7
    later = torch.randn(20, generator=generator, dtype=torch.float64) * 3 + 7
    scores = evaluate(Outcomes.of(y).guess(regression_prediction(20, generator=generator)), later)
    known = stats.norm(y.mean().item(), y.std(correction=0).item())
    assert scores["nll"] == pytest.approx(-known.logpdf(later.numpy()).mean(), rel=1e-9)
    low, high = known.interval(0.9)
    assert scores["interval_width_90"] == pytest.approx(high - low, rel=1e-6)


def test_classes_are_guessed_by_their_shares_and_none_is_impossible(generator):
    outcomes = Outcomes.of(torch.tensor([0, 0, 0, 1]), 3)
    assert outcomes.counts == (3, 1, 0)
    guess = outcomes.guess(class_prediction(2, generator=generator))
    assert torch.allclose(guess.probs, torch.tensor([4.0, 2.0, 1.0]).double().expand(2, 3) / 7)
    assert guess.log_prob(torch.tensor([2, 0])).tolist() == pytest.approx([math.log(1 / 7), math.log(4 / 7)])


def test_what_is_known_of_outcomes_goes_to_json_and_back():
    for outcomes in (Outcomes(1.5, 0.25), Outcomes.of(torch.tensor([0, 1, 1]), 2)):
        assert Outcomes.from_json(outcomes.to_json()) == outcomes
    with pytest.raises(DamagedArtifact, match="Fit again"):
        Outcomes.from_json({})


def test_something_else_is_refused():
    with pytest.raises(InvalidType, match="numbers or classes"):
        Outcomes().guess([1.0])
