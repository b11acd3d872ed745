"""``knowable serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidArgument, MissingExtra
from knowable.interfaces.cli.messages import plain_errors
from knowable.interfaces.cli.options import Config


def serve(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run, or a saved posterior or certificate: a folder or a file.")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0: from everywhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(metavar="N", help="Processes that hold the model.")] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token that clients must send; else KNOWABLE_TOKEN."),
    ] = None,
    max_rows: Annotated[int, typer.Option(metavar="N", help="Most rows of a request.")] = 10_000,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Longest body of a request.")] = 4 * 2**20,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Most time for a request.")] = 30.0,
    draws: Annotated[
        int | None, typer.Option(metavar="N", help="Most posterior draws of a prediction; else those of the run.")
    ] = None,
    student: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Distilled or compressed network for quick answers.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The network of a posterior that is not of plain layers.")
    ] = None,
    config: Config = None,
) -> None:
    """Serve a run: predictions with their uncertainty over HTTP, and a page to try them on.

    Listens on this machine alone unless --host says otherwise. A token is asked for if there is a --token-file, or
    KNOWABLE_TOKEN is set. Ends orderly on SIGTERM: what was accepted is answered first.
    """
    with plain_errors():
        for name, count in (("--workers", workers), ("--max-rows", max_rows), ("--max-body", max_body)):
            check_count(name, count)
        if draws is not None:
            check_count("--draws", draws)
        check_count("--port", port, at_least=0)
        check_number("--timeout", timeout, above=0.0)
        if not run.exists():
            raise InvalidArgument(f"There is no folder {str(run)!r}. Give one that knowable fit has written.")
        try:
            from knowable.interfaces.serve.rows import Limits
            from knowable.interfaces.serve.served import Source
            from knowable.interfaces.serve.server import CannotLoad, read_token
            from knowable.interfaces.serve.server import run as run_service
        except ImportError as error:
            raise MissingExtra(f"The service needs {error.name}: pip install 'knowable[serve]'.") from None
        import os

        source = Source(run, student, network, draws, max(1, (os.cpu_count() or 1) // workers))
        limits = Limits(rows=max_rows, body=max_body, waiting=2 * max_rows, seconds=timeout)
        try:
            run_service(source, host=host, port=port, workers=workers, token=read_token(token_file), limits=limits)
        except CannotLoad as error:
            raise InvalidArgument(str(error)) from None
