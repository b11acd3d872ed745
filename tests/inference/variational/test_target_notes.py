from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.training.loop import TrainingResult
from knowable.inference.variational.method import learned_scale_notes, tempering_notes, warmup_notes


def result(history: list[dict[str, float]], *, epochs: float, interrupted: bool = False) -> TrainingResult:
    return TrainingResult(history, 100, epochs, None, interrupted, "", 0.0)


def test_bayes_needs_no_note():
    assert tempering_notes(1.0, 1.0) == ()
    assert warmup_notes(10, result([], epochs=100.0)) == ()
    assert learned_scale_notes(kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1)), 100) == ()


@pytest.mark.parametrize(
    ("beta", "temperature", "wanted"),
    [(0.25, 1.0, "beta=0.25: the target is not the Bayes posterior (beta=1 is). Every row counts 4 times."),
     (1.0, 0.1, "temperature=0.1: the target is not the Bayes posterior (temperature=1 is).")],
)  # fmt: skip
def test_tempering_is_named(beta, temperature, wanted):
    assert tempering_notes(beta, temperature) == (wanted,)
    assert not kn.Diagnostics(notes=tempering_notes(beta, temperature)).bayes


def test_a_fit_that_was_stopped_in_the_warm_up_says_so():
    record = {"epoch": 3.0, "loss": 1.0}
    (note,) = warmup_notes(9, result([record], epochs=3.5, interrupted=True))
    assert "from epoch 3, when the KL still counted 40%" in note
    assert not kn.Diagnostics(notes=(note,)).bayes
    (note,) = warmup_notes(9, result([], epochs=0.5, interrupted=True))
    assert "from epoch 0" in note


def test_a_state_that_held_out_data_chose_from_the_warm_up_says_so():
    history = [{"epoch": e, "validation_log_likelihood": v} for e, v in ((2.0, -1.0), (4.0, -0.5), (20.0, -0.7))]
    (note,) = warmup_notes(9, result(history, epochs=20.0))
    assert "from epoch 4" in note
    assert warmup_notes(3, result(history, epochs=20.0)) == ()


def test_early_stopping_in_the_warm_up_is_reported_by_a_fit():
    # targets are noise of size 3 where the model has 0.3: without the KL it overfits at once, and held-out rows say so
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 10, generator=generator), 3 * torch.randn(60, 1, generator=generator)
    model = kn.Model(nn.Linear(10, 1), kn.Gaussian(0.3), kn.Normal(10.0))
    method = kn.MeanFieldVI(epochs=6000, training=kn.Training(patience=2), kl_warmup=3000)
    posterior = method.fit(model, (x[:15], y[:15]), validation=(x[15:], y[15:]))
    assert any("kl_warmup" in note for note in posterior.diagnostics.notes)
    assert not posterior.diagnostics.bayes


@pytest.mark.parametrize(
    ("per", "rows", "noted"),
    [("glob", 5, False), ("parameter", 1000, False), ("parameter", 20, True), ("weight", 1000, True)],
)
def test_many_learned_scales_are_counted(per, rows, noted):
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    model = kn.Model(net, kn.Gaussian(0.1), kn.EmpiricalBayes(kn.Normal(1.0), per=per))
    notes = learned_scale_notes(model, rows)
    assert bool(notes) is noted
    if per == "weight":
        assert notes[0].startswith("33 scales of the prior were learned from the same 1,000 rows")
        assert kn.Diagnostics(notes=notes).bayes  # the target is a posterior, of a prior that the data chose
