"""Tests of moments through whole networks, against the networks themselves at very many drawn weights."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

import knowable as kn
from knowable.core.model.model import Model
from knowable.inference.variational.moment import algebra as moments
from knowable.inference.variational.moment.algebra import Moments
from knowable.inference.variational.moment.network import KNOWN, NoRule, apply_rule, check_layers, propagate
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


@pytest.mark.slow
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


# --- moment layers ---------------------------------------------------------------------------------------------------


def _named(value: object) -> str:
    """A name for a test that is the same in every process."""
    return getattr(value, "__name__", None) or type(value).__name__


@pytest.fixture
def image(generator) -> Moments:
    shape = (2, 3, 6, 6)
    return Moments(
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.rand(shape, generator=generator, dtype=torch.float64),
    )


def same(one: Moments, two: Moments) -> None:
    torch.testing.assert_close(one.mean, two.mean)
    torch.testing.assert_close(one.variance, two.variance)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (F.relu, (), {"inplace": True}, lambda x: moments.rectified(x)),
        (torch.relu_, (), {}, lambda x: moments.rectified(x)),
        (F.leaky_relu, (0.2,), {}, lambda x: moments.rectified(x, 0.2)),
        (F.leaky_relu, (), {}, lambda x: moments.rectified(x, 0.01)),
        (torch.tanh, (), {}, lambda x: moments.smooth(torch.tanh, x)),
        (torch.sigmoid, (), {}, lambda x: moments.smooth(torch.sigmoid, x)),
        (F.gelu, (), {"approximate": "tanh"}, lambda x: moments.smooth(lambda z: F.gelu(z, approximate="tanh"), x)),
        (F.silu, (), {"inplace": True}, lambda x: moments.smooth(F.silu, x)),
        (F.elu, (0.5,), {"inplace": False}, lambda x: moments.smooth(lambda z: F.elu(z, 0.5), x)),
        (F.softplus, (2.0, 20.0), {}, lambda x: moments.smooth(lambda z: F.softplus(z, 2.0, 20.0), x)),
        (F.dropout, (), {"p": 0.4, "training": False}, lambda x: x),
        (F.dropout, (0.4, True), {}, lambda x: moments.dropped(x, 0.4)),
        (F.dropout2d, (), {"p": 0.4}, lambda x: moments.dropped(x, 0.4)),
    ],
    ids=_named,
)
def test_elementwise_layer_gets_its_rule(image, func, args, kwargs, expected):
    same(apply_rule(func, (image, *args), kwargs), expected(image))


def test_arithmetic_with_known_numbers_moves_and_stretches(image):
    factor = torch.linspace(-1, 2, 6, dtype=torch.float64)
    cases = [
        (torch.add, (image, 2.0), image.mean + 2, image.variance),
        (torch.Tensor.__rsub__, (image, 1.0), 1 - image.mean, image.variance),
        (torch.sub, (factor, image), factor - image.mean, image.variance),
        (torch.mul, (image, factor), image.mean * factor, image.variance * factor**2),
        (torch.mul, (factor, image), image.mean * factor, image.variance * factor**2),
        (torch.div, (image, 4), image.mean / 4, image.variance / 16),
        (torch.neg, (image,), -image.mean, image.variance),
    ]
    for func, args, mean, variance in cases:
        same(apply_rule(func, args, {}), Moments(mean, variance))


def test_reshaping_keeps_rows_and_covariances(generator):
    mean = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    covariance = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    x = Moments(mean, torch.ones_like(mean), covariance)
    found = apply_rule(torch.Tensor.view, (x, 2, 2, 3), {})
    assert found.mean.shape == found.variance.shape == (2, 2, 3)
    assert found.covariance is not None
    back = apply_rule(torch.flatten, (found, 1), {})
    same(back, x)
    with pytest.raises(NoRule, match="rows"):
        apply_rule(torch.flatten, (x,), {})


# --- pooling ---------------------------------------------------------------------------------------------------------


def windows(x: Tensor, size: int, stride: int, gap: int = 1) -> Tensor:
    """All windows, ``(batch, channels, rows, columns, size²)``, by loops."""
    reach = gap * (size - 1) + 1
    count = (x.shape[-1] - reach) // stride + 1
    found = torch.empty(*x.shape[:2], count, count, size**2, dtype=x.dtype)
    for i, j in itertools.product(range(count), repeat=2):
        top, left = i * stride, j * stride
        found[:, :, i, j] = x[:, :, top : top + reach : gap, left : left + reach : gap].flatten(2)
    return found


@pytest.mark.parametrize("settings", [{"stride": 2}, {"stride": 1}, {"divisor_override": 3}], ids=str)
def test_average_pooling_averages_and_divides_variances_twice(image, settings):
    found = apply_rule(F.avg_pool2d, (image, 2), settings)
    stride, divisor = settings.get("stride", 2), settings.get("divisor_override", 4)
    torch.testing.assert_close(found.mean, windows(image.mean, 2, stride).sum(-1) / divisor)
    torch.testing.assert_close(found.variance, windows(image.variance, 2, stride).sum(-1) / divisor**2)


def test_pooling_to_a_size_and_means_over_positions_are_averages(image):
    found = apply_rule(F.adaptive_avg_pool2d, (image, (3, 2)), {})
    torch.testing.assert_close(found.variance, F.avg_pool2d(image.variance, (2, 3)) / 6)
    whole = apply_rule(torch.Tensor.mean, (image, (2, 3)), {})
    torch.testing.assert_close(whole.variance, image.variance.sum((2, 3)) / 36**2)
    line = Moments(image.mean[:, :, 0], image.variance[:, :, 0])
    torch.testing.assert_close(apply_rule(F.avg_pool1d, (line, 3), {}).variance, F.avg_pool1d(line.variance, 3) / 3)


@pytest.mark.parametrize("settings", [{}, {"stride": 1}, {"stride": 1, "dilation": 2}], ids=str)
def test_max_pooling_is_the_greatest_of_each_window(image, settings):
    found = apply_rule(torch.max_pool2d, (image, 2), settings)
    stride, gap = settings.get("stride", 2), settings.get("dilation", 1)
    means, variances = (windows(each, 2, stride, gap).unbind(-1) for each in (image.mean, image.variance))
    expected = moments.greatest([Moments(m, v) for m, v in zip(means, variances, strict=True)])
    same(found, expected)
    assert found.mean.shape == F.max_pool2d(image.mean, 2, **settings).shape


def test_max_pooling_of_nearly_known_values_is_their_maximum(image):
    x = Moments(image.mean, torch.full_like(image.mean, 1e-14))
    found = apply_rule(torch.max_pool2d, (x, 3), {})
    torch.testing.assert_close(found.mean, F.max_pool2d(image.mean, 3), rtol=0, atol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "says"),
    [
        (torch.softmax, (1,), {}, "softmax"),
        (torch.exp, (), {}, "exp"),
        (F.avg_pool2d, (2,), {"padding": 1, "count_include_pad": False}, "different sizes"),
        (F.avg_pool2d, (4,), {"ceil_mode": True}, "different sizes"),
        (F.adaptive_avg_pool2d, (4,), {}, "different sizes"),
        (torch.max_pool2d, (3,), {"padding": 1}, "padding"),
        (torch.Tensor.mean, (), {}, "mean over rows"),
        (torch.Tensor.mean, (0,), {}, "mean over rows"),
        (torch.mul, (torch.ones(2, 2, 3, 6, 6),), {}, "repeats"),
        (torch.div, (2.0,), {"rounding_mode": "floor"}, "rounded"),
        (torch.sub, (2.0,), {"alpha": 3}, "by name"),
    ],
    ids=_named,
)
def test_operation_without_a_rule_is_refused_by_name(image, func, args, kwargs, says):
    with pytest.raises(NoRule, match=says) as caught:
        apply_rule(func, (image, *args), kwargs)
    assert isinstance(caught.value, kn.Unsupported)
    assert KNOWN in str(caught.value)


def test_division_by_random_values_is_refused(image):
    with pytest.raises(NoRule, match="division"):
        apply_rule(torch.div, (2.0, image), {})


def test_arguments_by_name_are_refused_where_they_would_be_missed(image):
    with pytest.raises(NoRule, match="by name"):
        apply_rule(torch.add, (2.0,), {"other": image})
    with pytest.raises(NoRule, match="by name"):
        apply_rule(torch.mul, (image,), {"other": 2.0})
