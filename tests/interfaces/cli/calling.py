"""Calling the command line in this process."""

from typer.testing import CliRunner

from knowable.interfaces.cli import app

runner = CliRunner()


def call(*arguments, stdin=None):
    """Run ``knowable`` with these arguments; ``.exit_code``, ``.stdout`` and ``.stderr`` say what came of it."""
    return runner.invoke(app, [str(each) for each in arguments], prog_name="knowable", input=stdin)
