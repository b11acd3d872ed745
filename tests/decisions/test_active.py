"""Tests of the active learner: what it chooses, what it keeps, and that nothing labelled is lost."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.decisions.active import ACQUISITIONS, Round

QUICK = kn.Laplace(structure="full", epochs=30)


def classes(seed=0, rows=60):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 0] > 1).long()


def class_model():
    torch.manual_seed(0)
    return kn.Model(nn.Linear(2, 3), kn.Categorical())


def numbers(seed=0, rows=40):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)


def number_model():
    return kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(noise=0.5))


@pytest.fixture(scope="module")
def taught():
    """A learner that knows ten labels; each test changes how it chooses alone."""
    x, y = classes()
    learner = kn.ActiveLearner(class_model(), QUICK, x, test=(x, y))
    learner.label(range(10), y[:10])
    _ = learner.posterior
    return learner


@pytest.mark.parametrize("acquisition", [a for a in ACQUISITIONS if a != "variance_reduction"])
def test_every_acquisition_chooses_rows_that_have_no_label(taught, acquisition):
    taught.acquisition = acquisition
    chosen = taught.query(5).tolist()
    assert len(set(chosen)) == 5 and not set(chosen) & set(range(10))
    assert taught.query(5).tolist() == chosen


def test_bald_asks_for_the_rows_of_most_mutual_information(taught):
    taught.acquisition = "bald"
    prediction = taught.posterior.predict_jointly(taught.pool, samples=100)
    expected = prediction.epistemic.clone()
    expected[:10] = -1.0
    assert taught.query(1).item() == int(expected.argmax())


def test_a_function_may_choose(taught):
    taught.acquisition = lambda prediction: prediction.probs[:, 2]
    chosen = taught.query(3)
    probs = taught.posterior.predict_jointly(taught.pool, samples=100).probs[:, 2]
    probs[:10] = -1.0
    assert chosen.tolist() == probs.topk(3).indices.tolist()
    taught.acquisition = lambda prediction: prediction.probs
    with pytest.raises(kn.InvalidData, match="one number for each of 50 rows"):
        taught.query()


def test_numbers_are_asked_where_their_closed_form_says():
    """For a linear model the variance of the function is x' S x, and the best row for others has a closed form."""
    x, y = numbers()
    learner = kn.ActiveLearner(number_model(), kn.ExactLinear(), x, "variance", samples=4_000)
    learner.label(range(5), y[:5])
    features = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)
    precision = torch.eye(4, dtype=torch.float64) + features[:5].T @ features[:5] / 0.25
    covariance = precision.inverse()
    variance = (features @ covariance * features).sum(1)
    variance[:5] = -1.0
    best = variance.argmax()
    assert variance[learner.query()] > 0.9 * variance[best]
    learner.acquisition = "variance_reduction"
    cross = features @ covariance @ features.T
    gain = cross.square().mean(1) / (cross.diagonal() + 0.25)
    gain[:5] = -1.0
    assert gain[learner.query()] > 0.85 * gain.max()
    learner.acquisition = "batch_bald"
    assert len(set(learner.query(4).tolist())) == 4


def test_joint_draws_of_a_closed_form_posterior_go_together_as_its_functions_do():
    x, y = numbers()
    posterior = kn.ExactLinear().fit(number_model(), (x[:5], y[:5]))
    draws = posterior.predict_jointly(x, samples=20_000).samples
    found = torch.cov(draws.T)
    features = torch.cat([x, torch.ones(40, 1, dtype=torch.float64)], 1)
    order = posterior.normal.layout.flatten(
        {"weight": torch.arange(3.0).view(1, 3), "bias": torch.tensor([3.0])}
    ).long()
    cross = features[:, order] @ posterior.covariance @ features[:, order].T
    scale = torch.outer(cross.diagonal(), cross.diagonal()).sqrt()
    assert ((found - cross).abs() < 5 * scale * math.sqrt(2 / 20_000)).all()


def test_run_asks_an_oracle_until_the_budget_and_scores_every_fit():
    x, y = classes()
    asked = []

    def oracle(rows):
        asked.append(rows)
        return y[rows]

    learner = kn.ActiveLearner(class_model(), QUICK, x, "margin", test=(x, y))
    posterior = learner.run(oracle, 14, batch=5)
    assert [len(rows) for rows in asked] == [5, 5, 4]
    assert [each.labels for each in learner.history] == [5, 10, 14]
    assert learner.history[-1].score == kn.metrics.accuracy(posterior.predict(x, samples=100), y)
    assert math.isnan(learner.history[0].agreement) and 0 <= learner.history[1].agreement <= 1


def test_labels_to_reach_a_score_are_interpolated_and_compared():
    x, y = classes()
    fast, slow = (kn.ActiveLearner(class_model(), QUICK, x, test=(x, y)) for _ in range(2))
    fast.history = [Round(10, 0.5, 0.9), Round(20, 0.9, 0.995), Round(30, 0.92, 0.999)]
    slow.history = [Round(10, 0.5, 0.9), Round(20, 0.7, 0.995), Round(40, 0.9, 0.8)]
    assert fast.labels_to_reach(0.7) == pytest.approx(15)
    assert fast.labels_to_reach(0.4) == 10 and fast.labels_to_reach(0.95) == math.inf
    assert fast.labels_saved(slow) == pytest.approx(40 - 20)
    assert not fast.settled
    fast.history.append(Round(40, 0.92, 0.992))
    assert fast.settled
    assert len(fast.plot(slow).axes[0].lines) == 2


def test_run_ends_when_predictions_have_settled():
    x, y = classes()
    learner = kn.ActiveLearner(class_model(), QUICK, x)
    learner.history = [Round(k, math.nan, 1.0) for k in (1, 2, 3)]
    learner.label([0], y[:1])
    learner.run(y, 30, until="settled")
    assert len(learner.indices) == 1


@pytest.mark.parametrize("kill_after", [1, 2])
def test_a_run_taken_up_again_is_the_run_that_was_not_stopped(tmp_path, kill_after):
    x, y = classes()

    def learner(folder):
        return kn.ActiveLearner(class_model(), QUICK, x, "batch_bald", test=(x, y), checkpoint=folder)

    whole = learner(None)
    whole.run(y, 12, batch=4)
    calls = []

    def stopped(rows):
        calls.append(rows)
        if len(calls) > kill_after:
            raise KeyboardInterrupt
        return y[rows]

    with pytest.raises(KeyboardInterrupt):
        learner(tmp_path).run(stopped, 12, batch=4)
    again = learner(tmp_path)
    assert len(again.indices) == 4 * kill_after
    again.run(y, 12, batch=4)
    assert again.indices == whole.indices
    assert [each.score for each in again.history] == [each.score for each in whole.history]
    assert again.history[-1] == whole.history[-1]


def test_another_run_in_a_checkpoint_is_refused(tmp_path):
    x, y = classes()
    kn.ActiveLearner(class_model(), QUICK, x, checkpoint=tmp_path).label([0, 1], y[:2])
    with pytest.raises(kn.InvalidArgument, match="belongs to another run: acquisition"):
        kn.ActiveLearner(class_model(), QUICK, x, "random", checkpoint=tmp_path)


def test_what_cannot_be_labelled_is_refused_and_nothing_is_lost():
    x, y = classes()
    learner = kn.ActiveLearner(class_model(), QUICK, x)
    with pytest.raises(kn.InvalidArgument, match="No row has a label yet"):
        _ = learner.posterior
    assert len(learner.query(3)) == 3
    learner.label([3, 4], y[3:5])
    with pytest.raises(kn.InvalidData, match="from 0 to 2"):
        learner.label([5], [7])
    with pytest.raises(kn.InvalidArgument, match="Row 4 of the pool has a label already"):
        learner.label([6, 4], y[[6, 4]])
    with pytest.raises(kn.InvalidArgument, match="from 0 to 59"):
        learner.label([60], [0])
    with pytest.raises(kn.InvalidArgument, match="at most the 58 rows"):
        learner.query(59)
    with pytest.raises(kn.InvalidArgument, match="acquisition"):
        kn.ActiveLearner(class_model(), QUICK, x, "bold")
    with pytest.raises(kn.InvalidData, match="59 targets, the pool 60 rows"):
        learner.run(y[:59], 10)
    assert learner.indices == [3, 4]
    learner.acquisition = "variance_reduction"
    with pytest.raises(kn.Unsupported, match="not for labels"):
        learner.query()
    x, y = numbers()
    of_numbers = kn.ActiveLearner(number_model(), kn.ExactLinear(), x, "margin")
    of_numbers.label([0, 1], y[:2])
    with pytest.raises(kn.Unsupported, match="is for labels"):
        of_numbers.query()


def test_images_with_labels_for_pixels_are_chosen_by_the_mean_of_their_pixels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 4, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    model = kn.Model(nn.Conv2d(1, 2, 1), kn.Categorical())
    learner = kn.ActiveLearner(model, kn.MeanFieldVI(epochs=5), x, "bald", samples=20)
    learner.label(range(4), y[:4])
    epistemic = learner.posterior.predict_jointly(x, samples=20).epistemic.flatten(1).mean(1)
    epistemic[:4] = -1.0
    assert learner.query().item() == int(epistemic.argmax())
    learner.acquisition = "batch_bald"
    with pytest.raises(kn.Unsupported, match="pixels"):
        learner.query(2)


def test_yes_or_no_has_the_information_of_two_classes():
    x, y = classes()
    model = kn.Model(nn.Linear(2, 1), kn.Bernoulli())
    learner = kn.ActiveLearner(model, kn.MeanFieldVI(epochs=5), x, "bald", samples=20, candidates=30)
    learner.label(range(6), (y[:6] > 0).long())
    assert len(learner.query(3).unique()) == 3


def test_a_posterior_that_is_known_is_not_fitted_again():
    x, y = numbers()
    method = kn.ExactLinear()
    known = method.fit(number_model(), (x[:10], y[:10].unsqueeze(1)))
    told = kn.ActiveLearner(number_model(), method, x)
    told.label(range(10), y[:10], posterior=known)
    assert told.posterior is known and int(told.query(1)[0]) >= 10
    told.label([20], y[20:21])
    assert told.posterior is not known
