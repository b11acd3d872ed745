"""``knowable predict``: a run on new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from knowable.interfaces.cli.exits import plain_errors, say
from knowable.interfaces.cli.options import AsJson, Config, DataFile, Force, Lenient, Level, Quiet, RunArgument


def predict(
    run: RunArgument,
    data: DataFile,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="CSV file to write; else standard output.")
    ] = None,
    level: Level = 0.9,
    lenient: Lenient = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Predict every row of a file, and say how sure each prediction is.

    Numbers: mean, standard deviation, interval, and the spread that is noise and the spread that is doubt. Classes: the
    probabilities, and the uncertainty in nats. Rows are named by their line in the file.
    """
    with plain_errors():
        import json

        from knowable.interfaces.cli.predictions import as_csv
        from knowable.interfaces.cli.run_folder import check_file, finite, write_file
        from knowable.interfaces.cli.scoring import predict_file

        path = None if out is None or str(out) == "-" else out
        if path is not None:
            check_file(path, force=force)
        rows = predict_file(run, data, level=level, lenient=lenient, quiet=quiet)
        text = json.dumps(finite(rows), indent=1, allow_nan=False) + "\n" if as_json else as_csv(rows)
        if path is None:
            typer.echo(text, nl=False)
            return
        write_file(path, text, force=force)
        if not quiet:
            say(f"{len(rows)} predictions in {path}")
