"""Tests of expected log likelihoods under normal outputs, against quadrature and draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import knowable as kn
from knowable.core.model.likelihood import Likelihood
from knowable.inference.variational.moment import expected_likelihood as rules
from knowable.inference.variational.moment.algebra import Moments


def outputs(generator: torch.Generator, rows: int, n: int, *, size: float = 1.0) -> Moments:
    """Correlated outputs, ``(rows, n)``."""
    factor = size * torch.randn(rows, n, n, generator=generator, dtype=torch.float64) / math.sqrt(n)
    covariance = factor @ factor.mT
    mean = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    return Moments(mean, covariance.diagonal(dim1=-2, dim2=-1), covariance)


def drawn(
    likelihood: Likelihood, output: Moments, y: Tensor, own: dict[str, Moments], generator
) -> tuple[Tensor, Tensor]:
    """Mean and standard error of the log likelihood over 20,000 draws of the outputs; own parameters by many nodes."""
    noise = torch.randn(20_000, *output.mean.shape, generator=generator, dtype=torch.float64)
    values = output.mean + torch.einsum("bij,kbj->kbi", torch.linalg.cholesky(output.covariance), noise)
    rows, targets = values.flatten(0, 1), y.expand(20_000, *y.shape).flatten(0, 1)
    places, shares = np.polynomial.hermite_e.hermegauss(30 if own else 1)
    total = torch.zeros(len(rows), dtype=torch.float64)
    for place, share in zip(places, shares / shares.sum(), strict=True):
        params = {name: each.mean + each.std * place for name, each in own.items()}
        total += share * likelihood.log_prob(rows, targets, params)
    each = total.view(20_000, -1)
    return each.mean(0), each.std(0) / math.sqrt(20_000)


def log_scale(value: float, std: float) -> Moments:
    return Moments(torch.tensor(value, dtype=torch.float64), torch.tensor(std**2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("likelihood", "own", "n"),
    [
        (kn.Gaussian(0.7), {}, 2),
        (kn.Gaussian((0.5, 2.0)), {}, 2),
        (kn.Gaussian(), {"log_noise": log_scale(-0.3, 0.2)}, 2),
        (kn.HeteroscedasticGaussian(), {}, 4),
        (kn.StudentT(4.0, 0.8), {}, 2),
        (kn.StudentT(4.0), {"log_scale": log_scale(-0.2, 0.3)}, 2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_numbers_have_the_mean_over_draws(generator, likelihood, own, n):
    output = outputs(generator, 3, n, size=0.4)
    y = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    found = rules.expected_log_likelihood(likelihood, output, y, own)
    mean, error = drawn(likelihood, output, y, own, generator)
    assert ((found - mean).abs() < 4.5 * error + 1e-4).all()


def test_counts_have_the_closed_form(generator):
    # E[y f - e^f - log y!] with E[e^f] = exp(m + v / 2)
    output = outputs(generator, 4, 3, size=0.8)
    y = torch.poisson(torch.full((4, 3), 2.0, dtype=torch.float64), generator=generator)
    exact = (y * output.mean - (output.mean + 0.5 * output.variance).exp() - torch.lgamma(y + 1)).sum(1)
    torch.testing.assert_close(rules.expected_log_likelihood(kn.Poisson(), output, y, {}), exact, rtol=1e-6, atol=1e-6)


def test_yes_and_no_have_the_integral_over_a_fine_grid(generator):
    output = outputs(generator, 4, 2)
    y = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]], dtype=torch.float64)
    nodes, weights = (torch.tensor(each) for each in np.polynomial.hermite_e.hermegauss(150))
    logits = (2 * y - 1).unsqueeze(-1) * (output.mean.unsqueeze(-1) + output.std.unsqueeze(-1) * nodes)
    exact = (torch.nn.functional.logsigmoid(logits) @ (weights / weights.sum())).sum(1)
    found = rules.expected_log_likelihood(kn.Bernoulli(), output, y, {})
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [0.3, 1.0, 2.0])
def test_labels_have_a_lower_bound_with_nearly_the_best_weights(generator, size):
    # for any weights a it is a bound (Knowles and Minka, 2011); scipy finds the best, and ours may lose 0.1 nats to it
    output = outputs(generator, 4, 5, size=size)
    y = torch.tensor([0, 1, 2, 4])
    found = rules.expected_log_likelihood(kn.Categorical(), output, y, {})
    mean, error = drawn(kn.Categorical(), output, y, {}, generator)
    assert (found < mean + 4.5 * error).all()
    for row in range(4):
        assert found[row] > output.mean[row, y[row]] - best_bound(output.mean[row], output.covariance[row]) - 0.1


def best_bound(mean: Tensor, covariance: Tensor) -> float:
    """The least upper bound of E[log sum exp f] over weights a."""

    def value(at):
        weights = torch.tensor(at, requires_grad=True)
        product = covariance @ weights
        bound = 0.5 * weights @ product + (mean + 0.5 * covariance.diagonal() - product).logsumexp(0)
        (slope,) = torch.autograd.grad(bound, weights)
        return bound.item(), slope.numpy()

    return scipy.optimize.minimize(value, mean.softmax(0).numpy(), jac=True, method="L-BFGS-B").fun


def test_bound_is_exact_for_known_logits_and_for_noise_that_all_share(generator):
    mean = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    exact = mean.logsumexp(1)
    torch.testing.assert_close(rules.log_sum_exp_bound(Moments(mean)), exact)
    shared = torch.full((3, 4, 4), 2.0, dtype=torch.float64)  # the same noise on all logits changes no probability
    together = Moments(mean, torch.full_like(mean, 2.0), shared)
    torch.testing.assert_close(rules.log_sum_exp_bound(together), exact)


def test_two_classes_are_close_to_the_integral_over_their_difference(generator):
    mean, variance = torch.tensor([[0.5, -0.2]], dtype=torch.float64), torch.tensor([[0.6, 0.9]], dtype=torch.float64)
    nodes, weights = (torch.tensor(each) for each in np.polynomial.hermite_e.hermegauss(150))
    difference = -0.7 + math.sqrt(1.5) * nodes
    exact = 0.5 + torch.nn.functional.softplus(difference) @ (weights / weights.sum())
    found = rules.log_sum_exp_bound(Moments(mean, variance)).item()
    assert exact.item() < found < exact.item() + 0.03


def test_pixels_have_labels_of_their_own(generator):
    mean = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    variance = torch.rand(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (2, 4, 4), generator=generator)
    found = rules.expected_log_likelihood(kn.Categorical(), Moments(mean, variance), y, {})
    flat = Moments(mean.permute(0, 2, 3, 1).reshape(-1, 3), variance.permute(0, 2, 3, 1).reshape(-1, 3))
    each = rules.expected_log_likelihood(kn.Categorical(), flat, y.flatten(), {})
    torch.testing.assert_close(found, each.view(2, 16).sum(1))


def test_weights_of_the_bound_are_held_fixed_where_it_does_not_depend_on_them(generator):
    # at their best values the bound's slope in them is zero: gradients are those of finite differences
    output = outputs(generator, 1, 4)
    mean = output.mean.clone().requires_grad_()
    rules.log_sum_exp_bound(Moments(mean, output.variance, output.covariance)).sum().backward()
    for k in range(4):
        move = torch.zeros_like(output.mean)
        move[0, k] = 1e-4
        ends = [
            rules.log_sum_exp_bound(Moments(output.mean + s * move, output.variance, output.covariance)).item()
            for s in (1, -1)
        ]
        assert mean.grad[0, k].item() == pytest.approx((ends[0] - ends[1]) / 2e-4, abs=2e-3)


@dataclass(frozen=True)
class Strange(kn.Poisson):
    """A likelihood of the user's own."""


@dataclass(frozen=True)
class Stranger(Likelihood):
    """One that is no relative of ours."""

    def check_target(self, y, output, *, name="y"):
        return y

    def log_prob(self, output, y, params):
        return -(output - y).abs().sum(1)

    def predict(self, outputs, params, log_weights):
        raise NotImplementedError


def test_likelihood_without_a_rule_is_refused_by_name():
    rules.check_likelihood(Strange())
    with pytest.raises(kn.Unsupported, match=r"Stranger.*rules for Gaussian"):
        rules.check_likelihood(Stranger())
