"""Tests of the model: the log joint, which parameters are what, and the prior predictive."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from tests.core.cases import DTYPE, batch_norm_net, diagonal_posterior, full_posterior, linear_data, linear_model, mlp


def _normal_log_prob(value: torch.Tensor, loc: torch.Tensor | float, scale: float) -> torch.Tensor:
    return -0.5 * ((value - loc) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)


# --- the log joint --------------------------------------------------------------------------------------------------


def test_the_log_joint_is_the_formula_written_out(generator):
    x, y = linear_data(generator=generator)
    model = linear_model(noise=None, prior=kn.Normal(2.0))
    weight = torch.tensor([[0.3, -0.7]], dtype=DTYPE)
    bias, log_noise = torch.tensor([0.1], dtype=DTYPE), torch.tensor(-0.4, dtype=DTYPE)
    params = {"weight": weight, "bias": bias, "likelihood.log_noise": log_noise}
    log_likelihood = _normal_log_prob(y, x @ weight.T + bias, math.exp(-0.4)).sum()
    log_prior = _normal_log_prob(weight, 0.0, 2.0).sum() + _normal_log_prob(bias, 0.0, 2.0).sum()
    log_prior = log_prior + _normal_log_prob(log_noise, -1.0, 2.0)  # the likelihood brings its own prior
    torch.testing.assert_close(model.log_joint(params, x, y, len(x)), log_likelihood + log_prior)
    torch.testing.assert_close(model.log_prior(params), log_prior)
    torch.testing.assert_close(model.log_likelihood(params, x, y).sum(), log_likelihood)
    assert model.log_likelihood(params, x, y).shape == (len(x),)


def test_batches_of_an_epoch_average_to_the_full_log_joint(generator):
    # equal batches: the mean over a partition is exact, whatever the parameters; this is what unbiased means here
    x, y = linear_data(20, generator=generator)
    model = linear_model()
    params = model.params()
    full = model.log_joint(params, x, y, 20)
    for size in (1, 4, 5, 10):
        batches = zip(x.split(size), y.split(size), strict=True)
        values = torch.stack([model.log_joint(params, *batch, 20) for batch in batches])
        torch.testing.assert_close(values.mean(), full)


def test_random_batches_average_to_the_full_log_joint(generator):
    # the mean of n estimates errs by their standard deviation / sqrt(n); 5 of those allowed
    x, y = linear_data(20, generator=generator)
    model = linear_model()
    params = model.params()
    rows = [torch.randperm(20, generator=generator)[:3] for _ in range(1_000)]
    values = torch.stack([model.log_joint(params, x[chosen], y[chosen], 20) for chosen in rows])
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - model.log_joint(params, x, y, 20)) < 5 * error


def test_the_log_joint_takes_arrays_and_a_plain_vector_of_targets(generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    expected = model.log_joint(model.params(), x, y, 20)
    assert model.log_joint(model.params(), x.numpy(), y.squeeze(1).numpy(), 20) == expected
    assert model.log_joint(model.params(), x.float(), y.squeeze(1), 20) == pytest.approx(expected.item(), rel=1e-5)


def test_the_log_joint_is_differentiable_in_every_parameter(generator):
    x, y = linear_data(generator=generator)
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian())
    params = {name: value.requires_grad_() for name, value in model.params().items()}
    model.log_joint(params, x, y, 20).backward()
    for name, value in params.items():
        assert value.grad is not None, name
        assert torch.isfinite(value.grad).all()


def test_a_dropout_layer_is_off_in_the_log_joint(generator):
    x, y = linear_data(generator=generator)
    model = kn.Model(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(DTYPE), kn.Gaussian())
    assert model.log_joint(model.params(), x, y, 20) == model.log_joint(model.params(), x, y, 20)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda p: {k: v for k, v in p.items() if k != "weight"}, "weight"),
        (lambda p: {**p, "wieght": p["weight"]}, "wieght"),
        (lambda p: {**p, "weight": p["weight"][:, :1]}, r"weight.*\(1, 1\)|\(1, 1\).*weight"),
    ],
)
def test_parameters_that_are_not_the_models_are_refused_by_name(change, wanted, generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    with pytest.raises(kn.InvalidArgument, match=wanted):
        model.log_joint(change(model.params()), x, y, 20)


@pytest.mark.parametrize(("size", "error"), [(0, kn.InvalidArgument), ("20", kn.InvalidType), (2.5, kn.InvalidType)])
def test_the_size_of_the_data_is_checked(size, error, generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    with pytest.raises(error, match="size must be a whole number"):
        model.log_joint(model.params(), x, y, size)


def test_targets_with_other_rows_than_the_inputs_are_refused(generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    with pytest.raises(kn.InvalidData, match=r"rows"):
        model.log_likelihood(model.params(), x, y[:3])


# --- which parameters are what --------------------------------------------------------------------------------------


def test_all_parameters_are_random_unless_said_otherwise():
    model = kn.Model(mlp(), kn.Gaussian())
    assert model.random_names == ["0.weight", "0.bias", "2.weight", "2.bias", "likelihood.log_noise"]
    assert model.point_names == []
    assert list(model.params()) == model.random_names


def test_random_parameters_the_others_are_points_and_frozen_ones_are_gone():
    model = kn.Model(mlp(), kn.Gaussian(), random="last_layer", frozen="0.bias")
    assert model.random_names == ["2.weight", "2.bias", "likelihood.log_noise"]
    assert model.point_names == ["0.weight"]
    assert "0.bias" not in model.params()
    assert model.frozen_names == {"0.bias"}


def test_a_frozen_parameter_keeps_the_networks_value_and_has_no_prior(generator):
    x, y = linear_data(generator=generator)
    net = nn.Linear(2, 1).to(DTYPE)
    model = kn.Model(net, kn.Gaussian(noise=0.1), kn.Normal(2.0), frozen="bias")
    weight = torch.zeros((1, 2), dtype=DTYPE)
    expected = _normal_log_prob(y, net.bias.detach(), 0.1).sum() + _normal_log_prob(weight, 0.0, 2.0).sum()
    torch.testing.assert_close(model.log_joint({"weight": weight}, x, y, 20), expected)


def test_a_frozen_noise_keeps_its_start_value(generator):
    x, y = linear_data(generator=generator)
    model = linear_model(noise=None, frozen="likelihood.*")
    assert list(model.params()) == ["weight", "bias"]
    fixed = kn.Model(model.net, kn.Gaussian(noise=1.0))
    torch.testing.assert_close(
        model.log_likelihood(model.params(), x, y), fixed.log_likelihood(fixed.params(), x, y), rtol=1e-6, atol=1e-6
    )


def test_hyperparameters_of_the_prior_are_points():
    model = linear_model(prior=kn.EmpiricalBayes(kn.Normal(1.0)))
    assert model.hyper_names == ["prior.*.log_scale"]
    assert model.point_names == ["prior.*.log_scale"]
    assert model.random_names == ["weight", "bias"]


def test_start_values_are_copies_of_the_networks_own():
    net = mlp()
    model = kn.Model(net, kn.Gaussian(0.1))
    model.params()["0.weight"].zero_()
    assert torch.equal(model.params()["0.weight"], net[0].weight)


def test_everything_takes_the_networks_dtype():
    model = kn.Model(mlp().double(), kn.Gaussian())
    assert model.dtype == torch.float64
    assert {value.dtype for value in model.params().values()} == {torch.float64}


def test_a_prior_by_glob_reaches_the_parameters_it_names():
    prior = {"*.bias": kn.Flat(), "likelihood.*": kn.Normal(0.1), "*": kn.Normal(3.0)}
    model = kn.Model(mlp(), kn.Gaussian(), prior)
    assert model.prior.prior_of("0.bias") == kn.Flat()
    assert model.prior.prior_of("2.weight") == kn.Normal(3.0)
    assert model.prior.prior_of("likelihood.log_noise") == kn.Normal(0.1)


def test_no_prior_means_a_standard_normal_one():
    assert linear_model().prior.prior_of("weight") == kn.Normal(1.0)


def test_the_printed_model_names_its_parts_and_counts_its_parameters():
    shown = repr(kn.Model(mlp(), kn.Gaussian(0.1), kn.Normal(2.0), random="last_layer"))
    parts = "Sequential, Gaussian(noise=0.1, outputs=1), prior=Normal(scale=2.0, loc=0.0)"
    assert shown == f"Model({parts}: 17 parameters, 5 random)"


# --- the prior predictive -------------------------------------------------------------------------------------------


def test_the_prior_predictive_of_a_linear_net_has_the_moments_in_closed_form(generator):
    # f(x) = w.x + b ~ N(0, s^2 (|x|^2 + 1)), y adds noise^2. With K draws the mean errs by sd / sqrt(K) and the
    # variance by v sqrt(2 / (K - 1)): 5 standard errors allowed at each of 6 rows
    scale, noise, draws = 1.5, 0.3, 4_000
    x = torch.randn((6, 2), generator=generator, dtype=DTYPE)
    model = linear_model(noise=noise, prior=kn.Normal(scale))
    prediction = model.prior_predict(x, samples=draws, generator=generator)
    variance = scale**2 * (x.square().sum(1, keepdim=True) + 1.0)
    assert len(prediction.samples) == draws
    assert (prediction.mean.abs() < 5 * (variance / draws).sqrt()).all()
    assert ((prediction.epistemic - variance).abs() < 5 * variance * math.sqrt(2 / draws)).all()
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(variance, noise**2))


def test_the_prior_predictive_repeats_with_its_generator_and_moves_without():
    model, x = linear_model(), torch.zeros(3, 2)
    first, second = (model.prior_predict(x, samples=5, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first.samples, second.samples)
    assert not torch.equal(model.prior_predict(x, samples=5).samples, first.samples)


def test_hyperparameters_stay_at_their_start_in_draws_from_the_prior(generator):
    model = linear_model(prior=kn.EmpiricalBayes(kn.Normal(0.01)))
    stack = model.prior_draws(200, generator=generator)
    assert (stack["prior.*.log_scale"] == model.params()["prior.*.log_scale"]).all()
    assert stack["weight"].abs().max() < 0.06  # six of its scale


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_a_posterior_as_prior_is_drawn_from(make, generator):
    first = make(linear_model(), generator)
    weight = linear_model(prior=first).prior_draws(4_000, generator=generator)["weight"]
    error = first.std()["weight"] / math.sqrt(4_000)
    assert ((weight.mean(0) - first.mean()["weight"]).abs() < 5 * error).all()


def test_parameters_that_are_not_random_keep_their_start_values_in_the_prior_predictive(generator):
    model = linear_model(random="weight")
    outputs = model.prior_predict(torch.zeros(1, 2), samples=10, generator=generator).samples
    torch.testing.assert_close(outputs, model.params()["bias"].expand_as(outputs))


# --- a posterior as prior -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [diagonal_posterior, full_posterior])
def test_a_posterior_as_prior_has_the_posteriors_density_and_its_means_as_start(family, generator):
    first = linear_model(noise=None)
    posterior = family(first, generator)
    second = kn.Model(first.net, kn.Gaussian(), prior=posterior)
    params = {name: torch.randn(v.shape, generator=generator, dtype=DTYPE) for name, v in first.params().items()}
    torch.testing.assert_close(second.log_prior(params), posterior.log_prob(params))
    for name, value in posterior.mean().items():
        torch.testing.assert_close(second.params()[name], value)


def test_points_of_the_posterior_stay_fixed_at_their_values_in_the_next_model(generator):
    x, _ = linear_data(generator=generator)
    posterior = diagonal_posterior(linear_model(random="weight"), generator)
    posterior.points["bias"].fill_(3.0)
    model = kn.Model(nn.Linear(2, 1).to(DTYPE), kn.Gaussian(0.1), prior=posterior)
    assert model.frozen_names == {"bias"}
    assert model.random_names == ["weight"]
    output = model.forward({"weight": torch.zeros((1, 2), dtype=DTYPE)}, x)
    assert torch.equal(output, torch.full_like(output, 3.0))


def test_modules_that_a_posterior_prior_fixes_stay_in_evaluation_mode(generator):
    posterior = diagonal_posterior(kn.Model(batch_norm_net(), kn.Gaussian(0.1), random="last_layer"), generator)
    model = kn.Model(batch_norm_net(), kn.Gaussian(0.1), prior=posterior)
    buffers = model.buffers()
    model.forward(model.params(), torch.randn(5, 2) + 3.0, buffers=buffers, training=True)
    assert all(torch.equal(value, posterior.buffers[name]) for name, value in buffers.items())


def test_a_posterior_of_another_network_is_refused_as_prior():
    posterior = diagonal_posterior(linear_model())
    with pytest.raises(kn.InvalidArgument, match=r"prior is a posterior that says nothing about 0\.weight, 0\.bias"):
        kn.Model(mlp(), kn.Gaussian(0.1), prior=posterior)
    with pytest.raises(kn.InvalidArgument, match=r"prior has shape \(1, 2\) for 'weight', the network \(1, 3\)"):
        kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), prior=posterior)


def test_a_correlated_prior_is_conditioned_on_what_is_frozen(generator):
    # p(w | b) is proportional to p(w, b) at the frozen b
    posterior = full_posterior(linear_model(), generator)
    model = kn.Model(nn.Linear(2, 1).to(DTYPE), kn.Gaussian(0.1), prior=posterior, frozen="bias")
    bias = model.net.bias.detach()
    params = [{"weight": torch.randn((1, 2), dtype=DTYPE, generator=generator)} for _ in range(2)]
    joint = [posterior.log_prob({"bias": bias, **each}) for each in params]
    torch.testing.assert_close(model.log_prior(params[0]) - model.log_prior(params[1]), joint[0] - joint[1])


def test_a_point_estimate_under_a_correlated_prior_is_refused(generator):
    with pytest.raises(
        kn.Unsupported, match="correlations between its parameters, so 'bias' cannot be a point estimate"
    ):
        linear_model(prior=full_posterior(linear_model(), generator), random="weight")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "wanted"),
    [
        ({"likelihood": kn.Gaussian}, kn.InvalidType, r"likelihood must be an instance: write Gaussian\(\)"),
        ({"likelihood": "gaussian"}, kn.InvalidType, "got the text 'gaussian'"),
        ({"prior": kn.Normal}, kn.InvalidType, r"prior must be an instance: write Normal\(\.\.\.\) with parentheses"),
        ({"prior": 1.0}, kn.InvalidType, "prior must be a knowable prior, a mapping .* or a posterior; got 1.0"),
        ({"net": 3}, kn.InvalidType, "net must be a torch.nn.Module, got int"),
        ({"random": "q"}, kn.InvalidArgument, "random='q' matches no parameter"),
        ({"frozen": "*"}, kn.InvalidArgument, r"random='\*' leaves no parameter random"),
        ({"random": []}, kn.InvalidArgument, r"random=\[\] leaves no parameter random"),
        ({"net": nn.Tanh()}, kn.InvalidArgument, "leaves no parameter random"),
    ],
)
def test_a_model_is_checked_at_the_door(arguments, error, wanted):
    with pytest.raises(error, match=wanted):
        kn.Model(**{"net": nn.Linear(2, 1), "likelihood": kn.Gaussian(0.1), **arguments})


def test_a_network_that_uses_the_likelihoods_prefix_for_the_same_name_is_refused():
    net = nn.Module()
    net.likelihood = nn.Module()
    net.likelihood.log_noise = nn.Parameter(torch.zeros(()))
    with pytest.raises(kn.InvalidArgument, match=r"begins with 'likelihood\.'; rename that submodule"):
        kn.Model(net, kn.Gaussian())


def test_a_parameter_that_is_0_or_1_is_random_or_frozen():
    prior = {"bias": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)}
    assert kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), prior).binary_names == ["bias"]
    assert kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), kn.Normal(1.0), frozen="bias").binary_names == []
    with pytest.raises(kn.Unsupported, match=r"'bias' has a discrete .* prior and cannot be trained by gradient"):
        kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), prior, random="weight")


# --- the same model under other priors ------------------------------------------------------------------------------


def test_other_priors_take_the_place_of_the_models_own_and_the_rest_become_points():
    model = kn.Model(mlp(), kn.Gaussian(), {"*.bias": kn.Normal(3.0), "*": kn.LaplacePrior(0.5)}, frozen="2.bias")
    other = model.with_priors({"0.weight": kn.LogUniform()}, random=["0.weight"])
    assert other.random_names == ["0.weight"]
    assert other.point_names == ["0.bias", "2.weight", "likelihood.log_noise"]
    priors = [other.prior.prior_of(name) for name in ("0.weight", "0.bias", "2.weight")]
    assert priors == [kn.LogUniform(), kn.Normal(3.0), kn.LaplacePrior(0.5)]
    assert other.prior.prior_of("likelihood.log_noise") == model.prior.prior_of("likelihood.log_noise")
    assert other.frozen_names == {"2.bias"} and other.params().keys() == model.params().keys()
    assert model.prior.prior_of("0.weight") == kn.LaplacePrior(0.5)  # the model itself is as it was


def test_scales_that_nobody_learns_any_more_are_gone():
    prior = {"*.weight": kn.EmpiricalBayes(kn.Normal(1.0)), "*": kn.Normal(1.0)}
    model = kn.Model(mlp(), kn.Gaussian(0.1), prior)
    weights = ["0.weight", "2.weight"]
    other = model.with_priors(dict.fromkeys(weights, kn.LogUniform()), random=weights)
    assert model.hyper_names and not other.hyper_names
    assert list(other.params()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_names_are_meant_literally():
    net = nn.ModuleDict({"a[b]": nn.Linear(1, 1)})
    net.forward = lambda x: net["a[b]"](x)  # type: ignore[method-assign]
    model = kn.Model(net, kn.Gaussian(0.1)).with_priors({"a[b].weight": kn.Flat()}, random=["a[b].weight"])
    assert model.prior.prior_of("a[b].weight") == kn.Flat()


def test_a_posterior_as_prior_cannot_be_replaced_in_part(generator):
    model = kn.Model(nn.Linear(2, 1).to(DTYPE), kn.Gaussian(0.1), diagonal_posterior(linear_model(), generator))
    with pytest.raises(kn.Unsupported, match="prior is a posterior"):
        model.with_priors({"weight": kn.LogUniform()}, random=["weight"])
