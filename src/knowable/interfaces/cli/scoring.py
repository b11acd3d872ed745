"""A run on other rows: the work behind ``knowable predict`` and ``knowable evaluate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowable.core.checks import check_number
from knowable.core.prediction import Prediction
from knowable.evaluation.evaluate import evaluate
from knowable.interfaces.cli.estimators import Estimator, class_names, encode, load_estimator, outcome_tensor
from knowable.interfaces.cli.notices import collected, refuse_doubtful, spoken_for_the_shell, tell
from knowable.interfaces.cli.predictions import prediction_rows
from knowable.interfaces.cli.run_folder import Run, finite
from knowable.interfaces.cli.training_table import lines_of, read_file
from knowable.interfaces.report.content import Notice
from knowable.interfaces.report.outcomes import Outcomes
from knowable.interfaces.report.quality import quality_table
from knowable.interfaces.report.run import Judged
from knowable.registry import find_method
from knowable.tabular.table import Table


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
    return Scored(opened, Judged(prediction, evaluate(prediction, y), evaluate(plain, y)), len(y))


def scores_as_json(scored: Scored) -> dict[str, Any]:
    """What ``--json`` prints."""
    from knowable.interfaces.cli.fitting import plain_scores

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
    from knowable.interfaces.console import as_rich, standard_output

    name = find_method(str(scored.opened.run.made["method"])).cls_name
    title = f"{scored.opened.target} by {name}, on {scored.rows} rows of {scored.opened.table.source}"
    table = quality_table(name, scored.judged.scores, scored.judged.baseline, title=title)
    standard_output().print(as_rich(table))
