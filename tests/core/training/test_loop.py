"""Tests of the one optimisation loop, on objectives whose minimum is known."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.storage.folder import Checkpoint
from knowable.core.training.loop import train
from tests.core.cases import linear_data, linear_model
from tests.core.training_cases import FAR, Cliff, Quadratic, run_quietly, settings_of, some_data

# --- the minimum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_the_loop_reaches_the_known_minimum_of_a_quadratic(optimiser, generator):
    data, objective = some_data(generator=generator), Quadratic()
    result = run_quietly(objective, data, settings_of(epochs=800, learning_rate=0.05, optimiser=optimiser))
    assert objective.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=1e-5)
    assert (result.steps, result.epochs, result.interrupted) == (800, 800.0, False)
    assert result.converged is None  # eight records are too few to tell
    assert result.message == "ended after 800 steps"


def test_small_batches_reach_the_minimum_because_the_rate_falls(generator):
    # at a constant rate the iterates would jitter by about sd sqrt(rate / 2) = 0.16 around it
    data, objective = some_data(100, generator), Quadratic()
    run_quietly(objective, data, settings_of(epochs=150, learning_rate=0.05, batch_size=10))
    assert abs(objective.theta.item() - data.tensors[1].mean().item()) < 0.02


def test_without_epochs_the_loop_stops_by_itself_once_the_loss_has_settled(generator):
    data, objective = some_data(generator=generator), Quadratic()
    result = run_quietly(objective, data, settings_of())
    assert objective.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=1e-4)
    assert result.converged is True
    assert result.message == f"settled after {result.steps} steps"
    assert result.steps < 20_000


def test_a_loss_that_never_settles_is_ended_with_a_warning(generator, monkeypatch):
    monkeypatch.setattr("knowable.core.training.schedule._LONGEST", 1_200)
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 100)
    data = as_data((torch.zeros(4, 2), torch.full((4,), 1e6, dtype=torch.float64)))
    with pytest.warns(kn.ConvergenceWarning, match=r"still improving after \d+ steps\. Pass epochs= to train longer"):
        result = train(Quadratic(), data, settings_of(learning_rate=1e-3))
    assert result.converged is False


# --- history and order ----------------------------------------------------------------------------------------------


def test_a_record_of_the_history_is_the_mean_over_its_hundred_steps(generator):
    data, objective = some_data(20, generator), Quadratic()
    history = run_quietly(objective, data, settings_of(epochs=65, batch_size=5)).history
    assert [record["step"] for record in history] == [100, 200, 260]
    assert [record["epoch"] for record in history] == [25.0, 50.0, 65.0]
    for record, (first, last) in zip(history, [(0, 100), (100, 200), (200, 260)], strict=True):
        expected = sum(objective.losses[first:last]) / (last - first)
        assert record["loss"] == pytest.approx(expected)
        assert record["twice"] == pytest.approx(2 * expected)
    rates = [record["learning_rate"] for record in history]
    assert rates[0] == 0.01
    assert rates == sorted(rates, reverse=True)


def test_batches_come_in_the_order_of_seed_and_epoch(generator):
    data = some_data(20, generator)
    first, second, other = Quadratic(), Quadratic(), Quadratic()
    for objective, seed in ((first, 1), (second, 1), (other, 2)):
        torch.rand(3)
        run_quietly(objective, data, settings_of(epochs=3, batch_size=5), seed=seed)
    assert first.batches == second.batches
    assert first.batches != other.batches
    for epoch in range(3):
        seen = itertools.chain(*first.batches[4 * epoch : 4 * epoch + 4])
        assert sorted(seen) == sorted(data.tensors[1].tolist())


def test_training_leaves_the_global_random_state_alone(generator):
    data, objective = some_data(20, generator), Quadratic()
    state = torch.get_rng_state()
    run_quietly(objective, data, settings_of(epochs=3, batch_size=5))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_objective_knows_how_far_training_is(generator):
    data, objective = some_data(20, generator), Quadratic()
    epochs = []
    forward = objective.forward
    objective.forward = lambda x, y: epochs.append(objective.epoch) or forward(x, y)
    run_quietly(objective, data, settings_of(epochs=2, batch_size=5))
    assert epochs == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


# --- accumulated gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [40, 41, 43])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_accumulated_batches_are_the_step_of_one_large_batch(rows, clip, optimiser, generator):
    # the order of the rows is that of seed and epoch, so four batches of 5 are the rows of one of 20; 43 rows end in a
    # batch of 3, which is a step of its own either way. What differs is the order of additions in float64: 1e-16 a step
    x, y = linear_data(rows, generator=generator)
    settings = {"epochs": 40, "learning_rate": 0.05}
    model = kn.Model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), kn.Gaussian())
    small, large = (
        kn.MAP(batch_size=size, training=kn.Training(accumulate=count, clip=clip, optimiser=optimiser), **settings).fit(
            model, (x, y)
        )
        for size, count in ((5, 4), (20, 1))
    )
    torch.testing.assert_close(small.mean(), large.mean(), rtol=1e-8, atol=1e-10)
    for one, other in zip(small.diagnostics.history, large.diagnostics.history, strict=True):
        assert one == pytest.approx(other, rel=1e-8)


def test_accumulated_batches_of_an_ensemble_are_those_of_one_large_batch(generator):
    x, y = linear_data(40, generator=generator)
    model = linear_model()
    small, large = (
        kn.DeepEnsemble(2, epochs=20, batch_size=size, training=kn.Training(accumulate=count)).fit(model, (x, y))
        for size, count in ((5, 4), (20, 1))
    )
    torch.testing.assert_close(small.stack, large.stack, rtol=1e-8, atol=1e-10)


def test_batches_that_are_left_over_are_a_step_of_their_own(generator):
    data, objective = some_data(20, generator), Quadratic()
    result = run_quietly(objective, data, settings_of(epochs=3, batch_size=4, accumulate=3))
    assert len(objective.batches) == 15  # five batches an epoch
    assert result.steps == 6 and result.epochs == 3.0  # in two steps: of three batches, and of two


def test_an_interrupted_run_with_accumulation_is_taken_up_and_ends_with_the_same_bits(tmp_path, generator):
    data, training = some_data(20, generator), settings_of(epochs=150, batch_size=4, accumulate=2)
    whole, stopped, resumed = Quadratic(), Quadratic(fail_at={601: RuntimeError("killed")}), Quadratic()
    run_quietly(whole, data, training)
    with pytest.raises(RuntimeError, match="killed"):
        run_quietly(stopped, data, training, checkpoint=Checkpoint(tmp_path / "run", seconds=0))
    result = run_quietly(resumed, data, training, checkpoint=tmp_path / "run")
    assert result.steps == 450
    assert len(resumed.batches) < len(whole.batches)
    assert torch.equal(resumed.theta, whole.theta)


def test_a_loader_that_ends_in_the_middle_of_a_group_is_read_to_its_end(generator):
    data = some_data(20, generator)
    loader = DataLoader(TensorDataset(*data.tensors), batch_size=4)
    objective = Quadratic()
    result = run_quietly(objective, as_data(loader), settings_of(epochs=2, accumulate=3))
    assert [len(batch) for batch in objective.batches] == [4] * 10
    assert result.steps == 4


# --- early stopping -------------------------------------------------------------------------------------------------


def test_early_stopping_ends_after_its_patience_and_restores_the_best_state(generator):
    # training pulls θ from 0 to the mean of y; held-out rows are best at half of that, passed on the way
    data = as_data((torch.zeros(4, 2), torch.full((4,), 4.0, dtype=torch.float64)))
    objective = Quadratic(centre=2.0)
    result = run_quietly(objective, data, settings_of(learning_rate=0.005, patience=3), validation=data)
    scores = [score for score, _ in objective.validated]
    best = scores.index(max(scores))
    assert 0 < best < len(scores) - 1
    assert len(scores) == best + 1 + 3
    assert objective.theta.item() == objective.validated[best][1]
    assert result.converged is True
    assert "no gain on the validation data" in result.message
    assert [record["validation_log_likelihood"] for record in result.history] == scores


def test_looking_at_held_out_data_does_not_change_what_training_does(generator):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)), kn.Gaussian(0.5))
    fits = [kn.MeanFieldVI(epochs=110).fit(model, (x, y), validation=v, seed=4) for v in (None, (x[:5], y[:5]))]
    losses = [[record["loss"] for record in fit.diagnostics.history] for fit in fits]
    assert losses[0] == losses[1]


# --- divergence -----------------------------------------------------------------------------------------------------


def test_a_loss_that_becomes_nan_goes_on_from_the_last_good_state_at_half_the_rate():
    # the first step goes from 0 to 4 x 3 = 12, over the cliff; at half the rate it converges
    objective = Cliff()
    with pytest.warns(
        kn.ConvergenceWarning, match=r"infinite at step 1: training continues from step 0 .*half .* \(2\)"
    ):
        result = train(objective, FAR, settings_of(epochs=600, learning_rate=4.0, optimiser="sgd"))
    assert objective.theta.item() == pytest.approx(3.0, abs=1e-6)
    assert result.history[0]["learning_rate"] == 2.0
    assert result.steps == 600


def test_a_fit_may_raise_instead_and_keeps_the_last_good_state():
    objective = Cliff()
    with pytest.raises(kn.Diverged, match=r"at step 1 with learning rate 4.*Standardise .* lower learning_rate.* clip"):
        train(objective, FAR, settings_of(epochs=600, learning_rate=4.0, optimiser="sgd", on_divergence="raise"))
    assert objective.theta.item() == 0.0


class Watched(Quadratic):
    """Finds fault with windows whose loss is above a level, and says what to do."""

    remedy = "Walk slower."

    def fault(self, record):
        return "The walk is too wild" if record["loss"] > 5.0 else ""


def test_a_fault_that_the_objective_finds_counts_as_divergence():
    # a quadratic of curvature 1: beyond a rate of 2 (1 + 0.9) SGD with momentum 0.9 diverges, long before the numbers
    # are not finite; half of 6 is below that
    settings, objective = {"epochs": 600, "learning_rate": 6.0, "optimiser": "sgd"}, Watched()
    with pytest.warns(kn.ConvergenceWarning, match=r"The walk is too wild at step .* from step 0 .*half .* \(3\)"):
        train(objective, FAR, settings_of(**settings))
    assert objective.theta.item() == pytest.approx(3.0, abs=1e-6)
    with pytest.raises(kn.Diverged, match=r"The walk is too wild at step .* rate 6. Walk slower"):
        train(Watched(), FAR, settings_of(**settings, on_divergence="raise"))


def test_eight_halvings_are_the_most():
    objective = Cliff(start=11.0)
    with pytest.warns(kn.ConvergenceWarning) as caught, pytest.raises(kn.Diverged, match="after 8 halvings"):
        train(objective, FAR, settings_of(epochs=600))
    assert len(caught) == 8
    assert objective.theta.item() == 11.0


class BadGradient(Quadratic):
    """The loss is finite, the gradient of step 100 is not: found when the window closes."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().forward(x, y)
        return loss + (0.0 * self.theta).sqrt().sum() if self.calls == 100 else loss, terms


def test_parameters_that_are_not_finite_at_the_end_of_a_window_go_back_to_its_beginning(generator):
    data, objective = some_data(20, generator), BadGradient()
    with pytest.warns(kn.ConvergenceWarning, match="at step 100: training continues from step 0"):
        result = train(objective, data, settings_of(epochs=60, batch_size=5))
    assert objective.batches[100:200] == objective.batches[:100]  # the same rows again, from the beginning
    assert torch.isfinite(objective.theta).all()
    assert (result.steps, result.epochs) == (240, 60.0)


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "step"), [(None, 0.1 * 3.0), (1.0, 0.1 * 1.0), (5.0, 0.1 * 3.0)])
def test_a_gradient_longer_than_clip_is_cut_to_it(clip, step):
    objective = Quadratic()
    run_quietly(objective, FAR, settings_of(epochs=1, learning_rate=0.1, optimiser="sgd", clip=clip))
    assert objective.theta.item() == pytest.approx(step, rel=1e-5)
