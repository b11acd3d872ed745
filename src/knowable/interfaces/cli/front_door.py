"""The front door of the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from knowable._version import __version__
from knowable.interfaces.cli.cite import cite
from knowable.interfaces.cli.compare import compare
from knowable.interfaces.cli.demo import demo
from knowable.interfaces.cli.evaluate import evaluate
from knowable.interfaces.cli.fit import fit
from knowable.interfaces.cli.methods import methods
from knowable.interfaces.cli.predict import predict
from knowable.interfaces.cli.report import report

app = typer.Typer(
    name="knowable",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, wrapped to the terminal, and plain errors
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app(prog_name="knowable")


@app.callback(invoke_without_command=True)
def front_door(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Turn any PyTorch network into a Bayesian one, and know what it doesn't know.

    New here? Run "knowable demo": it fits several methods to two small data sets and writes a report. With a table of
    your own: "knowable fit data.csv --target NAME".

    Exit codes: 0 good, 1 a failure of the program, 2 bad input, file or argument, 3 the fit did not converge, 130
    stopped from the keyboard.
    """
    if version:
        typer.echo(f"knowable {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (demo, fit, predict, evaluate, compare, report, methods, cite):
    app.command()(command)
