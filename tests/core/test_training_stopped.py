"""Tests of the optimisation loop where it is stopped and taken up again, and at the ends of epochs and cycles."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.model.data import Data
from knowable.core.storage.folder import Checkpoint
from knowable.core.training.loop import train
from tests.core.cases import batch_norm_net, same_params
from tests.core.training_cases import FAR, Cliff, Quadratic, run_quietly, settings_of, some_data

# --- from the keyboard ----------------------------------------------------------------------------------------------


def test_a_keyboard_interrupt_returns_the_last_good_state_with_a_warning(generator):
    data = some_data(20, generator)
    whole = Quadratic()
    run_quietly(whole, data, settings_of(epochs=50, batch_size=5))  # 200 steps; the interrupted run would have 500
    objective = Quadratic(fail_at={250: KeyboardInterrupt()})
    with pytest.warns(
        kn.Interrupted,
        match=r"stopped from the keyboard at step 200; the posterior is that of the last complete record",
    ):
        result = train(objective, data, settings_of(epochs=125, batch_size=5))
    assert result.interrupted
    assert result.converged is False
    assert (result.steps, [record["step"] for record in result.history]) == (200, [100, 200])
    assert objective.batches[:200] == whole.batches


def test_an_interrupted_fit_still_gives_a_posterior(monkeypatch):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.5))
    calls = [0]
    score = type(model).score

    def interrupted(self, *args):
        calls[0] += 1
        if calls[0] == 150:
            raise KeyboardInterrupt
        return score(self, *args)

    monkeypatch.setattr(type(model), "score", interrupted)
    with pytest.warns(kn.Interrupted):
        posterior = kn.MAP(epochs=500).fit(model, (x, y))
    assert posterior.diagnostics.converged is False
    assert "keyboard" in posterior.diagnostics.message
    assert torch.isfinite(posterior.predict(x).mean).all()


def test_an_interrupted_run_is_taken_up_and_ends_with_the_same_bits(tmp_path, generator):
    data, training = some_data(20, generator), settings_of(epochs=125, batch_size=5)
    whole, halves = Quadratic(), Quadratic(fail_at={250: KeyboardInterrupt()})
    expected = run_quietly(whole, data, training)
    run_quietly(halves, data, training, checkpoint=tmp_path / "run")
    resumed = Quadratic()
    result = run_quietly(resumed, data, training, checkpoint=tmp_path / "run")
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
    "sgd": (
        kn.MAP(epochs=8, batch_size=5, learning_rate=1e-3, training=kn.Training(optimiser="sgd")),
        _dropout_net,
        False,
    ),
    "a bound": (kn.MeanFieldVI(epochs=8, batch_size=5), _dropout_net, False),
    "a bound from a MAP fit": (kn.MeanFieldVI(epochs=8, batch_size=5, kl_warmup=4, start="map"), _dropout_net, False),
    "held-out data": (kn.MAP(epochs=8, batch_size=5, training=kn.Training(patience=2)), _dropout_net, True),
}


@pytest.mark.parametrize(("method", "net", "validation"), RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize("saves", [1, 2])
def test_a_run_that_was_killed_ends_with_the_same_bits(method, net, validation, saves, tmp_path, monkeypatch):
    monkeypatch.setattr("knowable.core.training.loop.WINDOW", 10)  # 32 steps in 4 records, a save after each
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
    training = settings_of(epochs=300, learning_rate=4.0, optimiser="sgd")
    whole, resumed = Cliff(), Cliff()
    expected = run_quietly(whole, FAR, training)
    checkpoint = Checkpoint(tmp_path / "run", seconds=0)
    _run_and_kill(1, lambda: run_quietly(Cliff(), FAR, training, checkpoint=checkpoint), monkeypatch)
    result = run_quietly(resumed, FAR, training, checkpoint=tmp_path / "run")
    assert torch.equal(resumed.theta, whole.theta)
    assert result.history == expected.history
    assert resumed.calls == 200  # it did not go over the cliff again


@pytest.mark.parametrize("saves", [5, 15])
def test_a_run_that_stops_by_itself_stops_at_the_same_step_when_it_was_killed(saves, tmp_path, monkeypatch, generator):
    # windows of 10 steps: the loss has settled after 10 of them or a few more, and the rate then falls over 150 steps
    monkeypatch.setattr("knowable.core.training.loop.WINDOW", 10)
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 150)
    data, training = some_data(20, generator), settings_of(batch_size=5, learning_rate=0.05)
    whole, resumed = Quadratic(), Quadratic()
    expected = run_quietly(whole, data, training)
    checkpoint = Checkpoint(tmp_path / "run", seconds=0)
    _run_and_kill(saves, lambda: run_quietly(Quadratic(), data, training, checkpoint=checkpoint), monkeypatch)
    result = run_quietly(resumed, data, training, checkpoint=tmp_path / "run")
    assert torch.equal(resumed.theta, whole.theta)
    assert (result.steps, result.converged, result.history) == (expected.steps, True, expected.history)
    assert resumed.calls == expected.steps - 10 * saves


def test_a_finished_run_is_not_run_again(tmp_path, generator):
    data, first, second = some_data(20, generator), Quadratic(), Quadratic()
    for objective in (first, second):
        result = run_quietly(objective, data, settings_of(epochs=30, batch_size=5), checkpoint=tmp_path / "run")
    assert second.calls == 0
    assert torch.equal(second.theta, first.theta)
    assert len(result.history) == 2


@pytest.mark.parametrize(
    ("identity", "change"),
    [
        ({"a": 1}, {"seed": 1}),
        (None, {"settings": settings_of(epochs=31, batch_size=5)}),
        ({"a": 1}, {"identity": {"a": 2}}),
    ],
)
def test_the_state_of_another_run_is_refused(identity, change, tmp_path, generator):
    options = {"settings": settings_of(epochs=30, batch_size=5), "seed": 0, "identity": identity}
    data = some_data(20, generator)
    train(Quadratic(), data, checkpoint=tmp_path / "run", **options)
    with pytest.raises(kn.InvalidArgument, match=rf"belongs to another fit: {next(iter(change))}|: a differs"):
        train(Quadratic(), data, checkpoint=tmp_path / "run", **{**options, **change})


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
    data, objective = some_data(20, generator), Noted()
    run_quietly(objective, data, settings_of(epochs=epochs, batch_size=5, cycles=3))
    assert objective.counts.tolist() == [epochs, 3]
    assert objective.epochs[epochs - 1] == objective.cycles[2] == objective.theta.item()


def test_a_loader_that_gives_fewer_batches_than_it_said_ends_its_epochs_too(generator):
    x, y = some_data(20, generator).tensors

    class Short:
        def __iter__(self):
            return iter([(x[:5], y[:5]), (x[5:10], y[5:10])])

        def __len__(self) -> int:
            return 4

    objective = Noted()
    run_quietly(objective, Data(Short(), 20), settings_of(epochs=3))
    assert objective.calls == 12  # six epochs of two steps, of which the last ends with the run
    assert objective.counts[0] == 5


@pytest.mark.parametrize("fails", [30, 100, 101, 104, 105, 150])
def test_what_is_kept_at_the_ends_of_epochs_survives_an_interrupt_exactly(fails, tmp_path, generator):
    # 4 steps an epoch and windows of 100: the 25th epoch and the first window end with the same step
    data, training = some_data(20, generator), settings_of(epochs=50, batch_size=5, cycles=4)
    whole, halves, resumed = Noted(), Noted(fail_at={fails: KeyboardInterrupt()}), Noted()
    run_quietly(whole, data, training)
    run_quietly(halves, data, training, checkpoint=tmp_path / "run")
    run_quietly(resumed, data, training, checkpoint=tmp_path / "run")
    assert same_params(resumed.tensors(), whole.tensors())


@pytest.mark.parametrize("fails", [1, 3])
def test_a_run_interrupted_before_its_first_record_begins_again_with_the_same_random_numbers(fails, tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20)
    model = kn.Model(_dropout_net(), kn.Gaussian())
    whole = kn.MAP(epochs=20).fit(model, (x, y), seed=3)
    calls, score = [0], kn.Model.score

    def interrupted(self, *args):
        calls[0] += 1
        if calls[0] == fails:
            raise KeyboardInterrupt
        return score(self, *args)

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
    data, training = some_data(20, generator), settings_of(epochs=120, learning_rate=0.1, batch_size=5)
    whole, stopped, resumed = Remembering(), Remembering(fail_at={330: KeyboardInterrupt()}), Remembering()
    run_quietly(whole, data, training)
    checkpoint = Checkpoint(tmp_path / "state", seconds=0)
    assert run_quietly(stopped, data, training, checkpoint=checkpoint).interrupted
    run_quietly(resumed, data, training, checkpoint=checkpoint)
    assert resumed.calls < whole.calls
    assert torch.equal(resumed.theta, whole.theta)
    assert whole.theta.item() == pytest.approx(data.tensors[1].mean().item(), abs=0.05)
