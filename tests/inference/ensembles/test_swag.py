"""Tests of SWAG: its moments against a trajectory written out, its spread against the theory of SGD on a quadratic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.support.randomness import derive_seed
from knowable.inference.ensembles.swag import SWAGObjective
from tests.core.cases import (
    DTYPE,
    batch_norm_net,
    diagonal_posterior,
    linear_data,
    linear_model,
    mlp,
    same_params,
)

SHORT = {"epochs": 30, "batch_size": 10, "snapshots": 12, "rank": 4}


class _Point(nn.Module):
    """The output is the parameter: with unit noise and a flat prior the loss is |θ - y|² / 2 and a constant."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.value = nn.Parameter(start.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(len(x), len(self.value))


def _quadratic(start: Tensor) -> kn.Model:
    return kn.Model(_Point(start), kn.Gaussian(1.0), kn.Flat())


def _model(net: nn.Module | None = None, **settings) -> kn.Model:
    return kn.Model((net or mlp()).to(DTYPE), kn.Gaussian(0.5), **settings)


def _covariance(posterior: kn.LowRankNormal) -> Tensor:
    """Dense, from the parts."""
    inner = (
        torch.eye(len(posterior.loc), dtype=DTYPE)
        + (posterior.basis * (posterior.basis_variance - 1)) @ posterior.basis.T
    )
    return posterior.scale.unsqueeze(1) * inner * posterior.scale


# --- moments of a known trajectory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2, 5, 20])
def test_moments_of_known_snapshots_are_the_formulas_of_the_paper(rank):
    snapshots = torch.randn(9, 3, dtype=DTYPE)
    objective = SWAGObjective(_quadratic(torch.zeros(3, dtype=DTYPE)), 4, rank)
    for each in snapshots:
        with torch.no_grad():
            objective.values[0].copy_(each)
        objective.end_of_epoch()
    loc, diagonal, factor = objective.moments()
    if rank:
        objective.snapshots = objective.snapshots[1:]  # as after a checkpoint of an earlier version
        with pytest.raises(kn.InvalidArgument, match="checkpoint was written by an earlier version"):
            objective.moments()
    torch.testing.assert_close(loc, snapshots.mean(0))
    variance = snapshots.square().mean(0) - snapshots.mean(0).square()
    running = snapshots.cumsum(0) / torch.arange(1, 10, dtype=DTYPE).unsqueeze(1)
    deviations = (snapshots - running)[-rank:] if rank else snapshots[:0]
    torch.testing.assert_close(diagonal, variance if rank == 0 else 0.5 * variance)
    expected = deviations.T @ deviations / (2 * max(1, len(deviations) - 1))
    torch.testing.assert_close(factor @ factor.T, expected)


def test_a_fit_on_a_quadratic_has_the_moments_of_gradient_descent_written_out():
    # full batches, no noise: heavy ball on |θ|²/2 with a constant rate, a snapshot after every step
    start, rate, snapshots = torch.tensor([3.0, -1.0], dtype=DTYPE), 0.05, 15
    data = torch.zeros(4, 1, dtype=DTYPE), torch.zeros(4, 2, dtype=DTYPE)
    method = kn.SWAG(start="network", rate=rate, snapshots=snapshots, batch_size=4, rank=6)
    posterior = method.fit(_quadratic(start), data)
    theta, velocity, seen = start, torch.zeros(2, dtype=DTYPE), []
    for _ in range(snapshots):
        velocity = 0.9 * velocity + theta
        theta = theta - rate * velocity
        seen.append(theta)
    trajectory = torch.stack(seen)
    mean = trajectory.mean(0)
    running = trajectory.cumsum(0) / torch.arange(1, snapshots + 1, dtype=DTYPE).unsqueeze(1)
    deviations = (trajectory - running)[-6:]
    variance = (trajectory - mean).square().mean(0)
    covariance = 0.5 * (variance.diag() + deviations.T @ deviations / 5)
    torch.testing.assert_close(posterior.mean()["value"], mean)
    torch.testing.assert_close(_covariance(posterior), covariance)
    torch.testing.assert_close(posterior.std()["value"], covariance.diagonal().sqrt())


# --- SGD on a noisy quadratic ----------------------------------------------------------------------------------------


def _covariance_of_snapshots(rate: float, momentum: float, orders: Tensor) -> Tensor:
    """Of heavy-ball SGD on a quadratic of curvature 1, at the ends of epochs, in units of the variance of the rows.

    A snapshot is Σ_e Σ_j h(age of step j of epoch e) ξ_ej, where h is how a unit gradient is felt so much later, and
    ξ_ej is the deviation of the row whose turn it is: ``orders[e, j]``.
    """
    snapshots, rows = orders.shape
    theta, velocity, felt = 0.0, 1.0, []
    theta = -rate * velocity
    for _ in range(rows * snapshots):
        felt.append(theta)
        velocity = momentum * velocity + theta
        theta = theta - rate * velocity
    response = torch.tensor(felt, dtype=DTYPE)
    ages = (torch.arange(1, snapshots + 1) * rows - 1).unsqueeze(1) - torch.arange(rows * snapshots)
    weights = torch.where(ages >= 0, response[ages.clamp_min(0)], 0.0)  # (snapshots, steps)
    of_rows = torch.zeros(snapshots, rows, dtype=DTYPE).index_add(1, orders.flatten(), weights)
    centred = of_rows - of_rows.mean(1, keepdim=True)
    return rows / (rows - 1) * centred @ centred.T


@pytest.mark.filterwarnings("ignore::knowable.WorseThanNetwork")  # the rate is large on purpose
def test_sgd_wanders_with_the_variance_that_theory_gives(seed):
    # 300 coordinates that share the order of the rows and nothing else; given it, each has quadratic forms of (nearly)
    # normal snapshots with covariance C, of mean tr(PC) and variance 2 tr((PC)²): 5 standard errors of their means
    rows, coordinates, snapshots, rate = 20, 300, 30, 0.06
    x, y = torch.arange(rows, dtype=DTYPE).unsqueeze(1), torch.randn(rows, coordinates, dtype=DTYPE)
    spread = y.var(0, correction=0)
    method = kn.SWAG(start="network", rate=rate, snapshots=snapshots, batch_size=1, rank=0)
    posterior = method.fit(_quadratic(y.mean(0)), (x, y), seed=seed)
    data, own = as_data((x, y)), derive_seed(seed, "swag")
    turns = [torch.cat([turn for turn, _ in data.batches(1, seed=own, epoch=epoch)]) for epoch in range(snapshots)]
    covariance = _covariance_of_snapshots(rate, 0.9, torch.stack(turns).squeeze(-1).long())
    mean = torch.full((snapshots, snapshots), 1 / snapshots**2, dtype=DTYPE)
    for form, found in (
        (torch.eye(snapshots, dtype=DTYPE) / snapshots - mean, posterior.std()["value"].square() / spread),
        (mean, (posterior.mean()["value"] - y.mean(0)).square() / spread),
    ):
        product = form @ covariance
        error = (2 * (product @ product).trace() / coordinates).sqrt()
        assert abs(found.mean() - product.trace()) < 5 * error


def test_the_low_rank_part_knows_directions_in_which_the_weights_wander_together(seed):
    # rows that differ along one direction only: all deviations are along it
    rows = 40
    direction = torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE)
    y = torch.randn(rows, 1, dtype=DTYPE) * direction
    method = kn.SWAG(start="network", rate=0.05, snapshots=30, batch_size=1, rank=10)
    posterior = method.fit(_quadratic(y.mean(0)), (torch.zeros(rows, 1, dtype=DTYPE), y), seed=seed)
    covariance = _covariance(posterior)

    ratio = covariance[0, 1] / covariance[1, 2]
    assert ratio.item() == pytest.approx((direction[0] * direction[1] / (direction[1] * direction[2])).item())
    assert torch.linalg.eigh(covariance)[1][:, -1].abs()[1] > 0.8  # the longest axis is mostly the second weight


# --- the fit ---------------------------------------------------------------------------------------------------------


def test_it_begins_at_the_mode():
    model, data = linear_model(noise=0.5), linear_data()
    posterior = kn.SWAG(epochs=600, learning_rate=0.1, snapshots=40).fit(model, data)
    mode = kn.MAP(epochs=600, learning_rate=0.1).fit(model, data).mean()
    for name, value in posterior.mean().items():  # within what a mean of 40 snapshots wanders
        assert ((value - mode[name]).abs() < 2 * posterior.std()[name] + 1e-3).all()
    assert posterior.diagnostics["snapshots"] == 40


@pytest.mark.parametrize("start", ["network", "posterior"])
def test_a_network_that_is_already_trained_is_not_trained_again(start):
    model, data = _model(), linear_data()
    trained = kn.MAP(epochs=50).fit(model, data)
    if start == "network":
        begin, model = "network", model.starting_at(trained.mean())
    else:
        begin = trained
    posterior = kn.SWAG(start=begin, rate=1e-9, snapshots=2).fit(model, data)
    for name, value in posterior.mean().items():
        if start == "posterior" or not name.startswith("likelihood."):  # a network has no noise: it is estimated
            torch.testing.assert_close(value, trained.mean()[name], rtol=1e-5, atol=1e-5)


def test_a_posterior_of_another_network_is_refused_as_start():
    with pytest.raises(kn.InvalidArgument, match="start is a posterior with nothing for"):
        kn.SWAG(start=diagonal_posterior(linear_model())).fit(_model(), linear_data())


def test_an_epoch_has_ten_batches_and_the_number_of_snapshots_follows_the_size_of_the_data():
    few, many = as_data(linear_data(50)), as_data((torch.zeros(60_000, 2), torch.zeros(60_000, 1)))
    model = linear_model()
    short, long = (kn.SWAG(rate=0.01)._around_the_mode(model, rows, 0) for rows in (few, many))
    assert (short.batch_size, short.epochs) == (5, 100)
    assert (long.batch_size, long.epochs) == (128, 20)
    given = kn.SWAG(rate=0.01, batch_size=25, snapshots=7, training=kn.Training(clip=2.0))._around_the_mode(
        model, few, 0
    )
    assert (given.batch_size, given.epochs, given.training.clip, given.learning_rate) == (25, 7, 2.0, 0.01)
    assert (given.schedule, given.training.optimiser) == ("constant", "sgd")


def test_sgd_that_leaves_the_mode_goes_back_with_half_the_rate_and_says_so(monkeypatch):
    # a quadratic of curvature 1: beyond 2 (1 + 0.9) / 1 = 3.8 SGD diverges, and the rate of 6 is halved to 3
    monkeypatch.setattr("knowable.inference.ensembles.swag.constant_rate", lambda *_, **__: 6.0)
    y = torch.randn(40, 3, dtype=DTYPE)
    data, model = (torch.zeros(40, 1, dtype=DTYPE), y), _quadratic(y.mean(0) + 0.01)
    with pytest.warns(kn.ConvergenceWarning, match=r"SGD left the mode .* half the learning rate \(3\)"):
        posterior = kn.SWAG(start="network", snapshots=600, batch_size=40).fit(model, data)
    torch.testing.assert_close(posterior.mean()["value"], y.mean(0), atol=0.05, rtol=0)
    assert posterior.diagnostics["learning_rate"] == 3.0


@pytest.mark.filterwarnings("ignore::knowable.WorseThanNetwork")  # the rate is large on purpose
def test_a_rate_that_is_given_is_taken_as_it_is():
    y = torch.randn(40, 3, dtype=DTYPE)
    data, model = (torch.zeros(40, 1, dtype=DTYPE), y), _quadratic(y.mean(0) + 0.01)
    posterior = kn.SWAG(start="network", snapshots=5, batch_size=40, rate=6.0).fit(model, data)
    assert posterior.diagnostics["learning_rate"] == 6.0


def test_the_rate_it_chooses_is_stable_and_said():
    model, (x, y) = linear_model(noise=0.1), linear_data(60)
    posterior = kn.SWAG(epochs=400, learning_rate=0.1, snapshots=30).fit(model, (x, y))
    design = torch.cat([x, torch.ones(60, 1, dtype=DTYPE)], 1)
    curvature = torch.linalg.eigvalsh(design.T @ design / 60 / 0.01)[-1].item()
    assert 0 < posterior.diagnostics["learning_rate"] < 2 * 1.9 / curvature
    assert all(torch.isfinite(value).all() for value in posterior.std().values())


# --- batch normalisation ---------------------------------------------------------------------------------------------


def test_every_draw_predicts_with_the_running_statistics_of_its_own_weights(tmp_path):
    model, (x, y) = _model(batch_norm_net()), linear_data(50)
    posterior = kn.SWAG(**SHORT).fit(model, (x, y))
    draws = posterior.draw_block(0, 3, 3, posterior.seed)
    prediction = posterior.predict(x, samples=3)
    for k in range(3):
        params = {name: value[k] for name, value in draws.items()}
        hidden = x @ params["0.weight"].T + params["0.bias"]  # all 50 rows are in the sample
        buffers = {"1.running_mean": hidden.mean(0), "1.running_var": hidden.var(0)}
        torch.testing.assert_close(
            prediction.samples[k], model.forward(params, x, buffers={**posterior.buffers, **buffers})
        )
    loaded = kn.load(posterior.save(tmp_path))
    assert torch.equal(loaded.predict(x, samples=3).samples, prediction.samples)
    capped = loaded.predict(x, samples=3, max_memory=20_000)
    torch.testing.assert_close(capped.samples, prediction.samples)


def test_the_mean_weights_have_the_running_statistics_of_the_data():
    model, (x, y) = _model(batch_norm_net()), linear_data(50)
    posterior = kn.SWAG(**SHORT).fit(model, (x, y))
    hidden = x @ posterior.mean()["0.weight"].T + posterior.mean()["0.bias"]
    torch.testing.assert_close(posterior.buffers["1.running_mean"], hidden.mean(0))


def test_networks_without_running_statistics_keep_no_data():
    assert kn.SWAG(**SHORT).fit(_model(), linear_data()).inputs is None
    frozen = _model(batch_norm_net(), frozen="1.*")
    assert kn.SWAG(**SHORT).fit(frozen, linear_data()).inputs is None


# --- point estimates, interrupts -------------------------------------------------------------------------------------


def test_point_estimates_stay_at_the_mode():
    model, data = _model(random="last_layer"), linear_data()
    posterior = kn.SWAG(**SHORT).fit(model, data, seed=2)
    mode = kn.MAP(epochs=30, batch_size=10).fit(model, data, seed=2)
    assert same_params(posterior.points, mode.points)
    assert set(posterior.layout.names) == set(model.random_names)


def _interrupting(monkeypatch, at: int) -> None:
    calls, score = [0], kn.Model.score

    def interrupted(self, *arguments):
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return score(self, *arguments)

    monkeypatch.setattr(kn.Model, "score", interrupted)


@pytest.mark.parametrize(("at", "kind", "snapshots"), [(30, kn.Particles, None), (250, kn.SWAGPosterior, 50)])
def test_an_interrupt_leaves_what_there_is_and_a_second_call_goes_on(at, kind, snapshots, tmp_path, monkeypatch):
    # 60 steps to the mode, 43 gradients for the rate, 200 steps of 100 snapshots
    model, data = _model(batch_norm_net()), linear_data()
    method = kn.SWAG(epochs=30, batch_size=10, snapshots=100, rank=4)
    whole = method.fit(model, data)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    monkeypatch.setattr("knowable.core.training.loop.WINDOW", 20)
    with monkeypatch.context() as patch:
        _interrupting(patch, at)
        with pytest.warns(kn.Interrupted):
            partial = method.fit(model, data, checkpoint=checkpoint)
    assert type(partial) is kind and partial.diagnostics.interrupted
    if snapshots is not None:
        assert 2 <= partial.diagnostics["snapshots"] < 100
    resumed = method.fit(model, data, checkpoint=checkpoint)
    assert same_params(resumed._tensors(), whole._tensors())


def test_an_interrupt_at_the_first_snapshot_leaves_a_point(monkeypatch):
    model, data = linear_model(), linear_data()
    method = kn.SWAG(start="network", rate=1e-6, snapshots=50)
    with monkeypatch.context() as patch:
        _interrupting(patch, 5)
        with pytest.warns(kn.Interrupted):
            partial = method.fit(model, data)
    assert len(partial) == 1 and partial.diagnostics["snapshots"] == 0.0
    assert same_params(partial.mean(), model.params())


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"rank": 1}, "rank must be 0 or at least 2, got 1"),
        ({"snapshots": 1}, "snapshots must be a whole number >= 2, got 1"),
        ({"rate": 0.0}, "rate must be a finite number > 0"),
        ({"start": "zero"}, "start must be one of 'map', 'network'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, wanted):
    with pytest.raises(kn.InvalidArgument, match=wanted):
        kn.SWAG(**arguments)


def test_a_prior_with_a_scale_to_learn_is_refused():
    with pytest.raises(kn.Unsupported, match="SWAG cannot learn the prior's own scale"):
        kn.SWAG().fit(_model(prior=kn.EmpiricalBayes(kn.Normal())), linear_data())


def test_an_interrupt_while_the_rate_is_chosen_leaves_the_mode(monkeypatch, tmp_path):
    model, data = _model(), linear_data()
    method = kn.SWAG(**SHORT)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    whole = method.fit(model, data)
    with monkeypatch.context() as patch:
        _interrupting(patch, 75)  # 60 steps to the mode
        with pytest.warns(kn.Interrupted, match="before the first snapshot: .* WITHOUT ANY UNCERTAINTY"):
            partial = method.fit(model, data, checkpoint=checkpoint)
    assert partial.diagnostics.interrupted
    assert same_params(partial.mean(), kn.MAP(epochs=30, batch_size=10).fit(model, data).mean())
    assert same_params(method.fit(model, data, checkpoint=checkpoint)._tensors(), whole._tensors())
