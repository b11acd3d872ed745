"""``knowable evaluate``: how good a run is on other rows."""

from __future__ import annotations

import typer

from knowable.interfaces.cli.exits import plain_errors
from knowable.interfaces.cli.options import AsJson, Config, DataFile, Lenient, Quiet, RunArgument


def evaluate(
    run: RunArgument,
    data: DataFile,
    lenient: Lenient = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Score a run on a file that has the outcomes, with standard errors.

    Beside the scores stand those of a guess that knows the outcomes of the training rows but no inputs.
    """
    with plain_errors():
        import json

        from knowable.interfaces.cli.scoring import print_scores, score_file, scores_as_json

        scored = score_file(run, data, lenient=lenient, quiet=quiet)
        if as_json:
            typer.echo(json.dumps(scores_as_json(scored), indent=1, allow_nan=False))
        elif not quiet:
            print_scores(scored)
