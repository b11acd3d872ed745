"""The convolution that draws its outputs; that its draws have the right moments is in test_gaussian_weight.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.inference.variational.gaussian_weight import (
    GaussianWeight,
    Geometry,
    LocalConvolution,
    local_rule,
    plain_local_rule,
)

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
