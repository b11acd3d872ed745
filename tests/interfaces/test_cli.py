"""The command line: what it prints, and how it fails."""

import pytest
from typer.testing import CliRunner

import knowable as kn
from knowable.interfaces import cli, demo
from knowable.registry import METHODS

runner = CliRunner()


def call(*arguments):
    return runner.invoke(cli.app, list(arguments), prog_name="knowable")


def test_without_arguments_the_help_is_printed():
    result = call()
    assert result.exit_code == 0
    for word in ("demo", "methods", "cite", "--version"):
        assert word in result.stdout


def test_version_is_printed():
    assert call("--version").stdout == f"knowable {kn.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "methods", "cite"])
def test_every_command_has_a_help_text(command):
    result = call(command, "--help")
    assert result.exit_code == 0 and len(result.stdout) > 80


def test_methods_lists_every_method_with_aliases_and_family():
    printed = call("methods").stdout
    for entry in METHODS.values():
        assert entry.name in printed and entry.family in printed
        assert all(alias in printed for alias in entry.aliases)
        assert entry.summary.split()[0] in printed


@pytest.mark.parametrize("name", ["mean_field_vi", "mfvi", "MeanFieldVI"])
def test_cite_prints_bibtex_by_name_alias_or_class(name):
    result = call("cite", name)
    assert result.exit_code == 0
    assert "blundell2015" in result.stdout and result.stdout.count("{") == result.stdout.count("}")


def test_cite_prints_a_paper_of_two_methods_once():
    assert call("cite", "map", "exact_linear").stdout.count("{mackay1992") == 1


def test_cite_of_an_unknown_method_names_the_nearest_on_one_line():
    result = call("cite", "mean_feild_vi")
    assert result.exit_code == 2 and result.stdout == ""
    assert "Did you mean 'mean_field_vi'?" in result.stderr
    assert result.stderr.count("\n") == 1


def test_demo_writes_a_self_contained_report(tmp_path):
    result = call("demo", "--quick", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Motorcycle, 2-fold" in result.stdout and "Digits, 539 held out" in result.stdout
    assert str(tmp_path / "out" / "report.html") in result.stdout
    assert "Mean-field VI" in page and "90% coverage" in page
    assert 'src="http' not in page and 'href="http' not in page and "<script" not in page


def test_an_option_that_does_not_exist_is_a_mistake_of_the_user():
    result = call("demo", "--sed", "1")
    assert result.exit_code == 2 and "--seed" in result.stderr


def test_a_bad_value_is_one_line_and_code_2(tmp_path):
    result = call("demo", "--seed", "-1", "--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "knowable: seed must be a whole number >= 0, got -1.\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "knowable: stopped from the keyboard\n"),
        (PermissionError(13, "Permission denied", "/out"), 1, "knowable: Permission denied: /out\n"),
        (kn.MissingExtra("Run:\n  pip"), 2, "knowable: Run: pip\n"),
    ],
)
def test_failures_are_one_line_with_their_own_code(error, code, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    result = call("demo")
    assert (result.exit_code, result.stderr) == (code, message)
