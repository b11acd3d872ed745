"""``knowable predict``: a run on new rows."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_number
from knowable.errors import Unsupported
from knowable.evaluation.evaluate import evaluate as score
from knowable.interfaces.cli.estimators import Estimator, class_names, encode, load_estimator, outcome_tensor
from knowable.interfaces.cli.messages import collected, plain_errors, refuse_doubtful, say, spoken_for_the_shell, tell
from knowable.interfaces.cli.options import AsJson, Config, DataFile, Force, Lenient, Level, Quiet, RunArgument
from knowable.interfaces.cli.run_folder import Run, finite
from knowable.interfaces.cli.training_table import lines_of, read_file
from knowable.registry import find_method
from knowable.report.fit_report import Judged
from knowable.report.quality import Outcomes, quality_table
from knowable.report.report import Notice
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
    """Predict every row of a file, and say how sure each prediction is.

    Numbers: mean, standard deviation, interval, and the spread that is noise and the spread that is doubt. Classes: the
    probabilities, and the uncertainty in nats. Rows are named by their line in the file.
    """
    with plain_errors():
        import json

        from knowable.interfaces.cli.run_folder import check_file, finite, write_file

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


# --- Predictions as rows of a table ----------------------------------------------------------------------------------


def prediction_rows(
    prediction: Prediction, lines: Sequence[int], *, classes: Sequence[str] = (), level: float = 0.9
) -> list[dict[str, Any]]:
    """One mapping for each row, ready for CSV or JSON.

    Numbers: ``line, mean, std, low, high, aleatoric_std, epistemic_std``, all in the outcome's unit. Classes: ``line,
    label, probability, p(name) ..., entropy, aleatoric, epistemic`` in nats.

    Args:
        prediction: In the user's units.
        lines: Where each row is in the file it came from.
        classes: Names of the classes.
        level: Of the interval from ``low`` to ``high``.
    """
    if isinstance(prediction, RegressionPrediction):
        columns = _numbers(prediction, level)
    elif isinstance(prediction, ClassPrediction):
        columns = _classes(prediction, classes)
    else:
        raise Unsupported(f"A {type(prediction).__name__} cannot be written as a table.")
    names = ["line", *columns]
    return [dict(zip(names, row, strict=True)) for row in zip(lines, *columns.values(), strict=True)]


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
    uncertainty = {
        "entropy": prediction.total,
        "aleatoric": prediction.aleatoric,
        "epistemic": prediction.epistemic,
    }
    return columns | {name: _round(value.detach().double().reshape(-1).tolist()) for name, value in uncertainty.items()}


def _round(values: list[float]) -> list[float]:
    """Nine significant digits: more than single precision holds."""
    return [float(f"{value:.9g}") if math.isfinite(value) else value for value in values]


# --- ``knowable evaluate``: how good a run is on other rows ----------------------------------------------------------


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

        scored = score_file(run, data, lenient=lenient, quiet=quiet)
        if as_json:
            typer.echo(json.dumps(scores_as_json(scored), indent=1, allow_nan=False))
        elif not quiet:
            print_scores(scored)


# --- A run on other rows: the work behind ``knowable predict`` and ``knowable evaluate`` -----------------------------


@dataclass(frozen=True)
class Opened:
    """A run with its estimator, and a table that fits it.

    Attributes:
        run: The run.
        estimator: Its estimator.
        table: The rows.
        notices: What looked wrong with them.
    """

    run: Run
    estimator: Estimator
    table: Table
    notices: tuple[Notice, ...]

    @property
    def target(self) -> str:
        """The column that is predicted."""
        return str(self.run.options["target"])


def open_with(run: Path, data: str, *, lenient: bool, quiet: bool) -> Opened:
    """Load a run and hold a file against its schema.

    Raises:
        InvalidData: If a column is missing or has the wrong type; or if something looks wrong and not ``lenient``.
    """
    opened = Run.open(run)
    estimator = load_estimator(opened.folder, str(opened.made.get("task")))
    with spoken_for_the_shell():
        table = read_file(data)
        with collected() as found:
            encode(estimator, table)
        refuse_doubtful(found, lenient=lenient)
    tell(found, quiet=quiet)
    return Opened(opened, estimator, table, tuple(found))


def predict_rows(opened: Opened) -> Prediction:
    """Predict all rows; what looked wrong with them has been said already."""
    with collected():
        return opened.estimator.predict_dist(opened.table)


def predict_file(run: Path, data: str, *, level: float, lenient: bool, quiet: bool) -> list[dict[str, Any]]:
    """Predictions for the rows of a file, one mapping each."""
    check_number("level", level, above=0.0, below=1.0)
    opened = open_with(run, data, lenient=lenient, quiet=quiet)
    prediction = predict_rows(opened)
    return prediction_rows(prediction, lines_of(opened.table), classes=class_names(opened.estimator), level=level)


@dataclass(frozen=True)
class Scored:
    """Scores of a run on the rows of a file."""

    opened: Opened
    judged: Judged
    rows: int


def score_file(run: Path, data: str, *, lenient: bool, quiet: bool) -> Scored:
    """Score a run on a file that has the outcomes.

    Raises:
        InvalidData: If the file lacks the target, or has gaps in it.
    """
    opened = open_with(run, data, lenient=lenient, quiet=quiet)
    with spoken_for_the_shell():
        opened.table.find(opened.target)
        y = outcome_tensor(opened.estimator, opened.estimator.schema_.target_of(opened.table))
    prediction = predict_rows(opened)
    plain = Outcomes.from_json(opened.run.made.get("outcomes", {})).guess(prediction)
    return Scored(opened, Judged(prediction, score(prediction, y), score(plain, y)), len(y))


def scores_as_json(scored: Scored) -> dict[str, Any]:
    """What ``--json`` prints."""
    from knowable.interfaces.cli.fit import plain_scores

    content = {
        "run": str(scored.opened.run.folder),
        "rows": scored.rows,
        "scores": plain_scores(scored.judged.scores),
        "guess_without_inputs": plain_scores(scored.judged.baseline),
        "warnings": [notice.text for notice in scored.opened.notices],
    }
    return finite(content)


def print_scores(scored: Scored) -> None:
    """What people see."""
    from knowable.interfaces.cli.messages import as_rich, standard_output

    name = find_method(str(scored.opened.run.made["method"])).cls_name
    title = f"{scored.opened.target} by {name}, on {scored.rows} rows of {scored.opened.table.source}"
    table = quality_table(name, scored.judged.scores, scored.judged.baseline, title=title)
    standard_output().print(as_rich(table))
