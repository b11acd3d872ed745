"""Warnings are collected, told once, and where the data looks wrong, an error."""

import warnings

import pytest

from knowable.errors import ConvergenceWarning, Interrupted, InvalidData, KnowableWarning
from knowable.interfaces.cli.messages import collected, for_the_shell, refuse_doubtful, spoken_for_the_shell, tell
from knowable.report.report import Notice


def test_our_own_warnings_are_collected_once_and_sorted_by_where_they_come_from():
    with collected() as found:
        for text, kind in (
            ("a", KnowableWarning),
            ("a", KnowableWarning),
            ("b", ConvergenceWarning),
            ("c", Interrupted),
        ):
            warnings.warn(text, kind, stacklevel=1)
    assert found == [Notice("Data", "a"), Notice("Fit", "b"), Notice("Fit", "c")]


def test_warnings_of_others_are_passed_on():
    with pytest.warns(DeprecationWarning, match="old"), collected() as found:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert found == []


def test_data_that_looks_wrong_ends_a_command_unless_it_is_to_go_on():
    found = [Notice("Fit", "slow"), Notice("Data", "Odd."), Notice("Data", "Odder.")]
    with pytest.raises(InvalidData, match=r"Odd\. \(and 1 more\) .*--lenient"):
        refuse_doubtful(found, lenient=False)
    refuse_doubtful(found, lenient=True)
    refuse_doubtful(found[:1], lenient=False)


def test_warnings_are_lines_on_standard_error_or_nothing(capsys):
    tell([Notice("Data", "one\n two")], quiet=False)
    tell([Notice("Data", "three")], quiet=True)
    assert capsys.readouterr() == ("", "knowable: warning: one two\n")


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ("say kinds={'a b': 'numeric'}.", "pass --kind 'a b'=numeric."),
        ('kinds={"x": "ignore"}', "--drop x"),
        ("Choose another target, or task='regression'.", "Choose another target, or --task regression."),
        ("nothing of the kind", "nothing of the kind"),
    ],
)
def test_arguments_are_spoken_of_as_flags(said, spoken):
    assert for_the_shell(said) == spoken
    with pytest.raises(InvalidData) as raised, spoken_for_the_shell():
        raise InvalidData(said)
    assert str(raised.value) == spoken
