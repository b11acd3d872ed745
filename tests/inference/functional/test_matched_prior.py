"""Priors matched to Gaussian processes, against closed forms: linear networks, and kernels of infinite width."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

import knowable as kn
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.functional import matched_prior
from knowable.inference.functional.matched_prior import _Search
from knowable.inference.functional.width_kernel import WidthKernel


def points(n: int, inputs: int = 1) -> torch.Tensor:
    return torch.randn(n, inputs, generator=torch.Generator().manual_seed(0))


def one_layer(activation: nn.Module, inputs: int = 1, width: int = 30, outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), activation, nn.Linear(width, outputs))


def test_a_linear_network_is_matched_exactly(seed):
    """The prior of x·w + b is the linear process with the same scales; errors are those of moments of 1,000 draws."""
    model = kn.Model(nn.Linear(3, 1), kn.Gaussian(), kn.Normal(2.0))
    found = kn.match_prior(model, kn.LinearKernel(scale=0.5, bias=0.8), points(60, 3), seed=seed)
    assert found.scales["weight"] == pytest.approx(0.5, rel=4 / math.sqrt(2 * 3_000))
    assert found.scales["bias"] == pytest.approx(0.8, rel=4 / math.sqrt(2 * 1_000))
    assert found.after.value < 0.15 and found.before.value - 5 * found.before.error > 1
    assert abs(found.after.kurtosis) < 0.3  # linear functions of normal weights
    for name, scale in found.scales.items():
        assert found.model.prior.prior_of(name) == kn.Normal(scale)
    assert found.model.prior.prior_of("likelihood.log_noise") == model.prior.prior_of("likelihood.log_noise")


def test_the_distance_is_that_of_the_prior_in_closed_form(seed):
    """Of a linear network, whose covariances are known; the error is one, by many repetitions."""
    x = points(20, 3)
    model = kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), {"weight": kn.Normal(0.7), "bias": kn.Normal(0.3)})
    own, wanted = (kn.LinearKernel(*scales).covariance(x.double()) for scales in ((0.7, 0.3), (0.5, 0.2)))
    exact = float((own - wanted).norm() / wanted.norm())
    search = _Search(model, x, torch.zeros(1, 20), wanted.unsqueeze(0), 100, seed)
    found = [
        search.distance(lambda n, g: model.network_params(model.prior_draws(n, generator=g)), f"{k}")
        for k in range(40)
    ]  # fmt: skip
    scores = np.array([(each.value - exact) / each.error for each in found])
    assert abs(scores.mean()) < 5 / math.sqrt(40)
    assert 0.6 < scores.std() < 1.6


@pytest.mark.parametrize(("activation", "lengthscale"), [(kn.Erf(), 1.5), (nn.ReLU(), 3.0)], ids=["erf", "relu"])
def test_one_hidden_layer_is_matched_as_its_kernel_of_infinite_width(activation, lengthscale):
    """That kernel is the covariance at any width with one hidden layer; its best scales are found by another search."""
    x, kernel = points(40), kn.RBFKernel(lengthscale)
    model = kn.Model(one_layer(activation), kn.Gaussian(0.1))
    names, width, wanted = list(model.random_names), WidthKernel(model), kernel.covariance(x.double())

    def squared(logs: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
        own = width.between(x.double(), x.double(), "nngp", dict(zip(names, (2 * at).exp(), strict=True)))
        value = (own - wanted).square().sum() / wanted.square().sum()
        return value.item(), torch.autograd.grad(value, at)[0].numpy()

    starts = [np.log([first, 1.0, 30**-0.5, 0.1]) for first in (1.0, 3.0)]
    best = min(minimize(squared, start, jac=True, bounds=[(-5, 5)] * 4).fun for start in starts)
    found = kn.match_prior(model, kernel, x)
    reached = squared(np.log([found.scales[name] for name in names]))[0]
    assert math.sqrt(reached) < math.sqrt(best) + 0.03
    assert abs(found.after.value - math.sqrt(reached)) < 4 * found.after.error + 0.01


def test_the_slope_of_the_objective_is_that_of_its_values(monkeypatch):
    """By differences, the draws made in several blocks."""
    monkeypatch.setattr(matched_prior, "_MOST_AT_ONCE", 17)
    model = kn.Model(one_layer(nn.Tanh(), 2, 5).double(), kn.Gaussian(0.1), frozen=["0.bias"])
    x = points(6, 2).double()
    search = _Search(model, x, torch.zeros(1, 6), kn.RBFKernel().covariance(x).unsqueeze(0), 40, 0)
    at = np.array([0.1, -0.3, 0.2])
    value, slope = search._value(at)
    for k, unit in enumerate(np.eye(3)):
        difference = (search._value(at + 1e-5 * unit)[0] - search._value(at - 1e-5 * unit)[0]) / 2e-5
        assert slope[k] == pytest.approx(difference, rel=1e-5, abs=1e-8)
    assert math.isfinite(value)


def test_several_outputs_and_a_mean_are_matched():
    x = points(30)
    found = kn.match_prior(kn.Model(one_layer(kn.Erf(), outputs=3), kn.Gaussian(0.1)),
                           kn.RBFKernel(2.0, scale=0.5, mean=4.0), x, draws=400)  # fmt: skip
    assert found.model.prior.prior_of("2.bias") == kn.Normal(found.scales["2.bias"], loc=4.0)
    assert found.after.value < 0.2
    prediction = found.model.prior_predict(x, samples=2_000, generator=torch.Generator().manual_seed(0))
    values = prediction.samples  # (draws, rows, outputs)
    assert values.mean().item() == pytest.approx(4.0, abs=0.1)
    assert values.std(0).mean().item() == pytest.approx(0.5, rel=0.1)


def test_the_functions_of_another_network_are_a_target():
    """A wide network with a prior of its own, of which a narrower one finds the scales times the root of the widths."""
    prior = {"0.*": kn.Normal(1.5), "2.weight": kn.Normal(100**-0.5), "2.bias": kn.Normal(0.3)}
    other = kn.Model(one_layer(kn.Erf(), width=100), kn.Gaussian(0.1), prior)
    found = kn.match_prior(
        kn.Model(one_layer(kn.Erf()), kn.Gaussian(0.1)), kn.NetworkPrior(1_000, other), points(30), draws=500
    )
    assert found.after.value < 0.12
    assert found.scales["2.weight"] * 30**0.5 == pytest.approx(1.0, rel=0.25)


def test_a_matched_model_is_fitted_and_saved_as_any_other(tmp_path):
    x = points(20)
    data, model = (x, torch.sin(x)), kn.Model(one_layer(nn.Tanh()), kn.Gaussian(), random="2.*")
    found = kn.match_prior(model, kn.RBFKernel(2.0), x, draws=100)
    assert set(found.scales) == {"2.weight", "2.bias"}  # the others are point estimates, as before
    posterior = kn.MAP(epochs=3).fit(found.model, data)
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert loaded.model.prior.prior_of("2.weight") == kn.Normal(found.scales["2.weight"])
    assert "distance of covariances" in str(found) and "Normal(" in str(found)


def test_the_plot_has_functions_of_both_priors_and_of_the_target():
    x = points(25, 3)
    found = kn.match_prior(kn.Model(one_layer(nn.Tanh(), 3), kn.Gaussian()), kn.RBFKernel(3.0), x, draws=100)
    figure = found.plot(functions=4)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "prior as it was", "matched prior", "RBFKernel: the target"
    ]  # fmt: skip
    assert all(len(axes.lines) == 4 for axes in figure.axes)
    low, high = figure.axes[0].get_ylim()
    assert low < -2 and high > 2


def test_a_poor_match_is_said():
    x = torch.linspace(-3, 3, 40).unsqueeze(1)
    with pytest.warns(kn.ModelWarning, match=r"functions like RBFKernel\(lengthscale=0.3"):
        kn.match_prior(kn.Model(one_layer(nn.ReLU()), kn.Gaussian()), kn.RBFKernel(0.3), x, draws=200)


def test_what_cannot_be_matched_is_refused():
    x, model = points(10), kn.Model(one_layer(nn.Tanh()), kn.Gaussian())
    for target in (None, kn.NetworkPrior()):
        with pytest.raises(InvalidArgument, match="target must say which functions are wanted"):
            kn.match_prior(model, target, x)
    with pytest.raises(kn.InvalidType, match="prior must be None"):
        kn.match_prior(model, "rbf", x)
    with pytest.raises(InvalidArgument, match="draws"):
        kn.match_prior(model, kn.RBFKernel(), x, draws=3)
    without = kn.Model(nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1, bias=False)), kn.Gaussian())
    with pytest.raises(Unsupported, match="target has the mean 2"):
        kn.match_prior(without, kn.RBFKernel(mean=2.0), x)
