"""Tests of the attacks: closed forms on linear models, bounds, and what more effort brings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import knowable as kn
from knowable.decisions.attack.attacks import Ball
from knowable.decisions.attack.objective import error_of
from knowable.errors import InvalidArgument, InvalidData, InvalidType

from .cases import linear_classifier, linear_regression, small_ensemble


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", [kn.attack.fgsm, kn.attack.pgd])
def test_the_worst_move_against_a_logistic_model_is_epsilon_times_the_sign_of_its_weights(attack, seed):
    weights, x = _random(1, 2, 5, seed=seed), _random(7, 5, seed=seed + 1)
    y = torch.arange(7) % 2
    posterior = linear_classifier(weights)
    against = (weights[0, 1 - y] - weights[0, y]).sign()
    torch.testing.assert_close(attack(posterior, x, y, 0.3), x + 0.3 * against)


@pytest.mark.parametrize("attack", [kn.attack.fgsm, kn.attack.pgd])
def test_the_worst_euclidean_move_against_a_logistic_model_is_along_its_weights(attack, seed):
    weights, x = _random(1, 2, 5, seed=seed), _random(7, 5, seed=seed + 1)
    y = torch.arange(7) % 2
    against = nn.functional.normalize(weights[0, 1 - y] - weights[0, y])
    torch.testing.assert_close(attack(linear_classifier(weights), x, y, 0.3, norm=2), x + 0.3 * against)


@pytest.mark.parametrize("attack", [kn.attack.fgsm, kn.attack.pgd])
@pytest.mark.parametrize("norm", ["inf", 2])
def test_the_worst_move_against_a_linear_regression_goes_away_from_the_target(attack, norm, seed):
    weights, x = _random(3, 4, seed=seed), _random(6, 4, seed=seed + 1)
    mean = weights.mean(0)
    y = x @ mean + torch.tensor([1.0, -1.0]).repeat(3)  # targets above and below the mean
    way = mean.sign() if norm == "inf" else nn.functional.normalize(mean, dim=0)
    expected = x - 0.2 * torch.tensor([1.0, -1.0]).repeat(3).unsqueeze(1) * way
    found = attack(linear_regression(weights), x, y.unsqueeze(1), 0.2, norm=norm)
    torch.testing.assert_close(found, expected)


def test_pgd_leaves_a_regression_that_fits_exactly_where_gradients_are_zero(seed):
    weights, x = _random(1, 4, seed=seed), _random(6, 4, seed=seed + 1)
    y = x @ weights.T
    found = kn.attack.pgd(linear_regression(weights), x, y, 0.2)
    torch.testing.assert_close((found @ weights.T - y).abs().squeeze(1), (0.2 * weights.abs().sum()).expand(6))


def test_fgsm_follows_the_gradient_of_the_averaged_likelihood(seed):
    posterior, x, y = small_ensemble(seed)
    inputs = x.clone().requires_grad_()
    probs = [nn.functional.softmax(torch.func.functional_call(posterior.model.net, draw, inputs), 1) for draw in
             ({k: v[i] for k, v in posterior.stack.items()} for i in range(3))]  # fmt: skip
    (-torch.stack(probs).mean(0)[torch.arange(40), y].log()).sum().backward()
    torch.testing.assert_close(kn.attack.fgsm(posterior, x, y, 0.1), x + 0.1 * inputs.grad.sign())


def test_the_attack_has_a_gradient_where_single_precision_says_that_the_network_is_certain():
    weights = torch.tensor([[[60.0, -20.0], [-60.0, 20.0]]])
    x, y = torch.tensor([[1.0, 0.5]]), torch.tensor([0])
    posterior = linear_classifier(weights)
    assert posterior.predict(x).probs[0, 0] == 1.0
    torch.testing.assert_close(kn.attack.fgsm(posterior, x, y, 0.1), torch.tensor([[0.9, 0.6]]))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.integers(0, 2))
def test_the_error_is_the_log_odds_of_another_label(logits: list[float], label: int):
    posterior = linear_classifier(torch.tensor(logits, dtype=torch.float64).view(1, 3, 1))
    error, wrong = error_of(posterior.predict(torch.ones(1, 1, dtype=torch.float64)), torch.tensor([label]))
    p = np.exp(logits) / np.exp(logits).sum()
    assert error.item() == pytest.approx(math.log((1 - p[label]) / p[label]), abs=1e-9)
    assert wrong.item() == (int(np.argmax(p)) != label)


def test_labels_of_two_outcomes_are_attacked_like_two_classes(seed):
    net = nn.Linear(3, 1).double()
    weights, x = _random(2, 1, 3, seed=seed), _random(8, 3, seed=seed + 1)
    y = torch.arange(8) % 2
    stack = {"weight": weights, "bias": torch.zeros(2, 1, dtype=torch.float64)}
    binary = kn.Particles(kn.Model(net, kn.Bernoulli()), stack)
    two = linear_classifier(torch.cat((torch.zeros_like(weights), weights), 1))
    moved = kn.attack.pgd(binary, x, y.unsqueeze(1), 0.5, steps=5)
    torch.testing.assert_close(moved, kn.attack.pgd(two, x, y, 0.5, steps=5))


# --- bounds ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(st.floats(0.01, 2.0), st.sampled_from(["inf", 2]), st.booleans(), st.integers(0, 5))
def test_no_attack_leaves_the_ball_or_the_box(epsilon: float, norm, boxed: bool, seed: int):
    posterior, x, y = small_ensemble(seed)
    clip = (x.min().item(), x.max().item()) if boxed else None
    setting = {"norm": norm, "clip": clip}
    for moved in (
        kn.attack.fgsm(posterior, x, y, epsilon, **setting),
        kn.attack.pgd(posterior, x, y, epsilon, steps=3, restarts=2, **setting),
        kn.attack.random_search(posterior, x, y, epsilon, queries=5, **setting),
    ):
        change = moved - x
        length = change.abs().amax(1) if norm == "inf" else change.norm(dim=1)
        assert (length <= epsilon * (1 + 1e-9)).all()
        assert not boxed or (moved.min() >= clip[0] and moved.max() <= clip[1])


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_random_starts_are_uniform_in_the_ball(norm):
    ball, centre = Ball(2.0, norm, None), torch.zeros(20_000, 3)
    found = ball.random(centre, torch.Generator().manual_seed(0))
    length = found.abs().amax(1) if norm == "inf" else found.norm(dim=1)
    share = (length / 2.0) ** 3  # of the volume: uniform on (0, 1)
    assert share.max() <= 1.0 + 1e-5
    assert abs(share.mean().item() - 0.5) < 4 * (1 / 12 / 20_000) ** 0.5


def test_moved_inputs_are_like_those_given():
    posterior, x, y = small_ensemble()
    for inputs in (x, x.float(), x.numpy()):
        moved = kn.attack.pgd(posterior, inputs, y, 0.1, steps=2)
        assert isinstance(moved, torch.Tensor) and moved.shape == x.shape
        assert moved.dtype == (torch.float32 if inputs is not x and isinstance(inputs, torch.Tensor) else torch.float64)
        assert not moved.requires_grad


# --- what more effort brings -----------------------------------------------------------------------------------------


def _errors(posterior: kn.Posterior, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return error_of(posterior.predict(x), y)[0]


def test_more_steps_restarts_and_room_never_lower_the_error(seed):
    posterior, x, y = small_ensemble(seed)
    clean = _errors(posterior, x, y)
    one = kn.attack.pgd(posterior, x, y, 0.3, steps=10)
    assert (_errors(posterior, one, y) >= clean).all()
    more = kn.attack.pgd(posterior, x, y, 0.3, steps=10, restarts=3)
    assert (_errors(posterior, more, y) >= _errors(posterior, one, y) - 1e-12).all()
    assert _errors(posterior, one, y).mean() >= _errors(posterior, kn.attack.pgd(posterior, x, y, 0.1), y).mean()


def test_attacks_are_repeatable_whatever_is_drawn_elsewhere():
    posterior, x, y = small_ensemble()
    for setting in ({}, {"restarts": 2}, {"fresh_draws": True}):
        first = kn.attack.pgd(posterior, x, y, 0.2, steps=3, **setting)
        torch.rand(7)
        assert torch.equal(first, kn.attack.pgd(posterior, x, y, 0.2, steps=3, **setting))


def test_rows_are_attacked_each_by_itself():
    posterior, x, y = small_ensemble()
    together = kn.attack.pgd(posterior, x, y, 0.2, steps=5)
    torch.testing.assert_close(together[3:4], kn.attack.pgd(posterior, x[3:4], y[3:4], 0.2, steps=5))


def test_fresh_draws_reach_the_worst_case_of_the_mean_of_a_linear_model(seed):
    # logits w x with w ~ N(m, s²): by symmetry the worst move is against the sign of m
    net = nn.Linear(3, 2, bias=False).double()
    mean = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 2.0, -0.5]], dtype=torch.float64)
    posterior = kn.DiagonalNormal(kn.Model(net, kn.Categorical()), {"weight": mean}, {"weight": 0.2 * mean.abs()})
    x, y = _random(5, 3, seed=seed), torch.zeros(5, dtype=torch.long)
    moved = kn.attack.pgd(posterior, x, y, 0.1, steps=10, fresh_draws=True, seed=seed)
    torch.testing.assert_close(moved, x + 0.1 * (mean[1] - mean[0]).sign())


def test_an_attacker_who_knows_the_detector_is_flagged_less_often(seed):
    posterior, x, y = small_ensemble(seed, members=5)
    found = kn.detect(posterior.predict(x), posterior.predict(10 * x), score="mutual_information")
    room = {"steps": 20, "restarts": 3}
    unaware, aware = (kn.attack.pgd(posterior, x, y, 1.0, detector=each, **room) for each in (None, found))
    pair = [
        kn.attack.evaluate(posterior, x, moved, y, score="mutual_information", validation=x)
        for moved in (unaware, aware)
    ]
    assert pair[1].undetected >= pair[0].undetected
    assert pair[1].undetected > 0
    by_name = kn.attack.pgd(posterior, x, y, 1.0, detector="mutual_information", **room)
    torch.testing.assert_close(by_name, aware)  # here the threshold of both is that of x


def test_a_feature_density_can_be_avoided_too():
    posterior, x, y = small_ensemble()
    density = kn.FeatureDensity(posterior, x, y)
    moved = kn.attack.pgd(posterior, x, y, 1.0, steps=20, restarts=3, detector=density)
    unaware = kn.attack.pgd(posterior, x, y, 1.0, steps=20, restarts=3)
    scores = [kn.attack.evaluate(posterior, x, each, y, score=density, validation=x) for each in (unaware, moved)]
    assert scores[1].undetected >= scores[0].undetected


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"epsilon": 0.0}, InvalidArgument, "epsilon"),
        ({"epsilon": -1.0}, InvalidArgument, "epsilon"),
        ({"epsilon": math.nan}, InvalidArgument, "epsilon"),
        ({"norm": 1}, InvalidArgument, "norm must be 'inf' or 2"),
        ({"steps": 0}, InvalidArgument, "steps"),
        ({"restarts": 0}, InvalidArgument, "restarts"),
        ({"step_size": 0.0}, InvalidArgument, "step_size"),
        ({"weight": 0.0}, InvalidArgument, "weight"),
        ({"clip": (1.0, 0.0)}, InvalidArgument, "clip"),
        ({"clip": (0.0, 1.0)}, InvalidData, "outside of clip"),
        ({"samples": 0}, InvalidArgument, "samples"),
        ({"detector": 3}, InvalidType, "detector"),
        ({"detector": "entropie"}, InvalidArgument, "Did you mean 'entropy'"),
    ],
)
def test_wrong_settings_are_named(change, error, said):
    posterior, x, y = small_ensemble()
    setting = {"epsilon": 0.1, **change}
    with pytest.raises(error, match=said):
        kn.attack.pgd(posterior, x, y, setting.pop("epsilon"), **setting)


def test_wrong_data_is_named():
    posterior, x, y = small_ensemble()
    bad = x.clone()
    bad[2, 1] = math.nan
    for inputs, labels, error, said in (
        ((x * 10).long(), y, InvalidType, "x holds integers .*token ids"),
        ((x, x), y, InvalidType, "x"),
        (bad, y, InvalidData, "row 2"),
        (x, y + 3, InvalidData, "whole number from 0 to 2"),
        (x, y[:3], InvalidData, "same number of rows"),
        (x[:, :2], y, InvalidData, "The network cannot take"),
    ):
        for attack in (kn.attack.fgsm, kn.attack.pgd, kn.attack.random_search):
            with pytest.raises(error, match=said):
                attack(posterior, inputs, labels, 0.1)


def test_a_network_without_gradients_is_refused():
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x.detach().round())

    model = kn.Model(Rounded(), kn.Categorical())
    posterior = kn.Particles(model, {name: value.unsqueeze(0) for name, value in model.params().items()})
    with pytest.raises(kn.Unsupported, match="no gradient"):
        kn.attack.fgsm(posterior, torch.randn(3, 2), torch.zeros(3), 0.1)
