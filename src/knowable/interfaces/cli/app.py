"""The command line: its commands, and ``methods``, ``cite`` and ``demo`` themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from knowable._version import __version__
from knowable.interfaces.cli.certify import certify
from knowable.interfaces.cli.compare import compare
from knowable.interfaces.cli.fit import fit
from knowable.interfaces.cli.messages import plain_errors
from knowable.interfaces.cli.options import AsJson, Config, Quiet, Seed, complete_method
from knowable.interfaces.cli.predict import evaluate, predict
from knowable.interfaces.cli.report import report
from knowable.interfaces.cli.signing import sign, verify
from knowable.interfaces.lab.command import lab
from knowable.interfaces.serve.command import serve


def methods(
    family: Annotated[str | None, typer.Option(metavar="NAME", help="Only one family, such as sampling.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the inference methods and what each does."""
    with plain_errors():
        from knowable.errors import InvalidArgument
        from knowable.registry import METHODS

        entries = [entry for entry in METHODS.values() if family in (None, entry.family)]
        if not entries:
            families = ", ".join(dict.fromkeys(entry.family for entry in METHODS.values()))
            raise InvalidArgument(f"There is no family {family!r}. The families are {families}.")
        if as_json:
            names = ("name", "aliases", "family", "summary")
            typer.echo(json.dumps([{name: getattr(entry, name) for name in names} for entry in entries], indent=1))
        else:
            _print_table(entries)


def _print_table(entries: list) -> None:
    from rich.table import Table

    from knowable.interfaces.cli.messages import standard_output

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "aliases", "family", "summary"):
        table.add_column(heading, no_wrap=heading != "summary", overflow="fold")
    for entry in entries:
        table.add_row(entry.name, ", ".join(entry.aliases), entry.family, entry.summary)
    standard_output().print(table, markup=False)


def cite(
    method: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Name, alias or class: mean_field_vi, mfvi, MeanFieldVI.",
            autocompletion=complete_method,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Print the BibTeX of the papers behind one or more methods."""
    with plain_errors():
        from knowable.registry import cite as bibtex_of
        from knowable.registry import find_method

        if as_json:
            entries = [find_method(name) for name in method]
            typer.echo(json.dumps({entry.name: list(entry.bibtex) for entry in entries}, indent=1, ensure_ascii=False))
        else:
            typer.echo(bibtex_of(*method))


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.html; nothing else is written.")] = Path(
        "knowable-demo"
    ),
    seed: Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough run of seconds, with short training.")] = False,
    quiet: Quiet = False,
    config: Config = None,
) -> None:
    """Fit several methods to real data, score them, and write a report.

    Two problems with few data that come with the package: head acceleration in motorcycle accidents, and handwritten
    digits, also lying on their side. It ends with what to act on: which predictions to refuse at which risk. Nothing
    is downloaded. It takes about a minute.
    """
    with plain_errors():
        from knowable.interfaces.demo import run_demo

        run_demo(out, seed=seed, quick=quick, quiet=quiet)


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


for command in (demo, fit, predict, evaluate, certify, compare, report, serve, lab, sign, verify, methods, cite):
    app.command()(command)
