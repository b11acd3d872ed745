"""Tests of the one optimisation loop, on objectives whose minimum is known."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.checkpoint import Checkpoint
from knowable.core.data import Data, as_data
from knowable.core.objective import Objective
from knowable.core.training import Training, train
from tests.core.cases import batch_norm_net, linear_data, linear_model, same_params


class Quadratic(Objective):
    r"""Mean of (θ - y)² / 2 over the batch: the minimum is the mean of y. It keeps what it saw."""

    def __init__(
        self, *, start: float = 0.0, centre: float | None = None, fail_at: dict[int, BaseException] | None = None
    ):
        super().__init__(linear_model(), 10)
        self.theta = nn.Parameter(torch.tensor([start], dtype=torch.float64))
        self.fail_at, self.calls = fail_at or {}, 0
        self.batches: list[list[float]] = []
        self.losses: list[float] = []
        self.validated: list[tuple[float, float]] = []
        self.centre = centre  # of the held-out data

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls += 1
        if self.calls in self.fail_at:
            raise self.fail_at[self.calls]
        loss = 0.5 * (self.theta - y).square().mean()
        self.batches.append(y.flatten().tolist())
        self.losses.append(loss.item())
        return loss, {"twice": 2 * loss.detach()}

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        score = -(self.theta - (self.centre or 0.0)).square().expand(len(x))
        self.validated.append((score[0].item(), self.theta.item()))
        return score


def _data(rows: int = 10, generator: torch.Generator | None = None) -> Data:
    y = torch.randn(rows, generator=generator, dtype=torch.float64) + 1.0
    return as_data((torch.zeros(rows, 2, dtype=torch.float64), y))


def _train(objective: Objective, data: Data, training: Training, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        return train(objective, data, training, **settings)


# --- the minimum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_the_loop_reaches_the_known_minimum_of_a_quadratic(optimiser, generator):
    data, objective = _data(generator=generator), Quadratic()
    result = _train(objective, data, Training(epochs=800, learning_rate=0.05, optimiser=optimiser))
    assert objective.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=1e-5)
    assert (result.steps, result.epochs, result.interrupted) == (800, 800.0, False)
    assert result.converged is None  # eight records are too few to tell
    assert result.message == "ended after 800 steps"


def test_small_batches_reach_the_minimum_because_the_rate_falls(generator):
    # at a constant rate the iterates would jitter by about sd sqrt(rate / 2) = 0.16 around it
    data, objective = _data(100, generator), Quadratic()
    _train(objective, data, Training(epochs=150, learning_rate=0.05, batch_size=10))
    assert abs(objective.theta.item() - data.tensors[1].mean().item()) < 0.02


def test_without_epochs_the_loop_stops_by_itself_once_the_loss_has_settled(generator):
    data, objective = _data(generator=generator), Quadratic()
    result = _train(objective, data, Training())
    assert objective.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=1e-4)
    assert result.converged is True
    assert result.message == f"settled after {result.steps} steps"
    assert result.steps < 20_000


def test_a_loss_that_never_settles_is_ended_with_a_warning(generator, monkeypatch):
    monkeypatch.setattr("knowable.core.schedule._LONGEST", 1_200)
    monkeypatch.setattr("knowable.core.schedule._SHORTEST_FALL", 100)
    data = as_data((torch.zeros(4, 2), torch.full((4,), 1e6, dtype=torch.float64)))
    with pytest.warns(kn.ConvergenceWarning, match=r"still improving after \d+ steps\. Pass epochs= to train longer"):
        result = train(Quadratic(), data, Training(learning_rate=1e-3))
    assert result.converged is False


# --- history and order ----------------------------------------------------------------------------------------------


def test_a_record_of_the_history_is_the_mean_over_its_hundred_steps(generator):
    data, objective = _data(20, generator), Quadratic()
    history = _train(objective, data, Training(epochs=65, batch_size=5)).history
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
    data = _data(20, generator)
    first, second, other = Quadratic(), Quadratic(), Quadratic()
    for objective, seed in ((first, 1), (second, 1), (other, 2)):
        torch.rand(3)
        _train(objective, data, Training(epochs=3, batch_size=5), seed=seed)
    assert first.batches == second.batches
    assert first.batches != other.batches
    for epoch in range(3):
        seen = itertools.chain(*first.batches[4 * epoch : 4 * epoch + 4])
        assert sorted(seen) == sorted(data.tensors[1].tolist())


def test_training_leaves_the_global_random_state_alone(generator):
    data, objective = _data(20, generator), Quadratic()
    state = torch.get_rng_state()
    _train(objective, data, Training(epochs=3, batch_size=5))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_objective_knows_how_far_training_is(generator):
    data, objective = _data(20, generator), Quadratic()
    epochs = []
    forward = objective.forward
    objective.forward = lambda x, y: epochs.append(objective.epoch) or forward(x, y)
    _train(objective, data, Training(epochs=2, batch_size=5))
    assert epochs == [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


# --- accumulated gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [40, 41, 43])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_accumulated_batches_are_the_step_of_one_large_batch(rows, clip, optimiser, generator):
    # the order of the rows is that of seed and epoch, so four batches of 5 are the rows of one of 20; 43 rows end in a
    # batch of 3, which is a step of its own either way. What differs is the order of additions in float64: 1e-16 a step
    x, y = linear_data(rows, generator=generator)
    settings = {"epochs": 40, "learning_rate": 0.05, "clip": clip, "optimiser": optimiser}
    model = kn.Model(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), kn.Gaussian())
    small, large = (
        kn.MAP(batch_size=size, accumulate=count, **settings).fit(model, (x, y)) for size, count in ((5, 4), (20, 1))
    )
    torch.testing.assert_close(small.mean(), large.mean(), rtol=1e-8, atol=1e-10)
    for one, other in zip(small.diagnostics.history, large.diagnostics.history, strict=True):
        assert one == pytest.approx(other, rel=1e-8)


def test_accumulated_batches_of_an_ensemble_are_those_of_one_large_batch(generator):
    x, y = linear_data(40, generator=generator)
    model = linear_model()
    small, large = (
        kn.DeepEnsemble(2, epochs=20, batch_size=size, accumulate=count).fit(model, (x, y))
        for size, count in ((5, 4), (20, 1))
    )
    torch.testing.assert_close(small.stack, large.stack, rtol=1e-8, atol=1e-10)


def test_batches_that_are_left_over_are_a_step_of_their_own(generator):
    data, objective = _data(20, generator), Quadratic()
    result = _train(objective, data, Training(epochs=3, batch_size=4, accumulate=3))
    assert len(objective.batches) == 15  # five batches an epoch
    assert result.steps == 6 and result.epochs == 3.0  # in two steps: of three batches, and of two


def test_an_interrupted_run_with_accumulation_is_taken_up_and_ends_with_the_same_bits(tmp_path, generator):
    data, training = _data(20, generator), Training(epochs=150, batch_size=4, accumulate=2)
    whole, stopped, resumed = Quadratic(), Quadratic(fail_at={601: RuntimeError("killed")}), Quadratic()
    _train(whole, data, training)
    with pytest.raises(RuntimeError, match="killed"):
        _train(stopped, data, training, checkpoint=Checkpoint(tmp_path / "run", seconds=0))
    result = _train(resumed, data, training, checkpoint=tmp_path / "run")
    assert result.steps == 450
    assert len(resumed.batches) < len(whole.batches)
    assert torch.equal(resumed.theta, whole.theta)


def test_a_loader_that_ends_in_the_middle_of_a_group_is_read_to_its_end(generator):
    data = _data(20, generator)
    loader = DataLoader(TensorDataset(*data.tensors), batch_size=4)
    objective = Quadratic()
    result = _train(objective, as_data(loader), Training(epochs=2, accumulate=3))
    assert [len(batch) for batch in objective.batches] == [4] * 10
    assert result.steps == 4


# --- early stopping -------------------------------------------------------------------------------------------------


def test_early_stopping_ends_after_its_patience_and_restores_the_best_state(generator):
    # training pulls θ from 0 to the mean of y; held-out rows are best at half of that, passed on the way
    data = as_data((torch.zeros(4, 2), torch.full((4,), 4.0, dtype=torch.float64)))
    objective = Quadratic(centre=2.0)
    result = _train(objective, data, Training(learning_rate=0.005, patience=3), validation=data)
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


class Cliff(Quadratic):
    """The loss is NaN once θ is above 10."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().forward(x, y)
        return torch.where(self.theta.squeeze() > 10.0, torch.nan, loss), terms


FAR = as_data((torch.zeros(4, 2), torch.full((4,), 3.0, dtype=torch.float64)))


def test_a_loss_that_leaves_the_finite_numbers_goes_on_from_the_last_good_state_at_half_the_rate():
    # the first step goes from 0 to 4 x 3 = 12, over the cliff; at half the rate it converges
    objective = Cliff()
    with pytest.warns(kn.ConvergenceWarning, match=r"finite numbers at step 1: going on from step 0 .*half .* \(2\)"):
        result = train(objective, FAR, Training(epochs=600, learning_rate=4.0, optimiser="sgd"))
    assert objective.theta.item() == pytest.approx(3.0, abs=1e-6)
    assert result.history[0]["learning_rate"] == 2.0
    assert result.steps == 600


def test_a_fit_may_raise_instead_and_keeps_the_last_good_state():
    objective = Cliff()
    with pytest.raises(kn.Diverged, match=r"at step 1 with learning rate 4.*Standardise .* lower learning_rate.* clip"):
        train(objective, FAR, Training(epochs=600, learning_rate=4.0, optimiser="sgd", on_divergence="raise"))
    assert objective.theta.item() == 0.0


def test_eight_halvings_are_the_most():
    objective = Cliff(start=11.0)
    with pytest.warns(kn.ConvergenceWarning) as caught, pytest.raises(kn.Diverged, match="after 8 halvings"):
        train(objective, FAR, Training(epochs=600))
    assert len(caught) == 8
    assert objective.theta.item() == 11.0


class BadGradient(Quadratic):
    """The loss is finite, the gradient of step 100 is not: found when the window closes."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss, terms = super().forward(x, y)
        return loss + (0.0 * self.theta).sqrt().sum() if self.calls == 100 else loss, terms


def test_parameters_that_are_not_finite_at_the_end_of_a_window_go_back_to_its_beginning(generator):
    data, objective = _data(20, generator), BadGradient()
    with pytest.warns(kn.ConvergenceWarning, match="at step 100: going on from step 0"):
        result = train(objective, data, Training(epochs=60, batch_size=5))
    assert objective.batches[100:200] == objective.batches[:100]  # the same rows again, from the beginning
    assert torch.isfinite(objective.theta).all()
    assert (result.steps, result.epochs) == (240, 60.0)


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip", "step"), [(None, 0.1 * 3.0), (1.0, 0.1 * 1.0), (5.0, 0.1 * 3.0)])
def test_a_gradient_longer_than_clip_is_cut_to_it(clip, step):
    objective = Quadratic()
    _train(objective, FAR, Training(epochs=1, learning_rate=0.1, optimiser="sgd", clip=clip))
    assert objective.theta.item() == pytest.approx(step, rel=1e-5)


# --- from the keyboard ----------------------------------------------------------------------------------------------


def test_a_keyboard_interrupt_returns_the_last_good_state_with_a_warning(generator):
    data = _data(20, generator)
    whole = Quadratic()
    _train(whole, data, Training(epochs=50, batch_size=5))  # 200 steps; the interrupted run would have 500
    objective = Quadratic(fail_at={250: KeyboardInterrupt()})
    with pytest.warns(kn.Interrupted, match=r"stopped from the keyboard at step 200; this is what it had learned"):
        result = train(objective, data, Training(epochs=125, batch_size=5))
    assert result.interrupted
    assert result.converged is False
    assert (result.steps, [record["step"] for record in result.history]) == (200, [100, 200])
    assert objective.batches[:200] == whole.batches


def test_an_interrupted_fit_still_gives_a_posterior(monkeypatch):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.5))
    calls = [0]
    score = type(model).score

    def interrupted(self, output, target, params):
        calls[0] += 1
        if calls[0] == 150:
            raise KeyboardInterrupt
        return score(self, output, target, params)

    monkeypatch.setattr(type(model), "score", interrupted)
    with pytest.warns(kn.Interrupted):
        posterior = kn.MAP(epochs=500).fit(model, (x, y))
    assert posterior.diagnostics.converged is False
    assert "keyboard" in posterior.diagnostics.message
    assert torch.isfinite(posterior.predict(x).mean).all()


def test_an_interrupted_run_is_taken_up_and_ends_with_the_same_bits(tmp_path, generator):
    data, training = _data(20, generator), Training(epochs=125, batch_size=5)
    whole, halves = Quadratic(), Quadratic(fail_at={250: KeyboardInterrupt()})
    expected = _train(whole, data, training)
    _train(halves, data, training, checkpoint=tmp_path / "run")
    resumed = Quadratic()
    result = _train(resumed, data, training, checkpoint=tmp_path / "run")
    assert torch.equal(resumed.theta, whole.theta)
    assert result.history == expected.history
    assert resumed.batches == whole.batches[200:]


# --- resuming -------------------------------------------------------------------------------------------------------


class _Killed(Exception):
    pass


def _run_and_kill(saves: int, run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until so many saves were made, and no further: as if the process had died there."""
    save, count = Checkpoint.save, [0]

    def deadly(self, *state) -> None:
        save(self, *state)
        count[0] += 1
        if count[0] == saves:
            raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", deadly)
        with pytest.raises(_Killed):
            run()


def _dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 1))


RESUMED = {
    "adam": (kn.MAP(epochs=8, batch_size=5), batch_norm_net, False),
    "sgd": (kn.MAP(epochs=8, batch_size=5, optimiser="sgd", learning_rate=1e-3), _dropout_net, False),
    "a bound": (kn.MeanFieldVI(epochs=8, batch_size=5), _dropout_net, False),
    "a bound from a MAP fit": (kn.MeanFieldVI(epochs=8, batch_size=5, kl_warmup=4, start="map"), _dropout_net, False),
    "held-out data": (kn.MAP(epochs=8, batch_size=5, patience=2), _dropout_net, True),
}


@pytest.mark.parametrize(("method", "net", "validation"), RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("saves", [1, 2])
def test_a_run_that_was_killed_ends_with_the_same_bits(method, net, validation, saves, tmp_path, monkeypatch):
    monkeypatch.setattr("knowable.core.training_run.WINDOW", 10)  # 32 steps in 4 records, a save after each
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(net(), kn.Gaussian())
    settings = {"seed": 3, "validation": (x[:5] + 0.1, y[:5]) if validation else None}
    expected = method.fit(model, (x, y), **settings)

    def fit() -> kn.Posterior:
        return method.fit(model, (x, y), checkpoint=Checkpoint(tmp_path / "run", seconds=0), **settings)

    _run_and_kill(saves, fit, monkeypatch)
    torch.rand(5)
    resumed = fit()
    assert same_params(resumed._tensors(), expected._tensors())
    assert same_params(resumed.points, expected.points)
    assert same_params(resumed.buffers, expected.buffers)
    assert resumed.diagnostics.history == expected.diagnostics.history
    assert resumed.diagnostics.terms == expected.diagnostics.terms


@pytest.mark.parametrize("saves", [1, 3])
def test_a_shuffling_loader_is_taken_up_between_epochs_with_the_same_bits(saves, tmp_path, monkeypatch):
    rows = TensorDataset(torch.randn(20, 2), torch.randn(20))
    model = kn.Model(_dropout_net(), kn.Gaussian(0.5))

    def fit(checkpoint=None):
        return kn.MAP(epochs=6).fit(model, DataLoader(rows, batch_size=6, shuffle=True), checkpoint=checkpoint)

    expected = fit()
    _run_and_kill(saves, lambda: fit(Checkpoint(tmp_path / "run", seconds=0)), monkeypatch)
    resumed = fit(Checkpoint(tmp_path / "run", seconds=0))
    assert same_params(resumed.mean(), expected.mean())
    assert resumed.diagnostics.history == expected.diagnostics.history


def test_a_halved_rate_survives_a_resume(tmp_path, monkeypatch):
    training = Training(epochs=300, learning_rate=4.0, optimiser="sgd")
    whole, resumed = Cliff(), Cliff()
    expected = _train(whole, FAR, training)
    checkpoint = Checkpoint(tmp_path / "run", seconds=0)
    _run_and_kill(1, lambda: _train(Cliff(), FAR, training, checkpoint=checkpoint), monkeypatch)
    result = _train(resumed, FAR, training, checkpoint=tmp_path / "run")
    assert torch.equal(resumed.theta, whole.theta)
    assert result.history == expected.history
    assert resumed.calls == 200  # it did not go over the cliff again


@pytest.mark.parametrize("saves", [5, 15])
def test_a_run_that_stops_by_itself_stops_at_the_same_step_when_it_was_killed(saves, tmp_path, monkeypatch, generator):
    # windows of 10 steps: the loss has settled after 10 of them or a few more, and the rate then falls over 150 steps
    monkeypatch.setattr("knowable.core.training_run.WINDOW", 10)
    monkeypatch.setattr("knowable.core.schedule._SHORTEST_FALL", 150)
    data, training = _data(20, generator), Training(batch_size=5, learning_rate=0.05)
    whole, resumed = Quadratic(), Quadratic()
    expected = _train(whole, data, training)
    checkpoint = Checkpoint(tmp_path / "run", seconds=0)
    _run_and_kill(saves, lambda: _train(Quadratic(), data, training, checkpoint=checkpoint), monkeypatch)
    result = _train(resumed, data, training, checkpoint=tmp_path / "run")
    assert torch.equal(resumed.theta, whole.theta)
    assert (result.steps, result.converged, result.history) == (expected.steps, True, expected.history)
    assert resumed.calls == expected.steps - 10 * saves


def test_a_finished_run_is_not_run_again(tmp_path, generator):
    data, first, second = _data(20, generator), Quadratic(), Quadratic()
    for objective in (first, second):
        result = _train(objective, data, Training(epochs=30, batch_size=5), checkpoint=tmp_path / "run")
    assert second.calls == 0
    assert torch.equal(second.theta, first.theta)
    assert len(result.history) == 2


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"training": Training(epochs=31, batch_size=5)}, {"identity": {"a": 2}}]
)
def test_the_state_of_another_run_is_refused(change, tmp_path, generator):
    settings = {"training": Training(epochs=30, batch_size=5), "seed": 0, "identity": {"a": 1}}
    data = _data(20, generator)
    train(Quadratic(), data, checkpoint=tmp_path / "run", **settings)
    with pytest.raises(kn.InvalidArgument, match=rf"belongs to another fit: {next(iter(change))}|: a differs"):
        train(Quadratic(), data, checkpoint=tmp_path / "run", **{**settings, **change})


# --- the ends of epochs and of cycles --------------------------------------------------------------------------------


class Noted(Quadratic):
    """Keeps where it was at the ends of epochs and cycles, and how often."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.epochs, self.cycles = torch.zeros(60, dtype=torch.float64), torch.zeros(60, dtype=torch.float64)
        self.counts = torch.zeros(2, dtype=torch.int64)

    def tensors(self):
        return {**super().tensors(), "epochs": self.epochs, "cycles": self.cycles, "counts": self.counts}

    def _note(self, where: Tensor, kind: int) -> None:
        where[self.counts[kind]] = self.theta.item()
        self.counts[kind] += 1

    def end_of_epoch(self) -> None:
        self._note(self.epochs, 0)

    def end_of_cycle(self) -> None:
        self._note(self.cycles, 1)


@pytest.mark.parametrize("epochs", [3, 25, 50])  # 12, 100 and 200 steps: with and without a window at the end
def test_an_objective_hears_of_every_epochs_and_every_cycles_end(epochs, generator):
    data, objective = _data(20, generator), Noted()
    _train(objective, data, Training(epochs=epochs, batch_size=5, cycles=3))
    assert objective.counts.tolist() == [epochs, 3]
    assert objective.epochs[epochs - 1] == objective.cycles[2] == objective.theta.item()


def test_a_loader_that_gives_fewer_batches_than_it_said_ends_its_epochs_too(generator):
    x, y = _data(20, generator).tensors

    class Short:
        def __iter__(self):
            return iter([(x[:5], y[:5]), (x[5:10], y[5:10])])

        def __len__(self) -> int:
            return 4

    objective = Noted()
    _train(objective, Data(Short(), 20), Training(epochs=3))
    assert objective.calls == 12  # six epochs of two steps, of which the last ends with the run
    assert objective.counts[0] == 5


@pytest.mark.parametrize("fails", [30, 100, 101, 104, 105, 150])
def test_what_is_kept_at_the_ends_of_epochs_survives_an_interrupt_exactly(fails, tmp_path, generator):
    # 4 steps an epoch and windows of 100: the 25th epoch and the first window end with the same step
    data, training = _data(20, generator), Training(epochs=50, batch_size=5, cycles=4)
    whole, halves, resumed = Noted(), Noted(fail_at={fails: KeyboardInterrupt()}), Noted()
    _train(whole, data, training)
    _train(halves, data, training, checkpoint=tmp_path / "run")
    _train(resumed, data, training, checkpoint=tmp_path / "run")
    assert same_params(resumed.tensors(), whole.tensors())


@pytest.mark.parametrize("fails", [1, 3])
def test_a_run_interrupted_before_its_first_record_begins_again_with_the_same_random_numbers(fails, tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(_dropout_net(), kn.Gaussian())
    whole = kn.MAP(epochs=20).fit(model, (x, y), seed=3)
    calls, score = [0], kn.Model.score

    def interrupted(self, output, target, params):
        calls[0] += 1
        if calls[0] == fails:
            raise KeyboardInterrupt
        return score(self, output, target, params)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.Interrupted)
        patch.setattr(kn.Model, "score", interrupted)
        kn.MAP(epochs=20).fit(model, (x, y), seed=3, checkpoint=tmp_path / "run")
    torch.rand(7)
    resumed = kn.MAP(epochs=20).fit(model, (x, y), seed=3, checkpoint=tmp_path / "run")
    assert same_params(resumed.mean(), whole.mean())


class Remembering(Quadratic):
    """Steps with a momentum of its own, which it keeps in the optimiser's state."""

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        state = optimiser.state[self.theta]
        state.setdefault("average", torch.zeros_like(self.theta))
        state["average"].lerp_(self.theta.grad, 0.2)
        with torch.no_grad():
            self.theta -= optimiser.param_groups[0]["lr"] * state["average"]


def test_an_objective_with_a_step_of_its_own_resumes_with_the_same_bits(tmp_path, generator):
    data, training = _data(20, generator), Training(epochs=120, learning_rate=0.1, batch_size=5)
    whole, stopped, resumed = Remembering(), Remembering(fail_at={330: KeyboardInterrupt()}), Remembering()
    _train(whole, data, training)
    checkpoint = Checkpoint(tmp_path / "state", seconds=0)
    assert _train(stopped, data, training, checkpoint=checkpoint).interrupted
    _train(resumed, data, training, checkpoint=checkpoint)
    assert resumed.calls < whole.calls
    assert torch.equal(resumed.theta, whole.theta)
    assert whole.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=0.05)
