"""Tests of acquisition functions and their maximum over a space."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.decisions.proposals import ConfidenceBound, Known, Weighted, best_row, build
from knowable.decisions.space import Space
from knowable.decisions.surrogate import fit_surrogate

DOUBLE = {"dtype": torch.float64}
NONE = torch.zeros(0, 2, **DOUBLE)


def told(rows=8, pending=NONE, failed=NONE, feasible=True):
    x = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0), **DOUBLE)
    y = -(x - 0.4).square().sum(1) * 4
    return Known(x, y, torch.full((rows,), feasible), pending, failed)


@pytest.fixture(scope="module")
def posterior():
    known = told()
    return fit_surrogate(known.x, known.y, noise=0.01)


def test_the_confidence_bound_is_the_mean_and_beta_standard_deviations(posterior):
    x = torch.rand(5, 2, **DOUBLE)
    prediction = posterior.predict(x)
    expected = (prediction.mean + 1.5 * prediction.epistemic.sqrt()).flatten()
    found = build("ucb", posterior, [], told(), beta=1.5, seed=0)(x.unsqueeze(1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_with_points_pending_the_bound_is_that_of_the_set(posterior):
    """Beside a point that is pending, the same point adds nothing."""
    x = torch.rand(3, 1, 2, **DOUBLE)
    both = build("ucb", posterior, [], told(pending=x[0]), beta=2.0, seed=0)
    alone = build("ucb", posterior, [], told(pending=torch.full((1, 2), 0.9, **DOUBLE)), beta=2.0, seed=0)
    values = both(x)
    assert (values[1:] >= values[0] - 1e-6).all()
    assert values[0] != alone(x)[0]


def test_the_expected_improvement_is_the_closed_form(posterior):
    """One point, the best mean as the value to improve on; the error is that of 256 quasi-random draws."""
    known = told()
    x = torch.rand(6, 1, 2, **DOUBLE)
    prediction, best = posterior.predict(x.squeeze(1)), posterior.predict(known.x).mean.max()
    mean, std = prediction.mean.flatten(), prediction.epistemic.sqrt().flatten()
    normal, score = torch.distributions.Normal(0.0, 1.0), (mean - best) / std
    expected = std * (score * normal.cdf(score) + normal.log_prob(score).exp())
    found = build("logei", posterior, [], known, beta=2.0, seed=0)(x).exp()
    assert ((found - expected).abs() < 0.1 * std).all()


def test_thompson_sampling_follows_one_function_of_the_posterior(posterior):
    x = torch.rand(4, 1, 2, **DOUBLE)
    draws = posterior.predict_jointly(x.squeeze(1), samples=64).samples.squeeze(-1)
    found = build("thompson", posterior, [], told(), beta=2.0, seed=1)(x)
    assert (draws - found).abs().max(1).values.min() < 1e-9
    other = build("thompson", posterior, [], told(), beta=2.0, seed=2)(x)
    assert not torch.equal(found, other)


def test_constraints_weigh_by_the_probability_that_they_hold(posterior):
    x = torch.rand(4, 1, 2, **DOUBLE)
    moments = posterior.predict(x.squeeze(1))
    log_probability = torch.special.log_ndtr(-moments.mean / moments.epistemic.sqrt()).flatten()
    alone = build("logei", posterior, [], told(), beta=2.0, seed=0)(x)
    found = build("logei", posterior, [posterior], told(), beta=2.0, seed=0)(x)
    torch.testing.assert_close(found, alone + log_probability, rtol=1e-4, atol=1e-4)
    nothing = build("ucb", posterior, [posterior], told(feasible=False), beta=2.0, seed=0)(x)
    torch.testing.assert_close(nothing, log_probability, rtol=1e-4, atol=1e-4)
    bound = build("ucb", posterior, [posterior], told(), beta=2.0, seed=0)(x)
    gain = build("ucb", posterior, [], told(), beta=2.0, seed=0)(x) - told().y.min()
    expected = torch.nn.functional.softplus(gain).log() + log_probability
    torch.testing.assert_close(bound, expected, rtol=1e-4, atol=1e-4)


def test_points_that_failed_keep_others_away(posterior):
    failed = torch.tensor([[0.4, 0.4]], **DOUBLE)
    acquisition = build("ucb", posterior, [], told(failed=failed), beta=2.0, seed=0)
    assert isinstance(acquisition, Weighted)
    near, far = torch.tensor([[[0.4, 0.4]]], **DOUBLE), torch.tensor([[[0.7, 0.7]]], **DOUBLE)
    plain = build("ucb", posterior, [], told(), beta=2.0, seed=0)
    assert acquisition(near) < acquisition(far) and plain(near) > plain(far) - 5.0
    point = best_row(acquisition, Space([(0, 1), (0, 1)]), told(failed=failed), NONE, 0)
    assert (point - failed).norm() > 0.02


class Bowl(torch.nn.Module):
    """The negative squared distance from a target, with slopes that are waves where they have to be climbed."""

    def __init__(self, target):
        super().__init__()
        self.target = torch.tensor(target, **DOUBLE)

    def forward(self, X):
        return -(X - self.target).square().sum((-1, -2))


def test_the_maximum_is_found_in_intervals_and_among_whole_numbers_and_options():
    known = told()
    found = best_row(Bowl([0.123, 0.987]), Space([(0, 1), (0, 1)]), known, NONE, 0)
    torch.testing.assert_close(found, torch.tensor([0.123, 0.987], **DOUBLE), atol=1e-4, rtol=0)
    space = Space([(0, 1), kn.Integer(0, 10), kn.Choice(["a", "b", "c"])])
    x = space.from_uniform(torch.rand(8, 3, **DOUBLE))
    mixed = Known(x, torch.arange(8.0, **DOUBLE), torch.ones(8, dtype=torch.bool), x[:0], x[:0])
    found = best_row(Bowl([0.321, 0.72, 0.1, 0.2, 0.9]), space, mixed, x[:0], 0)
    point = space.decode(found)
    assert point[0] == pytest.approx(0.321, abs=1e-4) and point[1:] == [7, "c"]
    assert space.encode(point) == pytest.approx(found.tolist())


def test_what_is_taken_does_not_come_again():
    space = Space([kn.Integer(0, 3)])
    rows = space.every_row()
    known = Known(rows[:1], torch.zeros(1, **DOUBLE), torch.ones(1, dtype=torch.bool), rows[:0], rows[:0])
    assert best_row(Bowl([0.0]), space, known, rows[:1], 0).tolist() == [1 / 3]
    assert best_row(Bowl([0.0]), space, known, rows, 0) is None


def test_gradients_of_the_bound_exist_where_nothing_is_uncertain(posterior):
    x = told().x[:1].unsqueeze(1).clone().requires_grad_()
    value = ConfidenceBound(kn.botorch.as_model(posterior), 2.0)(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert slope.isfinite().all() and not math.isnan(value.item())
