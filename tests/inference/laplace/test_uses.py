from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.inference.laplace.weight_uses import ConvolutionUse, LinearUse, Use

F64 = torch.float64
CONVOLUTIONS = {
    "plain": {"shape": (2, 3, 7, 6), "kernel": (3, 2)},
    "stride and zeros around": {"shape": (2, 3, 7, 6), "kernel": (3, 3), "stride": (2, 1), "padding": (1, 2)},
    "same": {"shape": (2, 3, 7, 6), "kernel": (4, 3), "padding": "same"},
    "valid": {"shape": (2, 3, 7, 6), "kernel": (3, 3), "padding": "valid"},
    "dilated": {"shape": (2, 3, 9, 8), "kernel": (3, 2), "dilation": (2, 3)},
    "a line": {"shape": (2, 3, 9), "kernel": (4,), "stride": (2,), "padding": (1,)},
    "a line, same, dilated": {"shape": (2, 3, 9), "kernel": (4,), "padding": "same", "dilation": (2,)},
}


def linear(shape: tuple[int, ...], weight: bool, bias: bool, generator: torch.Generator) -> tuple[Use, Tensor, Tensor]:
    x = torch.randn(*shape, 4, generator=generator, dtype=F64)
    w = torch.randn(3, 4, generator=generator, dtype=F64, requires_grad=True)
    b = torch.randn(3, generator=generator, dtype=F64, requires_grad=True)
    output = F.linear(x, w, b)
    return LinearUse("w" if weight else None, "b" if bias else None, x, output, output), w, b


def convolution(case: dict, weight: bool, bias: bool, generator: torch.Generator) -> tuple[Use, Tensor, Tensor]:
    dims = len(case["kernel"])
    settings = {"stride": (1,) * dims, "padding": (0,) * dims, "dilation": (1,) * dims}
    settings |= {name: value for name, value in case.items() if name in settings}
    x = torch.randn(case["shape"], generator=generator, dtype=F64)
    w = torch.randn(5, 3, *case["kernel"], generator=generator, dtype=F64, requires_grad=True)
    b = torch.randn(5, generator=generator, dtype=F64, requires_grad=True)
    output = (F.conv1d if dims == 1 else F.conv2d)(x, w, b, **settings)
    names = ("w" if weight else None, "b" if bias else None)
    return ConvolutionUse(*names, x, output, output, kernel=case["kernel"], **settings), w, b


def packed(use: Use, w: Tensor, b: Tensor, slope: Tensor) -> Tensor:
    """What autograd says of the parameters asked about, as the matrix (out, in + 1)."""
    found = torch.autograd.grad(use.output, (w, b), slope)
    columns = [found[0].flatten(1)] if use.weight else []
    return torch.cat([*columns, *([found[1].unsqueeze(1)] if use.bias else [])], 1)


def check(use: Use, w: Tensor, b: Tensor, generator: torch.Generator) -> None:
    slope = torch.randn(use.output.shape, generator=generator, dtype=F64)
    a, g = use.activations().flatten(0, -2), use.in_front(slope).flatten(0, -2)  # (count, in), (count, out)
    assert len(a) == use.count
    torch.testing.assert_close(g.T @ a, packed(use, w, b, slope))
    torch.testing.assert_close(use.second_moment(), a.T @ a)
    several = torch.stack([slope, 2 * slope])
    torch.testing.assert_close(
        use.in_front(several, lead=1), torch.stack([use.in_front(slope), 2 * use.in_front(slope)])
    )
    assert use.output.shape[use.feature_dim] == g.shape[1]


ASKED = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("shape", [(6,), (3, 5), (2, 3, 4)])
def test_gradients_of_a_linear_layer_are_sums_of_outer_products(shape, asked, generator):
    check(*linear(shape, *asked, generator), generator)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_a_convolution_are_sums_of_outer_products(name, asked, generator):
    check(*convolution(CONVOLUTIONS[name], *asked, generator), generator)


def test_a_use_names_what_is_asked_about(generator):
    assert linear((6,), True, True, generator)[0].names == ("w", "b")
    assert linear((6,), False, True, generator)[0].names == ("b",)
