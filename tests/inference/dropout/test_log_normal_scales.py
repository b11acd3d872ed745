from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

from knowable.inference.dropout.unit_noise import divergence_from_gamma, divergence_from_inverse_gamma

PAIRS = [(mu, sigma) for mu in (-6.0, -1.0, 0.0, 0.7, 3.0) for sigma in (0.02, 0.3, 1.0, 2.0)]
PARTS = {
    "gamma": (divergence_from_gamma, scipy.stats.gamma(0.5)),
    "inverse gamma": (divergence_from_inverse_gamma, scipy.stats.invgamma(0.5)),
}


@pytest.mark.parametrize("part", PARTS)
def test_the_divergence_is_the_integral(part):
    function, prior = PARTS[part]
    for mu, sigma in PAIRS:
        t = np.linspace(mu - 12 * sigma, mu + 12 * sigma, 20_001)  # log x, whose density under the prior has a factor x
        own = scipy.stats.norm(mu, sigma)
        expected = scipy.integrate.simpson(own.pdf(t) * (own.logpdf(t) - prior.logpdf(np.exp(t)) - t), x=t)
        found = function(torch.tensor(mu).double(), torch.tensor(math.log(sigma)).double()).item()
        assert math.isclose(found, expected, rel_tol=1e-7, abs_tol=1e-8), (mu, sigma)


def test_the_divergence_is_least_where_its_slope_is_zero():
    # e^{μ + σ²/2} = ½ and σ² = 2: ½ - ½ log 2
    found = divergence_from_gamma(torch.tensor(math.log(0.5) - 1.0), torch.tensor(0.5 * math.log(2)))
    assert math.isclose(found.item(), 0.5 - 0.5 * math.log(2), rel_tol=1e-5)


def test_the_product_of_both_parts_is_the_square_of_a_half_cauchy_scale(seed):
    n = 4000
    gamma, inverse = (part.rvs(n, random_state=seed + i) for i, (_, part) in enumerate(PARTS.values()))
    distance = scipy.stats.kstest((gamma * inverse) ** 0.5, scipy.stats.halfcauchy.cdf).statistic
    assert distance < 2.2 / math.sqrt(n)  # exceeded once in 8,000 times
