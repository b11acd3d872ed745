from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.dropout.noisy_units import NoisyUnits
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
