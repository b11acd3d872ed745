from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import knowable as kn
from knowable.inference.dropout.layer_trace import DropoutSite, LayerTrace, WeightAxis, trace_layers
from knowable.testing import network_case
from tests.inference.dropout.networks import Attention, Branches, CellLoop, Recurrent, Residual, images, perceptron


def traced(net: nn.Module, *shape: int, likelihood: object = None, **settings: object) -> LayerTrace:
    model = kn.Model(net, likelihood or kn.Gaussian(0.1), **settings)  # type: ignore[arg-type]
    return trace_layers(model, torch.randn(5, *shape))


def names(trace: LayerTrace) -> list[str]:
    return [name for call in trace.calls for name in call.axes]


def test_layers_are_found_in_the_order_of_their_use():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(4, 1), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    assert names(traced(Backwards(), 3)) == ["first.weight", "second.weight"]


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "residual", "frozen_backbone", "shared"])
def test_linear_layers_and_convolutions_have_rows_that_are_examples(name):
    case = network_case(name)
    trace = trace_layers(case.model(), case.x)
    assert trace.calls and all(call.by_rows for call in trace.calls)
    assert all(trace.by_example(each) for each in names(trace))
    assert {call.kind for call in trace.calls} <= {"linear", "convolution"}


def test_inputs_are_counted_with_their_groups():
    calls = traced(images(groups=2), 1, 8, 8, likelihood=kn.Categorical()).calls
    assert [list(call.inputs.values()) for call in calls] == [[1], [4], [16]]
    assert [axis.groups for call in calls for axis in call.axes.values()] == [1, 2, 1]
    transposed = traced(nn.Sequential(nn.ConvTranspose1d(3, 2, 2)), 3, 4).calls[0]
    assert transposed.inputs == {"0.weight": 3} and transposed.axes["0.weight"].axis == 0


def test_recurrent_layers_show_all_their_matrices_and_which_take_the_input():
    trace = traced(Recurrent(), 5, 2)
    recurrent = trace.calls[0]
    assert recurrent.kind == "recurrent"
    assert list(recurrent.axes) == [
        "lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.weight_ih_l1", "lstm.weight_hh_l1",
    ]  # fmt: skip
    assert tuple(recurrent.inputs.values()) == (2, 4, 4, 4) and recurrent.first == ("lstm.weight_ih_l0",)
    assert not any(trace.by_example(name) for name in recurrent.axes)
    assert trace.by_example("head.weight")


def test_a_cell_in_a_loop_is_used_at_every_step():
    trace = traced(CellLoop(), 5, 2)
    assert len(trace.calls_of("cell.weight_hh")) == 5
    assert trace.calls[0].first == ("cell.weight_ih",)


def test_attention_shows_its_matrices():
    call = traced(Attention(), 6, 4).calls[0]
    assert call.kind == "attention"
    assert set(call.axes) == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert call.first == ("attention.in_proj_weight",)


def test_a_weight_that_is_an_embedding_too_is_used_otherwise():
    case = network_case("tied")
    trace = trace_layers(case.model(), case.x)
    assert [call.kind for call in trace.calls] == ["embedding", "linear", "linear"]
    assert not trace.by_example("embed.weight") and trace.by_example("mix.weight")


def test_time_first_is_not_mistaken_for_rows():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.transpose(0, 1)).mean(0)

    for steps in (2, 3, 4):  # as many steps as there are rows in a trace, too
        assert not traced(TimeFirst(), steps, 2).by_example("layer.weight")


# --- dropout layers --------------------------------------------------------------------------------------------------


def sources(trace: LayerTrace) -> dict[str, tuple[str, int | None] | None]:
    return {
        next(iter(call.axes)): None if call.source is None else (call.source.path, call.source.channels)
        for call in trace.calls
    }


def test_dropout_is_followed_to_the_layer_it_feeds():
    trace = traced(perceptron(), 3)
    assert sources(trace) == {"0.weight": None, "3.weight": ("2", None), "6.weight": ("5", None)}
    assert not trace.escaped


def test_dropped_channels_are_followed_through_pooling_and_flattening():
    trace = traced(images(), 1, 8, 8, likelihood=kn.Categorical())
    assert sources(trace) == {"0.weight": None, "4.weight": ("2", 4), "8.weight": ("5", 4)}
    assert not trace.escaped


@pytest.mark.parametrize(
    "between", [nn.Tanh(), nn.MaxPool2d(2), nn.Softmax(1), nn.LayerNorm([2, 6, 6]), nn.Dropout(0.1)], ids=repr
)
def test_what_does_not_commute_with_dropped_elements_stops_them(between):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Dropout(0.2), between, nn.Conv2d(2, 1, 3), nn.Flatten())
    trace = traced(net, 1, 8, 8)
    assert any(output.path == "1" for output in trace.escaped)


@pytest.mark.parametrize("between", [nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(), nn.PReLU()], ids=repr)
def test_what_commutes_with_dropped_elements_lets_them_pass(between):
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), between, nn.Linear(4, 1))
    trace = traced(net, 3)
    assert not trace.escaped and sources(trace)["3.weight"] == ("1", None)


def test_dropout_that_is_added_to_something_escapes():
    trace = traced(Residual(), 3)
    assert [output.path for output in trace.escaped] == ["drop"]


def test_dropout_that_feeds_two_layers_is_seen_at_both():
    trace = traced(Branches(), 3)
    assert sources(trace) == {"first.weight": None, "left.weight": ("drop", None), "right.weight": ("drop", None)}


def test_a_dropout_layer_used_twice_has_two_outputs():
    drop = nn.Dropout(0.2)
    net = nn.Sequential(nn.Linear(3, 4), drop, nn.Linear(4, 4), drop, nn.Linear(4, 1))
    trace = traced(net, 3)
    assert [(output.path, output.call) for output in trace.outputs] == [("1", 0), ("1", 1)]


def test_dropout_in_a_frozen_part_is_off():
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2)), nn.Linear(4, 1))
    assert not traced(net, 3, frozen="0.*").outputs


def test_a_trace_leaves_network_and_generator_alone():
    net = perceptron()
    state, rates = torch.get_rng_state(), [m.p for m in net if isinstance(m, nn.Dropout)]
    model = kn.Model(net, kn.Gaussian(0.1))
    trace_layers(model, torch.zeros(1, 3))
    assert torch.equal(state, torch.get_rng_state())
    assert [m.p for m in net if isinstance(m, nn.Dropout)] == rates
    assert not any(m._forward_hooks for m in net)


# --- site -------------------------------------------------------------------------------------------------------------


# operation, its settings, shape of the input, shape of the weight, how the weight takes its inputs
CASES = {
    "linear": (F.linear, {}, (2, 6), (3, 6), WeightAxis("w")),
    "linear over tokens": (F.linear, {}, (2, 5, 6), (3, 6), WeightAxis("w")),
    "convolution 1d": (F.conv1d, {}, (2, 6, 7), (3, 6, 2), WeightAxis("w")),
    "convolution 2d": (F.conv2d, {"padding": 1}, (2, 6, 5, 5), (3, 6, 3, 3), WeightAxis("w")),
    "convolution 3d": (F.conv3d, {}, (2, 6, 3, 3, 3), (3, 6, 2, 2, 2), WeightAxis("w")),
    "grouped": (F.conv2d, {"groups": 2}, (2, 6, 5, 5), (4, 3, 3, 3), WeightAxis("w", groups=2)),
    "depthwise": (F.conv2d, {"groups": 6}, (2, 6, 5, 5), (6, 1, 3, 3), WeightAxis("w", groups=6)),
    "transposed": (F.conv_transpose2d, {"stride": 2}, (2, 6, 4, 4), (6, 3, 3, 3), WeightAxis("w", axis=0)),
    "transposed, grouped": (F.conv_transpose1d, {"groups": 3}, (2, 6, 4), (6, 2, 3), WeightAxis("w", axis=0)),
}


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_on_the_inputs_is_a_mask_on_the_weight(case, repeat, generator):
    operation, settings, x_shape, w_shape, place = CASES[case]
    x = torch.randn(x_shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(w_shape, generator=generator, dtype=torch.float64)
    site = DropoutSite((place,), 6 // repeat, 0.5, repeat)
    mask = torch.rand(site.units, generator=generator, dtype=torch.float64)
    channel = -1 if operation is F.linear else 1
    shape = [1] * x.dim()
    shape[channel] = -1
    expected = operation(x * site.on_inputs(mask).view(shape), weight, **settings)
    actual = operation(x, weight * site.on_weight(mask, place, weight), **settings)
    assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_many_masks_at_once_are_each_by_itself(case, generator):
    *_, w_shape, place = CASES[case]
    weight = torch.randn(w_shape, generator=generator)
    site = DropoutSite((place,), 3, 0.5, 2)
    masks = torch.rand((4, 3), generator=generator)
    together = weight * site.on_weight(masks, place, weight)
    assert together.shape == (4, *w_shape)
    for mask, one in zip(masks, together, strict=True):
        assert torch.equal(weight * site.on_weight(mask, place, weight), one)


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_max_by_unit_is_over_all_weights_that_the_unit_masks(case, repeat, generator):
    *_, w_shape, place = CASES[case]
    values = torch.rand(w_shape, generator=generator)
    site = DropoutSite((place,), 6 // repeat, 0.5, repeat)
    found = site.max_by_unit(values, place)
    for unit, mask in enumerate(torch.eye(site.units)):
        assert found[unit] == (values * site.on_weight(mask, place, values)).max()


def test_neighbours_share_their_mask():
    site = DropoutSite((WeightAxis("w"),), 2, 0.5, repeat=3)
    assert site.on_inputs(torch.tensor([0.0, 1.0])).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_site_survives_json():
    site = DropoutSite((WeightAxis("a", 0), WeightAxis("b", groups=2)), 4, 0.1, 3, by_example=True)
    assert DropoutSite.from_json(json.loads(json.dumps(site.to_json()))) == site
    assert site.name == "a"
