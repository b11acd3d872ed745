from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from knowable.core.network.network import Network
from knowable.inference.dropout.layer_trace import Place, Site
from knowable.inference.dropout.masked_weights import MaskedWeight, SiteMasks, masked_params
from knowable.inference.variational.gaussian_weight import GaussianWeight, local_rule

LAYERS = {
    "linear": (nn.Linear(6, 2), (4, 6), Place("weight")),
    "linear over tokens": (nn.Linear(6, 2), (4, 5, 6), Place("weight")),
    "convolution": (nn.Conv2d(6, 2, 3, padding=1), (4, 6, 5, 5), Place("weight")),
    "circular padding": (nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular"), (4, 6, 5, 5), Place("weight")),
    "grouped": (nn.Conv1d(6, 4, 3, groups=2), (4, 6, 5), Place("weight", groups=2)),
    "transposed": (nn.ConvTranspose2d(6, 2, 3, stride=2), (4, 6, 5, 5), Place("weight", axis=0)),
}


def random_masks(generator: torch.Generator, site: Site, scale: float = 1.5) -> SiteMasks:
    return SiteMasks(site, lambda rows: torch.rand((rows, site.units), generator=generator).round(), scale)


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_example_sees_its_own_masked_weight(layer, repeat, generator):
    net, shape, place = LAYERS[layer]
    x = torch.randn(shape, generator=generator)
    site = Site((place,), 6 // repeat, 0.5, repeat, by_example=True)
    network, params = Network(net), Network(net).params()
    masks = random_masks(generator, site)
    output = network(masked_params(params, [masks], by_example=True), x)
    assert masks.mask is not None and masks.mask.shape == (4, site.units)
    for row, mask, found in zip(x, masks.mask, output, strict=True):
        own = {**params, "weight": params["weight"] * site.on_weight(1.5 * mask, place, params["weight"])}
        assert torch.allclose(network(own, row.unsqueeze(0))[0], found, atol=1e-5)


def test_gradients_are_those_of_masked_inputs(generator):
    net, x = nn.Linear(6, 2), torch.randn((4, 6), generator=generator)
    site = Site((Place("weight"),), 6, 0.5, by_example=True)
    value = net.weight.detach().clone().requires_grad_()
    masks = random_masks(generator, site)
    Network(net)(masked_params({"weight": value}, [masks], by_example=True), x).square().sum().backward()
    assert masks.mask is not None
    again = net.weight.detach().clone().requires_grad_()
    nn.functional.linear(x * masks.mask * 1.5, again, net.bias).square().sum().backward()
    assert torch.allclose(value.grad, again.grad, atol=1e-5)


def test_a_weight_used_twice_has_one_mask(generator):
    layer = nn.Linear(3, 3)
    network = Network(nn.Sequential(layer, layer))
    site = Site((Place("0.weight"),), 3, 0.5, by_example=True)
    masks, x = random_masks(generator, site), torch.randn((5, 3), generator=generator)
    output = network(masked_params(network.params(), [masks], by_example=True), x)
    assert masks.mask is not None
    factor = 1.5 * masks.mask
    assert torch.allclose(output, layer(factor * layer(factor * x)), atol=1e-6)


def test_layers_that_share_their_input_share_its_mask(generator):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    site = Site((Place("0.weight"), Place("1.weight")), 3, 0.5, by_example=True)
    masks = random_masks(generator, site)
    params = masked_params(Network(net).params(), [masks], by_example=True)
    x = torch.randn((5, 3), generator=generator)
    for name in ("0.weight", "1.weight"):
        found = nn.functional.linear(x, params[name])
        assert masks.mask is not None
        assert torch.allclose(found, (1.5 * masks.mask * x) @ params[name].loc.T, atol=1e-6)


def test_a_weight_that_is_random_itself_meets_the_masked_input(generator):
    site = Site((Place("weight"),), 3, 0.5, by_example=True)
    loc, variance = torch.randn((2, 3), generator=generator), torch.rand((2, 3), generator=generator)
    masks, x = random_masks(generator, site), torch.randn((4, 3), generator=generator)
    given = masked_params({"weight": GaussianWeight(loc, variance, local_rule)}, [masks], by_example=True)
    assert given["weight"].shape == (2, 3)
    torch.manual_seed(1)
    found = nn.functional.linear(x, given["weight"])
    assert masks.mask is not None and type(found) is Tensor
    torch.manual_seed(1)
    assert torch.allclose(found, local_rule(nn.functional.linear, 1.5 * masks.mask * x, given["weight"].loc, None, {}))


def test_a_weight_that_is_random_itself_is_drawn_where_one_mask_is_for_all(generator):
    site = Site((Place("weight"),), 3, 0.5, by_example=False)
    weight = GaussianWeight(torch.zeros(2, 3), torch.ones(2, 3), local_rule)
    masks = random_masks(generator, site)
    given = masked_params({"weight": weight}, [masks], by_example=True)
    assert masks.mask is not None and type(given["weight"]) is Tensor
    assert torch.equal(given["weight"], weight.draw() * masks.mask * 1.5)


def test_anything_else_gets_one_mask_for_all(generator):
    site = Site((Place("weight"),), 3, 0.5, by_example=True)
    loc = torch.randn((2, 3), generator=generator)
    weight = MaskedWeight(loc, site.places[0], random_masks(generator, site))
    assert weight.shape == (2, 3) and weight.dim() == 2
    first: Tensor = weight * 1.0
    assert torch.equal(first, weight + 0.0)
    assert weight.masks.mask is not None and torch.equal(first, loc * weight.masks.mask * 1.5)
    assert type(first) is Tensor


@pytest.mark.parametrize(("asked", "allowed"), [(False, True), (True, False)])
def test_one_mask_for_all_where_rows_are_not_asked_for_or_not_possible(asked, allowed, generator):
    site = Site((Place("weight"),), 3, 0.5, by_example=allowed)
    loc = torch.randn((2, 3), generator=generator)
    given = masked_params({"weight": loc, "bias": loc}, [random_masks(generator, site)], by_example=asked)
    assert type(given["weight"]) is Tensor and given["bias"] is loc
    columns = (given["weight"] / loc).round(decimals=4)
    assert torch.equal(columns[0], columns[1]) and set(columns[0].tolist()) <= {0.0, 1.5}
