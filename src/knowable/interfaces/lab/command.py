"""``knowable lab``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.core.support.checks import check_count
from knowable.errors import MissingExtra
from knowable.interfaces.cli.messages import plain_errors
from knowable.interfaces.cli.options import Config


def lab(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: from everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0 takes a free one.")] = 8600,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that clients must send; else KNOWABLE_TOKEN."),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    config: Config = None,
) -> None:
    """Draw data, choose methods, and watch them fit: a page in the browser.

    Listens on this machine alone unless --host says otherwise. Nothing is loaded from the network. Ctrl-C ends it.
    """
    with plain_errors():
        check_count("--port", port, at_least=0)
        try:
            from knowable.interfaces.lab.server import run
            from knowable.interfaces.serve.server import read_token
        except ImportError as error:
            raise MissingExtra(f"The lab needs {error.name}: pip install 'knowable[lab]'.") from None
        run(host=host, port=port, token=read_token(token_file), browser=browser)
