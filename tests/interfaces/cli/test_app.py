"""The command line as a whole: help, version, completion, and both ways in."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import knowable as kn
from tests.interfaces.cli.calling import call

COMMANDS = ["demo", "fit", "predict", "evaluate", "compare", "report", "methods", "cite"]


def in_a_process(*command, **environment):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "TERM": "dumb", **environment}
    )


def test_without_arguments_the_help_names_every_command_and_what_exit_codes_mean():
    result = call()
    assert result.exit_code == 0
    for word in (*COMMANDS, "--version", "--install-completion", "Exit codes"):
        assert word in result.stdout


def test_version_is_printed():
    assert call("--version").stdout == f"knowable {kn.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_text_with_its_options_explained(command):
    result = call(command, "--help")
    assert result.exit_code == 0 and len(result.stdout) > 80
    assert "Options:" in result.stdout or "--help" in result.stdout


@pytest.mark.parametrize("command", ["fit", "predict", "evaluate", "compare", "report"])
def test_commands_on_tables_share_their_options(command):
    printed = call(command, "--help").stdout
    for option in ("--json", "--quiet", "--config", "--lenient"):
        assert option in printed


def test_an_option_that_does_not_exist_is_a_mistake_of_the_user():
    result = call("demo", "--sed", "1")
    assert result.exit_code == 2 and "--seed" in result.stderr


def test_a_command_that_does_not_exist_is_a_mistake_of_the_user():
    assert call("fitt").exit_code == 2


def test_python_m_knowable_is_the_command_line():
    result = in_a_process(sys.executable, "-m", "knowable", "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"knowable {kn.__version__}\n", "")


def test_a_process_ends_with_the_code_of_the_mistake(tmp_path):
    result = in_a_process(
        sys.executable, "-m", "knowable", "fit", str(tmp_path / "nothing.csv"), "--target", "y",
        "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stdout == "" and result.stderr.startswith("knowable: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_commands_and_methods_are_completed_by_the_shell():
    ask = {"_KNOWABLE_COMPLETE": "complete_bash"}
    commands = in_a_process(sys.executable, "-m", "knowable", COMP_WORDS="knowable pre", COMP_CWORD="1", **ask)
    assert commands.stdout.split() == ["predict"]
    methods = in_a_process(sys.executable, "-m", "knowable", COMP_WORDS="knowable cite mean", COMP_CWORD="2", **ask)
    assert methods.stdout.split() == ["mean_field_vi"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_on_the_page_of_commands(command):
    page = (Path(__file__).parents[3] / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--[a-z-]+", call(command, "--help").stdout)) - {"--help", "--quick"}
    assert [flag for flag in sorted(flags) if flag not in page] == []
