"""Tests that predictions can be differentiated in the inputs, against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.posterior.monte_carlo import differentiable_prediction, rows_to_differentiate

FEW = {"epochs": 2}
METHODS = {
    "point": kn.MAP(**FEW),
    "ensemble": kn.DeepEnsemble(2, **FEW),
    "mean field": kn.MeanFieldVI(**FEW),
    "dropout": kn.MCDropout(0.2, **FEW),
    "mixture": kn.EnsembleOf(kn.MeanFieldVI(**FEW), 2),
    "moments": kn.MomentVI(**FEW),
    "swag": kn.SWAG(),
    "laplace full": kn.Laplace(structure="full"),
    "laplace kron": kn.Laplace(structure="kron"),
    "laplace diag": kn.Laplace(structure="diag"),
    "laplace low rank": kn.Laplace(structure="lowrank"),
    "laplace sampled": kn.Laplace(structure="kron", prediction="sampling"),
}


def _classifier(convolution: bool = False) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(12) % 3
    if convolution:
        net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
        return net, torch.randn((12, 1, 3, 3), generator=generator, dtype=torch.float64), y
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    return net, torch.randn((12, 3), generator=generator, dtype=torch.float64), y


def _gradient_and_differences(posterior, x, quantity):
    x = x.clone().requires_grad_()
    value = quantity(differentiable_prediction(posterior, x, samples=4, seed=posterior.seed)).sum()
    (gradient,) = torch.autograd.grad(value, x)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    step = 1e-5
    with torch.no_grad():
        up, down = (quantity(posterior.predict(x + sign * step * direction, samples=4)).sum() for sign in (1, -1))
    return (gradient * direction).sum().item(), ((up - down) / (2 * step)).item()


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("name", METHODS)
def test_gradients_in_the_inputs_equal_finite_differences(name):
    net, x, y = _classifier(convolution=name.startswith(("mean", "laplace k", "laplace d")))
    posterior = METHODS[name].fit(kn.Model(net.double(), kn.Categorical()), (x, y))
    for quantity in (lambda p: p.log_mean_probs[:, 0], lambda p: p.total, lambda p: p.aleatoric):
        got, expected = _gradient_and_differences(posterior, x[:3], quantity)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_gradients_of_an_exact_linear_model_equal_finite_differences():
    x = torch.randn((10, 2), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(2, 1).double()
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.3)), (x, x.sum(1, keepdim=True)))
    for quantity in (lambda p: p.mean, lambda p: p.epistemic):
        got, expected = _gradient_and_differences(posterior, x[:3], quantity)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_gradients_of_a_recalibrated_posterior_equal_finite_differences():
    net, x, y = _classifier()
    posterior = kn.MeanFieldVI(**FEW).fit(kn.Model(net.double(), kn.Categorical()), (x, y))
    more = x + 0.1
    recalibrated = posterior.recalibrated((more, y))
    got, expected = _gradient_and_differences(recalibrated, x[:3], lambda p: p.total)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_differentiable_prediction_is_the_prediction():
    net, x, y = _classifier()
    posterior = kn.MeanFieldVI(**FEW).fit(kn.Model(net.double(), kn.Categorical()), (x, y))
    found = differentiable_prediction(posterior, x.requires_grad_(), samples=5, seed=posterior.seed)
    torch.testing.assert_close(found.probs.detach(), posterior.predict(x, samples=5).probs)
    assert found.probs.requires_grad
    assert not posterior.predict(x, samples=5).probs.requires_grad
    assert not next(posterior.predict_stream(x)).probs.requires_grad
    assert torch.is_grad_enabled()


def test_rows_to_differentiate_are_fewer_for_more_draws():
    net, x, y = _classifier()
    posterior = kn.MAP(**FEW).fit(kn.Model(net.double(), kn.Categorical()), (x, y))
    assert 1 <= rows_to_differentiate(posterior, x, 1000) < rows_to_differentiate(posterior, x, 10)
