from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.bottleneck import BottleneckObjective
from knowable.inference.variational.bottleneck_code import CodePlace, code_shape, tapped


def objective(**changes: object) -> tuple[BottleneckObjective, Tensor, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5), kn.Normal(1.2))
    model, tap = tapped(model, CodePlace.of(model, "0", "head"))
    settings = {"beta": 0.3, "initial_scale": 0.4, **changes}
    made = BottleneckObjective(model, tap, code_shape(model, tap, x), 50, **settings)  # type: ignore[arg-type]
    return made, x, y


def slow_terms(made: BottleneckObjective, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Distortion and rate of each row, written out for that network; the standard deviation is 0.4 at the start."""
    params = made.params()
    mean = x @ params["0.weight"].T + params["0.bias"]
    output = torch.tanh(mean + 0.4 * noise) @ params["2.weight"].T + params["2.bias"]
    distortion = -torch.distributions.Normal(output, 0.5).log_prob(y).sum(-1)
    code, marginal = torch.distributions.Normal(mean, torch.full_like(mean, 0.4)), torch.distributions.Normal(0.0, 1.0)
    return distortion, torch.distributions.kl_divergence(code, marginal).sum(1)


def test_loss_is_distortion_and_priced_rate_and_prior_per_example():
    made, x, y = objective()
    torch.manual_seed(5)
    loss, terms = made(x, y)
    torch.manual_seed(5)
    distortion, rate = slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))
    log_prior = made.model.log_prior(made.params())
    assert torch.allclose(terms["distortion"], distortion.mean())
    assert torch.allclose(terms["rate"], rate.mean())
    assert torch.allclose(loss, distortion.mean() + 0.3 * rate.mean() - log_prior / 50)
    assert torch.allclose(terms["log_likelihood"], -50 * distortion.mean())  # on the full-data scale


def test_several_codes_are_averaged_over():
    made, x, y = objective(draws=3)
    torch.manual_seed(5)
    _, terms = made(x, y)
    torch.manual_seed(5)
    each = [slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))[0].mean() for _ in range(3)]
    assert torch.allclose(terms["distortion"], torch.stack(each).mean())


def test_head_and_marginal_are_trained():
    made, x, y = objective(marginal="learned")
    made(x, y)[0].backward()
    assert set(made.code) == {"head_weight", "head_bias", "marginal_loc", "marginal_log_scale"}
    assert all(value.grad is not None and (value.grad != 0).any() for value in made.code.values())
    assert all(value.grad is not None and (value.grad != 0).any() for value in made.values)


def test_final_terms_are_the_means_over_all_rows_with_their_error(seed):
    made, x, y = objective()
    terms = made.final_terms(as_data((x, y), made.model), seed)
    draws = 20_000
    noise = torch.randn(draws, 20, 4, dtype=torch.float64)
    with torch.no_grad():
        many = slow_terms(made, x, y, noise)[0].mean(-1)
        rate = slow_terms(made, x, y, noise[0])[1].mean().item()
    error = (many.var().item() / draws + terms["distortion_standard_error"] ** 2) ** 0.5
    assert terms["rate"] == pytest.approx(rate)
    assert terms["distortion"] == pytest.approx(many.mean().item(), abs=5 * error)
    # 256 draws: the standard error itself is good to 1 / sqrt(512), 4 %
    assert terms["distortion_standard_error"] == pytest.approx((many.var().item() / 256) ** 0.5, rel=0.25)


def test_held_out_rows_are_scored_by_the_mean_density_over_codes(seed):
    made, x, y = objective()
    torch.manual_seed(seed)
    found = made.predictive_log_likelihood(x, y)
    torch.manual_seed(seed)
    each = [-slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))[0] for _ in range(8)]
    assert torch.allclose(found, torch.stack(each).exp().mean(0).log())
