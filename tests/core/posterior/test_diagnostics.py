"""Tests of what a fit says about itself."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from knowable.core.posterior.diagnostics import NOT_BAYES, Diagnostics, LogEvidence

DIAGNOSTICS = Diagnostics(
    method="MAP(epochs=3)",
    terms={"log_likelihood": -1.5, "log_prior": -2.0},
    history=[{"step": 100, "loss": 1.25}, {"step": 200, "loss": 1.0}],
    converged=None,
    message="ended after 200 steps",
    seconds=0.25,
    notes=("beta=2: not Bayes",),
)


def test_diagnostics_are_a_mapping_of_their_terms():
    assert dict(DIAGNOSTICS) == {"log_likelihood": -1.5, "log_prior": -2.0}
    assert DIAGNOSTICS["log_prior"] == -2.0
    assert len(DIAGNOSTICS) == 2
    assert "kl" not in DIAGNOSTICS
    with pytest.raises(KeyError):
        DIAGNOSTICS["kl"]


def test_diagnostics_survive_json():
    assert Diagnostics.from_json(json.loads(json.dumps(DIAGNOSTICS.to_json()))) == DIAGNOSTICS


def test_diagnostics_print_terms_and_notes():
    shown = repr(DIAGNOSTICS)
    assert shown.splitlines()[:2] == ["MAP(epochs=3)", "  ended after 200 steps (0.2 s)"]
    assert "log_likelihood" in shown
    assert "note: beta=2: not Bayes" in shown
    assert "no iterations" in repr(Diagnostics())


def test_diagnostics_know_whether_the_target_was_bayes():
    assert Diagnostics(notes=("something else",)).bayes
    assert not Diagnostics(notes=("something else", f"beta=2: {NOT_BAYES} (beta=1 is).")).bayes


def test_log_evidence_is_a_float_that_says_what_it_is():
    evidence = LogEvidence(-12.5, "bound", 0.25)
    assert evidence + 1.0 == -11.5
    assert (evidence.kind, evidence.standard_error) == ("bound", 0.25)
    assert repr(evidence) == "-12.5 ± 0.25 (bound)"
    assert repr(LogEvidence(-12.5, "exact")) == "-12.5 (exact)"
    assert evidence < LogEvidence(-12.0, "exact")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_log_evidence_can_be_copied_and_pickled(again):
    evidence = again(LogEvidence(-12.5, "bound", 0.25))
    assert (float(evidence), evidence.kind, evidence.standard_error) == (-12.5, "bound", 0.25)
