"""The normal-inverse-gamma posterior, beside the joint Student t of weights, targets and new outcomes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.exact.student_t import LinearStudentT
from tests.inference.exact.oracle import linear_layer_design

A, B = 1.5, 0.4
PRIOR = kn.NormalInverseGamma({"bias": kn.Normal(2.0, loc=0.5), "*": kn.Normal(0.8)}, shape=A, rate=B)


def problem(rows: int = 14, outputs: int = 1) -> tuple[kn.Model, tuple[Tensor, Tensor]]:
    x = torch.randn(rows, 2, dtype=torch.float64)
    y = x @ torch.randn(2, outputs, dtype=torch.float64) + 0.3 * torch.randn(rows, outputs, dtype=torch.float64)
    return kn.Model(nn.Linear(2, outputs).double(), kn.Gaussian(), PRIOR), (x, y)


def joint(design: Tensor) -> tuple[Tensor, Tensor]:
    """Location and scale matrix of targets ``design`` θ + noise, whose degrees of freedom are 2A."""
    outputs = design.shape[1] // 3
    mean = torch.tensor([0.0] * (2 * outputs) + [0.5] * outputs, dtype=torch.float64)
    variance = torch.tensor([0.64] * (2 * outputs) + [4.0] * outputs, dtype=torch.float64)
    scale = B / A * (design * variance @ design.T + torch.eye(len(design)).double())
    return design @ mean, scale


def conditioned(loc: Tensor, scale: Tensor, y: Tensor) -> tuple[float, Tensor, Tensor]:
    """Degrees of freedom, location and scale of a Student t, given its first elements (Ding, 2016)."""
    n = len(y)
    gain = scale[n:, :n] @ torch.linalg.inv(scale[:n, :n])
    away = y - loc[:n]
    distance = away @ torch.linalg.solve(scale[:n, :n], away)
    shrunk = scale[n:, n:] - gain @ scale[:n, n:]
    return 2 * A + n, loc[n:] + gain @ away, (2 * A + distance) / (2 * A + n) * shrunk


@pytest.mark.parametrize("outputs", [1, 3])
def test_evidence_is_the_student_t_density_of_the_targets(seed, outputs):
    model, (x, y) = problem(outputs=outputs)
    loc, scale = joint(linear_layer_design(x, outputs))
    expected = scipy.stats.multivariate_t(loc.numpy(), scale.numpy(), df=2 * A).logpdf(y.flatten().numpy())
    evidence = kn.ExactLinear().fit(model, (x, y)).log_evidence
    assert evidence == pytest.approx(expected, abs=1e-8) and evidence.kind == "exact"


def test_prediction_is_the_student_t_of_a_new_outcome_given_the_old_ones(seed):
    model, (x, y) = problem()
    new = torch.randn(4, 2, dtype=torch.float64)
    prediction = kn.ExactLinear().fit(model, (x, y)).predict(new)
    outcome = torch.randn(4, 1, dtype=torch.float64)
    for row in range(4):
        loc, scale = joint(linear_layer_design(torch.cat([x, new[row : row + 1]]), 1))
        df, centre, width = conditioned(loc, scale, y[:, 0])
        exact = scipy.stats.t(df, centre.item(), width.sqrt().item())
        assert prediction.log_prob(outcome)[row].item() == pytest.approx(exact.logpdf(outcome[row].item()), abs=1e-8)
        assert prediction.quantile(0.05)[row].item() == pytest.approx(exact.ppf(0.05), abs=1e-7)
        assert prediction.variance[row].item() == pytest.approx(exact.var(), abs=1e-8)
    posterior = kn.ExactLinear().fit(model, (x, y))
    noise = posterior.rate / (posterior.shape - 1)
    torch.testing.assert_close(prediction.aleatoric, torch.full((4, 1), noise, dtype=torch.float64))
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.variance)


def test_outputs_of_a_row_share_the_noise_that_is_not_known(seed):
    # zero correlation, but not independent: the joint density is a bivariate Student t
    model, (x, y) = problem(rows=5, outputs=2)
    new, outcome = torch.randn(1, 2, dtype=torch.float64), torch.randn(1, 2, dtype=torch.float64)
    loc, scale = joint(linear_layer_design(torch.cat([x, new]), 2))
    df, centre, width = conditioned(loc, scale, y.flatten())
    exact = scipy.stats.multivariate_t(centre.numpy(), width.numpy(), df=df)
    prediction = kn.ExactLinear().fit(model, (x, y)).predict(new)
    assert prediction.log_prob(outcome).item() == pytest.approx(exact.logpdf(outcome[0].numpy()), abs=1e-8)


def test_draws_of_outcomes_have_the_moments_of_the_student_t(seed, generator):
    # the mean square of S draws of a t with 13 degrees of freedom: its relative error is about sqrt(2.7 / S)
    model, (x, y) = problem(rows=5, outputs=2)
    prediction = kn.ExactLinear().fit(model, (x, y)).predict(x[:3])
    found = prediction.draw(20_000, generator=generator)
    assert ((found.mean(0) - prediction.mean).abs() < 4.5 * prediction.std / math.sqrt(20_000)).all()
    assert ((found.var(0) / prediction.variance - 1).abs() < 5 * math.sqrt(2.7 / 20_000)).all()
    both = (found - prediction.mean).square().mean(2).var(0) / prediction.variance.mean(1) ** 2
    assert (both > 1.05).all()  # of two independent normals of one variance it is 1; sharing the noise makes it larger


def test_density_is_likelihood_times_prior_over_evidence(seed):
    model, (x, y) = problem()
    posterior = kn.ExactLinear().fit(model, (x, y))
    draws = posterior.sample(5)
    for k in range(5):
        draw = {name: value[k] for name, value in draws.items()}
        expected = model.log_joint(draw, x, y, len(x)) - posterior.log_evidence
        torch.testing.assert_close(posterior.log_prob(draw), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(posterior.log_prob(draws)[-1], expected, rtol=0, atol=1e-8)


def test_draws_have_the_posteriors_moments(seed, generator):
    model, data = problem()
    posterior = kn.ExactLinear().fit(model, data)
    draws, mean, std = posterior.sample(20_000, generator=generator), posterior.mean(), posterior.std()
    for name, value in draws.items():
        error = std[name] / math.sqrt(20_000)
        assert ((value.mean(0) - mean[name]).abs() < 4.5 * error).all()
        assert ((value.std(0) / std[name] - 1).abs() < 0.05).all()  # kurtosis of the noise's logarithm is below 4


def test_batches_in_turn_are_the_whole(seed):
    model, (x, y) = problem(rows=60, outputs=2)
    whole = kn.ExactLinear().fit(model, (x, y))
    parts = [kn.ExactLinear().fit(model, (x[:7], y[:7]))]
    for rows in (slice(7, 8), slice(8, 40), slice(40, 60)):
        parts.append(parts[-1].update((x[rows], y[rows])))
    last = parts[-1]
    torch.testing.assert_close(last.loc, whole.loc, rtol=0, atol=1e-8)
    torch.testing.assert_close(last.covariance, whole.covariance, rtol=0, atol=1e-8)
    assert (last.shape, last.rate) == pytest.approx((whole.shape, whole.rate), abs=1e-8)
    assert sum(each.log_evidence for each in parts) == pytest.approx(whole.log_evidence, abs=1e-8)
    torch.testing.assert_close(last.predict(x).log_prob(y), whole.predict(x).log_prob(y), rtol=0, atol=1e-8)


def test_saved_and_loaded_it_is_the_same_and_can_be_updated(seed, tmp_path):
    model, (x, y) = problem()
    first = kn.ExactLinear().fit(model, (x[:8], y[:8]))
    second = first.update((x[8:], y[8:]))  # its prior is a posterior
    for number, posterior in enumerate((first, second)):
        posterior.save(tmp_path / str(number))
        loaded = kn.load(tmp_path / str(number))
        assert isinstance(loaded, LinearStudentT) and repr(loaded.model.prior) == repr(posterior.model.prior)
        torch.testing.assert_close(loaded.predict(x).log_prob(y), posterior.predict(x).log_prob(y), rtol=0, atol=0)
        more = loaded.update((x, y), method=kn.ExactLinear())
        torch.testing.assert_close(more.loc, posterior.update((x, y)).loc, rtol=0, atol=0)


def test_prior_is_a_density_and_its_draws_follow_it(seed, generator):
    prior = kn.NormalInverseGamma(kn.Normal(0.5, loc=1.0), shape=2.0, rate=0.3)

    def density(log_noise: float, weight: float) -> float:
        values = {"w": torch.tensor([weight]).double(), "likelihood.log_noise": torch.tensor(log_noise).double()}
        return prior.log_prob(values).exp().item()

    total, _ = scipy.integrate.dblquad(lambda w, s: density(s, w), -3.5, 2.5, -10, 12, epsabs=1e-4)
    assert total == pytest.approx(1.0, abs=2e-3)  # the weight beyond 10 has a probability of 1e-4
    like = {"w": torch.zeros(1).double(), "likelihood.log_noise": torch.tensor(0.0).double()}
    draws = [prior.sample(like, generator=generator) for _ in range(800)]
    noise = np.array([each["likelihood.log_noise"].exp().item() for each in draws])
    units = (np.array([each["w"].item() for each in draws]) - 1.0) / noise
    assert scipy.stats.kstest(noise**2, scipy.stats.invgamma(2.0, scale=0.3).cdf).pvalue > 1e-4
    assert scipy.stats.kstest(units, scipy.stats.norm(0, 0.5).cdf).pvalue > 1e-4


def test_other_methods_take_the_prior_too(seed):
    # the most probable values: of the noise's logarithm and the weights together
    model, (x, y) = problem(rows=40)
    exact = kn.ExactLinear().fit(model, (x, y))
    found = kn.MAP(epochs=400).fit(model, (x, y)).mean()
    torch.testing.assert_close(exact.layout.flatten(found), exact.loc, rtol=0, atol=2e-3)
    mode = 0.5 * math.log(exact.rate / (exact.shape + 1.5))  # a shape of 3 / 2 more: a density of three weights too
    assert found["likelihood.log_noise"].item() == pytest.approx(mode, abs=2e-3)


@pytest.mark.parametrize("method", [kn.Laplace(epochs=5), kn.MeanFieldVI(epochs=5)], ids=["laplace", "mean field"])
def test_methods_that_need_a_prior_of_each_weight_say_so(method):
    model, data = problem(rows=10)
    with pytest.raises(kn.Unsupported, match=r"NormalInverseGamma.* Use ExactLinear, FullRankVI or NUTS"):
        method.fit(model, data)


@pytest.mark.parametrize(
    ("likelihood", "outputs"), [(kn.Gaussian(0.1), 1), (kn.Gaussian(outputs=2), 2)], ids=["known", "several"]
)
def test_noise_that_is_known_or_of_several_outputs_is_refused(likelihood, outputs):
    model = kn.Model(nn.Linear(2, outputs), likelihood, PRIOR)
    with pytest.raises(kn.Unsupported, match="one noise that is not known"):
        kn.ExactLinear().fit(model, (torch.randn(9, 2), torch.randn(9, outputs)))


def test_wrong_arguments_are_refused():
    with pytest.raises(kn.InvalidType, match="weights must be a Normal"):
        kn.NormalInverseGamma(kn.LaplacePrior())
    with pytest.raises(kn.InvalidArgument, match="shape"):
        kn.NormalInverseGamma(shape=0.0)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(), kn.NormalInverseGamma({"weight": kn.Normal(1.0)}))
    with pytest.raises(kn.InvalidArgument, match="no entry for 'bias'"):
        kn.ExactLinear().fit(model, (torch.randn(9, 2), torch.randn(9, 1)))
