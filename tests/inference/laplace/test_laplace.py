"""Tests of the Laplace approximation: exact where the posterior is normal, Newton's answer elsewhere."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.storage.folder import Checkpoint
from knowable.inference.laplace.evidence import Evidence
from knowable.inference.point.point import PointObjective
from knowable.testing import LinearGaussian, network_case
from knowable.testing.subject import expect_same_posterior

QUICK = {"epochs": 30, "learning_rate": 0.05}
DTYPE = torch.float64


# --- linear models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
def test_a_linear_model_with_gaussian_noise_is_exact(structure, seed):
    # one output: the Kronecker product of a number and a matrix is that matrix, and 4 weights have 4 directions
    target = LinearGaussian.make(seed=seed)
    method = kn.Laplace(structure=structure, polish=5, **QUICK)
    posterior = method.fit(target.model(), target.data)
    draws = target.as_flat(posterior.sample(2))
    exact = torch.distributions.MultivariateNormal(target.mean, target.covariance)
    torch.testing.assert_close(target.as_flat(posterior.mean()), target.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(target.as_flat(posterior.std()), target.covariance.diagonal().sqrt(), rtol=0, atol=1e-5)
    torch.testing.assert_close(posterior.log_prob(target.as_params(draws)), exact.log_prob(draws), rtol=0, atol=1e-5)
    assert posterior.log_evidence.kind == "estimate"
    assert posterior.log_evidence == pytest.approx(target.log_evidence, abs=1e-5)
    x = torch.randn(5, 3, dtype=DTYPE)
    mean, std = target.predictive(x)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.mean.squeeze(1), mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(prediction.std.squeeze(1), std, rtol=0, atol=1e-5)


def test_the_diagonal_is_the_mean_field_answer(seed):
    target = LinearGaussian.make(seed=seed)
    posterior = kn.Laplace(structure="diag", polish=5, **QUICK).fit(target.model(), target.data)
    torch.testing.assert_close(target.as_flat(posterior.mean()), target.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(target.as_flat(posterior.std()), target.mean_field_std, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "prior",
    [
        kn.Normal(1.0),
        kn.EmpiricalBayes(kn.Normal(1.0)),
        kn.EmpiricalBayes(kn.Normal(1.0), kn.Normal(1.0), per="parameter"),
    ],
    ids=["noise", "noise and one prior scale", "noise and two prior scales"],
)
def test_open_scales_are_those_that_maximise_the_exact_evidence(prior, seed):
    target = LinearGaussian.make(seed=seed)
    model = kn.Model(target.model().net, kn.Gaussian(), prior)
    exact = kn.ExactLinear().fit(model, target.data)
    posterior = kn.Laplace(structure="full", **QUICK).fit(model, target.data)
    for name, value in exact.mean().items():
        torch.testing.assert_close(posterior.mean()[name], value, rtol=0, atol=1e-3)
    assert posterior.log_evidence == pytest.approx(exact.log_evidence, abs=1e-5)


def test_each_output_gets_its_own_noise(seed):
    torch.manual_seed(seed)
    x = torch.randn(80, 2, dtype=DTYPE)
    y = torch.stack([x.sum(1), x[:, 0]], 1) + torch.tensor([0.1, 0.6], dtype=DTYPE) * torch.randn(80, 2, dtype=DTYPE)
    model = kn.Model(nn.Linear(2, 2).double(), kn.Gaussian(outputs=2))
    exact = kn.ExactLinear().fit(model, (x, y))
    posterior = kn.Laplace(structure="full", **QUICK).fit(model, (x, y))
    for name, value in exact.mean().items():
        torch.testing.assert_close(posterior.mean()[name], value, rtol=0, atol=1e-3)
    torch.testing.assert_close(posterior.std()["weight"], exact.std()["weight"], rtol=1e-3, atol=0)


def test_two_halves_one_after_the_other_are_the_whole(seed):
    # online Laplace: the posterior of the first half is the prior of the second
    target = LinearGaussian.make(seed=seed)
    method = kn.Laplace(structure="full", **QUICK)
    first = method.fit(target.model(), (target.x[:25], target.y[:25]))
    model = kn.Model(target.model().net, kn.Gaussian(target.noise), prior=first)
    second = method.fit(model, (target.x[25:], target.y[25:]))
    torch.testing.assert_close(target.as_flat(second.mean()), target.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(second.covariance, target_covariance(target, second), rtol=0, atol=1e-8)
    assert first.log_evidence + second.log_evidence == pytest.approx(target.log_evidence, abs=1e-6)


def target_covariance(target: LinearGaussian, posterior: kn.FullNormal) -> Tensor:
    order = posterior.layout.flatten(target.as_params(torch.arange(4.0, dtype=DTYPE))).long()
    return target.covariance[order][:, order]


@pytest.mark.parametrize("structure", ["kron", "diag", "lowrank"])
def test_any_structure_can_be_the_prior_of_the_next(structure):
    case = network_case("mlp", rows=40, dtype=DTYPE)
    x, y = case.data
    method = kn.Laplace(structure=structure, **QUICK)
    first = method.fit(kn.Model(case.net, kn.Gaussian(0.3)), (x[:20], y[:20]))
    second = method.fit(kn.Model(case.net, kn.Gaussian(0.3), prior=first), (x[20:], y[20:]))
    spread = [sum(value.log().sum() for value in each.std().values()) for each in (first, second)]
    assert spread[1] < spread[0]  # more data, less doubt
    third = kn.Model(case.net, kn.Gaussian(0.3), prior=second)
    assert torch.isfinite(third.log_prior(second.mean()))


# --- beyond ----------------------------------------------------------------------------------------------------------


def newton(design: Tensor, y: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Mode and inverse Hessian of Bayesian logistic regression, by hand."""
    theta = torch.zeros(design.shape[1], dtype=DTYPE)
    for _ in range(50):
        p = (design @ theta).sigmoid()
        hessian = design.T @ (design * (p * (1 - p)).unsqueeze(1)) + prior * torch.eye(len(theta), dtype=DTYPE)
        theta = theta - torch.linalg.solve(hessian, design.T @ (p - y) + prior * theta)
    return theta, hessian.inverse()


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_logistic_regression_is_newtons_answer(curvature, seed):
    torch.manual_seed(seed)
    x = torch.randn(50, 2, dtype=DTYPE)
    y = (x.sum(1) + 0.7 * torch.randn(50, dtype=DTYPE) > 0).double()
    model = kn.Model(nn.Linear(2, 1).double(), kn.Bernoulli(), kn.Normal(2.0))
    posterior = kn.Laplace(structure="full", curvature=curvature, **QUICK).fit(model, (x, y))
    mean, covariance = newton(torch.cat([x, torch.ones(50, 1, dtype=DTYPE)], 1), y, 0.25)
    torch.testing.assert_close(posterior.loc, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.covariance, covariance, rtol=1e-7, atol=1e-9)


def test_the_evidence_is_that_of_numerical_integration_where_the_posterior_is_nearly_normal():
    # one weight, 200 rows: the error of the approximation is O(1 / N), here below 0.01 nats
    from scipy import integrate

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=generator, dtype=DTYPE)
    y = (torch.rand(200, 1, generator=generator, dtype=DTYPE) < (0.8 * x).sigmoid()).double()
    model = kn.Model(nn.Linear(1, 1, bias=False).double(), kn.Bernoulli())
    posterior = kn.Laplace(structure="full", **QUICK).fit(model, (x, y))

    def joint(weight: float) -> float:
        params = {"weight": torch.tensor([[weight]], dtype=DTYPE)}
        return model.log_joint(params, x, y, 200).item()

    top = joint(posterior.mean()["weight"].item())
    area, _ = integrate.quad(lambda w: torch.tensor(joint(w) - top).exp().item(), -3, 4)
    assert posterior.log_evidence == pytest.approx(top + torch.tensor(area).log().item(), abs=0.01)


# --- trained already -------------------------------------------------------------------------------------------------


def test_given_weights_stay_as_they_are():
    case = network_case("batchnorm_cnn")
    trained = copy.deepcopy(case.net)
    trained.train()(case.x)  # other running statistics
    with torch.no_grad():
        for value in trained.parameters():
            value.add_(0.1)
    for start in (trained, trained.state_dict()):
        posterior = kn.Laplace().fit(case.model(), case.data, start=start)
        for name, value in trained.named_parameters():
            assert torch.equal(posterior.mean()[name], value)
        assert torch.equal(posterior.buffers["1.running_mean"], trained[1].running_mean)
    assert "given weights" in posterior.diagnostics.message


def test_a_posterior_is_a_start_and_its_noise_is_taken():
    case = network_case("mlp")
    mode = kn.MAP(**QUICK).fit(case.model(), case.data)
    posterior = kn.Laplace(tune="never").fit(case.model(), case.data, start=mode)
    assert all(torch.equal(value, mode.mean()[name]) for name, value in posterior.mean().items())


def test_without_a_noise_the_most_probable_is_found():
    # the maximum of Σ log N(y | f, σ²) + log N(log σ | -1, 4), which 2,000 rows bring to the root mean square
    x = torch.randn(2000, 1, dtype=DTYPE)
    net = nn.Linear(1, 1).double()
    y = net(x).detach() + 0.3 * torch.randn(2000, 1, dtype=DTYPE)
    posterior = kn.Laplace(tune="never").fit(kn.Model(net, kn.Gaussian()), (x, y), start="network")
    expected = (y - net(x)).square().mean().sqrt().item()
    assert posterior.points["likelihood.log_noise"].exp().item() == pytest.approx(expected, rel=1e-3)


def test_the_last_layer_alone_is_exact_on_the_features():
    case = network_case("mlp", rows=30, dtype=DTYPE)
    settings = {"random": "last_layer", "frozen": "0.*"}
    exact = kn.ExactLinear().fit(kn.Model(case.net, kn.Gaussian(0.3), **settings), case.data)
    model = kn.Model(case.net, kn.Gaussian(0.3), kn.Normal(1.0), random="last_layer")
    posterior = kn.Laplace(structure="full", polish=3).fit(model, case.data, start="network")
    torch.testing.assert_close(posterior.loc, exact.loc)
    torch.testing.assert_close(posterior.covariance, exact.covariance)
    assert posterior.log_evidence == pytest.approx(exact.log_evidence)
    assert posterior.std()["0.weight"].max() == 0
    x = torch.randn(4, 3, dtype=DTYPE)
    torch.testing.assert_close(posterior.predict(x).std, exact.predict(x).std)


def test_weights_that_are_not_at_the_mode_are_said_to_be_not():
    case = network_case("mlp", rows=60)
    model = kn.Model(case.net, kn.Gaussian(0.3))
    far = kn.Laplace().fit(model, case.data, start="network")
    assert any("could rise" in note for note in far.diagnostics.notes)
    near = kn.Laplace(structure="full", polish=60).fit(model, case.data, start="network")
    assert not any("could rise" in note for note in near.diagnostics.notes)
    assert near.diagnostics["distance_from_mode"] < 0.1 < far.diagnostics["distance_from_mode"]


# --- what a fit says, and what it refuses ----------------------------------------------------------------------------


def test_the_report_has_the_terms_of_the_estimate():
    target = LinearGaussian.make()
    posterior = kn.Laplace(structure="full", **QUICK).fit(target.model(), target.data)
    terms = posterior.diagnostics
    gamma = 4 - (target.covariance.diagonal() / target.prior_scale**2).sum().item()
    assert terms["effective_parameters"] == pytest.approx(gamma, abs=1e-6)
    assert terms["log_evidence"] == posterior.log_evidence
    residual = target.y.squeeze(1) - target.design @ target.mean
    expected = torch.distributions.Normal(0.0, target.noise).log_prob(residual).sum().item()
    assert terms["log_likelihood"] == pytest.approx(expected, abs=1e-6)


def test_layers_without_factors_and_random_outputs_are_noted():
    case = network_case("transformer")
    notes = kn.Laplace(max_columns=2, **QUICK).fit(case.model(), case.data).diagnostics.notes
    assert any("No Kronecker factors for" in note and "norm1.weight" in note for note in notes)
    assert any("more outputs than max_columns=2" in note for note in notes)


def test_a_prior_scale_that_is_never_tuned_is_noted_and_stays():
    target = LinearGaussian.make()
    model = kn.Model(target.model().net, kn.Gaussian(0.5), kn.EmpiricalBayes(kn.Normal(0.7)))
    posterior = kn.Laplace(tune="never", **QUICK).fit(model, target.data)
    assert posterior.points["prior.*.log_scale"].exp().item() == pytest.approx(0.7)
    assert any("tune='never'" in note for note in posterior.diagnostics.notes)


def test_a_flat_prior_has_no_evidence_and_a_proper_posterior():
    target = LinearGaussian.make()
    model = kn.Model(target.model().net, kn.Gaussian(target.noise), kn.Flat())
    posterior = kn.Laplace(structure="full", **QUICK).fit(model, target.data)
    assert posterior.log_evidence is None
    expected = torch.linalg.inv(target.design.T @ target.design) * target.noise**2
    torch.testing.assert_close(target.as_flat(posterior.std()), expected.diagonal().sqrt())


def test_every_weight_may_have_its_own_prior_scale():
    # automatic relevance determination: irrelevant inputs are switched off
    torch.manual_seed(0)
    x = torch.randn(100, 4, dtype=DTYPE)
    y = x[:, :1] - x[:, 1:2] + 0.3 * torch.randn(100, 1, dtype=DTYPE)
    model = kn.Model(nn.Linear(4, 1).double(), kn.Gaussian(0.3), kn.EmpiricalBayes(kn.Normal(1.0), per="weight"))
    posterior = kn.Laplace(structure="full", **QUICK).fit(model, (x, y))
    scale = posterior.points["prior.weight.log_scale"].exp().squeeze(0)
    assert scale[:2].min() > 0.5 and scale[2:].max() < 0.2
    assert posterior.mean()["weight"][0, 2:].abs().max() < 0.05


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(kn.InvalidArgument, match="needs structure='full' or 'diag', got structure='kron'"):
        kn.Laplace(curvature="hessian")
    with pytest.raises(kn.InvalidArgument, match="structure must be one of 'full', 'kron', 'diag', 'lowrank'"):
        kn.Laplace(structure="krone")
    target = LinearGaussian.make()
    with pytest.raises(kn.InvalidArgument, match=r"a 4 x 4 matrix; max_parameters is 3"):
        kn.Laplace(structure="full", max_parameters=3).fit(target.model(), target.data)
    model = kn.Model(nn.Linear(3, 1), kn.Gaussian(), random="likelihood.*")
    with pytest.raises(kn.Unsupported, match="only the likelihood's parameters"):
        kn.Laplace(**QUICK).fit(model, target.data)


def test_interrupted_at_the_curvature_it_returns_the_mode(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    target = LinearGaussian.make()
    monkeypatch.setattr("knowable.inference.laplace.laplace.Evidence", interrupt)
    with pytest.warns(kn.Interrupted, match="before the curvature was computed: .* WITHOUT ANY UNCERTAINTY"):
        posterior = kn.Laplace(**QUICK).fit(target.model(), target.data)
    assert isinstance(posterior, kn.Particles)
    assert posterior.diagnostics.interrupted
    assert "WITHOUT ANY UNCERTAINTY" in repr(posterior.diagnostics)


def test_interrupted_in_training_it_says_that_there_is_no_uncertainty(monkeypatch):
    target, calls = LinearGaussian.make(), 0
    forward = PointObjective.forward

    def interrupt(self, *args):
        nonlocal calls
        calls += 1
        if calls > 100:
            raise KeyboardInterrupt
        return forward(self, *args)

    monkeypatch.setattr(PointObjective, "forward", interrupt)
    said = "before the mode was found: .* WITHOUT ANY UNCERTAINTY"
    with pytest.warns(kn.Interrupted, match="last complete record"), pytest.warns(kn.Interrupted, match=said):
        posterior = kn.Laplace(epochs=500).fit(target.model(), target.data)
    assert isinstance(posterior, kn.Particles) and posterior.diagnostics.interrupted


def test_a_killed_fit_that_tunes_as_it_goes_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("knowable.inference.laplace.evidence._FIRST", 40)
    monkeypatch.setattr("knowable.inference.laplace.evidence._STEPS", 30)
    case = network_case("mlp", rows=30, dtype=DTYPE)
    model, method = case.model(kn.EmpiricalBayes(kn.Normal(1.0))), kn.Laplace(epochs=120, batch_size=8)
    whole = method.fit(model, case.data)
    count = 0

    def killed(self, *args):
        nonlocal count
        count += 1
        if count == 9:
            raise RuntimeError("killed")
        return maximised(self, *args)

    maximised = Evidence.maximised
    monkeypatch.setattr(Evidence, "maximised", killed)
    with pytest.raises(RuntimeError, match="killed"):
        method.fit(model, case.data, checkpoint=Checkpoint(tmp_path / "state", seconds=0))
    resumed = method.fit(model, case.data, checkpoint=Checkpoint(tmp_path / "state", seconds=0))
    assert count < 25  # it did not begin again
    expect_same_posterior(whole, resumed, case.x, "A tuned fit that was killed")


def test_the_network_and_the_callers_randomness_are_left_alone():
    case = network_case("mlp")
    before, state = copy.deepcopy(case.net.state_dict()), torch.get_rng_state()
    kn.Laplace().fit(case.model(), case.data, start="network").predict(case.x)
    assert all(torch.equal(value, before[name]) for name, value in case.net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


# --- what is said of weights that were trained elsewhere -------------------------------------------------------------


def logistic(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A logistic regression of 200 rows, and the network at the maximum of its likelihood."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((200, 3), generator=generator, dtype=torch.float64)
    y = (x.sum(1) + torch.randn(200, generator=generator, dtype=torch.float64) > 0).double().unsqueeze(1)
    net = nn.Linear(3, 1).double()
    most_likely(net, x, y)
    return net, x, y


def most_likely(net: nn.Module, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
    search = torch.optim.LBFGS(net.parameters(), max_iter=200, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value = nn.functional.binary_cross_entropy_with_logits(net(x), y, weight, reduction="sum")
        value.backward()
        return value

    search.step(loss)


def notes_of(net: nn.Module, data: object, prior: kn.Prior) -> str:
    model = kn.Model(net, kn.Bernoulli(), prior)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.WorseThanNetwork)
        return " ".join(kn.Laplace(structure="full", start="network").fit(model, data).diagnostics.notes)


def test_weights_trained_without_a_prior_are_no_matter_under_a_wide_one(seed):
    net, x, y = logistic(seed)
    assert notes_of(net, (x, y), kn.Normal(10.0)) == ""


def test_a_narrow_prior_that_trained_weights_have_not_seen_is_noted(seed):
    net, x, y = logistic(seed)
    notes = notes_of(net, (x, y), kn.Normal(0.1))
    assert "trained without this prior" in notes and "Train longer" not in notes


def test_weights_that_were_not_trained_to_the_end_are_noted(seed):
    net, x, y = logistic(seed)
    with torch.no_grad():
        net.weight.zero_()
    assert "their log likelihood could rise" in notes_of(net, (x, y), kn.Normal(10.0))


def test_weights_of_rows_count_in_the_covariance_of_trained_weights_and_training_without_them_is_noted(seed):
    net, x, y = logistic(seed)
    counts = torch.where(y.squeeze(1) > 0, 5.0, 1.0).double()
    notes = notes_of(net, kn.Data((x, y), weights=counts), kn.Normal(10.0))
    assert "with the weights of the rows" in notes
    most_likely(net, x, y, counts.unsqueeze(1))
    assert notes_of(net, kn.Data((x, y), weights=counts), kn.Normal(10.0)) == ""
    fit = kn.Laplace(structure="full", start="network").fit
    model = kn.Model(net, kn.Bernoulli(), kn.Normal(10.0))
    weighted = fit(model, kn.Data((x, y), weights=counts))
    repeated = fit(model, (x.repeat_interleave(counts.long(), 0), y.repeat_interleave(counts.long(), 0)))
    torch.testing.assert_close(weighted.std()["weight"], repeated.std()["weight"])
