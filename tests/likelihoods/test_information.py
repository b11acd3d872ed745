"""Tests of each likelihood's curvature: the covariance of the score over its own targets is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

import knowable as kn

DTYPE = torch.float64


def score(likelihood, output: Tensor, y: Tensor, own) -> Tensor:
    """Gradient of log p(y | f) in f, of one row."""
    output = output.clone().requires_grad_()
    return torch.autograd.grad(likelihood.log_prob(output, y, own).sum(), output)[0].flatten()


def own_params(likelihood, value: float = -0.4):
    return {name: torch.full_like(each, value, dtype=DTYPE) for name, each in likelihood.params().items()}


def enumerated(likelihood, output: Tensor, targets: list[Tensor], own) -> Tensor:
    """E[score scoreᵀ] over targets that can be listed."""
    total = 0.0
    for y in targets:
        gradient = score(likelihood, output, y, own)
        total = total + likelihood.log_prob(output, y, own).exp().sum() * gradient.outer(gradient)
    return total


def integrated(likelihood, output: Tensor, own, trailing: tuple[int, ...]) -> Tensor:
    """The same over one real target."""

    def entry(i: int, j: int) -> float:
        def integrand(y: float) -> float:
            target = torch.full((1, *trailing), y, dtype=DTYPE)
            gradient = score(likelihood, output, target, own)
            return (likelihood.log_prob(output, target, own).exp().sum() * gradient[i] * gradient[j]).item()

        centre = output.flatten()[0].item()
        return integrate.quad(integrand, centre - 400, centre + 400, points=[centre], limit=400)[0]

    size = output.numel()
    return torch.tensor([[entry(i, j) for j in range(size)] for i in range(size)], dtype=DTYPE)


def dense(likelihood, output: Tensor, own) -> Tensor:
    information = likelihood.information(output, own)
    units = torch.eye(output.numel(), dtype=DTYPE).view(-1, *output.shape)
    return torch.stack([information.times(unit).flatten() for unit in units])


@pytest.mark.parametrize(
    ("likelihood", "size"),
    [
        (kn.Gaussian(), 1),
        (kn.Gaussian(0.7), 1),
        (kn.StudentT(df=5.0), 1),
        (kn.StudentT(df=2.5, scale=1.3), 1),
        (kn.HeteroscedasticGaussian(), 2),
    ],
    ids=repr,
)
def test_numbers_have_the_information_of_their_integral(likelihood, size):
    output = torch.tensor([[0.3, -0.6][:size]], dtype=DTYPE)
    own = own_params(likelihood)
    expected = integrated(likelihood, output, own, (1,))
    torch.testing.assert_close(dense(likelihood, output, own), expected, rtol=1e-5, atol=1e-6)


def test_classes_yes_or_no_and_counts_have_the_information_of_their_sum():
    logits = torch.randn(1, 4, dtype=DTYPE)
    labels = [torch.tensor([label]) for label in range(4)]
    torch.testing.assert_close(dense(kn.Categorical(), logits, {}), enumerated(kn.Categorical(), logits, labels, {}))
    logits = torch.randn(1, 2, dtype=DTYPE)
    both = [torch.tensor([[a, b]], dtype=DTYPE) for a in (0, 1) for b in (0, 1)]
    torch.testing.assert_close(dense(kn.Bernoulli(), logits, {}), enumerated(kn.Bernoulli(), logits, both, {}))
    rate = torch.tensor([[0.8]], dtype=DTYPE)
    counts = [torch.tensor([[count]], dtype=DTYPE) for count in range(60)]
    torch.testing.assert_close(dense(kn.Poisson(), rate, {}), enumerated(kn.Poisson(), rate, counts, {}))


def test_each_output_has_its_own_noise():
    likelihood = kn.Gaussian(outputs=2)
    own = {"log_noise": torch.tensor([0.0, 1.0], dtype=DTYPE)}
    found = likelihood.information(torch.zeros(3, 2, dtype=DTYPE), own).diagonal()
    np.testing.assert_allclose(found, [[1.0, np.exp(-2.0)]] * 3)


@pytest.mark.parametrize("likelihood", [kn.Gaussian(), kn.StudentT()], ids=repr)
def test_information_falls_with_the_square_of_the_named_noise(likelihood):
    output = torch.zeros(2, 1, dtype=DTYPE)
    first, second = ({likelihood.noise_name: torch.tensor(v, dtype=DTYPE)} for v in (0.2, 0.9))
    ratio = likelihood.information(output, second).diagonal() / likelihood.information(output, first).diagonal()
    torch.testing.assert_close(ratio, torch.full_like(ratio, np.exp(-1.4)))


def test_pixels_have_the_information_of_each():
    logits = torch.randn(2, 3, 2, 2, dtype=DTYPE)
    information = kn.Categorical().information(logits, {})
    torch.testing.assert_close(information.diagonal(), logits.softmax(1) * (1 - logits.softmax(1)))
