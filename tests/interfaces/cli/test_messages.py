"""Errors become one line and a code."""

import pytest
import typer

import knowable as kn
from knowable.interfaces.cli import messages as exits


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "knowable: stopped from the keyboard\n"),
        (KeyboardInterrupt("the fit was stopped"), 130, "knowable: the fit was stopped\n"),
        (kn.InvalidData("line 3:\n  not a number"), 2, "knowable: line 3: not a number\n"),
        (kn.MissingExtra("Run:\n  pip"), 2, "knowable: Run: pip\n"),
        (kn.DamagedArtifact("altered"), 2, "knowable: altered\n"),
        (kn.Diverged("left the finite numbers"), 3, "knowable: left the finite numbers\n"),
        (PermissionError(13, "Permission denied", "out"), 2, "knowable: Permission denied: out\n"),
        (FileNotFoundError(2, "No such file or directory", "x"), 2, "knowable: No such file or directory: x\n"),
        (OSError(28, "No space left on device", "out"), 1, "knowable: No space left on device: out\n"),
    ],
)
def test_every_kind_of_failure_has_its_code_and_one_line(error, code, message, capsys):
    with pytest.raises(typer.Exit) as ended, exits.plain_errors():
        raise error
    assert ended.value.exit_code == code
    assert capsys.readouterr() == ("", message)


def test_an_error_nobody_foresaw_is_code_1_and_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.delenv(exits.TRACEBACK, raising=False)
    with pytest.raises(typer.Exit) as ended, exits.plain_errors():
        raise ZeroDivisionError("division by zero")
    assert ended.value.exit_code == exits.FAILURE == 1
    printed = capsys.readouterr().err
    assert "ZeroDivisionError: division by zero" in printed and exits.TRACEBACK in printed and printed.count("\n") == 1


def test_with_the_variable_set_the_error_itself_comes_through(monkeypatch):
    monkeypatch.setenv(exits.TRACEBACK, "1")
    with pytest.raises(ZeroDivisionError), exits.plain_errors():
        raise ZeroDivisionError


@pytest.mark.parametrize("passing", [typer.Exit(3), BrokenPipeError()])
def test_what_is_no_error_passes(passing):
    with pytest.raises(type(passing)), exits.plain_errors():
        raise passing


def test_a_command_that_ends_well_says_nothing(capsys):
    with exits.plain_errors():
        pass
    assert capsys.readouterr() == ("", "")
