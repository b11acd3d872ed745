"""Kernels of infinitely wide networks against closed forms, linear models and draws of wide networks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.errors import Unsupported


def arc_cosine(k: Tensor) -> tuple[Tensor, Tensor]:
    """E[φφ] and E[φ'φ'] of ReLU from a covariance matrix: Cho and Saul (2009)."""
    size = k.diagonal().sqrt()
    theta = (k / size.outer(size)).clamp(-1, 1).acos()
    value = size.outer(size) / (2 * math.pi) * (theta.sin() + (math.pi - theta) * theta.cos())
    return value, (math.pi - theta) / (2 * math.pi)


def arc_sine(k: Tensor) -> tuple[Tensor, Tensor]:
    """E[φφ] and E[φ'φ'] of the error function: Williams (1997)."""
    own = 1 + 2 * k.diagonal()
    value = 2 / math.pi * (2 * k / own.outer(own).sqrt()).clamp(-1, 1).asin()
    return value, 4 / math.pi / (own.outer(own) - 4 * k.square()).sqrt()


def deep_kernels(x: Tensor, moments, widths: tuple[int, ...], weight: float, bias: float) -> tuple[Tensor, Tensor]:
    """NNGP and NTK of a fully connected network, written out; ``widths`` are those that layers sum over."""
    kernel = bias**2 + weight**2 * x @ x.T
    tangent = kernel
    for width in widths:
        value, slope = moments(kernel)
        kernel = bias**2 + width * weight**2 * value
        tangent = kernel + width * weight**2 * slope * tangent
    return kernel, tangent


@pytest.mark.parametrize(("activation", "moments"), [(nn.ReLU, arc_cosine), (kn.Erf, arc_sine)])
def test_deep_networks_have_the_published_kernels(activation, moments, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    net = nn.Sequential(
        nn.Linear(3, 20), activation(), nn.Sequential(nn.Linear(20, 30), activation(), nn.Dropout(0.5)),
        nn.Linear(30, 7), activation(), nn.Linear(7, 2),
    )  # fmt: skip
    model = kn.Model(net.double(), kn.Gaussian(0.1), {"*.bias": kn.Normal(0.7), "*": kn.Normal(0.3)})
    for kind, expected in zip(("nngp", "ntk"), deep_kernels(x, moments, (20, 30, 7), 0.3, 0.7), strict=True):
        found = kn.infinite_width_kernel(model, x, kind=kind)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(kn.infinite_width_kernel(model, x[:2], x[2:], kind=kind), found[:2, 2:])


def test_a_linear_network_has_the_kernel_of_its_prior():
    """Without hidden layers nothing is a limit: the covariance of x·w + b; frozen layers in front are features."""
    x = torch.randn(5, 3)
    plain = kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), {"bias": kn.Normal(0.5), "*": kn.Normal(2.0)})
    torch.testing.assert_close(kn.infinite_width_kernel(plain, x), 0.25 + 4.0 * x.double() @ x.double().T)
    front = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    model = kn.Model(nn.Sequential(*front, nn.Linear(4, 1)), kn.Gaussian(0.1), frozen=["0.*", "1.*"])
    features = front.eval()(x).double().detach()
    for kind in ("nngp", "ntk"):
        found = kn.infinite_width_kernel(model, x, kind=kind)
        torch.testing.assert_close(found, 1 + features @ features.T, rtol=1e-5, atol=1e-5)


CNN = (
    nn.Conv2d(2, 100, 3, padding=1), nn.ReLU(), kn.Residual(nn.Conv2d(100, 100, 3, padding="same")), nn.AvgPool2d(2),
    nn.Conv2d(100, 150, 2, stride=2, bias=False), nn.Tanh(),
)  # fmt: skip
SCALES = {
    "0.weight": kn.Normal(0.3), "2.0.weight": kn.Normal(900**-0.5), "4.weight": kn.Normal((1.5 / 400) ** 0.5),
    "*.weight": kn.Normal(150**-0.5), "*": kn.Normal(0.5),
}  # fmt: skip
NETWORKS = {
    "pooled": nn.Sequential(*CNN, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(150, 1)),
    "flattened": nn.Sequential(
        nn.Conv2d(2, 150, 3, stride=2), nn.GELU(), nn.Conv2d(150, 100, 2, dilation=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(100, 1),
    ),
    "dense": nn.Sequential(
        nn.Flatten(), nn.Linear(128, 300), nn.SiLU(), kn.Residual(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)),
        nn.Linear(300, 1),
    ),
}  # fmt: skip
PRIORS = {
    "pooled": SCALES,
    "flattened": {
        "0.weight": kn.Normal(0.3), "2.weight": kn.Normal(600**-0.5), "*.weight": kn.Normal(0.1), "*": kn.Normal(0.5)
    },
    "dense": {
        "1.weight": kn.Normal(128**-0.5), "*.weight": kn.Normal(300**-0.5), "*": kn.Normal(0.5)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_wide_networks_have_these_kernels(name, seed):
    """Second moments of draws of the prior, and empirical tangent kernels, are within five standard errors."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 2, 8, 8, generator=generator)
    model = kn.Model(NETWORKS[name], kn.Gaussian(0.1), PRIORS[name])
    draws = 60
    stack = model.prior_draws(draws, generator=generator)
    f = model.network.over_draws(model.network_params(stack), x, vectorise=False)[..., 0].double()
    products = f.unsqueeze(1) * f.unsqueeze(2)
    error = products.std(0) / math.sqrt(draws)
    nngp = kn.infinite_width_kernel(model, x)
    assert ((products.mean(0) - nngp).abs() < 5 * error + 0.02 * nngp.abs().max()).all()  # width n is 1/n away
    tangents = torch.stack([
        kn.empirical_ntk(model, x, params={key: value[k] for key, value in stack.items()})[..., 0, 0].double()
        for k in range(8)
    ])  # fmt: skip
    ntk = kn.infinite_width_kernel(model, x, kind="ntk")
    assert ((tangents.mean(0) - ntk).abs() < 5 * tangents.std(0) / math.sqrt(8) + 0.02 * ntk.abs().max()).all()


# --- stored values ---------------------------------------------------------------------------------------------------

STORED = json.loads((Path(__file__).parent / "neural_tangents.json").read_text())
"""Kernels computed by neural-tangents for weights of variance 1.4²/n and biases of 0.3²."""


def _deep(activation: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 8), activation, nn.Linear(8, 1)
    )


SAME_NETWORKS = {
    "relu": _deep(nn.ReLU()),
    "erf": _deep(kn.Erf()),
    "leaky_relu": _deep(nn.LeakyReLU(0.2)),
    "gelu": _deep(nn.GELU()),
    "residual": nn.Sequential(
        nn.Linear(3, 8), kn.Residual(nn.ReLU(), nn.Linear(8, 8), kn.Erf(), nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 1)
    ),
    "flattened": nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), kn.Erf(), nn.Flatten(), nn.Linear(32, 1)
    ),
    "averaged": nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.AvgPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1)
    ),
    "pooled": nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME_NETWORKS)
def test_kernels_are_those_of_neural_tangents(name):
    net = SAME_NETWORKS[name].double()
    images = isinstance(net[0], nn.Conv2d)
    x, other = (torch.tensor(STORED[key], dtype=torch.float64) for key in (
        ("images", "other_images") if images else ("x", "other")
    ))  # fmt: skip
    if images:  # stored with channels last
        x, other = x.movedim(-1, 1), other.movedim(-1, 1)
    prior: dict[str, kn.Normal] = {}
    for key, value in net.named_parameters():
        prior[key] = kn.Normal(STORED["weight"] / math.sqrt(value[0].numel()) if value.dim() > 1 else STORED["bias"])
    model = kn.Model(net, kn.Gaussian(0.1), prior)
    for kind, (own, cross) in STORED["kernels"][name].items():
        exact = {"rtol": 1e-5, "atol": 1e-5}
        found = kn.infinite_width_kernel(model, x, kind=kind), kn.infinite_width_kernel(model, x, other, kind=kind)
        torch.testing.assert_close(found[0], torch.tensor(own, dtype=torch.float64), **exact)
        torch.testing.assert_close(found[1], torch.tensor(cross, dtype=torch.float64), **exact)


REFUSED = {
    "must end in a linear layer": nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
    "not known here for layer '1', BatchNorm1d": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
    "must come directly behind": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.ReLU(), nn.Linear(4, 1)),
    "Residual '1' must end in": nn.Sequential(nn.Linear(3, 4), kn.Residual(nn.Tanh()), nn.Linear(4, 1)),
    "not known here for layer ''": nn.Bilinear(3, 3, 1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_networks_without_a_known_limit_are_refused(reason):
    with pytest.raises(Unsupported, match=reason):
        kn.infinite_width_kernel(kn.Model(REFUSED[reason], kn.Gaussian(0.1)), torch.zeros(2, 3))


def test_priors_without_a_known_limit_are_refused():
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    x = torch.zeros(2, 3)
    with pytest.raises(Unsupported, match=r"needs a normal prior on '0\.bias'"):
        kn.infinite_width_kernel(kn.Model(net(), kn.Gaussian(0.1), kn.LaplacePrior(1.0)), x)
    with pytest.raises(Unsupported, match=r"needs one variance for all of '0\.bias', around 0"):
        kn.infinite_width_kernel(kn.Model(net(), kn.Gaussian(0.1), kn.Normal(1.0, loc=1.0)), x)
    with pytest.raises(Unsupported, match="no point estimates of weights"):
        kn.infinite_width_kernel(kn.Model(net(), kn.Gaussian(0.1), random="last_layer"), x)
    with pytest.raises(Unsupported, match=r"'2\.weight' is frozen, behind random ones"):
        kn.infinite_width_kernel(kn.Model(net(), kn.Gaussian(0.1), frozen=["2.weight"]), x)
    layer = nn.Linear(3, 3)
    shared = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(Unsupported, match=r"'0\.bias' is used twice"):
        kn.infinite_width_kernel(kn.Model(shared, kn.Gaussian(0.1)), x)
    with pytest.raises(Unsupported, match="leave out output="):
        kn.infinite_width_kernel(kn.Model(net(), kn.Gaussian(0.1), output=lambda out: 2 * out), x)


def test_pooling_of_one_dimension_alone_is_refused():
    """None leaves a dimension as it is."""
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d((1, None)), nn.Flatten(), nn.Linear(8, 1))
    with pytest.raises(Unsupported, match="'1' must pool to one position"):
        kn.infinite_width_kernel(kn.Model(net, kn.Gaussian(0.1)), torch.zeros(2, 1, 4, 4))
