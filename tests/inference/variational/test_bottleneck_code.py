from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import knowable as kn
from knowable.inference.variational.bottleneck_code import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    MARGINAL_LOC,
    MARGINAL_LOG_SCALE,
    CodePlace,
    code_log_variance,
    code_mean,
    code_shape,
    rate_of,
    tapped,
)
from knowable.testing import network_case


def mlp() -> kn.Model:
    return kn.Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), kn.Gaussian(0.1))


def head(features: int) -> dict[str, Tensor]:
    return {HEAD_WEIGHT: torch.randn(features, features), HEAD_BIAS: torch.randn(features)}


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 3), (5, 2, 3, 3)], ids=["vectors", "sequences", "images"])
@pytest.mark.parametrize("learned", [False, True], ids=["standard", "learned"])
def test_rate_is_the_divergence_of_torch_for_each_row(shape, learned):
    mean, log_variance = torch.randn(shape), torch.randn(shape)
    tensors = {MARGINAL_LOC: torch.randn(shape[1:]), MARGINAL_LOG_SCALE: torch.randn(shape[1:])} if learned else {}
    marginal = (
        Normal(tensors[MARGINAL_LOC], tensors[MARGINAL_LOG_SCALE].exp())
        if learned
        else Normal(torch.zeros(shape[1:]), torch.ones(shape[1:]))
    )
    expected = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), marginal).flatten(1).sum(1)
    assert torch.allclose(rate_of(mean, log_variance, tensors), expected, rtol=1e-5, atol=1e-5)


def test_head_is_a_linear_function_of_the_features_at_every_position():
    value, tensors = torch.randn(2, 3, 4, 5), head(3)
    found = code_log_variance(value, tensors, "head")
    expected = tensors[HEAD_WEIGHT] @ value[1, :, 2, 4] + tensors[HEAD_BIAS]
    assert found.shape == value.shape and torch.allclose(found[1, :, 2, 4], expected, atol=1e-6)
    assert code_mean(value, "head") is value


@pytest.mark.parametrize(("shape", "axis"), [((2, 6), 1), ((2, 3, 6), 2), ((2, 6, 3, 3), 1)])
def test_split_features_are_mean_and_log_variance(shape, axis):
    value = torch.randn(shape)
    both = torch.cat([code_mean(value, "split"), code_log_variance(value, {}, "split")], dim=axis)
    assert torch.equal(both, value)


# --- where the code is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [("mlp", "2", (8,)), ("batchnorm_cnn", "10", (8,)), ("lstm", "head", (4,)), ("tied", "out", (5, 4)),
     ("linear", "", (3,)), ("transformer", "head", (8,))],
)  # fmt: skip
def test_without_a_name_the_code_is_what_the_last_layer_takes_in(name, layer, shape):
    case = network_case(name)
    place = CodePlace.of(case.model(), None, "head")
    assert place == CodePlace(layer, entrance=True, scale="head")
    model, tap = tapped(case.model(), place)
    assert code_shape(model, tap, case.x) == shape


def test_outside_of_drawing_the_network_computes_what_it_always_did():
    model = mlp()
    x, params = torch.randn(6, 3), model.params()
    made, tap = tapped(model, CodePlace.of(model, "1", "head"))
    assert torch.equal(made.forward(params, x), model.forward(params, x))
    with tap.drawing(head(4), None):
        assert torch.equal(made.forward(params, x), model.forward(params, x))
        assert tap.moments is not None
    assert tap.moments is None


@pytest.mark.parametrize("training", [False, True])
def test_code_takes_the_place_of_the_layer_s_output(training):
    model = mlp()
    x, params, tensors = torch.randn(6, 3), model.params(), head(4)
    noise = torch.randn(6, 4)
    made, tap = tapped(model, CodePlace.of(model, "1", "head"))
    with tap.drawing(tensors, lambda mean: noise):
        found = made.network(params, x, training=training)
    mean = torch.tanh(x @ params["0.weight"].T + params["0.bias"])
    code = mean + noise * torch.exp(0.5 * (mean @ tensors[HEAD_WEIGHT].T + tensors[HEAD_BIAS]))
    assert torch.allclose(found, code @ params["2.weight"].T + params["2.bias"], atol=1e-6)


def test_input_of_a_layer_is_the_output_of_the_one_before():
    model = mlp()
    x, params, tensors = torch.randn(6, 3), model.params(), head(4)
    outputs = []
    for place in (CodePlace("1", entrance=False, scale="head"), CodePlace("2", entrance=True, scale="head")):
        made, tap = tapped(model, place)
        with tap.drawing(tensors, torch.ones_like):
            outputs.append(made.forward(params, x))
    assert torch.equal(*outputs)


def test_user_s_network_and_model_are_left_alone():
    model = mlp()
    tapped(model, CodePlace.of(model, "1", "head"))
    hooks = [each._forward_hooks or each._forward_pre_hooks for each in model.net.modules()]
    inside = [each for training in (True, False) for each in model.network.modules(training=training).values()]
    assert not any(hooks) and not any(each._forward_hooks or each._forward_pre_hooks for each in inside)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_layer_that_is_not_there_is_refused_with_the_list():
    with pytest.raises(kn.InvalidArgument, match=r"layer must be one of '0', '1', '2'; got 'encoder'"):
        CodePlace.of(mlp(), "encoder", "head")


def test_split_needs_the_name_of_a_layer():
    with pytest.raises(kn.InvalidArgument, match="layer="):
        CodePlace.of(mlp(), None, "split")


def refused(net: nn.Module, layer: str, x: Tensor, scale: str = "head") -> str:
    model = kn.Model(net, kn.Gaussian(0.1))
    model, tap = tapped(model, CodePlace.of(model, layer, scale))
    with pytest.raises(kn.Unsupported) as error:
        code_shape(model, tap, x)
    return str(error.value)


def test_layers_that_give_no_code_are_refused():
    lstm = network_case("lstm")
    assert "output of 'lstm' is tuple" in refused(lstm.net, "lstm", lstm.x)
    shared = network_case("shared")
    assert "2 times" in refused(shared.net, "2", shared.x)
    assert "even number" in refused(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), "0", shared.x, "split")
    flat = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0), nn.Unflatten(0, (-1, 1)))
    assert "shape (2,)" in refused(flat, "1", shared.x)


class Bypass(nn.Module):
    """Has a layer that it never calls."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class ByName(nn.Module):
    """Calls its layer with a named argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


def test_input_that_comes_by_name_is_refused_in_words():
    model = kn.Model(ByName(), kn.Gaussian(0.1))
    model, tap = tapped(model, CodePlace.of(model, None, "head"))
    with pytest.raises(kn.Unsupported, match="input of 'layer', which is passed by name"):
        code_shape(model, tap, torch.randn(4, 3))


def test_layer_that_is_never_called_is_refused():
    assert "0 times" in refused(Bypass(), "idle", torch.randn(4, 3))
