"""The page of comparisons says what the stored results say, and calls a loss a loss."""

from __future__ import annotations

import math

import pytest
from benchmarks.proof_rows import scored, timed

from benchmarks import proof


def test_the_page_and_the_readme_say_what_the_results_say(capsys: pytest.CaptureFixture[str]):
    assert proof.main(["--check"]) == 0, f"run python -m benchmarks.proof: {capsys.readouterr().out}"


@pytest.mark.parametrize(("ours", "theirs", "outcome"), [(1.0, 2.0, "ahead"), (1.0, 1.05, "tie"), (2.0, 1.0, "behind")])
def test_the_shorter_time_is_ahead(ours: float, theirs: float, outcome: str):
    row = timed("study", "a step", "another", ours, theirs, "ms")
    assert row.outcome == outcome
    assert row.gap == pytest.approx(math.log(theirs / ours) / math.log(1.1))


@pytest.mark.parametrize(("sign", "outcome"), [(1.0, "behind"), (-1.0, "ahead")])
def test_scores_are_judged_by_their_standard_errors(sign: float, outcome: str):
    row = scored("study", "a score", "another", (1.0, 0.3), (2.0, 0.4), sign)
    assert row.outcome == outcome and row.gap == pytest.approx(-2.0 * sign)
    assert scored("study", "a score", "another", (1.0, 3.0), (2.0, 4.0), sign).outcome == "tie"


def test_losses_come_before_everything_else():
    text = proof.page()
    assert text.index("## Where we lose") < text.index("## Speed") < text.index("## Quality")
