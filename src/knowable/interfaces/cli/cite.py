"""``knowable cite``: the papers behind a method."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import plain_errors
from knowable.interfaces.cli.options import AsJson, complete_method


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
