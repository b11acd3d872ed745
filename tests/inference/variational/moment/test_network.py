"""Tests of moments through whole networks, against the networks themselves at very many drawn weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import knowable as kn
from knowable.core.model.model import Model
from knowable.inference.variational.moment.algebra import Moments
from knowable.inference.variational.moment.network import check_layers, propagate
from knowable.testing import network_case

DRAWS = 100_000


def with_spread(model: Model, share: float, generator: torch.Generator) -> dict[str, Moments]:
    """Every weight with a standard deviation of about ``share``."""
    return {
        name: Moments(value, (share * (0.5 + torch.rand(value.shape, generator=generator))).square().to(value))
        for name, value in model.network_params(model.params()).items()
    }


def sampled(model: Model, params: dict[str, Moments], x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means and covariances of the outputs ``(rows, outputs)`` over 100,000 draws of the weights."""
    outputs = []
    for _ in range(20):
        stack = {
            name: value.mean + value.std * torch.randn((DRAWS // 20, *value.mean.shape), generator=generator)
            for name, value in params.items()
        }
        outputs.append(vmap(lambda own: functional_call(model.net, own, (x,)))(stack))
    every = torch.cat(outputs).double().flatten(2)  # (draws, rows, outputs)
    centred = every - every.mean(0)
    return every.mean(0), torch.einsum("kbi,kbj->bij", centred, centred) / DRAWS


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU], ids=lambda each: each.__name__)
def test_three_layers_have_the_moments_of_a_hundred_thousand_draws_within_five_per_cent(generator, activation):
    net = nn.Sequential(nn.Linear(3, 30), activation(), nn.Linear(30, 30), activation(), nn.Linear(30, 2))
    model = kn.Model(net, kn.Gaussian(0.1))
    params, x = with_spread(model, 0.15, generator), torch.randn(6, 3, generator=generator)
    found = propagate(model, params, x, buffers={}, limit=64)
    mean, covariance = sampled(model, params, x, generator)
    std = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((found.mean - mean).abs() < 0.05 * std).all()
    torch.testing.assert_close(found.std.double(), std, rtol=0.05, atol=0)
    size = std.unsqueeze(1) * std.unsqueeze(2)
    assert ((found.covariance - covariance).abs() < 0.05 * size).all()


def test_without_covariances_the_spread_is_not_that_of_the_draws(generator):
    # only the first layer varies, and all that follows is positive: what its units say adds up in the units after them
    # and in the output, which variances alone cannot show
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    with torch.no_grad():
        for value in net.parameters():
            value.abs_()
    model = kn.Model(net, kn.Gaussian(0.1))
    fixed = {name: Moments(value) for name, value in model.network_params(model.params()).items()}
    params = {**fixed, "0.weight": with_spread(model, 0.1, generator)["0.weight"]}
    x = torch.randn(4, 3, generator=generator)
    _, covariance = sampled(model, params, x, generator)
    std = covariance[:, :, 0].sqrt()
    whole, parts = (propagate(model, params, x, buffers={}, limit=limit).std.double() for limit in (64, 0))
    torch.testing.assert_close(whole, std, rtol=0.05, atol=0)
    assert (parts < 0.7 * std).all()


def test_convolutions_and_pooling_have_about_the_moments_of_the_draws(generator):
    # positions share weights, which is left out: the means are good, variances within a third
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2)
    )
    model = kn.Model(net, kn.Categorical())
    params, x = with_spread(model, 0.1, generator), torch.randn(3, 1, 8, 8, generator=generator)
    found = propagate(model, params, x, buffers={}, limit=64)
    mean, covariance = sampled(model, params, x, generator)
    std = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((found.mean - mean).abs() < 0.15 * std).all()
    torch.testing.assert_close(found.std.double(), std, rtol=0.35, atol=0)


class Composite(nn.Module):
    """A forward pass with a will of its own: functions, methods, views, numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv1d(2, 3, 2),
            nn.Linear(9, 5),
            nn.Sequential(nn.Tanh(), nn.Linear(5, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        hidden = F.max_pool1d(F.dropout(hidden, 0.2, self.training), 1)
        hidden = self.second(hidden.view(hidden.size(0), -1)) * 0.5 + 1.0
        return self.head(hidden).squeeze(-1)


def test_composite_modules_are_followed_like_sequences_of_layers(generator):
    net = Composite()
    model = kn.Model(net, kn.Gaussian(0.1))
    params, x = with_spread(model, 0.1, generator), torch.randn(4, 2, 4, generator=generator)
    check_layers(model, x, limit=64)
    found = propagate(model, params, x, buffers={}, limit=64)
    weights, bias = params["second.weight"], params["second.bias"]
    chain = nn.Sequential(net.first, nn.ReLU(), nn.Flatten(), net.second)
    hidden = propagate(
        kn.Model(chain, kn.Gaussian(0.1)),
        {"0.weight": params["first.weight"], "0.bias": params["first.bias"], "3.weight": weights, "3.bias": bias},
        x, buffers={}, limit=64,
    )  # fmt: skip
    shifted = Moments(hidden.mean * 0.5 + 1.0, hidden.variance / 4, hidden.covariance / 4)
    from knowable.inference.variational.moment import algebra as moments

    expected = moments.linear(
        moments.smooth(torch.tanh, shifted), params["head.1.weight"], params["head.1.bias"], limit=64
    )
    assert found.mean.shape == (4,)
    torch.testing.assert_close(found.mean, expected.mean[:, 0])
    torch.testing.assert_close(found.variance, expected.variance[:, 0])


def test_known_parts_of_a_network_do_what_they_do(generator):
    # the last layer is random: what comes before it is an ordinary network, whatever its layers are
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Softmax(-1), nn.Linear(8, 1))
    model = kn.Model(net, kn.Gaussian(0.1), random="last_layer")
    x = torch.randn(5, 3, generator=generator)
    check_layers(model, x, limit=64)
    params = {
        name: Moments(value, torch.full_like(value, 0.04) if name in model.random_names else None)
        for name, value in model.params().items()
    }
    found = propagate(model, params, x, buffers=model.buffers(), limit=64)
    features = net[:3].eval()(x)
    torch.testing.assert_close(found.mean, net[3](features))
    torch.testing.assert_close(found.variance, 0.04 * (features.square().sum(1, keepdim=True) + 1))


def test_moments_can_be_differentiated(generator):
    case = network_case("mlp", dtype=torch.float64)
    model = case.model()
    values = {k: v for k, v in model.params().items() if not k.startswith("likelihood.")}
    loc = {name: value.clone().requires_grad_() for name, value in values.items()}
    variance = {name: torch.full_like(value, 0.01).requires_grad_() for name, value in values.items()}
    found = propagate(model, {k: Moments(v, variance[k]) for k, v in loc.items()}, case.x, buffers={}, limit=64)
    (found.mean.sum() + found.variance.sum()).backward()
    for value in (*loc.values(), *variance.values()):
        assert value.grad is not None and torch.isfinite(value.grad).all()


# --- refusals --------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.second(hidden)


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("batchnorm_mlp", r"BatchNorm1d '1'"),
        ("batchnorm_cnn", r"BatchNorm2d '1'"),
        ("lstm", r"LSTM 'lstm'"),
        ("transformer", r"MultiheadAttention '.*self_attn'"),
        ("tied", r"Embedding 'embed'"),
        ("shared", r"Linear '2'.*second use of the weight '2.weight'"),
    ],
)
def test_layer_without_a_rule_is_refused_by_name(name, says):
    case = network_case(name)
    with pytest.raises(kn.Unsupported, match=says):
        check_layers(case.model(), case.x, limit=64)


@pytest.mark.parametrize(
    ("net", "says"),
    [
        (Residual(), "Residual, which computes add of two random results"),
        (ByHand(), "ByHand, which computes"),
        (nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), r"Softmax '1', which computes softmax"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), r"LayerNorm '1'"),
    ],
    ids=["residual", "transpose", "softmax", "layernorm"],
)
def test_operation_that_would_lose_correlations_is_refused(net, says):
    with pytest.raises(kn.Unsupported, match=says):
        check_layers(kn.Model(net, kn.Categorical()), torch.randn(4, 3), limit=64)


def test_looking_leaves_the_network_alone():
    case = network_case("mlp")
    model = case.model()
    check_layers(model, case.x, limit=64)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.net.modules())
    assert not any(
        module._forward_hooks for mode in (True, False) for module in model.network.modules(training=mode).values()
    )
