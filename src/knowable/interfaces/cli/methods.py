"""``knowable methods``: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import plain_errors
from knowable.interfaces.cli.options import AsJson


def methods(
    family: Annotated[str | None, typer.Option(metavar="NAME", help="Only one family, as sampling.")] = None,
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

    from knowable.interfaces.console import standard_output

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "aliases", "family", "summary"):
        table.add_column(heading, no_wrap=heading != "summary", overflow="fold")
    for entry in entries:
        table.add_row(entry.name, ", ".join(entry.aliases), entry.family, entry.summary)
    standard_output().print(table, markup=False)
