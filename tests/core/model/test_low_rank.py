"""Tests of the diagonal-plus-low-rank posterior; dense matrices and torch's normal are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.model.structured_normal import directions
from knowable.core.network.params import Layout
from tests.core.cases import DTYPE, linear_model, mlp, same_params


def model_of(**settings) -> kn.Model:
    return kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), **settings)


def parts(model: kn.Model, rank: int, generator: torch.Generator | None) -> tuple[Layout, Tensor, Tensor, Tensor]:
    layout = Layout.of(model.params())
    loc = torch.randn(layout.size, generator=generator, dtype=DTYPE)
    diagonal = torch.rand(layout.size, generator=generator, dtype=DTYPE) + 0.2
    return layout, loc, diagonal, torch.randn((layout.size, rank), generator=generator, dtype=DTYPE)


MAKERS = {"covariance": kn.LowRankNormal.of_covariance, "precision": kn.LowRankNormal.of_precision}


def made(kind: str, rank: int = 3, generator: torch.Generator | None = None, **common) -> kn.LowRankNormal:
    model = model_of()
    return MAKERS[kind](model, *parts(model, rank, generator), **common)


def covariance(posterior: kn.LowRankNormal) -> Tensor:
    middle = torch.eye(len(posterior.loc), dtype=DTYPE)
    middle = middle + (posterior.basis * (posterior.basis_variance - 1)) @ posterior.basis.T
    return posterior.scale.unsqueeze(1) * middle * posterior.scale


@pytest.mark.parametrize("rank", [0, 1, 3, 17, 40])  # none; 17 weights: as many directions, and more than there are
@pytest.mark.parametrize("kind", MAKERS)
def test_it_has_the_covariance_or_precision_that_was_asked_for(kind, rank, generator):
    model = model_of()
    layout, loc, diagonal, factor = parts(model, rank, generator)
    found = covariance(MAKERS[kind](model, layout, loc, diagonal, factor))
    expected = diagonal.diag() + factor @ factor.T
    torch.testing.assert_close(found, expected if kind == "covariance" else expected.inverse())


@pytest.mark.parametrize("kind", MAKERS)
def test_the_log_density_is_that_of_torch(kind, generator):
    posterior = made(kind, generator=generator)
    draws = posterior.sample(5, generator)
    oracle = torch.distributions.MultivariateNormal(posterior.loc, covariance(posterior))
    expected = oracle.log_prob(posterior.layout.flatten(draws))
    torch.testing.assert_close(posterior.log_prob(draws), expected)
    torch.testing.assert_close(posterior.log_prob({name: value[2] for name, value in draws.items()}), expected[2])


@pytest.mark.parametrize("kind", MAKERS)
def test_draws_have_its_moments(kind, generator):
    # covariances err by sqrt((c_ij² + c_ii c_jj) / n): 5 of those
    posterior, n = made(kind, generator=generator), 20_000
    draws, expected = posterior.layout.flatten(posterior.sample(n, generator)), covariance(posterior)
    variances = expected.diagonal()
    assert ((draws.mean(0) - posterior.loc).abs() < 5 * (variances / n).sqrt()).all()
    error = ((expected**2 + variances.outer(variances)) / n).sqrt()
    assert ((draws.T.cov() - expected).abs() < 5 * error).all()
    torch.testing.assert_close(posterior.layout.flatten(posterior.std()), variances.sqrt())


def test_without_directions_it_is_the_diagonal_normal(generator):
    model = model_of()
    layout, loc, diagonal, factor = parts(model, 1, generator)
    posterior = kn.LowRankNormal.of_covariance(model, layout, loc, diagonal, 0 * factor)
    other = kn.DiagonalNormal(model, layout.views(loc), layout.views(diagonal.sqrt()))
    params = posterior.sample(4, generator)
    torch.testing.assert_close(posterior.log_prob(params), other.log_prob(params))


@pytest.mark.parametrize("signs", [None, torch.tensor([1.0, -1.0, 1.0])])
def test_directions_are_orthonormal_and_make_up_the_product(signs, generator):
    factor = torch.randn(7, 3, generator=generator, dtype=DTYPE)
    basis, values = directions(factor, signs)
    expected = factor @ factor.T if signs is None else (factor * signs) @ factor.T
    torch.testing.assert_close((basis * values) @ basis.T, expected)
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=DTYPE))


def test_tensors_and_back_give_the_same_posterior(generator):
    posterior = made("precision", generator=generator)
    again = kn.LowRankNormal._from_tensors(posterior.model, posterior._tensors())
    assert same_params(again.mean(), posterior.mean())
    assert same_params(again.std(), posterior.std())
    assert again.rank == 3


def test_a_missing_parameter_is_refused_by_name():
    posterior = made("covariance")
    params = posterior.mean()
    del params["0.bias"]
    with pytest.raises(kn.InvalidArgument, match=r"0\.bias"):
        posterior.log_prob(params)


# --- as a prior -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_as_a_prior_it_has_the_same_density_and_precision(kind, generator):
    posterior = made(kind, generator=generator)
    prior = posterior.as_prior()
    params = {name: value[0] for name, value in posterior.sample(1, generator).items()}
    torch.testing.assert_close(prior.log_prob(params), posterior.log_prob(params))
    other = Layout.of({name: params[name] for name in reversed(list(params))})
    order = other.flatten(posterior.layout.views(torch.arange(posterior.layout.size)))
    precision = covariance(posterior).inverse()[order][:, order]
    torch.testing.assert_close(prior.joint_normal(other)[1], precision)
    torch.testing.assert_close(prior.joint_normal(other)[0], posterior.loc[order])
    torch.testing.assert_close(other.flatten(prior.normal.precision_diagonal()), precision.diagonal())
    torch.testing.assert_close(prior.normal.log_det_precision(), torch.logdet(precision))


@pytest.mark.parametrize("kind", MAKERS)
def test_once_some_parameters_are_known_the_others_are_conditioned_on_them(kind, generator):
    # p(o | f) has precision P_oo and mean m_o - P_oo⁻¹ P_of (f - m_f)
    posterior = made(kind, generator=generator)
    net = mlp().to(DTYPE)
    model = kn.Model(net, kn.Gaussian(0.1), prior=posterior, frozen="0.*")
    prior = model.prior
    whole = posterior.as_prior().joint_normal(posterior.layout)[1]
    places = posterior.layout.views(torch.arange(posterior.layout.size))
    o = torch.cat([places[name].flatten() for name in ("2.weight", "2.bias")])
    f = torch.cat([places[name].flatten() for name in ("0.weight", "0.bias")])
    known = torch.cat([net[0].weight.flatten(), net[0].bias]).detach()
    mean = posterior.loc[o] - torch.linalg.solve(whole[o][:, o], whole[o][:, f] @ (known - posterior.loc[f]))
    found_mean, found = prior.joint_normal(Layout.of({n: posterior.mean()[n] for n in ("2.weight", "2.bias")}))
    torch.testing.assert_close(found, whole[o][:, o])
    torch.testing.assert_close(found_mean, mean)


def test_the_divergence_from_independent_normals_is_that_of_torch(generator):
    posterior = made("precision", generator=generator)
    loc, scale = torch.randn(17, dtype=DTYPE), torch.rand(17, dtype=DTYPE) + 0.1
    q = torch.distributions.MultivariateNormal(loc, scale.square().diag())
    p = torch.distributions.MultivariateNormal(posterior.loc, covariance(posterior))
    views = posterior.layout.views
    found = posterior.as_prior().joint_kl(views(loc), views(scale))
    torch.testing.assert_close(found, torch.distributions.kl_divergence(q, p))


def test_draws_from_the_prior_have_its_spread(generator):
    # standard deviations err by sd / sqrt(2 n): 5 of those
    posterior, n = made("precision", generator=generator), 2_000
    like = posterior.mean()
    draws = [posterior.as_prior().sample(like, generator=generator) for _ in range(n)]
    for name, std in posterior.std().items():
        values = torch.stack([draw[name] for draw in draws])
        assert ((values.std(0) - std).abs() < 5 * std / (2 * n) ** 0.5).all()


def test_a_model_with_this_prior_is_saved_and_loaded(tmp_path, generator):
    model = linear_model()
    prior = kn.LowRankNormal.of_precision(model, *parts(model, 2, generator))
    data = torch.randn(6, 2, dtype=DTYPE), torch.randn(6, 1, dtype=DTYPE)
    fitted = kn.MeanFieldVI(epochs=2).fit(kn.Model(model.net, kn.Gaussian(0.1), prior=prior), data)
    fitted.save(tmp_path / "fitted")
    loaded = kn.load(tmp_path / "fitted")
    assert torch.equal(loaded.model.log_prior(prior.mean()), fitted.model.log_prior(prior.mean()))


@pytest.mark.parametrize("signed", [False, True])
def test_directions_of_blocks_of_rows_are_those_of_the_whole(signed, generator, monkeypatch):
    factor = torch.randn((23, 4), generator=generator, dtype=DTYPE)
    factor[:, 3] = factor[:, 0]  # of rank 3
    scale = torch.rand(23, generator=generator, dtype=DTYPE) + 0.5
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=DTYPE) if signed else None
    monkeypatch.setattr("knowable.core.model.structured_normal._ROWS", 5)
    basis, values = directions(factor, signs, scale=scale)
    scaled = factor * scale.unsqueeze(1)
    expected = scaled @ scaled.T if signs is None else (scaled * signs) @ scaled.T
    torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=DTYPE))
    torch.testing.assert_close((basis * values) @ basis.T, expected)
