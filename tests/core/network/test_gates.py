"""Gates leave a network as it is while they are open, and take out what is behind a closed one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.gates import Gates, gated
from tests.core.cases import mlp


def test_open_gates_change_nothing():
    net, x = mlp(width=5), torch.randn(7, 2)
    assert torch.equal(gated(net, "0")(x), net(x))


def test_a_closed_gate_takes_its_unit_out():
    net, x = mlp(width=5), torch.randn(7, 2)
    made = gated(net, "0")
    with torch.no_grad():
        made[0][1].gate[2] = 0.0
        hidden = net[0](x)
        hidden[:, 2] = 0.0
        expected = net[2](torch.tanh(hidden))
    torch.testing.assert_close(made(x), expected)


@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 3, 4, 4)), (-1, (2, 5, 3)), (0, (3, 2))])
def test_gates_lie_along_the_dimension_asked_for(dim, shape):
    gates, x = Gates(3, dim=dim), torch.randn(shape)
    with torch.no_grad():
        gates.gate[1] = 0.0
    found = gates(x).movedim(dim, 0)
    assert (found[1] == 0).all()
    assert torch.equal(found[[0, 2]], x.movedim(dim, 0)[[0, 2]])


def test_one_gate_closes_all_that_a_module_gives_out():
    net = gated(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "1", per="layer")
    assert net[1][1].gate.shape == (1,)
    with torch.no_grad():
        net[1][1].gate.zero_()
    assert (net(torch.randn(3, 2, 2)) == 0).all()


def test_convolutions_have_a_gate_for_every_channel():
    net = gated(nn.Sequential(nn.Conv2d(1, 6, 3), nn.ConvTranspose2d(6, 4, 3)), ["0", "1"])
    assert [module.units for module in net.modules() if isinstance(module, Gates)] == [6, 4]
    assert net(torch.randn(2, 1, 5, 5)).shape == (2, 4, 5, 5)


def test_the_network_itself_is_not_changed_and_dtype_is_kept():
    net = mlp().double()
    before = {name: value.clone() for name, value in net.named_parameters()}
    made = gated(net, ["0", "2"])
    assert made is not net and list(dict(net.named_parameters())) == list(before)
    assert all(value.dtype == torch.float64 for value in made.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "wanted"),
    [
        ({"where": "7"}, kn.InvalidArgument, r"where='7' matches no module\. The modules are: 0, 1, 2"),
        ({"where": "1"}, kn.InvalidArgument, "where names '1', a Tanh; per='unit' supports.*per='layer'"),
        ({"where": []}, kn.InvalidType, "where must be a path or glob"),
        ({"where": 3}, kn.InvalidType, "where must be a path or glob"),
        ({"where": "0", "per": "weight"}, kn.InvalidArgument, "per must be one of 'unit', 'layer'; got 'weight'"),
    ],
)
def test_what_cannot_be_gated_is_refused(arguments, error, wanted):
    with pytest.raises(error, match=wanted):
        gated(mlp(), **arguments)


def test_gates_inside_gates_are_refused():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(kn.InvalidArgument, match=r"'0\.0' and also a module that contains it"):
        gated(net, ["0", "0.0"], per="layer")
    with pytest.raises(kn.InvalidType, match=r"net must be a torch\.nn\.Module"):
        gated(3, "0")  # type: ignore[arg-type]
    with pytest.raises(kn.InvalidArgument, match="units must be a whole number >= 1"):
        Gates(0)


def test_gates_with_a_prior_over_zero_and_one_are_binary_parameters():
    prior = {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)}
    model = kn.Model(gated(mlp(), "0"), kn.Gaussian(0.1), prior)
    assert model.binary_names == ["0.1.gate"]
    frozen = kn.Model(gated(mlp(), "0"), kn.Gaussian(0.1), kn.Normal(1.0), frozen="*.gate")
    assert frozen.binary_names == []
