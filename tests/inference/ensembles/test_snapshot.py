"""Tests of snapshot ensembles: on a quadratic, where every cycle's end is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from tests.core.cases import DTYPE, batch_norm_net, linear_data, mlp, same_params


class _Point(nn.Module):
    """The output is the parameter: with unit noise and a flat prior the loss is |θ - ȳ|² / 2 and a constant."""

    def __init__(self, start: list[float]):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(start, dtype=DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(x), len(self.value))


def _quadratic(start: list[float]) -> kn.Model:
    return kn.Model(_Point(start), kn.Gaussian(1.0), kn.Flat())


def test_snapshots_of_a_quadratic_are_the_iterates_of_gradient_descent_written_out():
    # heavy ball on |θ|²/2 with full batches, rate a_t = a (1 + cos(π (t mod L) / L)) / 2, at least a / 1000
    epochs, cycles, rate = 60, 3, 0.02
    x, y = torch.zeros(4, 1, dtype=DTYPE), torch.zeros(4, 2, dtype=DTYPE)
    method = kn.SnapshotEnsemble(
        epochs=epochs, cycles=cycles, learning_rate=rate, training=kn.Training(optimiser="sgd")
    )
    posterior = method.fit(_quadratic([3.0, -1.0]), (x, y))
    theta, velocity, expected = torch.tensor([3.0, -1.0], dtype=DTYPE), torch.zeros(2, dtype=DTYPE), []
    for t in range(epochs):
        share = (t % 20) / 20
        velocity = 0.9 * velocity + theta
        theta = theta - rate * max(0.5 * (1 + math.cos(math.pi * share)), 1e-3) * velocity
        if (t + 1) % 20 == 0:
            expected.append(theta)
    torch.testing.assert_close(posterior.stack["value"], torch.stack(expected))
    assert posterior.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_every_snapshot_is_at_the_minimum_where_cycles_are_long_enough(generator):
    y = torch.randn(30, 2, generator=generator, dtype=DTYPE) + 2
    method = kn.SnapshotEnsemble(epochs=400, cycles=4, learning_rate=0.05, batch_size=10)
    posterior = method.fit(_quadratic([0.0, 0.0]), (torch.zeros(30, 1, dtype=DTYPE), y))
    for snapshot in posterior.stack["value"][1:]:  # the first cycle has a way to go
        torch.testing.assert_close(snapshot, y.mean(0), rtol=0.0, atol=0.02)


def test_without_epochs_it_settles_first_and_then_goes_through_its_cycles(monkeypatch):
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 100)
    y = torch.tensor([[1.0], [2.0], [3.0]], dtype=DTYPE)
    posterior = kn.SnapshotEnsemble(cycles=3, learning_rate=0.05).fit(
        _quadratic([0.0]), (torch.zeros(3, 1, dtype=DTYPE), y)
    )
    assert posterior.diagnostics.converged is True
    steps = posterior.diagnostics.history[-1]["step"]
    assert len(posterior) == 3 and steps >= 1_000 + 3 * 500
    torch.testing.assert_close(posterior.stack["value"], torch.full((3, 1), 2.0, dtype=DTYPE), rtol=1e-3, atol=1e-3)


def test_only_the_last_snapshots_are_kept_if_so_asked():
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian()), linear_data()
    every = kn.SnapshotEnsemble(epochs=40, cycles=4).fit(model, data)
    last = kn.SnapshotEnsemble(epochs=40, cycles=4, keep=2).fit(model, data)
    assert same_params(last.stack, {name: value[2:] for name, value in every.stack.items()})


def test_snapshots_of_a_network_with_batch_norm_have_their_own_statistics():
    model, (x, y) = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian()), linear_data()
    posterior = kn.SnapshotEnsemble(epochs=20, cycles=2, batch_size=10).fit(model, (x, y))
    assert posterior.buffer_stack["1.num_batches_tracked"].tolist() == [20, 40]
    first = {**posterior.buffers, **{name: value[0] for name, value in posterior.buffer_stack.items()}}
    params = {name: value[0] for name, value in posterior.stack.items()}
    torch.testing.assert_close(posterior.predict(x).samples[0], model.forward(params, x, buffers=first))


def test_point_estimates_are_trained_first_and_then_stay():
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="last_layer"), linear_data()
    posterior = kn.SnapshotEnsemble(epochs=40, cycles=4).fit(model, data, seed=1)
    assert same_params(posterior.points, kn.MAP(epochs=10).fit(model, data, seed=1).points)
    assert len(posterior.stack["2.weight"].unique(dim=0)) == 4


@pytest.mark.parametrize(("epochs", "kept"), [(150, 1), (90, 1), (290, 2)])
def test_an_interrupt_leaves_the_snapshots_so_far_and_a_second_call_goes_on(epochs, kept, tmp_path, monkeypatch):
    # 300 epochs of one step in 3 cycles: windows end at steps 100, 200 and 300, where the snapshots are
    model, data = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian()), linear_data()
    method = kn.SnapshotEnsemble(epochs=300, cycles=3)
    whole = method.fit(model, data)
    calls, score = [0], kn.Model.score

    def interrupted(self, *arguments):
        calls[0] += 1
        if calls[0] == epochs:
            raise KeyboardInterrupt
        return score(self, *arguments)

    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(kn.Model, "score", interrupted)
        with pytest.warns(kn.Interrupted):
            partial = method.fit(model, data, checkpoint=checkpoint)
    assert len(partial) == kept
    resumed = method.fit(model, data, checkpoint=checkpoint)
    assert same_params(resumed.stack, whole.stack) and same_params(resumed.buffer_stack, whole.buffer_stack)


def test_more_snapshots_than_cycles_cannot_be_kept():
    with pytest.raises(kn.InvalidArgument, match="keep must be at most cycles=3, got 4"):
        kn.SnapshotEnsemble(cycles=3, keep=4)
