"""Tests of normal posteriors with a diagonal and a low-rank part: against the dense covariance."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.params import Layout
from tests.core.cases import DTYPE, linear_data, mlp, same_params


def _posterior(rank: int = 3) -> tuple[kn.LowRankNormal, torch.Tensor, torch.Tensor]:
    """A posterior over 17 parameters, and its mean and covariance."""
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1))
    layout = Layout.of(model.params())
    loc, diagonal = torch.randn(layout.size, dtype=DTYPE), torch.rand(layout.size, dtype=DTYPE) + 0.1
    factor = torch.randn(layout.size, rank, dtype=DTYPE)
    posterior = kn.LowRankNormal.of_covariance(model, layout, loc, diagonal, factor)
    return posterior, loc, diagonal.diag() + factor @ factor.T


@pytest.mark.parametrize("rank", [0, 3, 30])
def test_density_and_spread_are_those_of_the_dense_covariance(rank):
    posterior, loc, covariance = _posterior(rank)
    flat = torch.randn(5, len(loc), dtype=DTYPE)
    dense = torch.distributions.MultivariateNormal(loc, covariance)
    torch.testing.assert_close(posterior.log_prob(posterior.layout.views(flat)), dense.log_prob(flat))
    torch.testing.assert_close(posterior.layout.flatten(posterior.std()), covariance.diagonal().sqrt())
    torch.testing.assert_close(posterior.layout.flatten(posterior.mean()), loc)


def test_draws_have_the_mean_and_the_covariance(generator):
    # the error of a covariance over n draws is at most sqrt(2 v w / n) for variances v and w: 5 of those
    posterior, loc, covariance = _posterior()
    n = 20_000
    draws = posterior.layout.flatten(posterior.sample(n, generator))
    variances = covariance.diagonal()
    assert ((draws.mean(0) - loc).abs() < 5 * (variances / n).sqrt()).all()
    assert ((draws.T.cov() - covariance).abs() < 5 * (2 * variances.outer(variances) / n).sqrt()).all()


def test_it_is_saved_and_loaded_as_it_is(tmp_path):
    posterior, _, _ = _posterior()
    loaded = kn.load(posterior.save(tmp_path))
    assert type(loaded) is kn.LowRankNormal
    assert same_params(
        loaded.sample(3, torch.Generator().manual_seed(1)), posterior.sample(3, torch.Generator().manual_seed(1))
    )
    x = linear_data(3)[0]
    assert torch.equal(loaded.predict(x, 4).samples, posterior.predict(x, 4).samples)


def test_a_density_of_other_parameters_is_refused():
    with pytest.raises(kn.InvalidArgument, match="params lacks"):
        _posterior()[0].log_prob({"weight": torch.zeros(1)})
    assert math.isfinite(_posterior()[0].log_prob(_posterior()[0].mean()))
