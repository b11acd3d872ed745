"""The state of a run: what is kept, and that going back to it goes back to all of it."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.compiling.engine import Engine
from knowable.core.model.data import as_data
from knowable.core.support.progress import progress_bar
from knowable.core.training import loop
from knowable.core.training.loop import TrainingRun
from knowable.inference.point.point import PointObjective
from tests.core.training_cases import settings_of


def _run(seed: int) -> TrainingRun:
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian())
    data = as_data((torch.randn(300, 2), torch.randn(300)), model)
    objective = PointObjective(model, data.size, use_prior=True)
    return TrainingRun(objective, data, settings_of(epochs=80, batch_size=100), None, seed, Engine(), keeps_all=True)


def _steps(run: TrainingRun, epochs: int) -> None:
    with progress_bar("steps", False) as bar:
        for _ in range(epochs):
            run.epoch_of_steps(None, bar)


def test_going_back_to_the_last_good_state_goes_back_to_all_of_it(seed):
    run = _run(seed)
    _steps(run, 40)  # 120 steps: the last window closed at step 100
    before = {name: value.clone() for name, value in run.good[1].items()}
    run.restore_good()
    assert (run.step, run.epoch, run.batch) == (100, 33, 1)
    content = run.good[0]
    run._keep_state()
    assert run.good[0] == content
    after = run.good[1]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_steps_taken_again_from_a_good_state_are_the_same_steps(seed):
    run = _run(seed)
    _steps(run, 60)
    first = [value.detach().clone() for value in run.params]
    run.restore_good()
    _steps(run, 60 - run.epoch)
    assert run.step == 180
    assert all(torch.equal(one, two) for one, two in zip(first, run.params, strict=True))


def test_an_interrupt_while_the_state_is_kept_keeps_all_of_it(seed, monkeypatch):
    run = _run(seed)
    _steps(run, 40)
    wanted = [value.detach().clone() for value in run.params]

    def torn(value, held):
        monkeypatch.setattr("knowable.core.training.loop._copied", copied)
        raise KeyboardInterrupt

    copied = loop._copied
    monkeypatch.setattr("knowable.core.training.loop._copied", torn)
    with pytest.raises(KeyboardInterrupt):
        run._keep_state()
    run.restore_good()
    assert run.step == 120
    assert all(torch.equal(one, two) for one, two in zip(wanted, run.params, strict=True))


def test_the_last_step_ends_the_run_and_closes_its_window(seed):
    run = _run(seed)
    _steps(run, 80)
    assert run.finished
    assert [record["step"] for record in run.history] == [100, 200, 240]


# --- what an objective keeps and says along the way ------------------------------------------------------------------


class _Diary(PointObjective):
    """Keeps its first weight after every epoch."""

    def end_of_epoch(self) -> None:
        self.snapshots.append(self.values[0].detach().clone())

    def summary(self) -> dict[str, float]:
        return {"entries": float(len(self.snapshots))}


def _diary(seed: int, data: tuple[torch.Tensor, torch.Tensor]) -> TrainingRun:
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian())
    rows = as_data(data, model)
    objective = _Diary(model, rows.size, use_prior=True)
    return TrainingRun(objective, rows, settings_of(epochs=80, batch_size=100), None, seed, Engine(), keeps_all=True)


def test_what_is_kept_goes_back_with_the_rest_and_into_another_run(seed):
    data = torch.randn(300, 2), torch.randn(300)
    run = _diary(seed, data)
    _steps(run, 60)
    entries = list(run.objective.snapshots)
    assert len(entries) == 60
    run.restore_good()  # step 100: in the middle of epoch 33
    assert len(run.objective.snapshots) == 33
    other = _diary(seed, data)
    other._restore(*run.good)
    assert all(torch.equal(one, two) for one, two in zip(other.objective.snapshots, entries, strict=False))
    _steps(other, 60 - other.epoch)
    assert len(other.objective.snapshots) == 60 and len(run.objective.snapshots) == 33


def test_a_record_has_the_objectives_own_summary(seed):
    run = _diary(seed, (torch.randn(300, 2), torch.randn(300)))
    _steps(run, 80)
    assert [record["entries"] for record in run.history] == [33.0, 66.0, 80.0]


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_without_a_checkpoint_the_optimisers_memory_is_not_kept_and_begins_anew_after_a_divergence(seed):
    run = _run(seed)
    run.keeps_all = False
    _steps(run, 40)
    assert not any(name.startswith("optimiser.") for name in run.good[1])
    at = [value.detach().clone() for value in run.params]
    with pytest.warns(kn.errors.ConvergenceWarning, match="half the learning rate"):
        run._diverged("The loss became NaN or infinite")
    assert run.step == 100 and not run.optimiser.state
    assert not any(torch.equal(one, two) for one, two in zip(at, run.params, strict=True))


def test_state_is_kept_in_the_memory_of_the_one_before(seed):
    run = _run(seed)
    _steps(run, 40)
    places = {name: value.data_ptr() for name, value in run.good[1].items()}
    _steps(run, 30)
    assert run.good[0]["step"] == 200
    assert {name: value.data_ptr() for name, value in run.good[1].items()} == places
