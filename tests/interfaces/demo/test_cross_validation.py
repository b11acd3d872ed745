"""Joined predictions are, row by row, what they were."""

import pytest
import torch

from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidArgument
from knowable.interfaces.demo.cross_validation import join
from tests.interfaces.cases import regression_prediction


def test_joined_predictions_keep_every_number_of_every_row(generator):
    parts = [regression_prediction(rows, generator=generator) for rows in (3, 1, 4)]
    y = torch.randn(8, 1, generator=generator)
    joined = join(parts)
    pieces = y.split([3, 1, 4])

    def each(ask):
        return torch.cat([ask(part, piece) for part, piece in zip(parts, pieces, strict=True)])

    assert len(joined) == 8
    torch.testing.assert_close(joined.mean, each(lambda p, _: p.mean))
    torch.testing.assert_close(joined.aleatoric, each(lambda p, _: p.aleatoric))
    torch.testing.assert_close(joined.epistemic, each(lambda p, _: p.epistemic))
    torch.testing.assert_close(joined.log_prob(y), each(lambda p, piece: p.log_prob(piece)))
    torch.testing.assert_close(joined.cdf(y), each(lambda p, piece: p.cdf(piece)))
    torch.testing.assert_close(joined.quantile(0.2), each(lambda p, _: p.quantile(0.2)), rtol=1e-4, atol=1e-4)


def test_joined_draws_have_the_joined_means(generator):
    joined = join([regression_prediction(2, generator=generator) for _ in range(2)])
    draws = joined.draw(20_000, generator=generator)
    standard_error = joined.std / 20_000**0.5
    assert ((draws.mean(0) - joined.mean).abs() < 4.5 * standard_error).all()


def test_variance_integrated_in_closed_form_is_joined_too(generator):
    parts = [regression_prediction(rows, generator=generator) for rows in (2, 3)]
    closed = [RegressionPrediction(p.components, p.log_weights, within=0.5 * p.components.variance) for p in parts]
    torch.testing.assert_close(join(closed).epistemic, torch.cat([p.epistemic for p in closed]))
    with pytest.raises(InvalidArgument, match="closed form"):
        join([closed[0], parts[1]])


def test_predictions_with_different_numbers_of_draws_are_not_joined(generator):
    with pytest.raises(InvalidArgument, match="same number of draws"):
        join([regression_prediction(2, draws=3, generator=generator), regression_prediction(2, draws=4)])
