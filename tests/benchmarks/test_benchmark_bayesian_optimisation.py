from __future__ import annotations

import pytest
import torch
from benchmarks.bayesian_optimisation import contenders, problems, run, to_markdown
from benchmarks.study import Rows


def test_the_optima_are_those_of_the_functions():
    best = {
        "Forrester": [0.757249],
        "Branin": [(torch.pi + 5) / 15, 2.275 / 15],
        "Hartmann6": [0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573],
        "Branin in 30 dimensions": [(torch.pi + 5) / 15, 2.275 / 15] + [0.3] * 28,
    }
    for title, problem in problems().items():
        assert len(best[title]) == problem.dimensions
        assert problem.function(torch.tensor(best[title], dtype=torch.float64)) == pytest.approx(
            problem.optimum, abs=1e-4
        )


def test_rows_are_kept_and_a_table_has_medians_over_seeds(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    found = run(quick=True, only="random", rows=rows)
    assert len(rows) == len(problems()) and run(quick=True, only="random", rows=rows)["problems"] == found["problems"]
    fits = {
        "0": {"values": [0.0, 2.0], "seconds": 1.0, "inside": 0.5},
        "1": {"values": [4.0, 1.0], "seconds": 3.0, "inside": 1.0},
    }
    text = to_markdown({**found, "problems": {"Branin": {"ours": fits, "lost": {"0": {"error": "broken"}}}}})
    assert "| ours | 3.000 | 2.000 | -3.4 | 75% | 2.00 | 0, 1 |" in text and "failed: broken" in text


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of linear_operator
@pytest.mark.slow
def test_quick_run_has_a_row_for_every_contender(tmp_path):
    found = run(quick=True, only="*", rows=Rows(tmp_path / "rows.jsonl"))
    for fits in found["problems"].values():
        assert {name: rows["0"].get("error") for name, rows in fits.items()} == dict.fromkeys(contenders())
