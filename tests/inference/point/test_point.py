"""Tests of fitting one point; ridge regression in closed form is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.point.point import PointObjective
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model, same_params


def test_the_loss_is_the_negative_log_joint_per_example(generator):
    x, y = linear_data(generator=generator)
    model = linear_model(noise=None, prior=kn.Normal(0.5))
    loss, terms = PointObjective(model, 20, use_prior=True)(x, y)
    params = model.params()
    torch.testing.assert_close(loss, -model.log_joint(params, x, y, 20) / 20)
    torch.testing.assert_close(terms["log_likelihood"], model.log_likelihood(params, x, y).sum())
    torch.testing.assert_close(terms["log_prior"], model.log_prior(params))


def test_the_loss_of_a_batch_stands_for_all_rows(generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    loss, terms = PointObjective(model, 20, use_prior=True)(x[:5], y[:5])
    torch.testing.assert_close(loss, -model.log_joint(model.params(), x[:5], y[:5], 20) / 20)
    torch.testing.assert_close(terms["log_likelihood"], 4 * model.log_likelihood(model.params(), x[:5], y[:5]).sum())


def test_maximum_likelihood_leaves_the_prior_out(generator):
    x, y = linear_data(generator=generator)
    model = linear_model()
    loss, terms = PointObjective(model, 20, use_prior=False)(x, y)
    torch.testing.assert_close(loss, -model.log_likelihood(model.params(), x, y).mean())
    assert "log_prior" not in terms


def test_the_mode_of_a_linear_model_is_ridge_regression(generator):
    # (X'X / noise^2 + 1 / scale^2) w = X'y / noise^2; Adam's last steps of size 1e-5 decide the tolerance
    x, y = linear_data(30, generator=generator)
    noise, scale = 0.5, 0.7
    design = torch.cat([x, torch.ones((30, 1), dtype=DTYPE)], 1)
    precision = design.T @ design / noise**2 + torch.eye(3, dtype=DTYPE) / scale**2
    expected = torch.linalg.solve(precision, design.T @ y / noise**2).flatten()
    model = linear_model(noise=noise, prior=kn.Normal(scale))
    mode = kn.MAP(epochs=800, learning_rate=0.05).fit(model, (x, y)).mean()
    torch.testing.assert_close(torch.cat([mode["weight"].flatten(), mode["bias"]]), expected, rtol=0, atol=1e-4)


def test_random_parameters_become_one_atom_and_the_others_points(generator):
    x, y = linear_data(generator=generator)
    posterior = kn.MAP(epochs=5).fit(linear_model(noise=None, random="weight"), (x, y))
    assert len(posterior) == 1
    assert list(posterior.stack) == ["weight"]
    assert list(posterior.points) == ["bias", "likelihood.log_noise"]


def test_the_diagnostics_report_the_last_terms_and_the_noise(generator):
    x, y = linear_data(generator=generator)
    posterior = kn.MAP(epochs=150).fit(linear_model(noise=None), (x, y), seed=3)
    report = posterior.diagnostics
    assert report.method == "MAP(epochs=150)"
    assert [record["step"] for record in report.history] == [100, 150]
    assert report["log_noise"] == pytest.approx(posterior.mean()["likelihood.log_noise"].item())
    assert report["log_prior"] == report.history[-1]["log_prior"]
    assert posterior.seed == 3


def test_batch_norm_statistics_of_the_fit_go_into_the_posterior_and_not_into_the_network(generator):
    net = batch_norm_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x, y = linear_data(generator=generator)
    posterior = kn.MAP(epochs=5).fit(kn.Model(net, kn.Gaussian(0.1)), (x + 3.0, y))
    assert posterior.buffers["1.num_batches_tracked"] == 5
    assert not torch.equal(posterior.buffers["1.running_mean"], before["1.running_mean"])
    assert same_params(dict(net.state_dict()), before)


def test_held_out_rows_are_scored_in_evaluation_mode(generator):
    x, y = linear_data(generator=generator)
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)).to(DTYPE)
    model = kn.Model(net, kn.Gaussian(0.5))
    objective = PointObjective(model, 20, use_prior=True)
    expected = model.log_likelihood(model.params(), x, y)
    torch.testing.assert_close(objective.predictive_log_likelihood(x, y), expected)


def test_a_prior_with_a_scale_to_learn_is_refused_with_the_reason(generator):
    model = linear_model(prior=kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match=r"MAP cannot learn the prior's own scale.*such as MeanFieldVI"):
        kn.MAP().fit(model, linear_data(generator=generator))


# --- weights on rows, and inputs moved against the network ----------------------------------------------------------


def test_a_row_of_weight_two_is_worth_two_rows(generator):
    x, y = linear_data(generator=generator)
    model = linear_model(noise=None)
    weights = torch.tensor([2.0, 0.0] * 10, dtype=DTYPE)
    doubled = PointObjective(model, 20, use_prior=True)(torch.cat([x[::2], x[::2]]), torch.cat([y[::2], y[::2]]))
    weighted = PointObjective(model, 20, use_prior=True)(x, y, weights)
    torch.testing.assert_close(weighted[0], doubled[0])
    torch.testing.assert_close(weighted[1]["log_likelihood"], doubled[1]["log_likelihood"])


def test_the_mode_with_weights_is_weighted_ridge_regression(generator):
    x, y = linear_data(generator=generator)
    weights = torch.rand(20, generator=generator, dtype=DTYPE)
    posterior = kn.MAP(epochs=3_000, learning_rate=0.05).fit(linear_model(noise=0.5), kn.Data((x, y), 20, weights))
    design = torch.cat([x, torch.ones(20, 1, dtype=DTYPE)], 1)
    precision = design.T @ (weights.unsqueeze(1) * design) / 0.25 + torch.eye(3, dtype=DTYPE)
    expected = torch.linalg.solve(precision, design.T @ (weights.unsqueeze(1) * y) / 0.25).flatten()
    found = torch.cat([posterior.mean()["weight"].flatten(), posterior.mean()["bias"]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inputs_are_moved_against_the_network_by_the_sign_of_the_gradient(generator):
    # a linear network: the log density falls fastest along sign((y - f) w) of each input
    x, y = linear_data(generator=generator)
    model = linear_model(noise=0.5)
    attack = torch.tensor([0.1, 0.3], dtype=DTYPE)
    loss, _ = PointObjective(model, 20, use_prior=False, attack=attack)(x, y)
    params = model.params()
    residual = y - model.forward(params, x)
    moved = x - attack * (residual * params["weight"]).sign()
    clean, worse = model.log_likelihood(params, x, y).mean(), model.log_likelihood(params, moved, y).mean()
    assert worse < clean
    torch.testing.assert_close(loss, -0.5 * (clean + worse))


# --- the prior's gradient, written by hand ---------------------------------------------------------------------------


class _Odd(nn.Module):
    """Parameters that share a gradient, one that is not used, and one by itself."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.register_parameter(f"part{number}", nn.Parameter(torch.randn(2, 1, dtype=DTYPE)))
        self.unused = nn.Parameter(torch.randn(3, dtype=DTYPE))
        self.last = nn.Linear(1, 1, dtype=DTYPE)

    def forward(self, x):
        return self.last(x @ (self.part0 + self.part1) + (x * self.part2.T).sum(1, keepdim=True))


PRIORS = [
    kn.Normal(0.3),
    {"last*": kn.Normal(2.0, loc=1.5), "unused": kn.Flat(), "*": kn.Normal(0.7)},
    {"part0": kn.LaplacePrior(0.5), "likelihood*": kn.StudentTPrior(), "*": kn.Normal(0.7)},
    kn.LaplacePrior(0.5),
]


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_loss_and_gradient_are_those_of_the_log_joint(prior, generator):
    x, y = linear_data(generator=generator)
    model = kn.Model(_Odd(), kn.Gaussian(), prior)
    objective = PointObjective(model, 50, use_prior=True)
    loss, terms = objective(x, y)
    loss.backward()
    params = {name: value.detach().requires_grad_() for name, value in model.params().items()}
    expected = -model.log_likelihood(params, x, y).mean() - model.log_prior(params) / 50
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(terms["log_prior"], model.log_prior(params).detach())
    wanted = torch.autograd.grad(expected, list(params.values()), materialize_grads=True)
    for (name, value), gradient in zip(objective.params().items(), wanted, strict=True):
        found = torch.zeros_like(value) if value.grad is None else value.grad
        torch.testing.assert_close(found, gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_prior_is_added_to_the_gradient_without_another_tensor():
    model = kn.Model(nn.Linear(500, 400), kn.Gaussian(0.1))
    objective = PointObjective(model, 10, use_prior=True)
    x, y = torch.randn(4, 500), torch.randn(4, 400)
    loss, _ = objective(x, y)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    made = max(event.self_cpu_memory_usage for event in profile.events() if event.name == "NormalLogPriorBackward")
    assert made < 400 * 500 * 4  # the tensors that it makes are single numbers
