"""``knowable predict``: a run on new rows."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_number
from knowable.errors import InvalidArgument, Unsupported
from knowable.interfaces.cli.estimators import open_run, run_on
from knowable.interfaces.cli.fit import plain_scores
from knowable.interfaces.cli.messages import as_rich, collected, plain_errors, say, standard_output, tell
from knowable.interfaces.cli.options import AsJson, Config, DataFile, Force, Lenient, Level, Quiet, RunArgument
from knowable.interfaces.cli.run_folder import check_file, write_file
from knowable.interfaces.cli.training_table import lines_of
from knowable.report.html import finite
from knowable.report.quality import quality_table
from knowable.report.report import Notice
from knowable.tabular.columns import find_missing
from knowable.tabular.fit_report import class_names
from knowable.tabular.table import Table


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
    """Predict every row of a file, with the uncertainty of each prediction.

    Numbers: mean, standard deviation, interval, aleatoric and epistemic standard deviation. Classes: probabilities, and
    the entropy with its aleatoric and epistemic parts in nats. Rows are named by their line in the file, and by the
    columns that were given to fit as --id.
    """
    with plain_errors():
        path = None if out is None or str(out) == "-" else out
        if path is not None:
            check_file(path, force=force)
        check_number("level", level, above=0.0, below=1.0)
        opened, estimator, table, _ = open_run(run, data, lenient=lenient, quiet=quiet)
        with collected():  # what looks wrong with the rows has been said already
            prediction = estimator.predict_dist(table)
        identifiers = _carried(table, opened.options.get("id", ()), quiet=quiet)
        rows = prediction_rows(
            prediction, lines_of(table), identifiers=identifiers, classes=class_names(estimator), level=level
        )
        text = json.dumps(finite(rows), indent=1, allow_nan=False) + "\n" if as_json else as_csv(rows)
        if path is None:
            typer.echo(text, nl=False)
            return
        write_file(path, text, force=force)
        if not quiet:
            say(f"{len(rows)} predictions in {path}")


def prediction_rows(
    prediction: Prediction,
    lines: Sequence[int],
    *,
    identifiers: Mapping[str, Sequence[Any]] | None = None,
    classes: Sequence[str] = (),
    level: float = 0.9,
) -> list[dict[str, Any]]:
    """One mapping for each row, ready for CSV or JSON; ``identifiers`` come after the line.

    Numbers: ``line, mean, std, low, high, aleatoric_std, epistemic_std``, all in the outcome's unit. Classes: ``line,
    label, probability, p(name) ..., entropy, aleatoric, epistemic`` in nats.
    """
    if isinstance(prediction, RegressionPrediction):
        columns = _numbers(prediction, level)
    elif isinstance(prediction, ClassPrediction):
        columns = _classes(prediction, classes)
    else:
        raise Unsupported(f"A {type(prediction).__name__} cannot be written as a table.")
    clash = next((name for name in identifiers or () if name in ("line", *columns)), None)
    if clash is not None:
        raise InvalidArgument(f"--id {clash}: predictions have a column of that name. Rename it in the file.")
    found = {"line": lines, **(identifiers or {}), **columns}
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _carried(table: Table, names: Sequence[str], *, quiet: bool) -> dict[str, list[Any]]:
    """Columns of the file that name its rows; a warning where one is not there."""
    lacking = [name for name in names if name not in table.names]
    tell([Notice("Data", f"{table.source} has no column {name!r} to name its rows.") for name in lacking], quiet=quiet)
    return {
        name: [None if gap else value for value, gap in zip(table.column(name).tolist(), missing, strict=True)]
        for name in names
        if name not in lacking
        for missing in [find_missing(table.column(name))]
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, numbers in full."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _numbers(prediction: RegressionPrediction, level: float) -> dict[str, list[float]]:
    if prediction.mean[0].numel() != 1:
        raise Unsupported("The command line writes one outcome a row. Use predict_dist of the estimator for several.")
    low, high = prediction.interval(level)
    found = {
        "mean": prediction.mean,
        "std": prediction.std,
        "low": low,
        "high": high,
        "aleatoric_std": prediction.aleatoric.sqrt(),
        "epistemic_std": prediction.epistemic.clamp_min(0.0).sqrt(),
    }
    return {name: _round(values.detach().double().reshape(-1).tolist()) for name, values in found.items()}


def _classes(prediction: ClassPrediction, classes: Sequence[str]) -> dict[str, list[Any]]:
    probs = prediction.probs.detach().double()
    labels = prediction.labels.reshape(-1).tolist()
    columns: dict[str, list[Any]] = {
        "label": [classes[label] for label in labels],
        "probability": _round([probs[row, label].item() for row, label in enumerate(labels)]),
    }
    columns |= {f"p({name})": _round(probs[:, place].tolist()) for place, name in enumerate(classes)}
    uncertainty = {"entropy": prediction.total, "aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}
    return columns | {name: _round(value.detach().double().reshape(-1).tolist()) for name, value in uncertainty.items()}


def _round(values: list[float]) -> list[float]:
    """Nine significant digits: more than single precision holds."""
    return [float(f"{value:.9g}") if math.isfinite(value) else value for value in values]


def evaluate(
    run: RunArgument,
    data: DataFile,
    lenient: Lenient = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Score a run on a file that has the outcomes, with standard errors.

    Beside them are the scores of a baseline that knows the outcomes of the training rows but no inputs.
    """
    with plain_errors():
        scored = run_on(run, data, lenient=lenient, quiet=quiet)
        if as_json:
            content = {
                "run": str(run),
                "rows": len(scored.y),
                "scores": plain_scores(scored.scores),
                "guess_without_inputs": plain_scores(scored.baseline),
                "warnings": [notice.text for notice in scored.notices],
            }
            typer.echo(json.dumps(finite(content), indent=1, allow_nan=False))
        elif not quiet:
            name = scored.method.cls_name
            title = f"{scored.target} by {name}, on {len(scored.y)} rows of {scored.data}"
            standard_output().print(as_rich(quality_table(name, scored.scores, scored.baseline, title=title)))
