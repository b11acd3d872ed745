"""Tables and progress on the terminal."""

import io
import sys

import pytest
from rich.console import Console

from knowable.interfaces.cli.messages import as_rich, standard_output, ticking
from knowable.report import Column, score_table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_prints_scores_errors_and_the_star_of_the_best():
    table = score_table(
        "Title [bold]",
        {"a [red]": {"nll": 1.25}, "b": {"nll": 2.5}},
        [Column("nll", "NLL", decimals=2)],
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


@pytest.mark.parametrize("show", [True, False])
def test_progress_is_silent_where_nobody_watches(show, monkeypatch, capsys):
    if not show:
        monkeypatch.setattr(sys, "stderr", Terminal())
    with ticking("work", 2, show=show) as ticker:
        ticker.begin("one")
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_names_the_work_and_counts_it(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "120")
    with ticking("work", 2, show=True) as ticker:
        ticker.begin("first piece")
        ticker.begin("second piece")
    assert "work" in screen.getvalue() and "2/2" in screen.getvalue() and "done" in screen.getvalue()
