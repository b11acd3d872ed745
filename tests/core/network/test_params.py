"""Tests of parameters as dicts, flat buffers and stacks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from knowable.core.network.params import (
    Layout,
    expand_params,
    index_params,
    last_layer_names,
    number_of_draws,
    select_names,
    stack_params,
)
from knowable.errors import InvalidArgument, InvalidType
from tests.core.cases import Tied, mlp, same_params

SHAPES = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=5)
LEADS = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@settings(deadline=None, max_examples=50)
@given(shapes=SHAPES, lead=LEADS)
def test_flatten_and_views_are_inverse_for_any_shapes_and_leading_dimensions(shapes, lead):
    params = {f"p{i}": torch.randn((*lead, *shape)) for i, shape in enumerate(shapes)}
    layout = Layout(tuple(params), tuple(torch.Size(shape) for shape in shapes))
    flat = layout.flatten(params)
    assert flat.shape == (*lead, layout.size)
    assert same_params(layout.views(flat), params)


def test_a_flat_vector_holds_the_parameters_one_after_another():
    params = {"w": torch.arange(6.0).view(2, 3), "s": torch.tensor(9.0), "b": torch.tensor([7.0, 8.0])}
    assert Layout.of(params).flatten(params).tolist() == [0, 1, 2, 3, 4, 5, 9, 7, 8]


def test_views_share_memory_with_the_flat_buffer():
    layout = Layout.of({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
    flat = torch.zeros(3, layout.size)
    layout.views(flat)["b"][1, 0] = 5.0
    assert flat[1, 4] == 5.0


def test_flatten_takes_only_the_names_of_the_layout_in_its_order():
    params = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.full((1,), 2.0)}
    layout = Layout(("c", "a"), (torch.Size([1]), torch.Size([2])))
    assert layout.flatten(params).tolist() == [2.0, 0.0, 0.0]


def test_an_empty_layout_has_size_zero_and_no_views():
    layout = Layout.of({})
    assert layout.size == 0
    assert layout.views(layout.flatten({})) == {}


def test_stacking_and_indexing_are_inverse():
    draws = [{"w": torch.randn(2, 3), "s": torch.randn(())} for _ in range(4)]
    stack = stack_params(draws)
    assert number_of_draws(stack) == 4
    assert all(same_params(index_params(stack, k), draw) for k, draw in enumerate(draws))


def test_expanding_repeats_the_values_without_copying_them():
    params = {"w": torch.randn(2, 3)}
    many = expand_params(params, 5)
    assert many["w"].shape == (5, 2, 3)
    assert many["w"].data_ptr() == params["w"].data_ptr()
    assert torch.equal(many["w"][4], params["w"])


NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "likelihood.log_noise"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("*", set(NAMES)),
        ("0.weight", {"0.weight"}),
        ("*.bias", {"0.bias", "2.bias"}),
        (["0.*", "likelihood.*"], {"0.weight", "0.bias", "likelihood.log_noise"}),
        ("last_layer", {"2.weight", "2.bias", "likelihood.log_noise"}),
        (["0.bias", "last_layer"], {"2.weight", "2.bias", "likelihood.log_noise", "0.bias"}),
        (["last_layer", "0.bias"], {"2.weight", "2.bias", "likelihood.log_noise", "0.bias"}),
        ((), set()),
    ],
)
def test_names_globs_and_last_layer_are_resolved(choice, expected):
    assert select_names("random", choice, NAMES, mlp()) == expected


def test_a_glob_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(InvalidArgument, match=r"random='1\.weight' matches no parameter.*0\.weight, 0\.bias"):
        select_names("random", "1.weight", NAMES, mlp())


def test_a_long_list_of_names_is_cut():
    names = [f"p{i}" for i in range(30)]
    with pytest.raises(InvalidArgument, match=r"p11, \.\.\.\.$"):
        select_names("frozen", "q", names, nn.Linear(1, 1))


@pytest.mark.parametrize("choice", [5, None, [3], ["0.weight", None]])
def test_a_choice_that_is_not_text_is_refused_by_name(choice):
    with pytest.raises(InvalidType, match=r"frozen must be a name, a glob, 'last_layer' or a list of these; got"):
        select_names("frozen", choice, NAMES, mlp())


def test_the_last_layer_is_the_last_module_with_parameters_of_its_own():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.ReLU(), nn.Dropout())
    assert last_layer_names(net, [name for name, _ in net.named_parameters()]) == {"1.weight", "1.bias"}


def test_the_last_layer_of_a_single_layer_is_all_of_it():
    assert last_layer_names(nn.Linear(2, 1), ["weight", "bias"]) == {"weight", "bias"}


def test_a_last_layer_with_tied_weights_is_found_under_the_name_the_weights_have():
    net = Tied()
    names = [*(name for name, _ in net.named_parameters()), "likelihood.log_noise"]
    assert last_layer_names(net, names) == {"encoder.weight", "likelihood.log_noise"}


def test_a_network_without_parameters_has_no_last_layer():
    with pytest.raises(InvalidArgument, match="needs a network with at least one layer that has parameters"):
        last_layer_names(nn.ReLU(), [])
