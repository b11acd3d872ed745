from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import scipy.special
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.function_space.priors import (
    DrawnValues,
    GPyTorchKernel,
    KernelValues,
    as_function_prior,
    distances,
)


def points(n: int = 7, d: int = 2) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def linear_model(outputs: int = 1) -> kn.Model:
    return kn.Model(nn.Linear(2, outputs).double(), kn.Gaussian(0.1), kn.Normal(0.7))


def everything(values: KernelValues | DrawnValues, n: int) -> tuple[Tensor, Tensor]:
    return values.moments(torch.arange(n))


def test_rbf_kernel_is_its_formula_pair_by_pair():
    x = points()
    kernel = kn.RBFKernel(lengthscale=0.6, scale=1.5).covariance(x)
    for i, a in enumerate(x):
        for j, b in enumerate(x):
            expected = 1.5**2 * torch.exp(-(a - b).square().sum() / (2 * 0.6**2))
            assert abs(kernel[i, j] - expected) < 1e-12


@pytest.mark.parametrize("smoothness", [0.5, 1.5, 2.5])
def test_matern_kernels_are_the_general_formula_with_its_bessel_function(smoothness):
    x = points()
    kernel = kn.MaternKernel(lengthscale=0.8, scale=1.3, smoothness=smoothness).covariance(x)
    r = ((2 * smoothness) ** 0.5 * distances(x) / 0.8).numpy()
    r[r == 0] = 1e-9
    general = 2 ** (1 - smoothness) / scipy.special.gamma(smoothness) * r**smoothness * scipy.special.kv(smoothness, r)
    assert torch.allclose(kernel, 1.3**2 * torch.as_tensor(general), atol=1e-7)


def test_linear_kernel_is_the_covariance_of_a_linear_layer():
    x = points()
    design = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    prior = torch.diag(torch.tensor([4.0, 4.0, 9.0], dtype=torch.float64))
    assert torch.allclose(kn.LinearKernel(scale=2.0, bias=3.0).covariance(x), design @ prior @ design.T)


def test_kernel_looks_at_images_as_vectors_and_picks_the_points_asked_for():
    images = torch.randn(5, 1, 2, 3)
    values = kn.RBFKernel(mean=0.4).at(images, linear_model(), generator=torch.Generator())
    mean, covariance = values.moments(torch.tensor([3, 1]))
    assert torch.equal(mean, torch.full((1, 2), 0.4, dtype=torch.float64))
    expected = kn.RBFKernel().covariance(images[[3, 1]].flatten(1).double())
    assert torch.allclose(covariance, expected.unsqueeze(0))


@pytest.mark.parametrize("prior", [kn.NetworkPrior(50), kn.RBFKernel()], ids=["drawn", "kernel"])
def test_moments_of_some_outputs_are_those_among_all(prior):
    values = prior.at(points(), linear_model(outputs=4), generator=torch.Generator().manual_seed(0))
    index, only = torch.tensor([5, 0, 2]), torch.tensor([3, 1])
    for few, every in zip(values.moments(index, only), values.moments(index), strict=True):
        assert torch.allclose(few, every[only] if len(every) > 1 else every)


def test_network_prior_has_the_moments_of_a_linear_layer_within_their_standard_errors(seed, generator):
    x, draws = points(), 2_000
    prior = kn.NetworkPrior(draws).at(x, linear_model(outputs=2), generator=generator)
    mean, covariance = everything(prior, len(x))
    exact = kn.LinearKernel(scale=0.7, bias=0.7).covariance(x)
    variances = exact.diagonal()
    # of a sample mean K_ii / S; of a sample covariance of normal values (K_ii K_jj + K_ij^2) / S
    mean_error = (variances / draws).sqrt()
    error = ((torch.outer(variances, variances) + exact.square()) / draws).sqrt()
    assert mean.shape == (2, 7) and covariance.shape == (2, 7, 7)
    assert (mean.abs() < 5 * mean_error).all()
    assert ((covariance - exact).abs() < 5 * error).all()


def test_network_prior_is_that_of_another_model_where_one_is_given(generator):
    x = points()
    other = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.1), kn.Normal(1e-3))
    prior = kn.NetworkPrior(50, model=other).at(x, linear_model(), generator=generator)
    assert everything(prior, len(x))[1].abs().max() < 1e-4
    with pytest.raises(kn.InvalidArgument, match="model with 1 outputs, but the model to fit has 2"):
        kn.NetworkPrior(50, model=other).at(x, linear_model(outputs=2), generator=generator)


def test_drawn_values_have_the_sample_moments_of_numpy():
    draws = torch.randn(9, 4, 2)
    mean, covariance = everything(DrawnValues(draws), 4)
    for output in range(2):
        values = draws[:, :, output].double()
        assert torch.allclose(mean[output], values.mean(0), atol=1e-6)  # centred in float32
        assert torch.allclose(covariance[output], values.T.cov(), atol=1e-6)


def test_prior_without_weights_to_draw_is_refused():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), kn.Flat())
    with pytest.raises(kn.Unsupported, match="improper"):
        kn.NetworkPrior(5).at(points().float(), model, generator=torch.Generator())


@pytest.mark.parametrize("covariance", [torch.full((2, 2), torch.nan), torch.zeros(2, 2), -torch.eye(2)])
def test_covariances_that_are_none_are_refused(covariance):
    with pytest.raises(kn.InvalidArgument, match="prior"):
        KernelValues(0.0, covariance)


def test_more_values_than_memory_holds_are_refused_after_the_first_draw(monkeypatch, generator):
    monkeypatch.setattr("knowable.inference.variational.function_space.priors._MOST", 50 * 7 * 2 - 1)
    with pytest.raises(kn.InvalidArgument, match=r"50 draws of 2 outputs at 7 context points.*fewer"):
        kn.NetworkPrior(50).at(points(), linear_model(outputs=2), generator=generator)
    kn.NetworkPrior(49).at(points(), linear_model(outputs=2), generator=generator)


def test_infinite_functions_are_refused():
    with pytest.raises(kn.InvalidArgument, match="infinite"):
        DrawnValues(torch.full((3, 2, 1), torch.inf))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: kn.RBFKernel(lengthscale=0.0), "lengthscale"),
        (lambda: kn.RBFKernel(scale=-1.0), "scale"),
        (lambda: kn.MaternKernel(smoothness=2.0), "smoothness"),
        (lambda: kn.LinearKernel(bias=-0.1), "bias"),
        (lambda: kn.NetworkPrior(2), "draws"),
        (lambda: kn.NetworkPrior(model=nn.Linear(1, 1)), "model"),  # type: ignore[arg-type]
        (lambda: kn.GPyTorchKernel(nn.Linear(1, 1)), "kernel"),
        (lambda: as_function_prior("rbf"), "prior"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(make, name):
    with pytest.raises(kn.KnowableError, match=name):
        make()


def test_no_choice_is_the_model_s_own_prior():
    assert as_function_prior(None) == kn.NetworkPrior()
    kernel = kn.RBFKernel()
    assert as_function_prior(kernel) is kernel


class Doubled(nn.Module):
    """Stands for a kernel of GPyTorch, whose results are lazy."""

    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(to_dense=lambda: self.raw * x @ x.T)


def test_kernels_of_gpytorch_are_wrapped(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", SimpleNamespace(kernels=SimpleNamespace(Kernel=Doubled)))
    x = points()
    prior = as_function_prior(Doubled())
    assert isinstance(prior, GPyTorchKernel)
    covariance = prior.covariance(x)
    assert covariance.dtype == torch.float64 and not covariance.requires_grad
    assert torch.allclose(covariance, 2 * x @ x.T, rtol=1e-5, atol=1e-5)  # computed in the kernel's float32


def test_gpytorch_itself_agrees_with_ours():
    gpytorch = pytest.importorskip("gpytorch")
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 2.25, 0.6
    x = points()
    assert torch.allclose(as_function_prior(kernel).covariance(x), kn.RBFKernel(0.6, 1.5).covariance(x), atol=1e-6)
