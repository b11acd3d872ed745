"""Tests of the constant rate: its two parts against a linear model, where both are known."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.ensembles.swag import (
    _Probe,
    batches_for_rate,
    constant_rate,
    gradient_noise,
    largest_curvature,
    lowest_log_likelihood,
)
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model

NOISE = 0.5


def _at_the_mode(rows: int) -> tuple[kn.Model, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, y = linear_data(rows)
    model = linear_model(noise=NOISE)
    design = torch.cat([x, torch.ones(rows, 1, dtype=DTYPE)], 1)
    hessian = design.T @ design / NOISE**2 + torch.eye(3, dtype=DTYPE)
    mode = torch.linalg.solve(hessian, design.T @ y / NOISE**2).flatten()
    model = model.starting_at({"weight": mode[:2].view(1, 2), "bias": mode[2:]})
    return model, x, y, design


def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian():
    # twenty steps of the power method: the error falls with the ratio of the two largest eigenvalues
    model, x, y, design = _at_the_mode(40)
    probe = _Probe(model, as_data((x, y)), 0)
    eigenvalues = torch.linalg.eigvalsh(design.T @ design / NOISE**2 / 40 + torch.eye(3, dtype=DTYPE) / 40)
    assert largest_curvature(probe, [(x, y)]) == pytest.approx(eigenvalues[-1].item(), rel=0.05)


def test_the_curvature_is_that_of_the_steepest_batch():
    # one input of 10 among inputs of 0.1: the batch that has it is steep, wherever it comes
    x = torch.full((40, 1), 0.1, dtype=DTYPE)
    x[23] = 10.0
    model = kn.Model(torch.nn.Linear(1, 1, bias=False).to(DTYPE), kn.Gaussian(1.0), kn.Flat())
    data = as_data((x, 0 * x))
    steepest = (100.0 + 3 * 0.01) / 4
    for seed in range(3):
        batches = list(data.batches(4, seed=seed))
        assert largest_curvature(_Probe(model, data, 0), batches) == pytest.approx(steepest, rel=1e-6)


def test_the_few_rows_at_the_end_of_an_epoch_do_not_count():
    # batches of 10, 10, 10 and 4 rows; a row with an input of 10 counts only where it is in one of the first three
    x = torch.full((34, 1), 0.1, dtype=DTYPE)
    model = kn.Model(torch.nn.Linear(1, 1, bias=False).to(DTYPE), kn.Gaussian(1.0), kn.Flat())
    numbers = torch.arange(34, dtype=DTYPE).unsqueeze(1)
    turns = [batch[0].flatten().long() for batch in as_data((numbers, x)).batches(10, seed=3)]
    assert [len(turn) for turn in turns] == [10, 10, 10, 4]
    for turn, curvature in ((turns[-1], 0.01), (turns[1], (100 + 9 * 0.01) / 10)):
        steep = x.clone()
        steep[turn[0]] = 10.0
        # all targets are what the network says: gradients have no noise
        target = steep * model.params()["weight"]
        assert constant_rate(model, as_data((steep, target)), 10, seed=3) == pytest.approx(0.5 / curvature, rel=1e-3)


def test_a_flat_batch_does_not_hide_the_others():
    x = torch.zeros(40, 1, dtype=DTYPE)
    x[39] = 2.0
    model = kn.Model(torch.nn.Linear(1, 1, bias=False).to(DTYPE), kn.Gaussian(1.0), kn.Flat())
    batches = [(x[:20], 0 * x[:20]), (x[20:], 0 * x[20:])]
    assert largest_curvature(_Probe(model, as_data((x, 0 * x)), 0), batches) == pytest.approx(4.0 / 20, rel=1e-6)


def test_sgd_may_fall_by_twice_what_a_posterior_does_or_a_nat_for_each_number():
    model, x, y, _ = _at_the_mode(40)
    level = model.log_likelihood(model.params(), x, y).sum().item()
    assert lowest_log_likelihood(model, as_data((x, y)), 40, seed=0) == pytest.approx(level - 3 - 20)
    few = model.log_likelihood(model.params(), x[:2], y[:2]).sum().item()
    assert lowest_log_likelihood(model, as_data((x[:2], y[:2])), 2, seed=0) == pytest.approx(few - 2 - 20)


def test_the_noise_is_the_trace_of_the_covariance_of_the_batches_gradients():
    model, x, y, _ = _at_the_mode(40)
    data = as_data((x, y))
    batches = list(data.batches(8, seed=1))
    probe = _Probe(model, data, 0)
    gradients = []
    for bx, by in batches:
        part = torch.cat([bx, torch.ones(len(bx), 1, dtype=DTYPE)], 1)
        theta = torch.cat([model.params()["weight"].flatten(), model.params()["bias"]])
        gradients.append(part.T @ (part @ theta - by.flatten()) / NOISE**2 / len(bx) + theta / 40)
    assert gradient_noise(probe, batches) == pytest.approx(torch.stack(gradients).T.cov().trace().item())
    assert gradient_noise(probe, batches[:1]) == 0.0


def test_the_rate_is_the_smaller_of_its_two_limits():
    model, x, y, _ = _at_the_mode(40)
    data = as_data((x, y))
    probe = _Probe(model, data, 0)
    steep = 0.5 / largest_curvature(probe, list(data.batches(4, seed=3)))
    near = 0.1 * 2 * 3 / (40 * gradient_noise(probe, list(data.batches(4, seed=3))))
    assert constant_rate(model, data, 4, seed=3) == pytest.approx(min(steep, near), rel=0.05)
    assert constant_rate(model, data, 40, seed=3) == pytest.approx(0.5 / largest_curvature(probe, [(x, y)]), rel=0.05)


def test_looking_for_a_rate_changes_nothing():
    model, (x, y) = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian()), linear_data()
    before, state = model.buffers(), torch.get_rng_state()
    first, second = (constant_rate(model, as_data((x, y)), 5, seed=1) for _ in range(2))
    assert first == second > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.buffers().items())


def test_dropout_is_the_same_on_both_sides_of_a_difference():
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(DTYPE)
    model, (x, y) = kn.Model(net, kn.Gaussian(0.5)), linear_data()
    probe = _Probe(model, as_data((x, y)), 0)
    assert torch.equal(probe.gradient((x, y)), probe.gradient((x, y)))


def test_at_the_first_limit_the_stationary_distribution_is_as_near_to_the_posterior_as_any_rate_brings_it():
    # stationary: H Σ + Σ H = e C, so Σ = e S; KL(N(0, e S) || N(0, (N H)^-1)) by e alone, on a grid
    hessian = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=DTYPE)
    noise = torch.tensor([[0.4, -0.1], [-0.1, 0.2]], dtype=DTYPE)
    rows = 50
    eye = torch.eye(2, dtype=DTYPE)
    unit = torch.linalg.solve(torch.kron(hessian, eye) + torch.kron(eye, hessian), noise.flatten()).view(2, 2)

    def divergence(rate: float) -> float:
        covariance = rate * unit
        return 0.5 * ((rows * hessian @ covariance).trace() - 2 - torch.logdet(rows * hessian @ covariance)).item()

    best = 2 * 2 / (rows * noise.trace().item())
    assert all(divergence(best) < divergence(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


def test_short_runs_of_large_networks_look_at_few_batches(monkeypatch):
    model, x, y, _ = _at_the_mode(40)
    rows = as_data((x, y))
    assert batches_for_rate(model, rows, 4, 2) == 50  # a small network
    monkeypatch.setattr("knowable.inference.ensembles.swag.LITTLE_WORK", 0)
    assert batches_for_rate(model, rows, 4, 2) == 4
    assert batches_for_rate(model, rows, 4, 100) == 10  # 1,000 steps
    assert batches_for_rate(model, rows, 4, 1000) == 50
