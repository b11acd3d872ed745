"""The command line: ``knowable demo | methods | cite``.

Heavy things are imported inside the commands, so that ``knowable --help`` is quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from knowable._version import __version__
from knowable.errors import KnowableError

USER_MISTAKE, FAILURE, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="knowable",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help, wrapped to the terminal, and plain errors
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app()


@app.callback(invoke_without_command=True)
def front_door(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    """Turn any PyTorch network into a Bayesian one, and know what it doesn't know.

    New here? Run "knowable demo": it fits several methods to two small data sets and writes a report.
    """
    if version:
        typer.echo(f"knowable {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for report.html; nothing else is written.")] = Path(
        "knowable-demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Fixes every random choice.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A rough run of seconds, with short training.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Fit several methods to real data, score them, and write a report.

    Two problems that come with the package: head acceleration in motorcycle accidents, where the noise changes with
    time, and handwritten digits. Nothing is downloaded. It takes about a minute and a half on two processor cores.
    """
    with _plain_errors():
        from knowable.interfaces.demo import run_demo

        run_demo(out, seed=seed, quick=quick, quiet=quiet)


@app.command()
def methods() -> None:
    """List the inference methods and what each does."""
    from rich.table import Table

    from knowable.interfaces.console import standard_output
    from knowable.registry import METHODS

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "aliases", "family", "summary"):
        table.add_column(heading, no_wrap=heading != "summary", overflow="fold")
    for entry in METHODS.values():
        table.add_row(entry.name, ", ".join(entry.aliases), entry.family, entry.summary)
    standard_output().print(table, markup=False)


@app.command()
def cite(
    method: Annotated[
        list[str], typer.Argument(metavar="METHOD...", help="Name, alias or class: mean_field_vi, mfvi, MeanFieldVI.")
    ],
) -> None:
    """Print the BibTeX of the papers behind one or more methods."""
    with _plain_errors():
        from knowable.registry import cite as bibtex_of

        typer.echo(bibtex_of(*method))


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn an error made on purpose, or by the file system, into one line on standard error and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        _stop("stopped from the keyboard", INTERRUPTED)
    except KnowableError as error:
        _stop(str(error), USER_MISTAKE)
    except OSError as error:
        _stop(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", FAILURE)


def _stop(message: str, code: int) -> None:
    typer.echo(f"knowable: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)
