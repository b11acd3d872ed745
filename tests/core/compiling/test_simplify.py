"""Tests of recorded graphs made shorter: they compute the same, and write into nothing that is not theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from knowable.core.compiling.simplify import fold_constants, simplify, write_in_place

X = torch.randn(5, 3, dtype=torch.float64)


def _operations(graph) -> list[str]:
    return [
        str(node.target).removeprefix("aten.").partition(".")[0]
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]


def _simplified(function, *example: Tensor):
    graph = make_fx(function)(*example)
    simplify(graph)
    return graph


def _loss(flat: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ flat.view(3, 1)) + 2.0 * flat.sum().exp()).square().mean()


def _gradients(flat: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    gradient, value = vmap(grad_and_value(_loss), in_dims=(0, None))(flat, x)
    return value, gradient


FUNCTIONS = {
    "a gradient of many": (_gradients, (torch.randn(4, 3, dtype=torch.float64), X)),
    "a value used twice": (lambda x: ((x * 2).relu() + (x * 2).relu() * 3, x * 2), (X,)),
    "a chain": (lambda x: ((x @ x.T + 1.0).relu() * 2.0).neg() / 3.0, (X,)),
    "views of a fresh value": (lambda x: (lambda y: y.T.exp() + (y * 3).T)(x * 2), (X,)),
    "broadcasting": (lambda x: x.sum(0) * 2 + (x * x) * x.sum(0), (X,)),
    "another type": (lambda x: (x * 2).float() * 3 + x.float(), (X,)),
    "subtracting from": (lambda x: 1.0 - (x * 2) - (x * 3), (X,)),
    "itself twice": (lambda x: (lambda y: y * y)(x + 1), (X,)),
    "ones": (lambda x: torch.ones_like(x).sum(1, keepdim=True) / 4 * x + torch.zeros_like(x), (X,)),
    "whole numbers": (lambda x: (x > 0).sum(0) * 2 + 1, (X,)),
}


@pytest.mark.parametrize(("function", "example"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_computed_stays_the_same_call_after_call(function, example):
    graph = _simplified(function, *example)
    for shift in (0.0, 0.3, -1.0):
        given = [each + shift for each in example]
        before = [each.clone() for each in given]
        expected, found = function(*given), graph(*given)
        torch.testing.assert_close(found, expected)
        for each in found if isinstance(found, tuple) else (found,):
            each.mul_(7)  # results are the caller's own
        assert all(torch.equal(old, new) for old, new in zip(before, given, strict=True))


def test_what_gives_back_its_argument_is_left_out():
    graph = _simplified(lambda x: (((x - 0) / 1).pow(1).view(5, 3).expand(5, 3) * 2).detach(), X)
    assert _operations(graph) == ["mul"]


def test_what_does_not_depend_on_the_input_is_computed_once():
    graph = make_fx(lambda x: x * (torch.ones_like(x) / 5).neg().sum(0))(X)
    fold_constants(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert _operations(graph) == ["mul"]
    torch.testing.assert_close(graph(X), -X)


def test_a_constant_that_is_a_result_is_made_anew_each_time():
    graph = _simplified(lambda x: (torch.ones_like(x) * 2, x + 1), X)
    graph(X)[0].zero_()
    assert (graph(X)[0] == 2).all()


def test_large_constants_are_not_kept(monkeypatch):
    monkeypatch.setattr("knowable.core.compiling.simplify._LARGEST", 3)
    graph = _simplified(lambda x: x * (torch.ones_like(x) / 5), X)
    assert "ones_like" in _operations(graph)


def test_only_fresh_values_that_nobody_else_reads_are_overwritten():
    graph = make_fx(lambda x: (x * 2).relu() + x.relu())(X)
    write_in_place(graph)
    graph.recompile()
    assert _operations(graph) == ["mul", "relu_", "relu", "add"]  # x itself is not, nor what may look at it


def test_random_numbers_are_drawn_at_every_call():
    graph = _simplified(lambda x: x + torch.rand_like(torch.ones_like(x)), X)
    assert not torch.equal(graph(X), graph(X))


def test_a_graph_that_writes_is_left_as_it_is():
    def writing(x: Tensor) -> Tensor:
        copy = x * 1
        copy[0] = 3.0
        return copy / 1

    graph = _simplified(writing, X)
    torch.testing.assert_close(graph(X), writing(X))
    assert "div" in _operations(graph)
