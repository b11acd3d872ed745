"""Tests of ensembles of any method: one member is the method, weights follow evidence or held-out rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.support.randomness import derive_seed
from knowable.inference.ensembles.ensemble_of import held_out_log_densities, stacking_log_weights
from knowable.inference.point.point import fresh_start
from knowable.testing import LinearGaussian
from tests.core.cases import DTYPE, batch_norm_net, linear_data, mlp, same_params

SHORT = {"epochs": 20, "batch_size": 8}
METHODS = {
    "points": kn.MAP(**SHORT),
    "normals": kn.MeanFieldVI(**SHORT),
    "swag": kn.SWAG(**SHORT, snapshots=4, rank=2, rate=0.01),
    "chains": kn.HMC(chains=2, draws=3, warmup=4, start="network", steps=2),
    "ensembles": kn.DeepEnsemble(2, **SHORT),
}


def _model(net: nn.Module | None = None, **settings) -> kn.Model:
    return kn.Model((net or mlp()).to(DTYPE), kn.Gaussian(), **settings)


@pytest.mark.parametrize(
    "method",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name == "chains")) for name, each in METHODS.items()],
)
def test_one_member_is_the_method_itself(method):
    model, (x, y) = _model(), linear_data()
    posterior, alone = kn.EnsembleOf(method, 1).fit(model, (x, y), seed=3), method.fit(model, (x, y), seed=3)
    assert same_params(posterior.members[0].mean(), alone.mean())
    torch.testing.assert_close(posterior.mean(), alone.mean())
    member = posterior.members[0]
    assert torch.equal(member.predict(x, 5).samples, alone.predict(x, 5).samples)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_ensemble_is_saved_and_loaded_with_all_its_members(method, tmp_path):
    model, (x, y) = _model(), linear_data()
    posterior = kn.EnsembleOf(method, 2).fit(model, (x, y))
    loaded = kn.load(posterior.save(tmp_path))
    assert [type(each) for each in loaded.members] == [type(each) for each in posterior.members]
    assert torch.equal(loaded.predict(x, 7).samples, posterior.predict(x, 7).samples)
    assert same_params(
        loaded.sample(4, torch.Generator().manual_seed(0)), posterior.sample(4, torch.Generator().manual_seed(0))
    )
    assert loaded.diagnostics == posterior.diagnostics


def test_members_are_fits_of_their_own_from_new_starts():
    model, data = _model(), linear_data()
    method = kn.MeanFieldVI(**SHORT)
    posterior = kn.EnsembleOf(method, 3).fit(model, data, seed=5)
    start = model.starting_at(*fresh_start(model, 5, 2))
    alone = method.fit(start, data, seed=derive_seed(5, "member", 2))
    assert same_params(posterior.members[2].mean(), alone.mean())
    assert posterior.log_evidence.kind == "bound"
    assert float(posterior.log_evidence) == pytest.approx(sum(float(m.log_evidence) for m in posterior.members) / 3)


def test_members_may_all_begin_at_the_networks_own_weights():
    model, data = _model(), linear_data()
    posterior = kn.EnsembleOf(kn.MAP(**SHORT), 2, start="network").fit(model, data, seed=5)
    alone = kn.MAP(**SHORT).fit(model, data, seed=derive_seed(5, "member", 1))
    assert same_params(posterior.members[1].mean(), alone.mean())


def test_members_with_batch_norm_predict_with_their_own_statistics():
    model, (x, y) = _model(batch_norm_net()), linear_data()
    posterior = kn.EnsembleOf(kn.MAP(**SHORT), 2).fit(model, (x, y))
    prediction = posterior.predict(x)
    for k, member in enumerate(posterior.members):
        expected = model.forward(member.mean(), x, buffers=member.buffers)
        torch.testing.assert_close(prediction.samples[k], expected)


def test_exact_posteriors_of_one_model_are_all_the_exact_posterior(seed):
    target = LinearGaussian.make(seed=seed)
    posterior = kn.EnsembleOf(kn.ExactLinear(), 3).fit(target.model(), target.data)
    torch.testing.assert_close(target.as_flat(posterior.mean()), target.mean)
    torch.testing.assert_close(target.as_flat(posterior.std()), target.covariance.diagonal().sqrt())
    assert float(posterior.log_evidence) == pytest.approx(target.log_evidence)
    mean, std = target.predictive(target.x)
    prediction = posterior.predict(target.x)
    torch.testing.assert_close(prediction.mean.squeeze(1), mean)
    torch.testing.assert_close(prediction.std.squeeze(1), std)


def test_weights_by_evidence_are_the_members_shares_of_it():
    model, data = _model(), linear_data()
    posterior = kn.EnsembleOf(kn.MeanFieldVI(**SHORT), 3, weights="evidence").fit(model, data)
    bounds = torch.tensor([float(member.log_evidence) for member in posterior.members], dtype=DTYPE)
    torch.testing.assert_close(posterior.weights, bounds.softmax(0))
    assert posterior.diagnostics["effective_members"] < 3
    with pytest.raises(kn.Unsupported, match="weights='evidence' needs members that know their evidence; Particles"):
        kn.EnsembleOf(kn.MAP(**SHORT), 2, weights="evidence").fit(model, data)


def test_weights_by_validation_make_the_mixture_best_on_held_out_rows():
    model, (x, y) = _model(), linear_data(40)
    held_out = x[30:], y[30:]
    posterior = kn.EnsembleOf(kn.MAP(**SHORT), 4, weights="validation").fit(
        model, (x[:30], y[:30]), validation=held_out
    )
    densities = held_out_log_densities(posterior.members, kn.Data(held_out, 10))
    torch.testing.assert_close(posterior.log_weights, stacking_log_weights(densities))
    equal = kn.Mixture(model, posterior.members)
    assert (
        posterior.predict(held_out[0]).log_prob(held_out[1]).sum()
        >= equal.predict(held_out[0]).log_prob(held_out[1]).sum()
    )
    with pytest.raises(kn.InvalidArgument, match="weights='validation' needs held-out rows"):
        kn.EnsembleOf(kn.MAP(**SHORT), 2, weights="validation").fit(model, (x, y))


@pytest.mark.parametrize("method", [kn.MAP(**SHORT), kn.MeanFieldVI(**SHORT)], ids=["points", "normals"])
def test_point_estimates_of_the_first_member_serve_all(method):
    model, data = _model(random="last_layer"), linear_data()
    posterior = kn.EnsembleOf(method, 3).fit(model, data, seed=2)
    assert same_params(posterior.points, method.fit(model, data, seed=2).points)
    draws = posterior.sample(20, torch.Generator().manual_seed(0))
    assert all((draws[name] == value).all() for name, value in posterior.points.items())
    assert len(posterior.members[1].mean()) == len(model.params())


def test_what_members_learn_of_the_prior_is_averaged():
    model, data = _model(prior=kn.EmpiricalBayes(kn.Normal())), linear_data()
    posterior = kn.EnsembleOf(kn.MeanFieldVI(**SHORT), 2).fit(model, data)
    for name in model.hyper_names:
        each = [member.points[name] for member in posterior.members]
        torch.testing.assert_close(posterior.points[name], (each[0] + each[1]) / 2)


def test_members_that_differ_are_reported():
    model, (x, y) = _model(), linear_data()
    posterior = kn.EnsembleOf(kn.MAP(**SHORT), 3).fit(model, (x, y))
    assert posterior.diagnostics["disagreement"] == pytest.approx(kn.diversity(posterior, x).disagreement)
    assert posterior.diagnostics.message.startswith("3 members in turn: ended after 60 steps")
    assert {record["member"] for record in posterior.diagnostics.history} == {0.0, 1.0, 2.0}


@pytest.mark.parametrize(("at", "kept"), [(130, 2), (20, 1)])  # 60 steps a member
def test_an_interrupt_leaves_the_members_that_are_whole_and_a_second_call_fits_the_others(
    at, kept, tmp_path, monkeypatch
):
    model, data = _model(), linear_data()
    method = kn.EnsembleOf(kn.MAP(**SHORT), 3)
    whole = method.fit(model, data)
    calls, score = [0], kn.Model.score

    def interrupted(self, *arguments):
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return score(self, *arguments)

    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(kn.Model, "score", interrupted)
        with pytest.warns(kn.Interrupted):
            partial = method.fit(model, data, checkpoint=checkpoint)
    assert len(partial) == kept and partial.diagnostics.interrupted
    resumed = method.fit(model, data, checkpoint=checkpoint)
    assert same_params(resumed._tensors(), whole._tensors())


def test_an_interrupt_at_a_member_with_nothing_to_return_leaves_the_others(monkeypatch):
    model, data = _model(), linear_data()
    method = kn.EnsembleOf(kn.MeanFieldVI(**SHORT), 2)
    fit, calls = kn.MeanFieldVI._fit, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit(self, *arguments)

    monkeypatch.setattr(kn.MeanFieldVI, "_fit", interrupted)
    with pytest.warns(kn.Interrupted, match="stopped from the keyboard with 1 of 2 members"):
        partial = method.fit(model, data)
    assert len(partial) == 1 and partial.diagnostics.interrupted


def test_an_ensemble_with_more_members_goes_on_from_the_checkpoint_of_a_smaller_one(tmp_path):
    model, data = _model(), linear_data()
    for members in (1, 3):
        posterior = kn.EnsembleOf(kn.MAP(**SHORT), members).fit(model, data, checkpoint=tmp_path / "run")
    assert same_params(posterior._tensors(), kn.EnsembleOf(kn.MAP(**SHORT), 3).fit(model, data)._tensors())


def test_what_a_method_holds_as_a_point_may_differ_from_member_to_member(tmp_path):
    # the exact method sets a learned noise at one best value, though the model calls it random
    (x, y), model = linear_data(), kn.Model(nn.Linear(2, 1).to(DTYPE), kn.Gaussian())
    members = [kn.ExactLinear().fit(model, (x[part], y[part])) for part in (slice(0, 10), slice(10, 20))]
    mixture = kn.Mixture(model, members)
    noises = [member.points["likelihood.log_noise"] for member in members]
    assert noises[0] != noises[1]
    torch.testing.assert_close(mixture.mean()["likelihood.log_noise"], (noises[0] + noises[1]) / 2)
    assert set(mixture.sample(50)["likelihood.log_noise"].tolist()) == {each.item() for each in noises}
    loaded = kn.load(mixture.save(tmp_path))
    assert torch.equal(loaded.predict(x).std, mixture.predict(x).std)
    alone = kn.EnsembleOf(kn.ExactLinear(), 2).fit(model, (x, y))
    torch.testing.assert_close(alone.predict(x).std, kn.ExactLinear().fit(model, (x, y)).predict(x).std)
