"""Tests of the Kronecker-factored posterior; torch's full normal is the oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.kronecker import KroneckerBlock
from knowable.core.network.params import Layout
from tests.core.cases import DTYPE, same_params


def model_of(**settings) -> kn.Model:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1, bias=False)).to(DTYPE)
    return kn.Model(net, kn.Gaussian(0.1), **settings)


def posterior_of(model: kn.Model, generator: torch.Generator | None = None, **common) -> kn.KroneckerNormal:
    def basis(size: int):
        return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=DTYPE))[0]

    def values(*shape: int):
        return torch.rand(shape, generator=generator, dtype=DTYPE) + 0.2

    loc = {name: torch.randn(v.shape, generator=generator, dtype=DTYPE) for name, v in model.params().items()}
    blocks = [
        KroneckerBlock(
            ("0.weight", "0.bias"), (torch.Size((3, 2)), torch.Size((3,))), values(3, 3), basis(3), basis(3)
        ),
        KroneckerBlock(("1.weight",), (torch.Size((3,)),), values(3, 1), basis(3)),
        KroneckerBlock(("1.bias",), (torch.Size((3,)),), values(3, 1)),
        KroneckerBlock(("2.weight",), (torch.Size((1, 3)),), values(1, 3), None, basis(3)),
    ]
    return kn.KroneckerNormal(model, loc, blocks, **common)


def dense(posterior: kn.KroneckerNormal) -> tuple[Layout, torch.distributions.MultivariateNormal]:
    layout = Layout.of(posterior.loc)
    mean, precision = posterior.as_prior().joint_normal(layout)
    return layout, torch.distributions.MultivariateNormal(mean, precision_matrix=precision)


def test_the_log_density_is_that_of_torch(generator):
    posterior = posterior_of(model_of(), generator)
    layout, oracle = dense(posterior)
    draws = posterior.sample(5, generator)
    torch.testing.assert_close(posterior.log_prob(draws), oracle.log_prob(layout.flatten(draws)))
    one = {name: value[2] for name, value in draws.items()}
    torch.testing.assert_close(posterior.log_prob(one), oracle.log_prob(layout.flatten(draws))[2])


def test_draws_have_its_moments(generator):
    # covariances err by sqrt((c_ij² + c_ii c_jj) / n): 5 of those
    posterior, n = posterior_of(model_of(), generator), 20_000
    layout, oracle = dense(posterior)
    draws, covariance = layout.flatten(posterior.sample(n, generator)), oracle.covariance_matrix
    variances = covariance.diagonal()
    assert ((draws.mean(0) - oracle.mean).abs() < 5 * (variances / n).sqrt()).all()
    error = ((covariance**2 + variances.outer(variances)) / n).sqrt()
    assert ((draws.T.cov() - covariance).abs() < 5 * error).all()
    torch.testing.assert_close(layout.flatten(posterior.std()), variances.sqrt())


def test_every_random_parameter_is_held_once():
    model = model_of()
    posterior = posterior_of(model)
    with pytest.raises(kn.InvalidArgument, match="must hold each of"):
        kn.KroneckerNormal(model, posterior.loc, posterior.blocks[:-1])
    with pytest.raises(kn.InvalidArgument, match="must hold each of"):
        kn.KroneckerNormal(model, posterior.loc, [*posterior.blocks, posterior.blocks[0]])


def test_a_missing_parameter_is_refused_by_name():
    posterior = posterior_of(model_of())
    params = posterior.mean()
    del params["1.bias"]
    with pytest.raises(kn.InvalidArgument, match=r"1\.bias"):
        posterior.log_prob(params)


def test_tensors_and_back_give_the_same_posterior(generator):
    model = model_of()
    posterior = posterior_of(model, generator)
    again = kn.KroneckerNormal._from_tensors(model, posterior._tensors())
    assert same_params(again.mean(), posterior.mean())
    assert same_params(again.std(), posterior.std())
    draws = [each.sample(3, torch.Generator().manual_seed(1)) for each in (posterior, again)]
    assert same_params(*draws)


# --- as a prior -------------------------------------------------------------------------------------------------------


def test_as_a_prior_it_has_the_same_density(generator):
    posterior = posterior_of(model_of(), generator)
    params = {name: value[0] for name, value in posterior.sample(1, generator).items()}
    torch.testing.assert_close(posterior.as_prior().log_prob(params), posterior.log_prob(params))


def test_its_precision_is_given_in_the_order_asked_for(generator):
    posterior = posterior_of(model_of(), generator)
    prior, own = posterior.as_prior(), Layout.of(posterior.loc)
    other = Layout.of({name: posterior.loc[name] for name in reversed(list(posterior.loc))})
    order = other.flatten(own.views(torch.arange(own.size)))
    mean, precision = prior.joint_normal(own)
    torch.testing.assert_close(prior.joint_normal(other)[1], precision[order][:, order])
    torch.testing.assert_close(prior.joint_normal(other)[0], mean[order])
    torch.testing.assert_close(other.flatten(prior.normal.precision_diagonal()), precision.diagonal()[order])


def test_the_divergence_from_independent_normals_is_that_of_torch(generator):
    posterior = posterior_of(model_of(), generator)
    layout, oracle = dense(posterior)
    loc = {k: torch.randn(v.shape, generator=generator, dtype=DTYPE) for k, v in posterior.loc.items()}
    scale = {k: torch.rand(v.shape, generator=generator, dtype=DTYPE) + 0.1 for k, v in posterior.loc.items()}
    q = torch.distributions.MultivariateNormal(layout.flatten(loc), layout.flatten(scale).square().diag())
    torch.testing.assert_close(posterior.as_prior().joint_kl(loc, scale), torch.distributions.kl_divergence(q, oracle))


def test_draws_from_the_prior_have_its_spread(generator):
    # standard deviations err by sd / sqrt(2 n): 5 of those
    posterior, n = posterior_of(model_of(), generator), 2_000
    like = posterior.mean()
    draws = [posterior.as_prior().sample(like, generator=generator) for _ in range(n)]
    for name, std in posterior.std().items():
        values = torch.stack([draw[name] for draw in draws])
        assert ((values.std(0) - std).abs() < 5 * std / (2 * n) ** 0.5).all()


def test_freezing_a_whole_layer_leaves_the_others_and_a_half_is_refused(generator):
    model = model_of()
    posterior = posterior_of(model, generator)
    next_model = kn.Model(model.net, kn.Gaussian(0.1), prior=posterior, frozen="0.*")
    assert next_model.random_names == ["1.weight", "1.bias", "2.weight"]
    params = {name: posterior.loc[name] for name in next_model.random_names}
    expected = sum(0.5 * (b.log_det() - b.size * math.log(2 * math.pi)) for b in posterior.blocks[1:])
    torch.testing.assert_close(next_model.log_prior(params), expected)
    with pytest.raises(kn.Unsupported, match=r"0\.weight and 0\.bias go together"):
        kn.Model(model.net, kn.Gaussian(0.1), prior=posterior, frozen="0.bias")


def test_a_model_with_this_prior_is_saved_and_loaded(tmp_path, generator):
    model = model_of()
    prior = posterior_of(model, generator)
    data = torch.randn(6, 2, dtype=DTYPE), torch.randn(6, 1, dtype=DTYPE)
    fitted = kn.MeanFieldVI(epochs=2).fit(kn.Model(model.net, kn.Gaussian(0.1), prior=prior), data)
    fitted.save(tmp_path / "fitted")
    loaded = kn.load(tmp_path / "fitted")
    params = prior.mean()
    assert torch.equal(loaded.model.log_prior(params), fitted.model.log_prior(params))
