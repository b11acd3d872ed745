"""Tests of batched gradients: every way of computing them gives what autograd gives, one position at a time."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor, nn

from knowable.core.compiling import recorder as batched_gradient
from knowable.core.compiling.recorder import BatchedGradient, Recorded, compiled, rational_tanh, traced
from tests.core.cases import DTYPE

CHAINS, DIMENSION = 5, 4
A = torch.tensor([[2.0, 0.3, 0.0, 0.1], [0.3, 1.0, 0.2, 0.0], [0.0, 0.2, 3.0, 0.5], [0.1, 0.0, 0.5, 1.5]]).double()


def positions(dtype: torch.dtype = DTYPE, chains: int = CHAINS) -> Tensor:
    return torch.randn(chains, DIMENSION, dtype=DTYPE).to(dtype)


def by_autograd(function, position: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
    """The slow obvious version."""
    values, gradients = [], []
    for each in position:
        flat = each.clone().requires_grad_()
        value = function(flat, *data).reshape(()).to(flat.dtype)
        values.append(value.detach())
        gradients.append(torch.autograd.grad(value, flat)[0])
    return torch.stack(values), torch.stack(gradients)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-11) -> None:
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


# --- functions that people write -------------------------------------------------------------------------------------


def quadratic(flat: Tensor) -> Tensor:
    return -0.5 * flat @ A.to(flat) @ flat


def of_shape_one(flat: Tensor) -> Tensor:
    return quadratic(flat).reshape(1)


def with_double_constants(flat: Tensor) -> Tensor:
    return -((flat - torch.ones(DIMENSION, dtype=torch.float64)) ** 2).sum()


def with_a_branch(flat: Tensor) -> Tensor:
    return quadratic(flat) if flat[0] > 0 else 2 * quadratic(flat) + flat.sum()


def with_a_number_taken_out(flat: Tensor) -> Tensor:
    return quadratic(flat) * (2.0 if flat[0].item() > 0 else 3.0)


def with_a_branch_on_a_constant(flat: Tensor) -> Tensor:
    return quadratic(flat) if A.sum() > 0 else flat.sum()


def with_writing_into_a_copy(flat: Tensor) -> Tensor:
    copy = flat * 1.0
    copy[0] = 3.0
    return -(copy**2).sum() - (flat**2).sum()


def with_writing_into_a_sum(flat: Tensor) -> Tensor:
    total = flat.sum() + 0
    total += (flat**3).sum()
    return total


def with_writing_into_zeros_like(flat: Tensor) -> Tensor:
    made = torch.zeros_like(flat)
    made[1:] = flat[:-1] ** 2
    return -made.sum()


def with_writing_into_new_zeros(flat: Tensor) -> Tensor:
    made = torch.zeros(DIMENSION, dtype=flat.dtype)
    made[0] = flat[0] * 2
    made[1] = flat[1] ** 2
    return -(made**2).sum()


def with_a_mask_made_a_number(flat: Tensor) -> Tensor:
    return -((flat > 0) * 1.0).to(flat) @ flat**2


def with_whole_numbers_divided_by_one(flat: Tensor) -> Tensor:
    return -((torch.arange(DIMENSION) / 1).to(flat) * flat**2).sum() - flat.sum() / 1 + 0


def with_a_cholesky_factor(flat: Tensor) -> Tensor:
    matrix = A.to(flat) + torch.diag(flat**2)
    return -torch.linalg.cholesky(matrix).diagonal().log().sum()


def with_distributions(flat: Tensor) -> Tensor:
    normal = torch.distributions.Normal(flat[0], flat[1].exp())
    return normal.log_prob(torch.arange(3.0).to(flat)).sum() - flat.square().sum()


def with_a_multivariate_normal(flat: Tensor) -> Tensor:
    return torch.distributions.MultivariateNormal(torch.zeros(DIMENSION).to(flat), A.to(flat)).log_prob(flat)


def with_autograd_inside(flat: Tensor) -> Tensor:
    return torch.logsumexp(flat, 0) - torch.nn.functional.softplus(flat).sum() + flat.sin().prod()


FUNCTIONS = [value for name, value in list(globals().items()) if name.startswith(("quadratic", "of_", "with_"))]


@pytest.mark.parametrize("mode", ["eager", "traced", "auto"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("chains", [1, CHAINS])  # a single chain is recorded without vmap
def test_values_and_gradients_are_those_of_autograd(function, mode, chains):
    batched = BatchedGradient(function, mode=mode)
    for _ in range(4):  # after the first time what was recorded is used; either branch is met
        position = positions(chains=chains)
        kept = position.clone()
        assert_same(batched.value_and_grad(position), by_autograd(function, position))
        torch.testing.assert_close(batched.value(position), by_autograd(function, position)[0], rtol=1e-11, atol=1e-11)
        assert torch.equal(position, kept), "the positions were changed"


@pytest.mark.parametrize("function", [quadratic, with_double_constants, with_a_branch], ids=lambda f: f.__name__)
def test_single_precision_stays_single_precision(function):
    value, gradient = BatchedGradient(function).value_and_grad(positions(torch.float32))
    assert value.dtype == gradient.dtype == torch.float32


def test_gradients_do_not_carry_a_graph_along():
    for function in (quadratic, with_a_branch):
        value, gradient = BatchedGradient(function).value_and_grad(positions().requires_grad_())
        assert not value.requires_grad and not gradient.requires_grad


def test_a_function_that_is_the_same_everywhere_has_no_gradient():
    for function in (lambda flat: torch.tensor(3.0), lambda flat: 3.0 * flat.detach().sum().sign() ** 2):
        value, gradient = BatchedGradient(function).value_and_grad(positions())
        assert torch.equal(value, torch.full((CHAINS,), 3.0, dtype=DTYPE))
        assert torch.equal(gradient, torch.zeros(CHAINS, DIMENSION, dtype=DTYPE))


def test_an_error_of_the_function_itself_comes_through():
    def wrong(flat: Tensor) -> Tensor:
        return (flat @ torch.ones(7, dtype=flat.dtype)).sum()

    def broken(flat: Tensor) -> Tensor:
        raise KeyError("mu")

    with pytest.raises(RuntimeError, match="size"):
        BatchedGradient(wrong).value_and_grad(positions())
    with pytest.raises(KeyError, match="mu"):
        BatchedGradient(broken).value_and_grad(positions())


def test_arguments_of_distributions_are_not_checked_inside_and_are_outside():
    def spread(flat: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, flat[0]).log_prob(flat[1])

    position = positions()
    position[:, 0] = torch.tensor([1.0, -1.0, 0.0, 2.0, math.nan])
    value, _ = BatchedGradient(spread).value_and_grad(position)
    assert torch.isfinite(value).tolist() == [True, False, False, True, False]
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)


def test_random_numbers_of_the_function_are_new_at_every_call_and_for_every_chain():
    torch.manual_seed(0)
    batched = BatchedGradient(lambda flat: flat.sum() * 0 + torch.randn((), dtype=flat.dtype), mode="traced")
    found = torch.cat([batched.value(positions()) for _ in range(3)])
    assert len(found.unique()) == 3 * CHAINS


# --- data ------------------------------------------------------------------------------------------------------------


def squared_error(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return -((x @ flat - y) ** 2).sum()


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_data_is_shared_by_all_chains_and_may_be_of_any_size(mode):
    batched = BatchedGradient(squared_error, mode=mode)
    for rows in (6, 1, 9, 6):
        x, y, position = torch.randn(rows, DIMENSION, dtype=DTYPE), torch.randn(rows, dtype=DTYPE), positions()
        assert_same(batched.value_and_grad(position, x, y), by_autograd(squared_error, position, x, y))


def test_other_data_of_the_same_shape_is_not_taken_for_the_first():
    batched, position = BatchedGradient(squared_error, mode="traced"), positions()
    x, y = torch.randn(6, DIMENSION, dtype=DTYPE), torch.randn(6, dtype=DTYPE)
    for shift in (0.0, 1.0):
        expected = by_autograd(squared_error, position, x + shift, y)
        assert_same(batched.value_and_grad(position, x + shift, y), expected)


def test_any_number_of_chains_is_taken():
    batched = BatchedGradient(quadratic)
    for chains in (1, 5, 2):
        position = torch.randn(chains, DIMENSION, dtype=DTYPE)
        assert_same(batched.value_and_grad(position), by_autograd(quadratic, position))


# --- how it is computed ----------------------------------------------------------------------------------------------


def test_a_recorded_function_is_not_called_again():
    calls = []

    def counted(flat: Tensor) -> Tensor:
        calls.append(flat)
        return quadratic(flat)

    batched = BatchedGradient(counted, mode="traced")
    batched.value_and_grad(positions())
    before = len(calls)
    batched.value_and_grad(positions())
    assert len(calls) == before
    eager = BatchedGradient(counted, mode="eager")
    eager.value_and_grad(positions())
    before = len(calls)
    eager.value_and_grad(positions())
    assert len(calls) == before + 1


def test_gradients_are_counted_and_values_are_not():
    batched = BatchedGradient(quadratic)
    batched.value(positions())
    batched.value_and_grad(positions())
    batched.value_and_grad(positions())
    assert batched.calls == 2


def test_a_long_run_is_compiled_at_a_call_that_a_resumed_run_knows(monkeypatch):
    used = []
    monkeypatch.setattr(batched_gradient, "_COMPILE_AFTER", 3)
    monkeypatch.setattr(batched_gradient, "_COMPILE_AFTER_OUTSIDE", 2)
    monkeypatch.setattr(batched_gradient, "compiled", lambda f, *example: used.append(f) or traced(f, *example))
    batched = BatchedGradient(quadratic)
    for _ in range(3):
        assert not batched.compiling
        batched.value_and_grad(positions())
    for _ in range(2):  # from here on steps may be fused: a few gradients beside them are not worth a graph
        batched.value_and_grad(positions())
        assert batched.compiling and not used
    batched.value_and_grad(positions())
    batched.value_and_grad(positions())
    assert len(used) == 1
    resumed = BatchedGradient(quadratic)
    resumed.calls, resumed.direct = 5, 2
    resumed.value_and_grad(positions())
    assert len(used) == 2


def test_recording_leaves_out_what_does_nothing():
    graph = traced(lambda x: ((x - 0) / 1).pow(1) * 2, torch.ones(3))
    assert [node.op for node in graph.graph.nodes].count("call_function") == 1  # type: ignore[attr-defined]
    assert torch.equal(graph(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("value", [lambda x: x * 1.0, lambda x: x / 1, lambda x: x + 0.0])
def test_recording_keeps_what_makes_whole_numbers_real(value):
    x = torch.tensor([1, 2, 3])
    assert traced(value, x)(x).dtype == torch.float32


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # the compiler takes half a minute where its cache is cold
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_compiled_gradients_are_those_of_autograd(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(batched_gradient, "_COMPILE_AFTER_OUTSIDE", 0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    layout = [value.shape for value in net.parameters()]

    def log_joint(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = flat.split([shape.numel() for shape in layout])
        w1, b1, w2, b2 = (part.view(shape) for part, shape in zip(parts, layout, strict=True))
        return -((torch.tanh(x @ w1.T + b1) @ w2.T + b2 - y) ** 2).sum() - 0.5 * flat.square().sum()

    size = sum(shape.numel() for shape in layout)
    x, y, position = (torch.randn(shape, dtype=dtype) for shape in ((30, 2), (30, 1), (3, size)))
    batched = BatchedGradient(log_joint, mode="compiled")
    found = batched.value_and_grad(position, x, y)
    exact = by_autograd(log_joint, position.double(), x.double(), y.double())
    # float32 sums of 30 terms of order 10: relative errors of about 1e-6
    for left, right in zip(found, exact, strict=True):
        assert (left.double() - right).abs().max() < tolerance * right.abs().max()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
def test_without_a_compiler_it_is_as_recorded(monkeypatch):
    import torch._inductor.compile_fx as inductor

    def none_here(*arguments):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inductor, "compile_fx", none_here)
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    function = compiled(lambda x: x.sin() * 2, torch.ones(3))
    assert torch.equal(function(torch.ones(3)), torch.ones(3).sin() * 2)
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_the_quotient_of_polynomials_is_tanh_to_single_precision():
    x = torch.linspace(-12, 12, 200_001)
    exact = torch.tanh(x.double())
    assert (rational_tanh(x).double() - exact).abs().max() < 4e-7  # 3 or 4 units in the last place near 1
    small = torch.logspace(-6, -1, 100)
    assert (rational_tanh(small).double() / torch.tanh(small.double()) - 1).abs().max() < 1e-6


# --- products with a matrix that all chains share ---------------------------------------------------------------------


def linear_layer(flat: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ flat.reshape(3, -1).T).square().sum()


@pytest.mark.parametrize("large", [1, 100])
def test_a_shared_matrix_is_multiplied_once_for_all_chains(monkeypatch, large):
    from torch.fx.experimental.proxy_tensor import make_fx

    monkeypatch.setattr(batched_gradient, "_LARGE", large)
    x, position = torch.randn(7, 2, dtype=DTYPE), torch.randn(CHAINS, 6, dtype=DTYPE)
    whole = torch.func.vmap(torch.func.grad_and_value(linear_layer), in_dims=(0, None))
    graph = make_fx(whole)(position, x)
    batched_gradient.join_shared_products(graph)
    graph.recompile()
    names = [str(node.target) for node in graph.graph.nodes]
    joined = 2 if large == 1 else 0  # the layer and the gradient of its weights
    assert (names.count("aten.mm.default"), names.count("aten.bmm.default")) == (joined, 2 - joined)
    gradient, value = graph(position, x)
    assert_same((value, gradient), by_autograd(linear_layer, position, x))


def test_recording_draws_nothing_from_the_global_generator(seed):
    # a run that is taken up again records again, and must go on with the random numbers it would have had
    x = torch.zeros(3, dtype=DTYPE)
    noisy = Recorded(lambda x: x + torch.randn_like(x), "traced")
    torch.manual_seed(seed)
    expected = [torch.randn_like(x) for _ in range(3)]
    torch.manual_seed(seed)
    found = [noisy(x) for _ in range(3)]
    torch.testing.assert_close(found, expected)
