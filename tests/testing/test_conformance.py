from __future__ import annotations

import pytest

import knowable as kn
from knowable.testing import CHECKS, Check, check_method, parametrize_with_checks
from knowable.testing.checks import inputs, networks, predicting, resuming, storing
from knowable.testing.checks import predicting as precision
from knowable.testing.checks import predicting as randomness
from knowable.testing.checks import storing as untouched
from tests.testing.faulty import faulty, sound

MODULES = (inputs, networks, precision, predicting, randomness, resuming, storing, untouched)


def test_every_check_there_is_is_in_the_suite():
    written = {name.removeprefix("check_") for module in MODULES for name in vars(module) if name.startswith("check_")}
    # which are there once for every kind of network
    assert written - {check.name for check in CHECKS} == {"case", "network"}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


def test_check_is_called_with_a_subject():
    seen = []
    subject = sound()
    Check("seen", seen.append)(subject)
    assert seen == [subject]


def test_parametrization_pairs_every_subject_with_every_check():
    mark = parametrize_with_checks([sound(), sound(seeded=False)])
    names, values = mark.args
    assert names == ("subject", "check")
    assert len(values) == 2 * len(CHECKS)
    assert values[0].id == f"MAP-{CHECKS[0].name}"


def test_all_failures_are_told_at_once(monkeypatch):
    def fail(subject):
        raise AssertionError(f"not {subject.name}")

    def crash(subject):
        raise RuntimeError("broken")

    checks = (Check("good", lambda subject: None), Check("bad", fail), Check("worse", crash))
    monkeypatch.setattr("knowable.testing.conformance.CHECKS", checks)
    with pytest.raises(
        AssertionError, match=r"(?s)MAP fails 2 of 3 checks.*bad: .*not MAP.*worse: RuntimeError: broken"
    ):
        check_method(kn.MAP())


def test_declarations_reach_the_checks(monkeypatch):
    seen = []
    monkeypatch.setattr("knowable.testing.conformance.CHECKS", (Check("look", seen.append),))
    longer = kn.MAP(epochs=9)
    check_method(kn.MAP(), refuses=["lstm"], seeded=False, iterates=False, longer=longer, any_value=["clip"])
    (subject,) = seen
    assert subject.refuses == {"lstm"} and subject.any_value == {"clip"}
    assert not subject.seeded and not subject.iterates and subject.longer is longer


def test_one_call_runs_the_whole_suite(monkeypatch):
    def fit(fit, model, data, *, seed=0, **keywords):
        return fit(model, data, **keywords)

    subject = faulty(fit)
    quick = tuple(check for check in CHECKS if "seed" in check.name)
    monkeypatch.setattr("knowable.testing.conformance.CHECKS", quick)
    with pytest.raises(AssertionError, match="fails 1 of 2 checks"):
        check_method(subject.method)
