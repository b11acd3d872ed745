from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.joint_normal import IndependentNormal, ProductNormal
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.params import Layout
from knowable.core.posterior.normal import ProductPosterior


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def model_of(net: nn.Module | None = None, **knobs: object) -> kn.Model:
    return kn.Model(net or network(), kn.Gaussian(0.3), **knobs)  # type: ignore[arg-type]


def parts_of(model: kn.Model, seed: int = 0) -> list[kn.Posterior]:
    """A full normal over the last layer, a Kronecker one over the first weight, independent normals for its bias."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    start = model.params()
    layout = Layout.of({name: start[name] for name in ("2.weight", "2.bias")})
    factor = normal(3, 3).tril(-1) + normal(3).exp().diag()
    basis = torch.linalg.qr(normal(2, 2))[0]
    block = KroneckerBlock(("0.weight",), (torch.Size([2, 2]),), normal(2, 2).exp(), basis, None)
    return [
        kn.FullNormal(model, layout, normal(3), factor),
        kn.KroneckerNormal(model, {"0.weight": normal(2, 2)}, [block]),
        kn.DiagonalNormal(model, {"0.bias": normal(2)}, {"0.bias": normal(2).exp()}),
    ]


@pytest.fixture
def product(seed) -> ProductPosterior:
    model = model_of()
    return ProductPosterior(model, parts_of(model, seed), seed=3)


def dense(product: ProductPosterior) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """Mean and covariance of all weights, put together by hand."""
    full, kronecker, diagonal = product.parts
    layout = Layout.of({name: product.model.params()[name] for name in ("2.weight", "2.bias", "0.weight", "0.bias")})
    (block,) = kronecker.blocks
    loc = torch.cat([full.loc, kronecker.loc["0.weight"].flatten(), diagonal.loc["0.bias"]])
    covariance = torch.block_diag(
        full.covariance, torch.linalg.inv(block.dense()), diagonal.scale["0.bias"].square().diag()
    )
    return layout, loc, covariance


def test_density_is_the_product_of_the_parts(product):
    layout, loc, covariance = dense(product)
    normal = torch.distributions.MultivariateNormal(loc, covariance)
    values = normal.sample((6,))
    torch.testing.assert_close(product.log_prob(layout.views(values)), normal.log_prob(values))
    one = product.log_prob(layout.views(values[0]))
    assert one.shape == () and one.item() == pytest.approx(normal.log_prob(values[0]).item())


def test_draws_have_the_moments_of_the_parts_and_are_independent(product, seed):
    # each moment of 20,000 draws within 5 standard errors
    layout, loc, covariance = dense(product)
    draws = layout.flatten(product.sample(20_000, torch.Generator().manual_seed(seed)))
    variance = covariance.diagonal()
    assert ((draws.mean(0) - loc).abs() < 5 * (variance / 20_000).sqrt()).all()
    error = ((covariance.square() + variance.outer(variance)) / 20_000).sqrt()
    assert ((draws.T.cov() - covariance).abs() < 5 * error).all()
    torch.testing.assert_close(layout.flatten(product.mean()), loc)
    torch.testing.assert_close(layout.flatten(product.std()), variance.sqrt())


def test_parameters_come_in_the_order_of_the_model(product):
    assert list(product.sample(2)) == list(product.mean()) == list(product.model.params())


def test_point_estimates_are_the_product_s(seed):
    model = model_of(random="2.*")
    points = {name: model.params()[name] for name in model.point_names}
    full = parts_of(model_of(model.net), seed)[0]
    again = kn.FullNormal(model, full.layout, full.loc, full.scale_tril)
    product = ProductPosterior(model, [again], points=points)
    assert (product.std()["0.weight"] == 0).all()
    assert product.predict(torch.zeros(3, 2, dtype=torch.float64)).mean.shape == (3, 1)


def test_part_of_a_parameter_is_found(product):
    assert product.part_of("2.bias") is product.parts[0]
    assert product.part_of("0.bias") is product.parts[2]
    with pytest.raises(kn.InvalidArgument, match="name"):
        product.part_of("1.weight")


def test_parts_that_miss_or_repeat_a_parameter_are_refused():
    model = model_of()
    parts = parts_of(model)
    for wrong in (parts[:2], [*parts, parts[0]]):
        with pytest.raises(kn.InvalidArgument, match="parts must hold each of"):
            ProductPosterior(model, wrong)


def test_saved_product_is_the_same(product, tmp_path):
    product.diagnostics = kn.Diagnostics(method="by hand")
    product.save(tmp_path / "product")
    loaded = kn.load(tmp_path / "product")
    assert isinstance(loaded, ProductPosterior)
    assert [type(part) for part in loaded.parts] == [type(part) for part in product.parts]
    x = torch.randn(4, 2, dtype=torch.float64)
    assert torch.equal(loaded.predict(x).mean, product.predict(x).mean)
    draw = product.sample(3, torch.Generator().manual_seed(1))
    assert torch.equal(loaded.log_prob(draw), product.log_prob(draw))
    assert repr(loaded) == repr(product)
    assert repr(product).startswith("ProductPosterior(FullNormal, KroneckerNormal, DiagonalNormal: 9 random")


# --- as a prior ------------------------------------------------------------------------------------------------------


def test_prior_has_the_density_of_the_posterior(product):
    prior = product.as_prior()
    draw = {name: value[0] for name, value in product.sample(1, torch.Generator().manual_seed(0)).items()}
    assert prior.log_prob(draw).item() == pytest.approx(product.log_prob(draw).item(), rel=1e-10)
    layout, loc, covariance = dense(product)
    mean, precision = prior.joint_normal(layout)
    torch.testing.assert_close(mean, loc)
    torch.testing.assert_close(precision, torch.linalg.inv(covariance))
    torch.testing.assert_close(layout.flatten(prior.normal.precision_diagonal()), precision.diagonal())


def test_independent_parts_alone_make_an_independent_prior(seed):
    model = model_of(random="0.*")
    start = model.params()
    ones = {name: torch.full_like(start[name], 0.5) for name in ("0.weight", "0.bias")}
    parts = [kn.DiagonalNormal(model, {name: start[name]}, {name: ones[name]}) for name in ones]
    points = {name: start[name] for name in model.point_names}
    prior = ProductPosterior(model, parts, points=points).as_prior()
    assert isinstance(prior.normal, IndependentNormal)
    assert torch.equal(prior.prior_of("0.bias").scale, ones["0.bias"])
    assert prior.fixed.keys() == points.keys()


def test_draws_from_the_prior_have_its_spread(product, seed):
    # the quadratic form of a draw is χ² with 9 degrees of freedom: the mean of 400 within 5 standard errors
    prior = product.as_prior()
    layout, loc, covariance = dense(product)
    generator = torch.Generator().manual_seed(seed)
    like = product.model.params()
    draws = torch.stack([layout.flatten(prior.sample(like, generator=generator)) for _ in range(400)])
    away = draws - loc
    squares = (away @ torch.linalg.inv(covariance) * away).sum(1)
    assert abs(squares.mean().item() - 9) < 5 * math.sqrt(2 * 9 / 400)


def test_divergence_of_independent_normals_is_that_of_the_dense_form(product):
    layout, loc, covariance = dense(product)
    model = kn.Model(product.model.net, kn.Gaussian(0.3), product)
    x = torch.zeros(4, 2, dtype=torch.float64)
    objective = kn.MeanFieldVI(initial_scale=0.4).objective(model, x, 4)
    start = layout.flatten(model.params())
    torch.testing.assert_close(start, loc)  # a fit begins at the prior's means
    own = torch.eye(len(loc), dtype=torch.float64) * 0.16
    product_of = torch.linalg.solve(covariance, own)
    expected = 0.5 * (product_of.trace() - len(loc) - torch.logdet(product_of))
    assert objective.kl_divergence().item() == pytest.approx(expected.item(), rel=1e-9)


def test_next_fit_moves_from_it_and_saves_it(product, tmp_path):
    x, y = torch.randn(10, 2, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    model = kn.Model(product.model.net, kn.Gaussian(0.3), product)
    posterior = kn.FullRankVI(epochs=5).fit(model, (x, y))
    posterior.save(tmp_path / "next")
    loaded = kn.load(tmp_path / "next")
    prior, again = model.prior, loaded.model.prior
    assert isinstance(again.normal, ProductNormal) and len(again.normal.parts) == 3
    draw = {name: value[0] for name, value in posterior.sample(1).items()}
    assert again.log_prob(draw).item() == pytest.approx(prior.log_prob(draw).item(), rel=1e-12)


def test_frozen_parameters_leave_the_prior_of_the_others(product):
    # a full part is conditioned on what is frozen of it, and a part that is frozen as a whole goes
    net = product.model.net
    model = kn.Model(net, kn.Gaussian(0.3), product, frozen=["2.bias", "0.weight"])
    layout, loc, covariance = dense(product)
    places = layout.views(torch.arange(layout.size))
    names = ["2.weight", "0.bias"]
    o = torch.cat([places[name].flatten() for name in names])
    f = torch.cat([places[name].flatten() for name in ("2.bias", "0.weight")])
    frozen = torch.cat([net[2].bias.detach(), net[0].weight.detach().flatten()])
    gain = covariance[o][:, f] @ torch.linalg.inv(covariance[f][:, f])
    mean = loc[o] + gain @ (frozen - loc[f])
    normal = torch.distributions.MultivariateNormal(mean, covariance[o][:, o] - gain @ covariance[f][:, o])
    at = {name: model.params()[name] for name in names}
    flat = torch.cat([at[name].flatten() for name in names])
    assert model.log_prior({**at}).item() == pytest.approx(normal.log_prob(flat).item(), rel=1e-8)


def test_parts_without_a_density_make_no_prior():
    model = model_of()
    parts = parts_of(model)
    atom = kn.Particles(model, {"0.bias": torch.zeros(1, 2, dtype=torch.float64)})
    with pytest.raises(kn.Unsupported, match="no density"):
        ProductPosterior(model, [*parts[:2], atom]).as_prior()
