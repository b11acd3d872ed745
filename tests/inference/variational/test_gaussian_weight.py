from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jacrev

import knowable as kn
from knowable.inference.variational.gaussian_weight import (
    GaussianPair,
    GaussianWeight,
    Geometry,
    LocalConvolution,
    LocalLinear,
    PairRules,
    flipout_rule,
    local_rule,
    output_moments,
    plain_local_rule,
    trace_usage,
)
from knowable.testing import network_case

DRAWS = 1500
RULES = {"local": local_rule, "plain local": plain_local_rule, "flipout": flipout_rule}

# Operation, shape of the input, shape of the weight, number of output channels.
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    "linear": (F.linear, (3, 4), (2, 4), 2),
    "linear over tokens": (F.linear, (3, 2, 4), (2, 4), 2),
    "conv1d": (F.conv1d, (2, 3, 5), (2, 3, 3), 2),
    "conv2d": (F.conv2d, (2, 2, 4, 4), (3, 2, 3, 3), 3),
    "strided conv2d": (lambda *a: F.conv2d(*a, stride=2, padding=1), (2, 2, 4, 4), (3, 2, 3, 3), 3),
    "grouped conv2d": (lambda *a: F.conv2d(*a, groups=2, dilation=2), (2, 4, 4, 4), (2, 2, 2, 2), 2),
    "conv_transpose2d": (F.conv_transpose2d, (2, 2, 3, 3), (2, 3, 2, 2), 3),
    "strided conv_transpose2d": (
        lambda *a: F.conv_transpose2d(*a, stride=2, padding=1, output_padding=1), (2, 2, 3, 3), (2, 3, 3, 3), 3,
    ),
}  # fmt: skip


def operands(name: str, generator: torch.Generator) -> tuple[Callable[..., Tensor], Tensor, dict[str, Tensor]]:
    """The operation, an input, and means and variances of a weight and a bias."""
    op, x_shape, w_shape, channels = OPERATIONS[name]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    moments = {
        "loc": normal(*w_shape), "variance": 0.3 * normal(*w_shape).square(),
        "bias_loc": normal(channels), "bias_variance": 0.3 * normal(channels).square(),
    }  # fmt: skip
    return op, normal(*x_shape), moments


def gaussian(moments: dict[str, Tensor], rule: Callable[..., Tensor]) -> tuple[GaussianWeight, GaussianWeight]:
    """Weight and bias as Gaussian variables."""
    weight = GaussianWeight(moments["loc"], moments["variance"], rule)
    return weight, GaussianWeight(moments["bias_loc"], moments["bias_variance"], rule)


def carried(op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Many results of the operation with Gaussian weights, ``(DRAWS, rows, ...)``."""
    owner = weight if isinstance(weight, GaussianWeight) else bias
    if owner.rule is not flipout_rule:  # independent for every example: many examples are as good as many calls
        repeated = op(x.repeat(DRAWS, *(1,) * (x.dim() - 1)), weight, bias)
        return repeated.unflatten(0, (DRAWS, len(x)))
    return torch.stack([op(x, weight, bias) for _ in range(DRAWS)])


def exact_covariance(op: Callable[..., Tensor], x: Tensor, moments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean ``(rows, ...)`` and covariance ``(outputs, outputs)`` of the result, which is linear in weight and bias."""
    jacobians = jacrev(lambda weight, bias: op(x, weight, bias), (0, 1))(moments["loc"], moments["bias_loc"])
    spreads = [
        jacobian.flatten(-variance.dim()).flatten(0, -2) * variance.flatten().sqrt()  # (outputs, weights)
        for jacobian, variance in zip(jacobians, (moments["variance"], moments["bias_variance"]), strict=True)
    ]
    return op(x, moments["loc"], moments["bias_loc"]), sum(each @ each.T for each in spreads)


def assert_mean_and_variance(found: Tensor, mean: Tensor, variance: Tensor) -> None:
    # S draws: means within 5 sqrt(v / S), variances within 5 v sqrt(2 / S). At most about a hundred positions are
    # looked at, so that a right answer fails once in ten thousand runs
    variance = variance.reshape(mean.shape)
    assert ((found.mean(0) - mean).abs() < 5 * (variance / DRAWS).sqrt() + 1e-9).all()
    assert ((found.var(0) - variance).abs() < 5 * variance * math.sqrt(2 / DRAWS) + 1e-9).all()


# --- the two rules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_position_has_the_mean_and_variance_of_weight_draws(generator, name, rule):
    op, x, moments = operands(name, generator)
    mean, covariance = exact_covariance(op, x, moments)
    found = carried(op, x, *gaussian(moments, RULES[rule]))
    assert_mean_and_variance(found, mean, covariance.diagonal())


def test_noise_of_channels_that_lie_last_is_as_right_and_lies_as_they_do(generator):
    op, x, moments = operands("conv2d", generator)
    mean, covariance = exact_covariance(op, x, moments)
    last = x.repeat(DRAWS, 1, 1, 1).contiguous(memory_format=torch.channels_last)
    found = op(last, *gaussian(moments, local_rule))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_mean_and_variance(found.unflatten(0, (DRAWS, len(x))), mean, covariance.diagonal())


@pytest.mark.parametrize("name", ["linear", "linear over tokens", "conv2d", "conv_transpose2d"])
def test_flipout_keeps_the_covariance_within_an_example_and_none_between(generator, name):
    # a correlation estimated from S normal draws has a standard error of at most 1 / sqrt(S); between two examples,
    # which share the size of the perturbation and not its signs, E[a² b²] may be 3 instead of 1
    op, x, moments = operands(name, generator)
    found = carried(op, x, *gaussian(moments, flipout_rule)).flatten(2)  # (S, rows, outputs of an example)
    count = found.shape[2]
    covariance = exact_covariance(op, x, moments)[1][:count, :count]
    expected = covariance / covariance.diagonal().sqrt().outer(covariance.diagonal().sqrt())
    joint = found[:, :2].flatten(1).T.corrcoef()
    assert ((joint[:count, :count] - expected).abs() < 5.5 / math.sqrt(DRAWS)).all()
    assert (joint[:count, count:].abs() < 5.5 * math.sqrt(3 / DRAWS)).all()


def test_local_draws_are_independent_between_examples_and_outputs(generator):
    op, x, moments = operands("linear", generator)
    correlations = carried(op, x, *gaussian(moments, local_rule)).flatten(1).T.corrcoef()
    off_diagonal = correlations - torch.eye(len(correlations), dtype=torch.float64)
    assert (off_diagonal.abs() < 5 / math.sqrt(DRAWS)).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("part", ["weight without bias", "weight", "bias"])
def test_only_the_weight_or_only_the_bias_may_be_random(generator, name, rule, part):
    op, x, moments = operands(name, generator)
    weight, bias = gaussian(moments, RULES[rule])
    if part == "bias":
        weight, moments["variance"] = moments["loc"], torch.zeros_like(moments["variance"])
    else:
        bias, moments["bias_variance"] = moments["bias_loc"], torch.zeros_like(moments["bias_variance"])
    if part == "weight without bias":
        bias, moments["bias_loc"] = None, torch.zeros_like(moments["bias_loc"])
    mean, covariance = exact_covariance(op, x, moments)
    assert_mean_and_variance(carried(op, x, weight, bias), mean, covariance.diagonal())


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=["rows", "tokens"])
@pytest.mark.parametrize("bias", ["random", "fixed", "none"])
def test_gradient_written_by_hand_is_that_of_finite_differences(seed, generator, shape, bias):
    def leaf(*size: int, positive: bool = False) -> Tensor:
        value = torch.randn(size, generator=generator, dtype=torch.float64)
        return (value.abs() + 0.1 if positive else value).requires_grad_()

    inputs = [leaf(*shape), leaf(2, 4), leaf(2, 4, positive=True)]
    inputs += [] if bias == "none" else [leaf(2)] if bias == "fixed" else [leaf(2), leaf(2, positive=True)]

    def draw(*given: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # the same noise every time
            return LocalLinear.apply(*given, *[None] * (5 - len(given)))

    assert torch.autograd.gradcheck(draw, inputs)


def test_gradient_written_by_hand_is_that_of_the_rule_by_autograd(seed, generator):
    _, x, moments = operands("linear", generator)
    leaves = [value.requires_grad_() for value in (x, *moments.values())]

    def by_autograd() -> Tensor:
        std = F.linear(x.square(), moments["variance"], moments["bias_variance"]).sqrt()
        return F.linear(x, moments["loc"], moments["bias_loc"]) + std * torch.randn_like(std)

    torch.manual_seed(seed)
    expected = by_autograd()
    torch.manual_seed(seed)
    found = LocalLinear.apply(x, *moments.values())
    weights = torch.randn_like(expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(each, leaves, weights) for each in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_input_of_zeros_has_a_finite_gradient():
    variance = torch.ones(2, 3, requires_grad=True)
    loc = torch.zeros(2, 3, requires_grad=True)
    output = F.linear(torch.zeros(4, 3), GaussianWeight(loc, variance, local_rule))
    gradients = torch.autograd.grad(output.sum(), (loc, variance))
    assert all((each == 0).all() for each in gradients)


# --- everything else a network may do with a weight ------------------------------------------------------------------


def test_other_operations_see_one_draw_the_same_each_time(generator):
    weight = GaussianWeight(torch.zeros(5), torch.ones(5), local_rule)
    first, second = weight * 1.0, weight + 0.0
    assert torch.equal(first, second)
    assert type(first) is Tensor
    assert (first != 0).any()
    fresh = GaussianWeight(torch.zeros(5), torch.ones(5), local_rule) * 1.0
    assert not torch.equal(first, fresh)


def test_looking_at_a_weight_does_not_draw_it():
    weight = GaussianWeight(torch.zeros(5, 2), torch.ones(5, 2), local_rule)
    assert weight.shape == (5, 2) and weight.size(0) == 5 and weight.dim() == 2 and len(weight) == 5
    assert weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_floating_point()
    assert weight._draw is None


def test_gradient_reaches_mean_and_variance_through_a_draw():
    loc, variance = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    weight = GaussianWeight(loc, variance, local_rule)
    by_loc, by_variance = torch.autograd.grad((weight * 2.0).sum(), (loc, variance))
    assert (by_loc == 2).all()
    torch.testing.assert_close(by_variance, weight.draw().detach())  # d 2 (v^½ ε) / dv = ε at v = 1


# --- which weights act once per example ------------------------------------------------------------------------------


class Twice(nn.Module):
    """A layer used two times, and one used once."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def test_layers_of_an_mlp_act_once_per_example():
    case = network_case("mlp")
    usage = trace_usage(case.model(), case.x)
    assert all(usage.suits(name, "auto") for name, _ in case.net.named_parameters())
    assert not usage.suits("likelihood.log_noise", "auto")


def test_layer_used_twice_is_not_left_to_itself():
    usage = trace_usage(kn.Model(Twice(), kn.Gaussian(0.1)), torch.randn(5, 3))
    assert not usage.suits("inner.weight", "auto") and not usage.suits("inner.weight", "local")
    assert usage.suits("outer.weight", "auto") and usage.suits("outer.bias", "auto")


def test_convolutions_and_tokens_act_several_times_but_in_one_operation():
    case = network_case("batchnorm_cnn")
    usage = trace_usage(case.model(), case.x)
    assert usage.suits("0.weight", "local") and not usage.suits("0.weight", "auto")
    assert usage.coupled and not usage.suits("8.weight", "auto")  # batch normalisation: examples meet
    assert usage.suits("8.weight", "local")
    assert not usage.suits("1.weight", "local")  # batch normalisation
    case = network_case("transformer")
    usage = trace_usage(case.model(), case.x)
    assert usage.suits("embed.weight", "local") and not usage.suits("embed.weight", "auto")
    assert not usage.suits("encoder.layers.0.self_attn.in_proj_weight", "local")
    assert usage.suits("head.weight", "auto")


@pytest.mark.parametrize(("name", "parameter"), [("lstm", "lstm.weight_hh_l0"), ("tied", "embed.weight")])
def test_recurrent_and_tied_weights_are_drawn(name, parameter):
    case = network_case(name)
    usage = trace_usage(case.model(), case.x)
    assert not usage.suits(parameter, "local")


def test_watching_changes_neither_the_network_nor_the_generator():
    case = network_case("batchnorm_cnn")
    before = {name: value.clone() for name, value in case.net.state_dict().items()}
    state = torch.get_rng_state()
    trace_usage(case.model(), case.x)
    assert all(torch.equal(value, before[name]) for name, value in case.net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("op", "shape"), [(F.linear, (4, 3)), (F.conv1d, (4, 3, 5))], ids=["linear", "convolution"])
def test_pairs_follow_the_rules_that_weights_do(rule, op, shape):
    # the same noise, so the same outputs; what takes no pair is left alone
    x, weight, bias = torch.randn(shape), torch.randn(2, 3, *[2] * (len(shape) - 2)), torch.randn(2)
    moments = {"weight": (weight, 0.1 + weight.square()), "bias": (bias, 0.1 + bias.square())}
    torch.manual_seed(0)
    expected = op(x, *(GaussianWeight(*pair, rule) for pair in moments.values()))
    rules = PairRules({name: GaussianPair(*pair, rule) for name, pair in moments.items()})
    torch.manual_seed(0)
    with rules:
        found = op(x, rules.params["weight"], rules.params["bias"])
        other = F.linear(torch.ones(1, 2), torch.ones(1, 2))
    torch.testing.assert_close(found, expected)
    assert other.item() == 2.0


def test_moments_of_an_output_are_those_of_a_sum_of_normals(generator):
    x = torch.randn(4, 3, generator=generator)
    loc, variance = torch.randn(2, 3, generator=generator), torch.rand(2, 3, generator=generator)
    bias_loc, bias_variance = torch.randn(2, generator=generator), torch.rand(2, generator=generator)
    weight, bias = GaussianPair(loc, variance, local_rule), GaussianPair(bias_loc, bias_variance, local_rule)
    mean, spread = output_moments(F.linear, x, weight, bias, {})
    torch.testing.assert_close(mean, x @ loc.T + bias_loc)
    torch.testing.assert_close(spread, x.square() @ variance.T + bias_variance)
    fixed_mean, fixed_spread = output_moments(F.linear, x, loc, bias, {})  # only the bias is random
    torch.testing.assert_close(fixed_mean, mean)
    torch.testing.assert_close(fixed_spread.expand_as(mean), bias_variance.expand_as(mean))


# --- local convolution -----------------------------------------------------------------------------------------------


PLAIN = Geometry([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
CASES: dict[str, tuple[Callable[..., Tensor], dict, tuple[int, ...], tuple[int, ...], int]] = {
    "plain": (F.conv2d, {}, (2, 2, 4, 4), (3, 2, 3, 3), 3),
    "stride and padding": (F.conv2d, {"stride": 2, "padding": (1, 0)}, (2, 2, 5, 4), (3, 2, 3, 3), 3),
    "groups and dilation": (F.conv2d, {"groups": 2, "dilation": 2}, (2, 4, 4, 4), (2, 2, 2, 2), 2),
    "one dimension": (F.conv1d, {"padding": (1,)}, (2, 3, 5), (2, 3, 3), 2),
    "three dimensions": (F.conv3d, {}, (1, 1, 3, 3, 3), (2, 1, 2, 2, 2), 2),
    "transposed": (
        F.conv_transpose2d, {"stride": 2, "padding": 1, "output_padding": 1}, (2, 2, 3, 3), (2, 3, 3, 3), 3,
    ),
}  # fmt: skip


def leaves(case: str, generator: torch.Generator) -> list[Tensor]:
    """Input, mean and variance of the weight, mean and variance of the bias."""
    _, _, x, weight, outputs = CASES[case]
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (x, weight, weight)]
    values += [torch.randn(outputs, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [(value.abs() + 0.1 if i in (2, 4) else value).requires_grad_() for i, value in enumerate(values)]


def geometry_of(case: str, x: Tensor, weight: Tensor) -> Geometry:
    op, rest, *_ = CASES[case]
    found = Geometry.of(x, weight, rest, transposed=op is F.conv_transpose2d)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_draws_and_gradients_are_those_of_the_plain_rule(seed, generator, case):
    x, loc, variance, bias, bias_variance = given = leaves(case, generator)
    op, rest, *_ = CASES[case]
    torch.manual_seed(seed)
    weight = GaussianWeight(loc, variance, plain_local_rule)
    expected = plain_local_rule(op, x, weight, GaussianWeight(bias, bias_variance, plain_local_rule), rest)
    torch.manual_seed(seed)
    found = LocalConvolution.apply(*given, geometry_of(case, x, loc))
    torch.testing.assert_close(found, expected.as_subclass(Tensor), rtol=1e-10, atol=1e-10)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(each, given, weights) for each in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("biases", [0, 1, 2], ids=["no bias", "fixed bias", "random bias"])
def test_gradient_is_that_of_finite_differences(seed, generator, biases):
    given = leaves("stride and padding", generator)[: 3 + biases]
    geometry = geometry_of("stride and padding", given[0], given[1])

    def draw(*values: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # the same noise every time
            return LocalConvolution.apply(*values, *[None] * (5 - len(values)), geometry)

    assert torch.autograd.gradcheck(draw, given)


def test_nothing_is_computed_for_an_input_that_needs_no_gradient(generator, monkeypatch):
    wanted = []
    backward = torch.ops.aten.convolution_backward

    def spy(*args):
        wanted.append(args[-1])
        return backward(*args)

    monkeypatch.setattr("knowable.inference.variational.gaussian_weight._convolution_backward", spy)
    x, loc, variance, *_ = leaves("plain", generator)
    LocalConvolution.apply(x.detach(), loc, variance, None, None, PLAIN).sum().backward()
    assert wanted == [[False, True, False]] * 2
    assert loc.grad is not None and variance.grad is not None and x.grad is None


@pytest.mark.parametrize("rest", [{"padding": "same"}, {"padding": "valid"}])
def test_padding_in_words_is_left_to_plain_operations(seed, generator, rest):
    x, loc, variance, bias, _ = leaves("plain", generator)
    assert Geometry.of(x, loc, rest, transposed=False) is None
    torch.manual_seed(seed)
    found = local_rule(F.conv2d, x, GaussianWeight(loc, variance, local_rule), bias, rest)
    torch.manual_seed(seed)
    mean, std = F.conv2d(x, loc, bias, **rest), F.conv2d(x.square(), variance, **rest).sqrt()
    torch.testing.assert_close(found.as_subclass(Tensor), mean + std * torch.randn_like(mean))


def test_one_image_without_a_batch_is_left_to_plain_operations(generator):
    x, loc, *_ = leaves("plain", generator)
    assert Geometry.of(x[0], loc, {}, transposed=False) is None


def test_numbers_are_given_to_every_dimension():
    x, weight = torch.zeros(1, 2, 5, 5), torch.zeros(3, 2, 3, 3)
    found = Geometry.of(x, weight, {"stride": 2, "padding": (1,), "dilation": (1, 2)}, transposed=False)
    assert found == ([2, 2], [1, 1], [1, 2], False, [0, 0], 1)
