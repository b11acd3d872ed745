"""Tests of what members report together."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.inference.ensembles.members import joint_diagnostics
from tests.core.cases import diagonal_posterior, linear_model

METHOD = kn.DeepEnsemble(2, epochs=3)


def _fits(*diagnostics: kn.Diagnostics) -> list[kn.Posterior]:
    model = linear_model()
    return [diagonal_posterior(model, diagnostics=each) for each in diagnostics]


def test_terms_are_averaged_histories_joined_and_times_added():
    first = kn.Diagnostics("", {"loss": 1.0, "own": 5.0}, [{"step": 100.0}], True, seconds=2.0, notes=("a", "b"))
    second = kn.Diagnostics("", {"loss": 3.0}, [{"step": 50.0}], True, message="done", seconds=1.5, notes=("b",))
    found = joint_diagnostics(METHOD, _fits(first, second), 2)
    assert found.terms == {"loss": 2.0}
    assert found.history == [{"member": 0.0, "step": 100.0}, {"member": 1.0, "step": 50.0}]
    assert (found.seconds, found.notes, found.method) == (3.5, ("a", "b"), "DeepEnsemble(members=2, epochs=3)")
    assert (found.converged, found.interrupted, found.message) == (True, False, "2 members in turn: done")


@pytest.mark.parametrize(
    ("each", "expected"), [((True, False), False), ((True, None), None), ((True, True), True), ((None, False), None)]
)
def test_an_ensemble_has_converged_if_all_its_members_have(each, expected):
    found = joint_diagnostics(METHOD, _fits(*(kn.Diagnostics(converged=one) for one in each)), 2)
    assert found.converged is expected


def test_fewer_members_than_asked_for_are_those_before_an_interrupt():
    found = joint_diagnostics(METHOD, _fits(kn.Diagnostics(converged=True)), 4)
    assert (found.interrupted, found.converged) == (True, False)
    assert found.message == "1 of 4 members in turn: stopped from the keyboard"
    assert joint_diagnostics(METHOD, _fits(kn.Diagnostics(message="ok")), 1).message == "1 member in turn: ok"
