from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.network import Network
from knowable.inference.dropout.layer_trace import DropoutSite, WeightAxis
from knowable.inference.dropout.masked_weights import MaskedWeight, MaskedWeights, SiteMasks, masked_params
from knowable.inference.dropout.placement import place_dropout
from knowable.inference.variational.gaussian_weight import GaussianWeight, local_rule
from tests.inference.dropout.networks import Attention, Recurrent, Residual, images, perceptron


def posterior_of(
    net: nn.Module, *shape: int, rate: float | None = None, where: str | None = None, **settings: object
) -> tuple[MaskedWeights, Tensor]:
    """Dropout on the weights that a network has, without a fit; and inputs for it."""
    model = kn.Model(net, settings.pop("likelihood", kn.Gaussian(0.1)), random=settings.pop("random", "*"))  # type: ignore[arg-type]
    x = torch.randn(7, *shape, dtype=model.dtype)
    placement = place_dropout(model, x, rate=rate, where=where)
    params = model.params()
    points = {name: params[name] for name in model.point_names}
    return MaskedWeights(model, params, placement, points=points, **settings), x  # type: ignore[arg-type]


# --- draws -----------------------------------------------------------------------------------------------------------


def test_columns_are_zero_or_scaled_up(generator):
    posterior, _ = posterior_of(perceptron(None), 3, rate=0.2)
    draws = posterior.sample(300, generator)
    ratio = draws["2.weight"] / posterior.loc["2.weight"]  # (300, 6, 6)
    assert torch.isclose(ratio, torch.tensor(1.25)).logical_or(ratio == 0).all()
    assert (ratio.round(decimals=3) == ratio[:, :1].round(decimals=3)).all()  # whole columns
    dropped = (ratio[:, 0] == 0).double().mean().item()
    assert abs(dropped - 0.2) < 5 * math.sqrt(0.16 / (300 * 6))
    for name in ("0.weight", "2.bias"):
        assert (draws[name] == posterior.loc[name]).all()


def test_channels_are_zero_or_scaled_up_also_when_flattened(generator):
    posterior, _ = posterior_of(images(groups=2), 1, 8, 8, likelihood=kn.Categorical())
    draws = posterior.sample(50, generator)
    flattened = (draws["8.weight"][:, 0] == 0).view(50, 4, 4)
    assert (flattened == flattened[..., :1]).all() and flattened.any() and not flattened.all()
    # channels 0 and 1 go to the first group of outputs, 2 and 3 to the second
    convolution = (draws["4.weight"] == 0).all((-2, -1)).view(50, 2, 2, 2)  # (draws, groups, outputs, inputs of each)
    assert (convolution == convolution[:, :, :1]).all() and convolution.any()


def test_recurrent_weights_have_one_mask_for_all_gates(generator):
    posterior, _ = posterior_of(Recurrent(), 5, 2)
    draws = posterior.sample(50, generator)
    for name in ("lstm.weight_ih_l0", "lstm.weight_ih_l1"):
        dropped = draws[name] == 0
        assert (dropped == dropped[:, :1]).all() and dropped.any()


def test_mean_and_spread_are_those_of_many_draws(generator):
    posterior, _ = posterior_of(perceptron(None), 3, rate=0.4)
    n = 4000
    draws, mean, std = posterior.sample(n, generator), posterior.mean(), posterior.std()
    for name, value in draws.items():
        error = std[name] / math.sqrt(n)
        assert ((value.mean(0) - mean[name]).abs() <= 5 * error + 1e-6).all()
        # a two-valued variable of rate p: its squared distance from the mean has variance s⁴ (1 - 2p)² / (p (1 - p))
        spread = (value - mean[name]).square().mean(0)
        error = std[name].square() * math.sqrt((1 - 0.8) ** 2 / 0.24 / n)
        assert ((spread - std[name].square()).abs() <= 5 * error + 1e-6).all()


def test_masks_of_different_sites_are_independent(generator):
    posterior, _ = posterior_of(perceptron(None), 3, rate=0.5)
    draws = posterior.sample(4000, generator)
    first, second = ((draws[name][:, 0] == 0).double() for name in ("2.weight", "4.weight"))
    correlation = (first - 0.5).T @ (second - 0.5) / 4000 / 0.25
    assert correlation.abs().max() < 5 / math.sqrt(4000)


def test_there_is_no_density_and_no_prior_for_the_next_fit():
    posterior, _ = posterior_of(perceptron(None), 3)
    with pytest.raises(kn.Unsupported, match="no density"):
        posterior.log_prob(posterior.mean())
    with pytest.raises(kn.Unsupported):
        posterior.as_prior()


# --- prediction ------------------------------------------------------------------------------------------------------


def test_the_prediction_of_a_linear_layer_has_its_variance_in_closed_form(generator):
    posterior, x = posterior_of(nn.Linear(4, 1).double(), 4, rate=0.3)
    n = 6000
    prediction = posterior.predict(x, samples=n)
    weight = posterior.loc["weight"]
    expected = (x * weight).square().sum(1, keepdim=True) * 0.3 / 0.7
    mean = x @ weight.T + posterior.loc["bias"]
    squares = (prediction.samples - mean).square()
    assert ((prediction.mean - mean).abs() < 5 * (expected / n).sqrt()).all()
    assert ((squares.mean(0) - expected).abs() < 5 * squares.std(0) / math.sqrt(n)).all()
    assert torch.allclose(prediction.aleatoric, torch.full_like(expected, 0.01))


def test_weight_scaling_is_the_network_at_its_mean_weights():
    posterior, x = posterior_of(perceptron(0.2), 3, prediction="weight_scaling")
    prediction = posterior.predict(x)
    assert torch.allclose(prediction.mean, posterior.model.forward(posterior.mean(), x))
    assert len(prediction.samples) == 1 and (prediction.epistemic == 0).all()


def test_weight_scaling_is_the_mean_of_monte_carlo_on_one_linear_layer():
    net, n = nn.Linear(4, 1).double(), 4000
    posterior, x = posterior_of(net, 4, rate=0.3)
    scaled = MaskedWeights(posterior.model, posterior.loc, posterior.placement, prediction="weight_scaling")
    many = posterior.predict(x, samples=n)
    assert ((many.mean - scaled.predict(x).mean).abs() < 5 * (many.epistemic / n).sqrt()).all()


def test_weight_scaling_turns_noise_off_too():
    posterior, x = posterior_of(Residual(), 3, prediction="weight_scaling")
    assert torch.allclose(posterior.predict(x).mean, posterior.model.forward(posterior.mean(), x), atol=1e-6)


@pytest.mark.parametrize(("net", "shape"), [(Residual(), (3,)), (Attention(), (5, 4))], ids=["residual", "attention"])
def test_draws_of_a_noisy_network_are_functions_of_the_row_alone(net, shape):
    posterior, x = posterior_of(net, *shape)
    whole = posterior.predict(x, samples=6).samples
    assert not torch.allclose(whole[0], whole[1])
    assert torch.allclose(posterior.predict(x[2:4], samples=6).samples, whole[:, 2:4], atol=1e-6)
    assert torch.equal(posterior.predict(x, samples=3).samples, whole[:3])
    capped = posterior.predict(x, samples=6, max_memory=whole.numel() * 4 * 3).samples
    assert torch.allclose(capped, whole, atol=1e-6)


def test_the_noise_of_a_network_has_the_moments_of_its_dropout():
    net = Residual(0.4)
    posterior, x = posterior_of(net, 3)
    n = 800
    prediction = posterior.predict(x, samples=n)
    params = posterior.mean()
    with torch.no_grad():
        hidden = torch.tanh(net.first(x))
    parts = hidden * params["second.weight"]  # what each unit adds: once, and again where it is not dropped
    expected = parts.square().sum(1, keepdim=True) * 0.4 / 0.6
    mean = (2 * parts).sum(1, keepdim=True) + params["second.bias"]
    squares = (prediction.samples - mean).square()
    assert ((prediction.mean - mean).abs() < 5 * (expected / n).sqrt() + 1e-6).all()
    assert ((squares.mean(0) - expected).abs() < 5 * squares.std(0) / math.sqrt(n)).all()


def test_predictions_leave_the_global_generator_alone():
    for net in (perceptron(None), Residual()):
        posterior, x = posterior_of(net, 3)
        state = torch.get_rng_state()
        posterior.predict(x, samples=3)
        assert torch.equal(state, torch.get_rng_state())


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prediction", ["monte_carlo", "weight_scaling"])
@pytest.mark.parametrize(
    ("net", "shape"),
    [(perceptron(0.2), (3,)), (Residual(), (3,)), (Recurrent(), (5, 2)), (Attention(), (5, 4))],
    ids=["perceptron", "residual", "recurrent", "attention"],
)
def test_what_was_saved_predicts_the_same(net, shape, prediction, tmp_path):
    posterior, x = posterior_of(net, *shape, prediction=prediction)
    loaded = kn.load(posterior.save(tmp_path / "it"), None if isinstance(net, nn.Sequential) else net)
    assert isinstance(loaded, MaskedWeights)
    assert loaded.placement == posterior.placement and loaded.prediction == prediction
    assert torch.equal(loaded.predict(x, samples=5).samples, posterior.predict(x, samples=5).samples)


def test_a_posterior_can_be_copied():
    posterior, x = posterior_of(Residual(), 3)
    before = posterior.predict(x, samples=4).samples
    assert torch.equal(copy.deepcopy(posterior).predict(x, samples=4).samples, before)


def test_rates_are_by_name():
    posterior, _ = posterior_of(perceptron(0.2), 3)
    assert posterior.rates == {"3.weight": 0.2, "6.weight": 0.2}


# --- masked weight ----------------------------------------------------------------------------------------------------


LAYERS = {
    "linear": (nn.Linear(6, 2), (4, 6), WeightAxis("weight")),
    "linear over tokens": (nn.Linear(6, 2), (4, 5, 6), WeightAxis("weight")),
    "convolution": (nn.Conv2d(6, 2, 3, padding=1), (4, 6, 5, 5), WeightAxis("weight")),
    "circular padding": (nn.Conv2d(6, 2, 3, padding=1, padding_mode="circular"), (4, 6, 5, 5), WeightAxis("weight")),
    "grouped": (nn.Conv1d(6, 4, 3, groups=2), (4, 6, 5), WeightAxis("weight", groups=2)),
    "transposed": (nn.ConvTranspose2d(6, 2, 3, stride=2), (4, 6, 5, 5), WeightAxis("weight", axis=0)),
}


def random_masks(generator: torch.Generator, site: DropoutSite, scale: float = 1.5) -> SiteMasks:
    return SiteMasks(site, lambda rows: torch.rand((rows, site.units), generator=generator).round(), scale)


@pytest.mark.parametrize("repeat", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_example_sees_its_own_masked_weight(layer, repeat, generator):
    net, shape, place = LAYERS[layer]
    x = torch.randn(shape, generator=generator)
    site = DropoutSite((place,), 6 // repeat, 0.5, repeat, by_example=True)
    network, params = Network(net), Network(net).params()
    masks = random_masks(generator, site)
    output = network(masked_params(params, [masks], by_example=True), x)
    assert masks.mask is not None and masks.mask.shape == (4, site.units)
    for row, mask, found in zip(x, masks.mask, output, strict=True):
        own = {**params, "weight": params["weight"] * site.on_weight(1.5 * mask, place, params["weight"])}
        assert torch.allclose(network(own, row.unsqueeze(0))[0], found, atol=1e-5)


def test_gradients_are_those_of_masked_inputs(generator):
    net, x = nn.Linear(6, 2), torch.randn((4, 6), generator=generator)
    site = DropoutSite((WeightAxis("weight"),), 6, 0.5, by_example=True)
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
    site = DropoutSite((WeightAxis("0.weight"),), 3, 0.5, by_example=True)
    masks, x = random_masks(generator, site), torch.randn((5, 3), generator=generator)
    output = network(masked_params(network.params(), [masks], by_example=True), x)
    assert masks.mask is not None
    factor = 1.5 * masks.mask
    assert torch.allclose(output, layer(factor * layer(factor * x)), atol=1e-6)


def test_layers_that_share_their_input_share_its_mask(generator):
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    site = DropoutSite((WeightAxis("0.weight"), WeightAxis("1.weight")), 3, 0.5, by_example=True)
    masks = random_masks(generator, site)
    params = masked_params(Network(net).params(), [masks], by_example=True)
    x = torch.randn((5, 3), generator=generator)
    for name in ("0.weight", "1.weight"):
        found = nn.functional.linear(x, params[name])
        assert masks.mask is not None
        assert torch.allclose(found, (1.5 * masks.mask * x) @ params[name].loc.T, atol=1e-6)


def test_a_weight_that_is_random_itself_meets_the_masked_input(generator):
    site = DropoutSite((WeightAxis("weight"),), 3, 0.5, by_example=True)
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
    site = DropoutSite((WeightAxis("weight"),), 3, 0.5, by_example=False)
    weight = GaussianWeight(torch.zeros(2, 3), torch.ones(2, 3), local_rule)
    masks = random_masks(generator, site)
    given = masked_params({"weight": weight}, [masks], by_example=True)
    assert masks.mask is not None and type(given["weight"]) is Tensor
    assert torch.equal(given["weight"], weight.draw() * masks.mask * 1.5)


def test_anything_else_gets_one_mask_for_all(generator):
    site = DropoutSite((WeightAxis("weight"),), 3, 0.5, by_example=True)
    loc = torch.randn((2, 3), generator=generator)
    weight = MaskedWeight(loc, site.places[0], random_masks(generator, site))
    assert weight.shape == (2, 3) and weight.dim() == 2
    first: Tensor = weight * 1.0
    assert torch.equal(first, weight + 0.0)
    assert weight.masks.mask is not None and torch.equal(first, loc * weight.masks.mask * 1.5)
    assert type(first) is Tensor


@pytest.mark.parametrize(("asked", "allowed"), [(False, True), (True, False)])
def test_one_mask_for_all_where_rows_are_not_asked_for_or_not_possible(asked, allowed, generator):
    site = DropoutSite((WeightAxis("weight"),), 3, 0.5, by_example=allowed)
    loc = torch.randn((2, 3), generator=generator)
    given = masked_params({"weight": loc, "bias": loc}, [random_masks(generator, site)], by_example=asked)
    assert type(given["weight"]) is Tensor and given["bias"] is loc
    columns = (given["weight"] / loc).round(decimals=4)
    assert torch.equal(columns[0], columns[1]) and set(columns[0].tolist()) <= {0.0, 1.5}
