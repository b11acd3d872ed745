from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import Gamma, InverseGamma, LogNormal

import knowable as kn
from knowable.inference.dropout.noisy_units import (
    GroupNoise,
    HorseshoeNoise,
    LogUniformNoise,
    NoisyUnits,
    divergence_from_gamma,
    divergence_from_inverse_gamma,
)
from knowable.inference.dropout.truncated_log_normal import divergence_from_log_uniform
from tests.inference.dropout.networks import Recurrent

PRIORS = ["log_uniform", "horseshoe"]
NETWORKS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), (4,)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(24, 1)), (4, 3, 3)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 3, 2), nn.Flatten(), nn.Linear(12, 1)), (4, 3)),
}


def posterior_of(net: nn.Module, *shape: int, prior: str = "log_uniform", rows: int = 6) -> tuple[NoisyUnits, Tensor]:
    """Noise that differs from unit to unit."""
    x = torch.randn((rows, *shape), dtype=next(net.parameters()).dtype)
    model = kn.Model(net, kn.Gaussian(0.1))
    objective = kn.StructuredDropout(prior).objective(model, x, rows)
    with torch.no_grad():
        for value in [*objective.noises.parameters(), *objective.log_scales]:  # type: ignore[attr-defined]
            value.copy_(-0.7 * torch.rand_like(value))
    return objective.posterior(), x


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("network", NETWORKS)
def test_draws_have_the_mean_and_spread(network, prior, generator):
    make, shape = NETWORKS[network]
    posterior, _ = posterior_of(make().double(), *shape, prior=prior)
    n = 6000
    draws, mean, std = posterior.sample(n, generator), posterior.mean(), posterior.std()
    for name, value in draws.items():
        assert ((value.mean(0) - mean[name]).abs() <= 5.5 * std[name] / math.sqrt(n) + 1e-12).all(), name
        squares = (value - mean[name]).square()
        error = squares.std(0) / math.sqrt(n)  # itself an estimate, of what has a long tail
        assert ((squares.mean(0) - std[name].square()).abs() <= 8 * error + 1e-12).all(), name


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_ratio_of_a_unit_is_the_largest_of_its_weights(network, prior):
    make, shape = NETWORKS[network]
    posterior, _ = posterior_of(make().double(), *shape, prior=prior)
    mean, std, found = posterior.mean(), posterior.std(), posterior.signal_to_noise()
    assert list(found) == list(mean)
    for name, value in found.items():
        assert value.shape == mean[name].shape
        assert torch.isinf(value).all() if name.endswith("bias") else torch.isfinite(value).all()
    for site in posterior.sites:
        (place,) = site.places
        own, each = mean[place.name].abs() / std[place.name], torch.eye(site.units, dtype=torch.float64)
        for unit in range(site.units):
            mine = site.on_weight(each[unit], place, own).expand_as(own).bool()
            assert torch.allclose(found[place.name][mine], own[mine].max())


def test_the_ratio_under_the_log_uniform_prior_is_that_of_the_noise_even_where_weights_are_zero():
    posterior, _ = posterior_of(nn.Linear(4, 2), 4)
    posterior.loc["weight"][:, 1] = 0.0
    spread = posterior.noises[0].moments()[1]
    assert torch.allclose(posterior.signal_to_noise()["weight"], spread.rsqrt().expand(2, 4))
    assert torch.allclose(posterior.unit_signal_to_noise()["weight"], spread.rsqrt())


def test_units_below_one_are_noise():
    assert NoisyUnits.log_alpha_threshold == 0.0


@pytest.mark.parametrize("prior", PRIORS)
def test_the_prediction_of_a_linear_layer_has_its_variance_in_closed_form(prior):
    posterior, x = posterior_of(nn.Linear(4, 1).double(), 4, prior=prior)
    n = 2000
    prediction = posterior.predict(x, samples=n)
    mean, std = posterior.mean(), posterior.std()
    expected = x @ mean["weight"].T + mean["bias"]
    draws = posterior.sample(40_000, torch.Generator().manual_seed(1))["weight"].squeeze(1)
    spread = (x @ (draws - mean["weight"]).T).var(1, keepdim=True)
    assert ((prediction.mean - expected).abs() < 5 * (spread / n).sqrt()).all()
    if prior == "log_uniform":  # factors of units are independent of each other
        exact = x.square() @ std["weight"].T.square()
        squares = (prediction.samples - expected).square()
        assert ((squares.mean(0) - exact).abs() < 6 * squares.std(0) / math.sqrt(n)).all()


@pytest.mark.parametrize("prior", PRIORS)
def test_all_inputs_share_a_draw(prior):
    posterior, x = posterior_of(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1)), 4, prior=prior)
    whole = posterior.predict(x, samples=5).samples
    assert not torch.allclose(whole[0], whole[1])
    assert torch.allclose(posterior.predict(x[2:4], samples=5).samples, whole[:, 2:4], atol=1e-6)
    assert torch.allclose(posterior.predict(torch.cat([x, x]), samples=5).samples[:, len(x) :], whole, atol=1e-6)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("net", "shape"), [(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), (4,)), (Recurrent(), (5, 2))]
)
def test_what_was_saved_predicts_the_same(net, shape, prior, tmp_path):
    posterior, x = posterior_of(net, *shape, prior=prior)
    loaded = kn.load(posterior.save(tmp_path / "it"), None if isinstance(net, nn.Sequential) else net)
    assert isinstance(loaded, NoisyUnits) and loaded.sites == posterior.sites
    assert torch.equal(loaded.predict(x, samples=5).samples, posterior.predict(x, samples=5).samples)
    for name, value in posterior.signal_to_noise().items():
        assert torch.equal(loaded.signal_to_noise()[name], value)


def test_a_posterior_can_be_copied_and_no_longer_learns():
    posterior, x = posterior_of(nn.Linear(4, 1), 4)
    before = posterior.predict(x, samples=4).samples
    assert torch.equal(copy.deepcopy(posterior).predict(x, samples=4).samples, before)
    assert not any(value.requires_grad for value in posterior.sample(2).values())


def test_there_is_no_density():
    posterior, _ = posterior_of(nn.Linear(4, 1), 4)
    with pytest.raises(kn.Unsupported, match="no density"):
        posterior.log_prob(posterior.mean())


# --- unit noise -------------------------------------------------------------------------------------------------------


LIKE = torch.zeros((), dtype=torch.float64)


def log_uniform() -> LogUniformNoise:
    noise = LogUniformNoise(4, span=20.0, like=LIKE)
    with torch.no_grad():
        noise.loc.copy_(torch.tensor([0.0, -0.5, -3.0, 1.0]))
        noise.log_scale.copy_(torch.tensor([-3.0, 0.5, -1.0, 0.0]))
    return noise


def horseshoe() -> HorseshoeNoise:
    noise = HorseshoeNoise(4, global_scale=1e-2, like=LIKE)
    with torch.no_grad():
        noise.global_loc.copy_(torch.tensor([-1.0, 2.0]))
        noise.global_log_scale.copy_(torch.tensor([-0.7, -0.2]))
        noise.loc.copy_(torch.tensor([[-2.0, 0.0, 0.3, 1.0], [1.0, 2.0, 0.0, -1.0]]))
        noise.log_scale.copy_(torch.tensor([[-1.0, -3.0, 0.1, -0.5], [-2.0, -1.0, -0.3, -0.4]]))
    return noise


NOISES = {"log_uniform": log_uniform, "horseshoe": horseshoe}


@pytest.mark.parametrize("kind", NOISES)
def test_draws_have_the_moments(kind, generator):
    noise, n = NOISES[kind](), 40_000
    mean, spread = (each.detach() for each in noise.moments())
    drawn = noise.draw(n, generator).detach() / mean
    assert ((drawn.mean(0) - 1).abs() < 5 * (spread / n).sqrt()).all()
    squares = (drawn - 1).square()
    assert ((squares.mean(0) - spread).abs() < 6 * squares.std(0) / math.sqrt(n)).all()


@pytest.mark.parametrize("kind", NOISES)
def test_draws_follow_the_generator_or_the_global_one(kind, generator):
    noise = NOISES[kind]()
    state = generator.get_state()
    first = noise.draw(3, generator)
    generator.set_state(state)
    assert torch.equal(noise.draw(3, generator), first)
    torch.manual_seed(1)
    second = noise.draw(3)
    torch.manual_seed(1)
    assert torch.equal(noise.draw(3), second) and second.shape == (3, 4)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_begins_narrow(kind):
    make = {"log_uniform": LogUniformNoise, "horseshoe": HorseshoeNoise}[kind]
    extra = {"span": 20.0} if kind == "log_uniform" else {"global_scale": 1e-5}
    mean, spread = make(3, initial_scale=0.02, like=LIKE, **extra).moments()
    assert ((mean - 1).abs() < 0.03).all() and (spread < 0.03**2).all()


def test_the_divergence_of_all_units_is_their_sum():
    noise = log_uniform()
    each = divergence_from_log_uniform(noise.loc, noise.log_scale.exp(), -20.0, 0.0)
    assert torch.isclose(noise.total_divergence([noise]), each.sum())


def test_the_divergence_of_the_horseshoe_is_that_of_its_parts(generator):
    noise, n = horseshoe(), 40_000
    half = torch.tensor(0.5, dtype=torch.float64)
    priors = (Gamma(half, torch.ones_like(half)), InverseGamma(half, torch.ones_like(half)))
    total = torch.zeros(n, dtype=torch.float64)
    for loc, log_scale in ((noise.global_loc, noise.global_log_scale), (noise.loc, noise.log_scale)):
        for part, prior in enumerate(priors):
            own = LogNormal(loc[part].detach(), log_scale[part].detach().exp())
            shape = (n, *loc[part].shape)
            drawn = torch.exp(own.loc + own.scale * torch.randn(shape, generator=generator, dtype=torch.float64))
            total += (own.log_prob(drawn) - prior.log_prob(drawn)).view(n, -1).sum(1)
    assert abs(total.mean() - noise.total_divergence([noise])) < 5 * total.std() / math.sqrt(n)


def test_units_of_a_layer_share_its_scale(generator):
    noise, n = horseshoe(), 20_000
    logs = noise.draw(n, generator).detach().log()
    shared, own = (each.detach() for each in noise._log_variances())
    expected = torch.full((4, 4), shared.item()).double() + torch.diag(own)
    error = ((expected.diagonal().outer(expected.diagonal()) + expected.square()) / n).sqrt()
    assert ((logs.T.cov() - expected).abs() < 5 * error).all()
    assert (logs.mean(0).abs() < 5 * (expected.diagonal() / n).sqrt()).all()  # the median is not in the draws


@pytest.mark.parametrize("median", [1e-7, 0.3])
def test_medians_begin_where_they_are_told(median):
    noise = HorseshoeNoise(3, global_scale=1e-5, initial_median=median, like=LIKE)
    assert torch.allclose(noise.log_prior_scale(), torch.full((3,), math.log(median)).double())
    assert noise.total_divergence([noise]) < 100  # and not where the prior has no mass


def test_the_median_is_half_the_sum_of_the_logarithms():
    noise = horseshoe()
    expected = math.log(1e-2) + 0.5 * (-1.0 + 2.0 + torch.tensor([-1.0, 2.0, 0.3, 0.0]))
    assert torch.allclose(noise.log_prior_scale(), expected.double())
    assert log_uniform().log_prior_scale() is None


def test_what_has_left_its_range_is_put_back():
    noise = LogUniformNoise(3, span=5.0, like=LIKE)
    with torch.no_grad():
        noise.loc.copy_(torch.tensor([-100.0, -1.0, 100.0]))
        noise.log_scale.copy_(torch.tensor([-50.0, 0.0, 50.0]))
    noise.clamp_parameters()
    assert noise.loc.tolist() == [-10.0, -1.0, 5.0]
    assert torch.allclose(noise.log_scale.exp(), torch.tensor([1e-4, 1.0, 50.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", NOISES)
def test_gradients_reach_every_parameter(kind):
    noise: GroupNoise = NOISES[kind]()
    torch.manual_seed(0)
    loss: Tensor = noise.draw(5).square().sum() + noise.total_divergence([noise])
    loss.backward()
    assert all(each.grad is not None and (each.grad != 0).all() for each in noise.parameters())


@pytest.mark.parametrize("kind", NOISES)
def test_several_layers_at_once_are_each_by_itself(kind):
    first, second = NOISES[kind](), NOISES[kind]()
    with torch.no_grad():
        for value in second.parameters():
            value.mul_(0.7)
    expected = first.divergence() + second.divergence()
    assert torch.isclose(type(first).total_divergence([first, second]), expected)


# --- log normal scales ------------------------------------------------------------------------------------------------


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
