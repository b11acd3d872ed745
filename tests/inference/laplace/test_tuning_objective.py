"""Tests of the objective whose scales are chosen as training goes."""

from __future__ import annotations

import math

import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace import evidence as tuning_objective
from knowable.inference.laplace.evidence import TuningObjective

NOISE = "likelihood.log_noise"


def make(target: float = 2.0, gain: float = 5.0) -> tuple[TuningObjective, list[float]]:
    calls: list[float] = []
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian())

    def choose(params, buffers):
        calls.append(params[NOISE].item())
        return {NOISE: torch.tensor(target, dtype=torch.float64)}, gain

    return TuningObjective(model, 10, names=[NOISE], choose=choose), calls


def epochs(objective: TuningObjective, count: int, steps: int) -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 1)
    for _ in range(count):
        for _ in range(steps):
            objective(x, y)
        objective.end_of_epoch()


def test_the_chosen_parameters_are_held_by_training():
    objective, _ = make()
    loss, _ = objective(torch.randn(5, 2), torch.randn(5, 1))
    loss.backward()
    assert [name for name, value in objective.params().items() if not value.requires_grad] == [NOISE]
    assert objective.params()["weight"].grad is not None


def test_choices_are_made_after_enough_steps_and_epochs(monkeypatch):
    monkeypatch.setattr(tuning_objective, "_FIRST", 10)
    monkeypatch.setattr(tuning_objective, "_STEPS", 6)
    monkeypatch.setattr(tuning_objective, "_EPOCHS", 2)
    objective, calls = make()
    epochs(objective, 4, 2)
    assert calls == []  # 8 steps
    epochs(objective, 1, 2)
    assert len(calls) == 1
    epochs(objective, 2, 2)
    assert len(calls) == 1  # 4 steps later
    epochs(objective, 1, 2)
    assert len(calls) == 2
    epochs(objective, 1, 20)
    assert len(calls) == 2  # one epoch later
    epochs(objective, 1, 1)
    assert len(calls) == 3


def test_a_scale_moves_towards_its_best_value_but_not_too_far(monkeypatch):
    monkeypatch.setattr(tuning_objective, "_FIRST", 1)
    monkeypatch.setattr(tuning_objective, "_STEPS", 1)
    monkeypatch.setattr(tuning_objective, "_EPOCHS", 1)
    objective, calls = make(target=1.2)  # from 0
    epochs(objective, 4, 1)
    assert calls == [0.0, 0.5, 1.0, 1.2000000476837158]


def test_training_does_not_settle_while_there_is_much_to_gain(monkeypatch):
    monkeypatch.setattr(tuning_objective, "_FIRST", 1)
    objective, _ = make(gain=5.0)
    assert objective.settles_from == math.inf
    epochs(objective, 300, 1)
    assert objective.settles_from == math.inf
    settled, _ = make(gain=0.01)
    epochs(settled, 300, 1)
    assert settled.settles_from == 0.0
    monkeypatch.setattr(tuning_objective, "_LONGEST", 200)
    assert objective.settles_from == 0.0  # for ever it does not wait


def test_all_that_changes_is_in_its_tensors(monkeypatch):
    monkeypatch.setattr(tuning_objective, "_FIRST", 1)
    monkeypatch.setattr(tuning_objective, "_STEPS", 3)
    first, _ = make()
    second, _ = make()
    epochs(first, 7, 1)
    for name, value in second.tensors().items():
        with torch.no_grad():
            value.copy_(first.tensors()[name])
    epochs(first, 5, 1)
    epochs(second, 5, 1)
    assert torch.equal(first.params()[NOISE], second.params()[NOISE])
    assert {name for name in first.tensors() if name.startswith("tuning.")} == {
        "tuning.steps", "tuning.epochs", "tuning.last", "tuning.gain",
    }  # fmt: skip
