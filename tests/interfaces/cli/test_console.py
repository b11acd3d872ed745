"""Tables and progress on the terminal."""

import io

from rich.console import Console

from knowable.interfaces.cli.messages import as_rich, standard_output
from knowable.report.scores import ScoreColumn, score_table


def test_a_table_prints_scores_errors_and_the_star_of_the_best():
    table = score_table(
        "Title [bold]",
        {"a [red]": {"nll": 1.25}, "b": {"nll": 2.5}},
        [ScoreColumn("nll", "NLL", decimals=2)],
        note="How.",
        standard_errors={"a [red]": {"nll": 0.5}, "b": {"nll": 0.25}},
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(as_rich(table))
    printed = console.file.getvalue()
    for text in ("Title [bold]", "a [red]", "1.25 ★", "± 0.50", "2.50", "± 0.25", "How."):
        assert text in printed
    assert printed.count("★") == 1


def test_output_that_is_no_terminal_is_wide_enough_for_a_table():
    assert standard_output().width >= 100
