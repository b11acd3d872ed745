"""Tests of Monte Carlo prediction under a memory budget."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.posterior import monte_carlo as predicting
from knowable.core.posterior.monte_carlo import bytes_per_row, predict_outputs, rows_that_fit
from knowable.core.support.checks import parse_memory
from tests.core.cases import atoms, batch_norm_net, diagonal_posterior, full_posterior, mlp


@pytest.mark.parametrize(
    ("value", "bytes_"),
    [
        (None, None), (1000, 1000), ("1000", 1000), ("1B", 1), ("500MB", 500_000_000), ("500mb", 500_000_000),
        ("1.5 GB", 1_500_000_000), ("2KiB", 2048), ("1GiB", 2**30), (" 3 MiB ", 3 * 2**20), (np.int64(7), 7),
    ],
)  # fmt: skip
def test_memory_is_read_from_numbers_and_text(value, bytes_):
    assert parse_memory(value) == bytes_


@pytest.mark.parametrize("value", ["lots", "", "5 XB", "-5MB", "1.2.3MB", ".MB", "0MB", 0, -1, "nan"])
def test_memory_that_makes_no_sense_is_refused(value):
    with pytest.raises(kn.InvalidArgument, match="max_memory must be"):
        parse_memory(value)


@pytest.mark.parametrize("value", [1.5, True, [1]])
def test_memory_of_another_type_is_refused(value):
    with pytest.raises(kn.InvalidType, match="max_memory must be bytes or text such as '500MB', got"):
        parse_memory(value)


POSTERIORS = {
    "diagonal": lambda: diagonal_posterior(kn.Model(mlp(width=8), kn.Gaussian()), torch.Generator().manual_seed(0)),
    "full": lambda: full_posterior(kn.Model(mlp(), kn.Gaussian(0.1)), torch.Generator().manual_seed(0)),
    "few atoms": lambda: atoms(kn.Model(mlp(), kn.Gaussian(0.1)), 5, torch.Generator().manual_seed(0)),
    "many atoms": lambda: atoms(kn.Model(mlp(), kn.Gaussian(0.1)), 200, torch.Generator().manual_seed(0)),
    "batch norm": lambda: diagonal_posterior(
        kn.Model(batch_norm_net(), kn.Gaussian(0.1)), torch.Generator().manual_seed(0)
    ),
}


@pytest.mark.parametrize("make", POSTERIORS.values(), ids=POSTERIORS)
@pytest.mark.parametrize("memory", [22_000, 60_000, "1MB"])
def test_a_capped_prediction_is_the_uncapped_one(make, memory, generator):
    # the same draws in other blocks: only the order of floating-point sums inside a layer may differ
    x = torch.randn((50, 2), generator=generator)
    free, capped = make().predict(x, 50), make().predict(x, 50, max_memory=memory)
    torch.testing.assert_close(capped.samples, free.samples, rtol=1e-5, atol=1e-5)
    assert torch.equal(capped.log_weights, free.log_weights)
    torch.testing.assert_close(capped.total, free.total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", POSTERIORS.values(), ids=POSTERIORS)
def test_a_stream_of_predictions_is_the_whole_prediction_in_pieces(make, generator):
    x = torch.randn((50, 2), generator=generator)
    posterior = make()
    whole = posterior.predict(x, 20)
    pieces = list(posterior.predict_stream(x, 20, max_memory=4_000))
    assert len(pieces) > 1
    torch.testing.assert_close(torch.cat([each.samples for each in pieces], 1), whole.samples, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([each.mean for each in pieces]), whole.mean, rtol=1e-5, atol=1e-5)


def test_a_stream_with_a_generator_uses_the_same_draws_in_every_piece(generator):
    posterior = POSTERIORS["diagonal"]()
    x = torch.randn((1, 2), generator=generator).expand(50, 2)
    pieces = list(posterior.predict_stream(x, 20, torch.Generator().manual_seed(9), max_memory=4_000))
    assert all(torch.equal(each.samples[:, :1], pieces[0].samples[:, :1]) for each in pieces)


def test_a_cap_too_small_for_the_result_is_refused_with_the_way_out():
    posterior = POSTERIORS["diagonal"]()
    wanted = (
        r"max_memory=1,000 is too small: .* 64 draws for 100 rows and their copies take 25,600 bytes.*predict_stream"
    )
    with pytest.raises(kn.InvalidArgument, match=wanted):
        posterior.predict(torch.zeros(100, 2), max_memory=1_000)


def test_rows_that_fit_leave_half_of_the_memory_to_the_result():
    posterior = POSTERIORS["diagonal"]()
    x = torch.zeros(100, 2)
    assert rows_that_fit(posterior, x, 10, 8_000) == 100  # 10 draws of 4 bytes: 40 a row, 4,000 bytes for the result
    assert rows_that_fit(posterior, x, 10, 1) == 1


@pytest.mark.parametrize("memory", [200_000, 2_000_000])
def test_the_plan_keeps_what_it_counts_within_the_memory(memory):
    posterior = diagonal_posterior(kn.Model(mlp(8, 2, width=64), kn.Gaussian(0.1)))
    x, draws = torch.zeros(500, 8), 16
    footprint = predicting._Footprint(posterior, x)
    plan = predicting.Budget(posterior, x, draws, memory)
    result = draws * len(x) * footprint.output
    weights = (draws if plan.keep else plan.block) * footprint.draw
    together = min(plan.block, DRAWS_AT_ONCE) if plan.vectorise else 1
    working = plan.rows * (footprint.working + (together - 1) * footprint.own)
    assert result + weights + working <= memory


def test_what_is_counted_covers_what_a_forward_pass_computes():
    # one row of a net 8 -> 64 -> tanh -> 2, in floats: 64 + 64 + 2 at the least
    posterior = diagonal_posterior(kn.Model(mlp(8, 2, width=64), kn.Gaussian(0.1)))
    footprint = predicting._Footprint(posterior, torch.zeros(10, 8))
    assert footprint.output == 2 * 4
    assert footprint.working >= (64 + 64 + 2) * 4
    assert footprint.draw == (8 * 64 + 64 + 64 * 2 + 2) * 4


def test_bytes_of_a_row_are_those_of_all_that_is_computed_from_it():
    # 3 inputs -> 50 -> tanh -> 7 outputs in float32: at least 50 + 50 + 7 numbers, and not many times as many
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 7))
    model = kn.Model(net, kn.Categorical())
    for rows in (1, 2, 100):
        found = bytes_per_row(model, torch.randn(rows, 3), model.buffers())
        assert 4 * (50 + 50 + 7) <= found <= 4 * 4 * (50 + 50 + 7)
    assert bytes_per_row(kn.Model(net.double(), kn.Categorical()), torch.randn(2, 3).double(), {}) >= 1.5 * found


def test_draws_are_kept_for_the_next_prediction_where_they_fit():
    posterior = POSTERIORS["diagonal"]()
    calls = []
    original = posterior.draw_block
    posterior.draw_block = lambda *arguments: calls.append(arguments) or original(*arguments)
    x = torch.zeros(3, 2)
    posterior.predict(x, 10)
    posterior.predict(x, 10)
    assert len(calls) == 1
    posterior.predict(x, 11)
    assert len(calls) == 2


def test_draws_are_not_kept_where_they_take_too_much():
    posterior = diagonal_posterior(kn.Model(mlp(width=500), kn.Gaussian(0.1)))  # 2,001 floats a draw
    x = torch.zeros(3, 2)
    free = posterior.predict(x, 64).samples
    posterior._kept = None
    capped = posterior.predict(x, 64, max_memory=300_000).samples
    assert posterior._kept is None
    torch.testing.assert_close(capped, free, rtol=1e-5, atol=1e-5)


def test_a_large_network_is_run_draw_by_draw(monkeypatch, generator):
    posterior = POSTERIORS["diagonal"]()
    x = torch.randn((5, 2), generator=generator)
    together = posterior.predict(x, 12).samples
    monkeypatch.setattr(predicting, "_VECTORISE_BELOW", 0)
    torch.testing.assert_close(posterior.predict(x, 12).samples, together)


def test_outputs_of_any_shape_come_back_with_draws_first(generator):
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1))
    posterior = diagonal_posterior(kn.Model(net, kn.Categorical()), generator)
    outputs, own, log_weights = predict_outputs(posterior, torch.randn(4, 1, 5, 5), 6, 0, None)
    assert outputs.shape == (6, 4, 3, 5, 5)
    assert own == {}
    assert log_weights.shape == (6,)
    torch.testing.assert_close(log_weights.exp().sum(), torch.tensor(1.0))


PEAK = """
import sys, torch, knowable as kn
from torch import nn
torch.set_num_threads(1)
inputs, width, rows, cap, outputs = map(int, sys.argv[2:])

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

net = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))
model = kn.Model(net, getattr(kn, sys.argv[1])())
start = model.params()
posterior = kn.DiagonalNormal(model, start, {name: torch.full_like(value, 0.01) for name, value in start.items()})
x = torch.randn(rows, inputs)
posterior.predict(x[:4], 2)
posterior._kept = None
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts from here
posterior.predict(x, 32, max_memory=cap)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("likelihood", "inputs", "width", "rows", "cap", "outputs"),
    [
        ("Gaussian", 20, 64, 20_000, 20_000_000, 1),
        ("Gaussian", 20, 64, 20_000, 80_000_000, 1),
        ("Gaussian", 100, 700, 3_000, 40_000_000, 1),
        ("Categorical", 20, 64, 3_000, 160_000_000, 100),  # a copy of the outputs has 38 MB
        ("Bernoulli", 20, 64, 3_000, 160_000_000, 100),
        ("Poisson", 20, 64, 3_000, 240_000_000, 100),
        ("StudentT", 20, 64, 3_000, 240_000_000, 100),
        ("HeteroscedasticGaussian", 20, 64, 3_000, 240_000_000, 100),
    ],
)
def test_a_capped_prediction_takes_no_more_memory_than_it_may(likelihood, inputs, width, rows, cap, outputs):
    # the allocator is told to give back what is freed: what is measured is what is in use, with 10% for its own needs
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, likelihood, *map(str, (inputs, width, rows, cap, outputs))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.1 * cap


@pytest.mark.parametrize("likelihood", [kn.Gaussian(0.3), kn.StudentT(), kn.Poisson(), kn.Bernoulli()], ids=repr)
@pytest.mark.parametrize(
    "method", [kn.MAP(epochs=2), kn.MeanFieldVI(epochs=2), kn.DeepEnsemble(2, epochs=2), kn.Laplace(epochs=2)], ids=repr
)
def test_a_prediction_has_the_shape_of_the_targets_that_were_fitted(method, likelihood, tmp_path):
    net, x = torch.nn.Linear(2, 1), torch.randn(12, 2)
    y = torch.randint(0, 2, (12,)).float()
    flat = method.fit(kn.Model(net, likelihood), (x, y))
    column = method.fit(kn.Model(net, likelihood), (x, y.unsqueeze(1)))
    flat.save(tmp_path / "flat")
    for posterior, shape in ((flat, (12,)), (kn.load(tmp_path / "flat"), (12,)), (column, (12, 1))):
        found, wanted = posterior.predict(x), column.predict(x)
        numbers = ["total", "aleatoric", "epistemic"]
        numbers += ["probs", "labels"] if isinstance(likelihood, kn.Bernoulli) else ["mean", "std", "variance"]
        for name in numbers:
            value = getattr(found, name)
            assert value.shape == shape
            torch.testing.assert_close(value.flatten(), getattr(wanted, name).flatten())
        assert found.samples.shape[1:] == shape and found.draw(3).shape == (3, *shape)
        for target in (y, y.unsqueeze(1)):
            torch.testing.assert_close(found.log_prob(target), wanted.log_prob(y))
        if "mean" in numbers:
            for low, same in zip(found.interval(0.8), wanted.interval(0.8), strict=True):
                assert low.shape == shape
                torch.testing.assert_close(low.flatten(), same.flatten())
        torch.testing.assert_close(next(iter(posterior.predict_stream(x))).total, found.total)
