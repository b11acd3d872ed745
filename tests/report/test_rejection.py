from __future__ import annotations

import torch

from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.evaluation.risk_control import rejection_rule
from knowable.likelihoods.categorical import CategoricalPrediction
from knowable.report.rejection import DELTA, RISKS, rejection_listing


def prediction_of_labels(rows: int, generator: torch.Generator) -> tuple[CategoricalPrediction, torch.Tensor]:
    """Labels that are right as often as their probability says."""
    p = 0.5 + 0.5 * torch.rand(rows, generator=generator, dtype=torch.float64) ** 0.2
    probs = torch.stack([p, 1 - p], 1)
    y = (torch.rand(rows, generator=generator, dtype=torch.float64) > p).long()
    return CategoricalPrediction(probs.log()[None], torch.zeros(1, dtype=torch.float64)), y


def test_every_line_is_the_rule_for_its_risk(generator: torch.Generator):
    prediction, y = prediction_of_labels(2000, generator)
    listing = rejection_listing(prediction, y)
    assert [row[0] for row in listing.rows] == ["10%", "5%", "2%", "1%"]
    for risk, row in zip(RISKS, listing.rows, strict=True):
        rule = rejection_rule(prediction.total, prediction.labels != y, risk, DELTA)
        expected = f"{rule.threshold:.3g} nats" if rule.certified else "reject all"
        assert row[1:3] == (expected, f"{rule.accepted:.0%}")
    assert listing.rows[0][1].endswith("nats")
    assert "2,000 held-out ones with probability 95%" in listing.note


def test_a_risk_that_needs_more_rows_says_so(generator: torch.Generator):
    prediction, y = prediction_of_labels(100, generator)
    assert rejection_listing(prediction, y).rows[-1][1] == "needs 299 held-out rows"
    assert rejection_listing(prediction, torch.zeros_like(y)).rows[0][1] != "needs 29 held-out rows"
    assert rejection_listing(prediction, 1 - prediction.labels).rows[0][1] == "reject all"


def test_numbers_are_accepted_up_to_a_standard_deviation(generator: torch.Generator):
    std = 0.1 + torch.rand(1500, 1, generator=generator, dtype=torch.float64)
    y = std * torch.randn(1500, 1, generator=generator, dtype=torch.float64)
    weight = torch.zeros(1, dtype=torch.float64)
    prediction = RegressionPrediction(NormalComponents(torch.zeros_like(std)[None], std[None]), weight)
    listing = rejection_listing(prediction, y, scale=2.0)
    assert [row[0] for row in listing.rows] == ["2", "1", "0.5"]
    for row, limit in zip(listing.rows, (2.0, 1.0, 0.5), strict=True):
        rule = rejection_rule(std[:, 0], (y.abs() > limit)[:, 0], 0.1, DELTA)
        assert row[1] == f"{rule.threshold:.3g}"
    several = RegressionPrediction(NormalComponents(torch.zeros(1, 5, 2), torch.ones(1, 5, 2)), torch.zeros(1))
    assert rejection_listing(several, torch.zeros(5, 2)) is None
