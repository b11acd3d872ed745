"""Tests of the exceptions and warnings."""

from __future__ import annotations

import inspect

import pytest

import knowable as kn
from knowable import errors

BUILTINS = {
    "InvalidArgument": ValueError,
    "InvalidData": ValueError,
    "InvalidType": TypeError,
    "Unsupported": NotImplementedError,
    "Diverged": RuntimeError,
    "TooFewSteps": RuntimeError,
    "CannotSave": OSError,
    "DamagedArtifact": OSError,
    "NotSigned": OSError,
    "ProcessLost": ConnectionError,
    "MissingExtra": ImportError,
}
DEFINED = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}


@pytest.mark.parametrize(("name", "builtin"), BUILTINS.items())
def test_every_exception_is_also_the_builtin_a_python_programmer_expects(name, builtin):
    assert issubclass(getattr(kn, name), builtin)
    assert issubclass(getattr(kn, name), kn.KnowableError)


def test_every_class_is_one_or_a_warning_and_is_public():
    assert {name for name, each in DEFINED.items() if issubclass(each, kn.KnowableError)} == {
        *BUILTINS,
        "KnowableError",
    }
    for name, each in DEFINED.items():
        assert issubclass(each, kn.KnowableError | kn.KnowableWarning)
        assert getattr(kn, name) is each
        assert name in kn.__all__


def test_warnings_are_user_warnings_that_can_be_silenced_together():
    assert issubclass(kn.KnowableWarning, UserWarning)
    warned = [each for each in DEFINED.values() if issubclass(each, kn.KnowableWarning)]
    assert len(warned) > 1
