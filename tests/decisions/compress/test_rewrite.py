from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.gates import gated
from knowable.decisions.compress.rewrite import GraphEdit, RewritePlan, rewrite
from tests.decisions.compress.cases import NETWORKS, Looking, make, pruned, random_masks

SHARES = (0.0, 0.3, 0.6, 0.85, 0.97, 1.0)


def _same(left: nn.Module, right: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(left(x), right(x), rtol=1e-5, atol=1e-5)


def _count(net: nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_rewritten_network_computes_what_the_one_with_zeros_does(name, share, generator):
    net, x = make(name, generator=generator)
    pruned(net, random_masks(net, share, generator=generator))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    made = rewrite(net, x)
    for rows in (x, torch.randn((3, *x.shape[1:]), generator=generator) * 3, x[:1]):
        if not (name == "views" and len(rows) == 1):  # its squeeze() would squeeze the batch, too
            _same(net, made.net, rows)
    assert _count(made.net) <= _count(net) + sum(count[0] for count in made.plan.layers.values())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["mlp", "lenet", "batch_norm_cnn", "residual", "dense", "unet", "views", "tokens"])
def test_much_of_a_sparse_network_goes(name, generator):
    net, x = make(name, generator=generator)
    pruned(net, random_masks(net, 0.9, generator=generator))
    made = rewrite(net, x)
    assert _count(made.net) < 0.7 * _count(net)
    assert [note for note in made.notes if "getitem" not in note and "unsqueeze" not in note] == []


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_goes_where_nothing_is_zero(name, generator):
    net, x = make(name, generator=generator)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.1)
    made = rewrite(net, x)
    assert _count(made.net) == _count(net)
    assert {key: value.shape for key, value in made.net.named_parameters()} == {
        key: value.shape for key, value in net.named_parameters()
    }


@pytest.mark.parametrize(("name", "dead"), [("lenet", "0.weight"), ("residual", "three.weight")])
def test_a_network_keeps_its_class_where_only_layers_change(name, dead, generator):
    net, x = make(name, generator=generator)
    with torch.no_grad():
        net.get_parameter(dead)[:2] = 0.0
    made = rewrite(net, x).net
    assert type(made) is type(net)
    assert made.get_parameter(dead).shape[0] == net.get_parameter(dead).shape[0] - 2


def test_a_unit_that_dies_takes_others_with_it():
    # unit 0 of layer 2 reads only unit 0 of layer 1, which reads nothing; unit 1 of layer 1 is read by none
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]))
        net[2].weight.copy_(torch.tensor([[5.0, 0.0, 0.0], [6.0, 0.0, 7.0]]))
        net[4].weight.copy_(torch.tensor([[8.0, 9.0]]))
    x = torch.randn(10, 2)
    made = rewrite(net, x)
    assert [tuple(value.shape) for value in made.net.parameters() if value.dim() == 2] == [(1, 2), (1, 1), (1, 1)]
    _same(net, made.net, x)
    hidden = torch.tanh(net[0].bias[0])
    first = torch.tanh(5.0 * hidden + net[2].bias[0])
    torch.testing.assert_close(made.net[4].bias, net[4].bias + 8.0 * first)
    torch.testing.assert_close(made.net[2].bias, net[2].bias[1:] + 6.0 * hidden)


def test_a_constant_channel_goes_before_a_padded_convolution_only_if_it_is_zero():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    with torch.no_grad():
        net[0].weight[:2] = 0.0
        net[0].bias.copy_(torch.tensor([-1.0, 1.0, 0.5]))
    x = torch.randn(4, 1, 6, 6)
    made = rewrite(net, x)
    assert made.net[0].out_channels == 2  # the one that is relu(1) at every pixel is not constant beyond the border
    _same(net, made.net, x)
    net[2] = nn.Conv2d(3, 2, 3)
    assert rewrite(net, x).net[0].out_channels == 1
    _same(net, rewrite(net, x).net, x)


def test_constant_channels_before_a_padded_convolution_become_one():
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.Sigmoid(), nn.Conv2d(5, 2, 3, padding=1), nn.ConvTranspose2d(2, 1, 2))
    with torch.no_grad():
        net[0].weight[:4] = 0.0
    x = torch.randn(4, 1, 6, 6)
    assert rewrite(net, x).net[0].out_channels == 2
    assert rewrite(net, x, merge_constants=False).net[0].out_channels == 5
    _same(net, rewrite(net, x).net, x)
    _same(net, rewrite(net, x, merge_constants=False).net, x)


@pytest.mark.parametrize("constant", [0.0, 0.7])
def test_a_branch_that_is_the_same_for_every_input_goes_as_a_whole(constant, generator):
    net, x = make("residual", generator=generator)
    with torch.no_grad():
        net.four.weight.zero_()
        net.four.bias.fill_(constant)
    made = rewrite(net, x)
    assert not [name for name, _ in made.net.named_parameters() if name.startswith(("three", "four"))]
    assert [name for name, _ in made.net.named_buffers() if "shift" in name] == ["shift_add_1.shift"] * (constant != 0)
    _same(net, made.net, x)


def test_channels_joined_by_a_sum_go_together_or_not_at_all(generator):
    net, x = make("residual", generator=generator)
    with torch.no_grad():
        net.four.weight[2] = 0.0
        net.four.bias[2] = 0.0  # the branch gives nothing to channel 2, but the skip does
        net.head.weight[:, 4] = 0.0  # channel 4 is read by the next block alone ...
        net.three.weight[:, 4] = 0.0  # ... and here no longer
    made = rewrite(net, x).net
    shapes = {name: tuple(value.shape) for name, value in made.named_parameters()}
    assert shapes["two.weight"][0] == shapes["skip.weight"][0] == shapes["norm.weight"][0] == 5
    assert shapes["four.weight"][0] == shapes["three.weight"][1] == shapes["head.weight"][1] == 5
    _same(net, made, x)


def test_inputs_that_nothing_reads_are_left_out_where_that_pays(generator):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 2))
    with torch.no_grad():
        net[1].weight[:, 8:] = 0.0
    x = torch.randn((5, 1, 8, 8), generator=generator)
    made = rewrite(net, x)
    assert made.plan.columns == {"1": 8}
    assert made.net[1][0].index.tolist() == list(range(8))
    assert tuple(made.net[1][1].weight.shape) == (50, 8)
    _same(net, made.net, x)
    with torch.no_grad():
        net[1].weight[:] = 1.0
        net[1].weight[:, :3] = 0.0  # 3 of 64 are not worth a copy
    assert rewrite(net, x).plan.columns == {}


def test_closed_gates_cut_units(generator):
    net = gated(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), "0")
    with torch.no_grad():
        net[0][1].gate.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]))
    x = torch.randn((4, 7), generator=generator)
    made = rewrite(net, x)
    assert made.net[0][0].out_features == made.net[0][1].units == 2
    _same(net, made.net, x)


def test_what_cannot_be_traced_is_left_alone_and_said(generator):
    net, x = make("branching", generator=generator)
    pruned(net, random_masks(net, 0.8, generator=generator))
    made = rewrite(net, x)
    assert any("inner (Looking)" in note for note in made.notes)
    assert made.net.before.out_features == 6  # what goes into the unknown stays
    alone = rewrite(net.inner, x)
    assert "cannot be traced" in alone.notes[0]
    _same(net.inner, alone.net, x)


def test_a_recurrent_layer_is_left_alone_and_said(generator):
    net, x = make("recurrent", generator=generator)
    pruned(net, random_masks(net, 0.9, generator=generator))
    made = rewrite(net, x)
    assert any("lstm (LSTM)" in note for note in made.notes)
    assert any("norm (LayerNorm)" in note for note in made.notes)
    assert {key: value.shape for key, value in made.net.lstm.named_parameters()} == {
        key: value.shape for key, value in net.lstm.named_parameters()
    }


def test_a_module_with_a_hook_is_left_alone(generator):
    net, x = make("mlp", generator=generator)
    pruned(net, random_masks(net, 0.8, generator=generator))
    net[0].register_forward_hook(lambda module, inputs, output: output + 1.0)
    made = rewrite(net, x)
    assert made.net[0].out_features == 12
    _same(net, made.net, x)


def test_a_layer_of_another_class_is_left_alone(generator):
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    net, x = make("mlp", generator=generator)
    net[3] = Doubled(12, 9)
    pruned(net, random_masks(net, 0.8, generator=generator))
    made = rewrite(net, x)
    assert made.net[3].weight.shape == (9, 12)
    _same(net, made.net, x)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_plan_makes_the_same_network_again(name, share, generator):
    net, x = make(name, generator=generator)
    pruned(net, random_masks(net, share, generator=generator))
    made = rewrite(net, x)
    again = RewritePlan.from_json(made.plan.to_json()).apply(copy.deepcopy(net)).eval()
    again.load_state_dict(made.net.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), made.net(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_rewritten_network_is_right_for_many_masks(name, generator):
    for _ in range(60):
        net, x = make(name, generator=generator)
        share = float(torch.rand((), generator=generator))
        pruned(net, random_masks(net, share, generator=generator))
        merged = float(torch.rand((), generator=generator)) < 0.5
        _same(net, rewrite(net, x, merge_constants=merged).net, x)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_comes_back_from_json():
    plan = RewritePlan(
        {"0": (2, 3, True)},
        {"1": 4},
        {"2": 5},
        [GraphEdit("view", "relu", (1, 3)), GraphEdit("add", "x", shift=(1, 6))],
    )
    assert RewritePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_parameters_behind_chosen_columns_have_a_new_name():
    plan = RewritePlan(columns={"body.fc": 3})
    assert plan.new_name("body.fc.weight") == "body.fc.1.weight"
    assert plan.new_name("body.other.weight") == "body.other.weight"
    assert plan.new_name("weight") == "weight"


def test_a_plan_for_another_network_is_refused(generator):
    net, x = make("residual", generator=generator)
    with torch.no_grad():
        net.four.weight.zero_()
        net.four.bias.zero_()
    plan = rewrite(net, x).plan
    assert [(edit.node, edit.flatten, edit.shift) for edit in plan.edits] == [("add_1", None, None)]
    with pytest.raises(kn.InvalidArgument, match="its graph has no 'add_1'"):
        plan.apply(nn.Linear(2, 2))
    with pytest.raises(kn.InvalidArgument, match=r"torch\.fx cannot trace its forward"):
        plan.apply(Looking())
    with pytest.raises(kn.InvalidArgument, match="'1' is a ReLU"):
        RewritePlan(columns={"1": 2}).apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
