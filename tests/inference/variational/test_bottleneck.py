from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.bottleneck import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    MARGINAL_LOC,
    MARGINAL_LOG_SCALE,
    BottleneckObjective,
    CodePlace,
    code_log_variance,
    code_mean,
    code_shape,
    rate_of,
    tapped,
)
from knowable.testing import network_case

FLAT = {"likelihood.*": kn.Flat(), "*": kn.Flat()}


def normal_pair(correlation: float, n: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs and targets whose sample moments are exactly those of standard normals with that correlation."""
    x, e = torch.randn(2, n, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    e = e - e.mean() - (e @ x) / n * x
    y = correlation * x + math.sqrt(1 - correlation**2) * e / e.std(correction=0)
    return x.unsqueeze(1), y.unsqueeze(1)


def linear_model(prior: object = FLAT) -> kn.Model:
    """A linear encoder to one number, a linear decoder, noise to be learned: the whole family of the optimum."""
    return kn.Model(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double(), kn.Gaussian(), prior)  # type: ignore[arg-type]


def gaussian_optimum(correlation: float, beta: float) -> tuple[float, float]:
    """Rate and distortion of the best normal code of normal variables (Chechik et al., 2005), in nats.

    D(R) = h(y) + log(1 - rho^2 (1 - exp(-2 R))) / 2, whose slope is -beta at the optimum.
    """
    squared = correlation**2
    if beta >= squared:
        return 0.0, 0.5 * math.log(2 * math.pi * math.e)
    left = beta * (1 - squared) / (squared * (1 - beta))  # exp(-2 R)
    distortion = 0.5 * math.log(2 * math.pi * math.e) + 0.5 * math.log(1 - squared * (1 - left))
    return -0.5 * math.log(left), distortion


@pytest.mark.parametrize("beta", [0.05, 0.3])
def test_normal_variables_reach_the_known_optimum(seed, beta):
    # all terms depend on second moments alone, which the data has exactly. The learned marginal becomes the code's own,
    # so that the rate is the information. Near the optimum D + beta R is flat: it is close before R and D are
    x, y = normal_pair(0.9)
    rate, distortion = gaussian_optimum(0.9, beta)
    method = kn.InformationBottleneck(
        layer="0", beta=beta, marginal="learned", epochs=600, learning_rate=0.03, draws=8, initial_scale=0.5
    )
    posterior = method.fit(linear_model(), (x, y), seed=seed)
    found = posterior.diagnostics
    error = 4 * found["distortion_standard_error"]
    assert found["distortion"] + beta * found["rate"] == pytest.approx(distortion + beta * rate, abs=0.01 + error)
    assert found["rate"] == pytest.approx(rate, rel=0.1)


def test_rate_that_is_not_worth_its_price_is_not_paid(seed):
    x, y = normal_pair(0.6)  # information costs more than it brings beyond beta = 0.36
    method = kn.InformationBottleneck(layer="0", beta=0.7, epochs=400, learning_rate=0.03, draws=4, initial_scale=0.5)
    found = method.fit(linear_model(), (x, y), seed=seed).diagnostics
    assert found["rate"] < 0.01
    assert found["distortion"] == pytest.approx(gaussian_optimum(0.6, 0.7)[1], abs=0.02)


def test_rate_falls_and_distortion_rises_with_beta(seed):
    x, y = normal_pair(0.9)
    found = []
    for beta in (0.01, 0.1, 0.5):
        method = kn.InformationBottleneck(layer="0", beta=beta, epochs=300, learning_rate=0.03, draws=4)
        found.append(method.fit(linear_model(), (x, y), seed=seed).diagnostics)
    rates, distortions = ([each[name] for each in found] for name in ("rate", "distortion"))
    assert rates[0] > rates[1] > rates[2]
    assert distortions[0] < distortions[1] < distortions[2]


def test_without_a_price_it_is_ordinary_training(seed):
    # at beta = 0 noise in the code only hurts: what is left of it costs less than 0.02 nats per example
    x, y = normal_pair(0.9)
    method = kn.InformationBottleneck(layer="0", beta=0.0, epochs=600, learning_rate=0.03)
    found = method.fit(linear_model(), (x, y), seed=seed).diagnostics
    least = 0.5 * math.log(2 * math.pi * math.e * (1 - 0.9**2))  # that of maximum likelihood
    assert found["distortion"] - least > -4 * found["distortion_standard_error"]
    assert found["distortion"] - least < 0.02


def test_prior_of_the_weights_counts_as_in_map(seed):
    x, y = normal_pair(0.9)
    tight = {"likelihood.*": kn.Flat(), "*": kn.Normal(0.05)}
    method = kn.InformationBottleneck(layer="0", beta=0.0, epochs=200, learning_rate=0.03)
    loose, held = (method.fit(linear_model(prior), (x, y), seed=seed) for prior in (FLAT, tight))
    assert held.mean()["1.weight"].abs() < 0.5 * loose.mean()["1.weight"].abs()


def test_network_written_for_split_features_is_fitted(seed):
    # the network does not run without its bottleneck: the decoder takes half of what the encoder gives
    x, y = normal_pair(0.9)
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 1)).double()
    method = kn.InformationBottleneck(
        layer="0", scale="split", beta=0.05, marginal="learned", epochs=600, learning_rate=0.03, draws=8
    )
    found = method.fit(kn.Model(net, kn.Gaussian(), FLAT), (x, y), seed=seed).diagnostics
    rate, distortion = gaussian_optimum(0.9, 0.05)
    error = 4 * found["distortion_standard_error"]
    assert found["distortion"] + 0.05 * found["rate"] == pytest.approx(distortion + 0.05 * rate, abs=0.01 + error)


def test_classification_and_images_work_and_say_what_they_are(seed):
    x = torch.randn(40, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    posterior = kn.InformationBottleneck(layer="0", beta=0.001, epochs=60).fit(
        kn.Model(net, kn.Categorical()), (x, y), seed=seed
    )
    mean, std = posterior.encode(x)
    assert mean.shape == std.shape == (40, 3, 4, 4)
    assert torch.allclose(posterior.rate(x).mean(), torch.tensor(posterior.diagnostics["rate"]), rtol=1e-3)
    assert posterior.log_evidence is None
    assert "point estimates" in posterior.diagnostics.notes[0]
    assert (posterior.predict(x).epistemic >= 0).all()


def test_layer_that_gives_no_code_is_refused_in_words():
    net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).double()
    with pytest.raises(kn.Unsupported, match="even number of features"):
        kn.InformationBottleneck(layer="0", scale="split", epochs=1).fit(
            kn.Model(net, kn.Gaussian(0.1)), normal_pair(0.5)
        )


def test_prior_whose_scale_is_learned_is_refused():
    model = linear_model(kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="InformationBottleneck cannot learn the prior's own scale"):
        kn.InformationBottleneck(epochs=1).fit(model, normal_pair(0.5))


# --- bottleneck code -------------------------------------------------------------------------------------------------


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


# --- bottleneck objective --------------------------------------------------------------------------------------------


def objective(**changes: object) -> tuple[BottleneckObjective, Tensor, Tensor]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5), kn.Normal(1.2))
    model, tap = tapped(model, CodePlace.of(model, "0", "head"))
    settings = {"beta": 0.3, "initial_scale": 0.4, **changes}
    made = BottleneckObjective(model, tap, code_shape(model, tap, x), 50, **settings)  # type: ignore[arg-type]
    return made, x, y


def slow_terms(made: BottleneckObjective, x: Tensor, y: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Distortion and rate of each row, written out for that network; the standard deviation is 0.4 at the start."""
    params = made.params()
    mean = x @ params["0.weight"].T + params["0.bias"]
    output = torch.tanh(mean + 0.4 * noise) @ params["2.weight"].T + params["2.bias"]
    distortion = -torch.distributions.Normal(output, 0.5).log_prob(y).sum(-1)
    code, marginal = torch.distributions.Normal(mean, torch.full_like(mean, 0.4)), torch.distributions.Normal(0.0, 1.0)
    return distortion, torch.distributions.kl_divergence(code, marginal).sum(1)


def test_loss_is_distortion_and_priced_rate_and_prior_per_example():
    made, x, y = objective()
    torch.manual_seed(5)
    loss, terms = made(x, y)
    torch.manual_seed(5)
    distortion, rate = slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))
    log_prior = made.model.log_prior(made.params())
    assert torch.allclose(terms["distortion"], distortion.mean())
    assert torch.allclose(terms["rate"], rate.mean())
    assert torch.allclose(loss, distortion.mean() + 0.3 * rate.mean() - log_prior / 50)
    assert torch.allclose(terms["log_likelihood"], -50 * distortion.mean())  # on the full-data scale


def test_several_codes_are_averaged_over():
    made, x, y = objective(draws=3)
    torch.manual_seed(5)
    _, terms = made(x, y)
    torch.manual_seed(5)
    each = [slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))[0].mean() for _ in range(3)]
    assert torch.allclose(terms["distortion"], torch.stack(each).mean())


def test_head_and_marginal_are_trained():
    made, x, y = objective(marginal="learned")
    made(x, y)[0].backward()
    assert set(made.code) == {"head_weight", "head_bias", "marginal_loc", "marginal_log_scale"}
    assert all(value.grad is not None and (value.grad != 0).any() for value in made.code.values())
    assert all(value.grad is not None and (value.grad != 0).any() for value in made.values)


def test_final_terms_are_the_means_over_all_rows_with_their_error(seed):
    made, x, y = objective()
    terms = made.final_terms(as_data((x, y), made.model), seed)
    draws = 20_000
    noise = torch.randn(draws, 20, 4, dtype=torch.float64)
    with torch.no_grad():
        many = slow_terms(made, x, y, noise)[0].mean(-1)
        rate = slow_terms(made, x, y, noise[0])[1].mean().item()
    error = (many.var().item() / draws + terms["distortion_standard_error"] ** 2) ** 0.5
    assert terms["rate"] == pytest.approx(rate)
    assert terms["distortion"] == pytest.approx(many.mean().item(), abs=5 * error)
    # 256 draws: the standard error itself is good to 1 / sqrt(512), 4 %
    assert terms["distortion_standard_error"] == pytest.approx((many.var().item() / 256) ** 0.5, rel=0.25)


def test_held_out_rows_are_scored_by_the_mean_density_over_codes(seed):
    made, x, y = objective()
    torch.manual_seed(seed)
    found = made.predictive_log_likelihood(x, y)
    torch.manual_seed(seed)
    each = [-slow_terms(made, x, y, torch.randn(20, 4, dtype=torch.float64))[0] for _ in range(8)]
    assert torch.allclose(found, torch.stack(each).exp().mean(0).log())


# --- bottleneck posterior --------------------------------------------------------------------------------------------


CODE = {
    "head_weight": torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=torch.float64),
    "head_bias": torch.tensor([-1.0, -2.0], dtype=torch.float64),
}


def linear_posterior() -> kn.RandomCode:
    """Three inputs, a code of two numbers, one output; all of it linear."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.3))
    return kn.RandomCode(model, model.params(), CODE, place=CodePlace("0", False, "head"), shape=torch.Size([2]))


def inputs(rows: int = 5) -> Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def slow_moments(posterior: kn.RandomCode, x: Tensor) -> tuple[Tensor, Tensor]:
    params = posterior.mean()
    mean = x @ params["0.weight"].T + params["0.bias"]
    return mean, torch.exp(0.5 * (mean @ CODE["head_weight"].T + CODE["head_bias"]))


def test_code_and_its_rate_are_the_formulas():
    posterior, x = linear_posterior(), inputs()
    mean, std = slow_moments(posterior, x)
    found = posterior.encode(x)
    assert torch.allclose(found[0], mean) and torch.allclose(found[1], std)
    rate = kl_divergence(Normal(mean, std), Normal(torch.zeros_like(mean), 1.0)).sum(1)
    assert torch.allclose(posterior.rate(x), rate)


def test_predictions_of_a_linear_decoder_have_the_closed_form_moments(seed, generator):
    posterior, x, draws = linear_posterior(), inputs(), 4_000
    prediction = posterior.predict(x, samples=draws, generator=generator)
    mean, std = slow_moments(posterior, x)
    weight, bias = (posterior.mean()[name] for name in ("1.weight", "1.bias"))
    expected, variance = mean @ weight.T + bias, std.square() @ weight.square().T
    # draws are normal: standard errors of a sample mean and of a sample variance
    assert ((prediction.mean - expected).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((prediction.epistemic - variance).abs() < 5 * variance * (2 / draws) ** 0.5).all()
    assert torch.allclose(prediction.aleatoric, torch.full_like(expected, 0.09))


def test_weights_are_the_same_in_every_draw():
    posterior = linear_posterior()
    draws = posterior.sample(4)
    assert all((value == posterior.mean()[name]).all() for name, value in draws.items())
    assert all((value == 0).all() for value in posterior.std().values())


def test_row_does_not_depend_on_the_others():
    posterior, x = linear_posterior(), inputs()
    whole = posterior.predict(x, samples=6).samples
    assert torch.allclose(posterior.predict(x[2:3], samples=6).samples, whole[:, 2:3])


def test_draws_one_by_one_are_the_same_as_together():
    posterior, x = linear_posterior(), inputs()
    together = posterior.predict(x, samples=6).samples
    posterior._vectorises = False
    assert torch.allclose(posterior.predict(x, samples=6).samples, together)


def test_more_samples_begin_with_the_same_draws():
    posterior, x = linear_posterior(), inputs()
    assert torch.allclose(posterior.predict(x, samples=9).samples[:4], posterior.predict(x, samples=4).samples)


@pytest.mark.parametrize("scale", ["head", "split"])
def test_saving_and_loading_changes_nothing(tmp_path, scale):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(2 if scale == "split" else 4, 1))
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    method = kn.InformationBottleneck(layer="0", scale=scale, marginal="learned", epochs=3)
    posterior = method.fit(kn.Model(net, kn.Gaussian()), (x, y))
    posterior.save(tmp_path / "saved")
    loaded = kn.load(tmp_path / "saved")
    assert isinstance(loaded, kn.RandomCode) and loaded.place == posterior.place
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert torch.equal(loaded.rate(x), posterior.rate(x))


def test_there_is_no_density_and_no_prior_in_it():
    posterior = linear_posterior()
    with pytest.raises(kn.Unsupported):
        posterior.log_prob(posterior.mean())
    with pytest.raises(kn.Unsupported):
        posterior.as_prior()
