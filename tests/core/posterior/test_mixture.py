"""Tests of mixtures of posteriors: they are what the formulas of mixtures say, and ask every member."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.posterior.saving import load_posterior
from tests.core.cases import (
    DTYPE,
    atoms,
    batch_norm_net,
    diagonal_posterior,
    full_posterior,
    linear_data,
    linear_model,
    mlp,
    same_params,
)  # fmt: skip

LOG_WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE).log()


def _mixture(model: kn.Model | None = None, **common) -> kn.Mixture:
    model = model or linear_model()
    members = [diagonal_posterior(model), full_posterior(model), diagonal_posterior(model)]
    return kn.Mixture(model, members, LOG_WEIGHTS + 7.0, **common)


def test_weights_are_normalised_and_equal_by_default():
    model = linear_model()
    torch.testing.assert_close(_mixture(model).weights, LOG_WEIGHTS.exp())
    assert kn.Mixture(model, [diagonal_posterior(model)] * 4).weights.tolist() == pytest.approx([0.25] * 4)
    assert len(_mixture()) == 3


def test_outcomes_have_the_shape_that_members_agree_on_and_their_training_rows_are_known():
    x, y = linear_data(20)
    model = linear_model(noise=0.5)
    first, second = (kn.ExactLinear().fit(model, (x[rows], y[rows, 0])) for rows in (slice(10), slice(10, 20)))
    mixture = kn.Mixture(model, [first, second])
    assert mixture.predict(x).mean.shape == (20,)
    with pytest.raises(kn.InvalidData, match="20 of the 20 rows of held_out"):
        mixture.recalibrated((x, y))
    assert kn.Mixture(model, [first, diagonal_posterior(model)]).predict(x).mean.shape == (20, 1)


def test_mean_and_spread_follow_the_laws_of_total_expectation_and_variance():
    mixture, weights = _mixture(), LOG_WEIGHTS.exp().tolist()
    means, spreads = [m.mean() for m in mixture.members], [m.std() for m in mixture.members]
    for name in ("weight", "bias"):
        mean = sum(w * m[name] for w, m in zip(weights, means, strict=True))
        second = sum(w * (s[name] ** 2 + m[name] ** 2) for w, m, s in zip(weights, means, spreads, strict=True))
        torch.testing.assert_close(mixture.mean()[name], mean)
        torch.testing.assert_close(mixture.std()[name], (second - mean**2).sqrt())


def test_draws_have_the_moments_of_the_mixture(generator):
    # 5 standard errors of a mean over n draws
    mixture, n = _mixture(), 40_000
    draws, mean, std = mixture.sample(n, generator), mixture.mean(), mixture.std()
    for name, value in draws.items():
        assert ((value.mean(0) - mean[name]).abs() < 5 * std[name] / math.sqrt(n)).all()
        assert ((value.std(0) / std[name] - 1).abs() < 5 / math.sqrt(n)).all()


def test_draws_come_from_their_members_as_often_as_the_weights_say(generator):
    # a share p of n draws errs by sqrt(p (1 - p) / n): 5 of those
    model = linear_model()
    members = [atoms(model, 1, generator) for _ in range(3)]
    n = 20_000
    draws = kn.Mixture(model, members, LOG_WEIGHTS).sample(n, generator)
    for member, weight in zip(members, LOG_WEIGHTS.exp().tolist(), strict=True):
        own = (draws["weight"] == member.mean()["weight"]).flatten(1).all(1)
        assert torch.equal(draws["bias"][own], member.mean()["bias"].expand(int(own.sum()), 1))
        assert abs(own.double().mean() - weight) < 5 * math.sqrt(weight * (1 - weight) / n)


def test_the_density_is_that_of_a_mixture(generator):
    mixture = _mixture()
    draws = mixture.sample(6, generator)
    each = torch.stack([member.log_prob(draws).exp() for member in mixture.members])
    torch.testing.assert_close(mixture.log_prob(draws), (LOG_WEIGHTS.exp() @ each).log())
    one = {name: value[0] for name, value in draws.items()}
    torch.testing.assert_close(mixture.log_prob(one), mixture.log_prob(draws)[0])


def test_a_mixture_of_points_predicts_as_the_points_with_their_weights_do(generator):
    model, x = linear_model(noise=None), linear_data(5)[0]
    points = atoms(model, 4, generator)
    members = [kn.Particles(model, {k: v[i : i + 1] for k, v in points.stack.items()}) for i in range(4)]
    mixture = kn.Mixture(model, members, points.log_weights)
    left, right, y = mixture.predict(x), points.predict(x), torch.randn(5, 1, dtype=DTYPE)
    for name in ("mean", "variance", "aleatoric", "epistemic", "samples", "log_weights"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name))
    torch.testing.assert_close(left.log_prob(y), right.log_prob(y))
    torch.testing.assert_close(left.quantile(0.3), right.quantile(0.3))


def test_a_prediction_shares_its_draws_among_the_members_and_weighs_them():
    mixture, x = _mixture(), linear_data(5)[0]
    prediction = mixture.predict(x, samples=20)
    assert prediction.samples.shape[0] == 20
    shares = [7, 7, 6]
    torch.testing.assert_close(
        prediction.log_weights.exp(),
        torch.cat([torch.full((n,), w / n) for n, w in zip(shares, LOG_WEIGHTS.exp().tolist(), strict=True)]).to(DTYPE),
    )


def test_members_that_predict_in_closed_form_do_so_in_a_mixture():
    x, y = linear_data(30)
    model = linear_model()
    exact = [kn.ExactLinear().fit(model, (x[part], y[part])) for part in (slice(0, 10), slice(10, 30))]
    mixture = kn.Mixture(model, exact, torch.tensor([0.3, 0.7], dtype=DTYPE).log())
    each = [member.predict(x).log_prob(y).exp() for member in exact]
    torch.testing.assert_close(mixture.predict(x).log_prob(y), (0.3 * each[0] + 0.7 * each[1]).log())
    predictions = [member.predict(x) for member in exact]
    within = 0.3 * predictions[0].epistemic + 0.7 * predictions[1].epistemic
    between = 0.3 * 0.7 * (predictions[0].mean - predictions[1].mean) ** 2
    torch.testing.assert_close(mixture.predict(x).epistemic, within + between)


def test_more_members_than_draws_are_chosen_evenly_by_their_weights(generator):
    # systematic resampling: a member of weight w is asked floor(K w) or ceil(K w) times
    model = linear_model()
    members = [atoms(model, 1, generator) for _ in range(30)]
    weights = torch.rand(30, generator=generator, dtype=DTYPE)
    mixture = kn.Mixture(model, members, weights.log())
    prediction = mixture.predict(linear_data(3)[0], samples=8)
    wanted = 8 * mixture.weights
    found = (8 * prediction.log_weights.exp()).round()
    assert len(prediction.log_weights) <= 8 and found.sum() == 8
    assert ((found >= 1) & (found <= wanted.max().ceil())).all()


def test_every_member_predicts_with_its_own_buffers():
    model, x = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1)), torch.randn(6, 2, dtype=DTYPE)
    members = []
    for shift in (0.0, 2.0):
        buffers = model.buffers()
        buffers["1.running_mean"] += shift
        members.append(atoms(model, 1, buffers=buffers))
    prediction = kn.Mixture(model, members).predict(x)
    for member, found in zip(members, prediction.samples, strict=True):
        torch.testing.assert_close(found, model.forward(member.mean(), x, buffers=member.buffers))


@pytest.mark.parametrize("random", ["*", "last_layer"])
def test_a_mixture_that_was_saved_is_the_same_in_all_it_says(random, tmp_path, generator):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random=random)
    points = {name: model.params()[name] for name in model.point_names}
    mixture = _mixture(model, points=points, seed=5, log_evidence=kn.LogEvidence(-3.0, "bound"))
    inner = kn.Mixture(model, [mixture, atoms(model, 3, generator)], points=points, seed=2)
    for each in (mixture, inner):
        each.members[0].diagnostics = kn.Diagnostics("a member", {"loss": 1.0})
        each.members[0].log_evidence = kn.LogEvidence(-2.5, "estimate", 0.1)
        loaded = load_posterior(each.save(tmp_path / str(len(each))))
        x = torch.randn(4, 2, dtype=DTYPE)
        assert type(loaded) is kn.Mixture and len(loaded) == len(each)
        assert same_params(loaded.mean(), each.mean()) and same_params(loaded.std(), each.std())
        draws = [p.sample(5, torch.Generator().manual_seed(0)) for p in (loaded, each)]
        assert same_params(*draws)
        assert torch.equal(loaded.predict(x, 9).samples, each.predict(x, 9).samples)
        assert loaded.members[0].diagnostics == each.members[0].diagnostics
        assert repr(loaded.members[0].log_evidence) == repr(each.members[0].log_evidence)
        assert repr(loaded) == repr(each)


def test_members_fitted_with_point_estimates_held_become_posteriors_of_the_whole_model():
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), random="last_layer")
    points = {name: torch.randn_like(model.params()[name]) for name in model.point_names}
    held = model.with_fixed(points)
    mixture = kn.Mixture(model, [diagonal_posterior(held), diagonal_posterior(held)], points=points)
    assert all(member.model is model for member in mixture.members)
    draws, x = mixture.sample(4), torch.randn(3, 2, dtype=DTYPE)
    assert all(torch.equal(draws[name], value.expand_as(draws[name])) for name, value in points.items())
    member = mixture.members[1]
    assert all(torch.equal(member.mean()[name], value) for name, value in points.items())
    assert torch.isfinite(mixture.predict(x).mean).all()


def test_a_mixture_says_what_it_is_made_of():
    assert "Mixture(3 members: DiagonalNormal, FullNormal; 3 random parameters of Linear" in repr(_mixture())


def test_a_mixture_of_nothing_or_with_other_weights_is_refused():
    model = linear_model()
    with pytest.raises(kn.InvalidArgument, match="members must be at least one posterior"):
        kn.Mixture(model, [])
    with pytest.raises(kn.InvalidArgument, match="log_weights must be 2 numbers"):
        kn.Mixture(model, [diagonal_posterior(model)] * 2, LOG_WEIGHTS)


def test_members_without_a_density_leave_the_mixture_without_one():
    model = linear_model()
    with pytest.raises(kn.Unsupported, match="Particles has no density"):
        kn.Mixture(model, [atoms(model, 1)]).log_prob(model.params())
