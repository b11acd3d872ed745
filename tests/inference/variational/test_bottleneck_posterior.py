from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import knowable as kn
from knowable.inference.variational.bottleneck_code import CodePlace

CODE = {
    "head_weight": torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=torch.float64),
    "head_bias": torch.tensor([-1.0, -2.0], dtype=torch.float64),
}


def linear_posterior() -> kn.RandomCode:
    """Three inputs, a code of two numbers, one output; all of it linear."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.3))
    return kn.RandomCode(model, model.params(), CODE, place=CodePlace("0", False, "head"), shape=torch.Size([2]))


def inputs(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def slow_moments(posterior: kn.RandomCode, x: Tensor) -> tuple[Tensor, Tensor]:
    params = posterior.mean()
    mean = x @ params["0.weight"].T + params["0.bias"]
    return mean, torch.exp(0.5 * (mean @ CODE["head_weight"].T + CODE["head_bias"]))


def test_code_and_its_rate_are_the_formulas():
    posterior, x = linear_posterior(), inputs()
    mean, std = slow_moments(posterior, x)
    found = posterior.encode(x)
    assert torch.allclose(found[0], mean) and torch.allclose(found[1], std)
    rate = kl_divergence(Normal(mean, std), Normal(torch.zeros_like(mean), 1.0)).sum(1)
    assert torch.allclose(posterior.rate(x), rate)


def test_predictions_of_a_linear_decoder_have_the_closed_form_moments(seed, generator):
    posterior, x, draws = linear_posterior(), inputs(), 4_000
    prediction = posterior.predict(x, samples=draws, generator=generator)
    mean, std = slow_moments(posterior, x)
    weight, bias = (posterior.mean()[name] for name in ("1.weight", "1.bias"))
    expected, variance = mean @ weight.T + bias, std.square() @ weight.square().T
    # draws are normal: standard errors of a sample mean and of a sample variance
    assert ((prediction.mean - expected).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((prediction.epistemic - variance).abs() < 5 * variance * (2 / draws) ** 0.5).all()
    assert torch.allclose(prediction.aleatoric, torch.full_like(expected, 0.09))


def test_weights_are_the_same_in_every_draw():
    posterior = linear_posterior()
    draws = posterior.sample(4)
    assert all((value == posterior.mean()[name]).all() for name, value in draws.items())
    assert all((value == 0).all() for value in posterior.std().values())


def test_row_does_not_depend_on_the_others():
    posterior, x = linear_posterior(), inputs()
    whole = posterior.predict(x, samples=6).samples
    assert torch.allclose(posterior.predict(x[2:3], samples=6).samples, whole[:, 2:3])


def test_draws_one_by_one_are_the_same_as_together():
    posterior, x = linear_posterior(), inputs()
    together = posterior.predict(x, samples=6).samples
    posterior._vectorises = False
    assert torch.allclose(posterior.predict(x, samples=6).samples, together)


def test_more_samples_begin_with_the_same_draws():
    posterior, x = linear_posterior(), inputs()
    assert torch.allclose(posterior.predict(x, samples=9).samples[:4], posterior.predict(x, samples=4).samples)


@pytest.mark.parametrize("scale", ["head", "split"])
def test_saving_and_loading_changes_nothing(tmp_path, scale):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(2 if scale == "split" else 4, 1))
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    method = kn.InformationBottleneck(layer="0", scale=scale, marginal="learned", epochs=3)
    posterior = method.fit(kn.Model(net, kn.Gaussian()), (x, y))
    posterior.save(tmp_path / "saved")
    loaded = kn.load(tmp_path / "saved")
    assert isinstance(loaded, kn.RandomCode) and loaded.place == posterior.place
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert torch.equal(loaded.rate(x), posterior.rate(x))


def test_there_is_no_density_and_no_prior_in_it():
    posterior = linear_posterior()
    with pytest.raises(kn.Unsupported):
        posterior.log_prob(posterior.mean())
    with pytest.raises(kn.Unsupported):
        posterior.as_prior()
