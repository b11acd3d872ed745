"""Tests of acquisition functions against enumeration, closed forms and slow loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knowable as kn
from knowable.decisions import acquisition


def draws(seed, count=5, rows=6, classes=3):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, rows, classes, generator=generator, dtype=torch.float64)
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    return logits.softmax(2), weights / weights.sum()


def numbers(seed, count=7, rows=6):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(count, rows, generator=generator, dtype=torch.float64)
    noise = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.2
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    return means, noise, weights / weights.sum()


def entropy_of(table):
    return -sum(p * math.log(p) for p in table if p > 0)


def joint_information(probs, weights, rows):
    """I(y_rows; w) by enumeration of all joint outcomes."""
    joint = []
    for labels in itertools.product(range(probs.shape[2]), repeat=len(rows)):
        under = torch.ones(len(weights), dtype=torch.float64)
        for row, label in zip(rows, labels, strict=True):
            under = under * probs[:, row, label]
        joint.append((under @ weights).item())
    inside = sum(weights[k] * entropy_of(probs[k, row].tolist()) for k in range(len(weights)) for row in rows)
    return entropy_of(joint) - float(inside)


def test_bald_is_the_information_by_enumeration(seed):
    probs, weights = draws(seed)
    found = acquisition.mutual_information(probs, weights)
    for row in range(6):
        assert found[row].item() == pytest.approx(joint_information(probs, weights, [row]), abs=1e-12)


def test_epig_is_the_mean_information_between_two_labels(seed):
    probs, weights = draws(seed)
    targets = draws(seed + 1000)[0][:, :4]
    found = acquisition.epig(probs, targets, weights)
    for row in range(6):
        total = 0.0
        for other in range(4):
            joint = torch.einsum("k,kc,kd->cd", weights, probs[:, row], targets[:, other])
            sides = entropy_of(joint.sum(1).tolist()) + entropy_of(joint.sum(0).tolist())
            total += (sides - entropy_of(joint.flatten().tolist())) / 4
        assert found[row].item() == pytest.approx(total, abs=1e-12)


def test_a_batch_is_the_greedy_choice_by_enumeration(seed):
    probs, weights = draws(seed, rows=8)
    chosen, information = acquisition.batch_mutual_information(probs, weights, 4)
    slow = []
    for _ in range(4):
        gains = {row: joint_information(probs, weights, [*slow, row]) for row in range(8) if row not in slow}
        slow.append(max(gains, key=gains.get))
    assert chosen == slow
    assert information == pytest.approx(joint_information(probs, weights, slow), abs=1e-9)


def test_rows_passed_over_are_not_better(seed, monkeypatch):
    """The search looks at few rows in full; here at two at first, and by groups of outcomes at the others."""
    probs, weights = draws(seed, rows=40)
    monkeypatch.setattr(acquisition, "_BLOCK", 2)
    monkeypatch.setattr(acquisition, "_GROUPS", 5)
    chosen, information = acquisition.batch_mutual_information(probs, weights, 3)
    for place in range(3):
        gains = {k: joint_information(probs, weights, [*chosen[:place], k]) for k in range(40)}
        assert max(gains, key=lambda k: gains[k] if k not in chosen[:place] else -1.0) == chosen[place]
    assert information == pytest.approx(joint_information(probs, weights, chosen), abs=1e-9)


def test_less_is_known_given_groups_of_outcomes(seed, monkeypatch):
    probs, weights = draws(seed, rows=30)
    monkeypatch.setattr(acquisition, "_CONFIGURATIONS", 50)  # drawn from the fourth row on
    outcomes = acquisition._Outcomes(weights, probs[:, 0], seed)
    for row in range(1, 6):
        for groups in (1, 4, 100):
            monkeypatch.setattr(acquisition, "_GROUPS", groups)
            assert (outcomes.at_most(probs) >= outcomes.entropy_of(probs) - 1e-12).all()
        outcomes = outcomes.with_row(probs[:, row])


def test_drawn_outcomes_estimate_the_information_of_all(seed, monkeypatch):
    probs, weights = draws(seed, rows=8)
    monkeypatch.setattr(acquisition, "_CONFIGURATIONS", 2_000)
    exact, _ = acquisition.batch_mutual_information(probs, weights, 6)
    monkeypatch.setattr(acquisition, "_CONFIGURATIONS", 80)  # drawn from the fourth row on
    estimates = [acquisition.batch_mutual_information(probs, weights, 6, seed=k) for k in range(40)]
    values = torch.tensor([value for _, value in estimates])
    rows = [joint_information(probs, weights, chosen) for chosen, _ in estimates]
    error = (values - torch.tensor(rows)).std() / math.sqrt(40)
    best = joint_information(probs, weights, exact)
    assert abs((values - torch.tensor(rows)).mean()) < 5 * error + 0.05 * best  # choices favour what looks high


def test_near_copies_are_not_chosen_twice():
    probs, weights = draws(0, count=20, rows=6)
    doubled = torch.cat([probs, probs[:, :1]], 1)
    best = int(acquisition.mutual_information(probs, weights).argmax())
    probs = torch.cat([probs, probs[:, best : best + 1].expand(-1, 3, -1)], 1)
    chosen, _ = acquisition.batch_mutual_information(probs, weights, 3)
    same = {best, 6, 7, 8}
    assert len(same & set(chosen[:2])) == 1
    assert doubled.shape[1] == 7


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_scores_of_labels_keep_their_bounds(seed):
    probs, weights = draws(seed)
    total, information = acquisition.entropy(probs, weights), acquisition.mutual_information(probs, weights)
    about_others = acquisition.epig(probs, probs[:, :2], weights)
    assert (information >= -1e-12).all() and (information <= total + 1e-12).all()
    assert (about_others >= -1e-12).all() and (about_others <= information + 1e-12).all()  # data processing
    assert (total <= math.log(3) + 1e-12).all()
    ratio = acquisition.variation_ratio(probs, weights)
    assert (ratio >= -1e-12).all() and (ratio <= 1 - 1 / 3 + 1e-12).all()
    assert (acquisition.margin(probs, weights) <= 1.0).all()


def test_variation_ratio_and_margin_are_their_definitions():
    probs = torch.tensor([[[0.9, 0.1, 0.0]], [[0.2, 0.8, 0.0]], [[0.6, 0.4, 0.0]]])
    weights = torch.tensor([0.2, 0.5, 0.3])
    assert acquisition.variation_ratio(probs, weights).item() == pytest.approx(0.5)
    assert acquisition.margin(probs, weights).item() == pytest.approx(1 - (0.54 - 0.46), abs=1e-6)


def test_a_batch_of_numbers_is_the_greedy_log_determinant(seed):
    means, noise, weights = numbers(seed)
    covariance = torch.einsum("k,ki,kj->ij", weights, means - weights @ means, means - weights @ means)
    scaled = covariance / torch.outer(noise, noise).sqrt()

    def information(rows):
        return 0.5 * torch.logdet(torch.eye(len(rows), dtype=torch.float64) + scaled[rows][:, rows]).item()

    chosen, total = acquisition.batch_normal_information(means, noise, weights, 4)
    slow = []
    for _ in range(4):
        gains = {row: information([*slow, row]) for row in range(6) if row not in slow}
        slow.append(max(gains, key=gains.get))
    assert chosen == slow and total == pytest.approx(information(slow), abs=1e-9)
    single = acquisition.normal_information(means, noise, weights)
    assert single[0].item() == pytest.approx(information([0]), abs=1e-12)


def test_numbers_inform_about_others_by_their_correlation(seed):
    means, noise, weights = numbers(seed)
    targets, other_noise, _ = numbers(seed + 1000)
    deviations, others = means - weights @ means, targets - weights @ targets
    found = acquisition.normal_epig(means, noise, targets, other_noise, weights)
    lower = acquisition.variance_reduction(means, noise, targets, weights)
    for row in range(6):
        covariance = torch.einsum("k,k,kj->j", weights, deviations[:, row], others)
        own = (weights * deviations[:, row] ** 2).sum() + noise[row]
        there = torch.einsum("k,kj->j", weights, others**2) + other_noise
        expected = -0.5 * torch.log(1 - covariance**2 / (own * there)).mean()
        assert found[row].item() == pytest.approx(expected.item(), abs=1e-10)
        assert lower[row].item() == pytest.approx((covariance**2 / own).mean().item(), abs=1e-12)


def test_the_upper_bound_has_the_epistemic_part_alone():
    x = torch.linspace(-1, 1, 8).unsqueeze(1)
    posterior = kn.ExactLinear().fit(kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(0.5)), (x, 2 * x))
    prediction = posterior.predict(x)
    expected = prediction.mean.flatten() + 3 * (prediction.variance.flatten() - 0.25).sqrt()
    found = acquisition.upper_confidence_bound(prediction, 3.0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
