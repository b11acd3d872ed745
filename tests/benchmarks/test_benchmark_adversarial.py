from __future__ import annotations

import pytest
from benchmarks.adversarial import METHODS, run, to_markdown
from benchmarks.study import Rows


@pytest.mark.slow
def test_quick_run_has_every_attacker_for_every_posterior_and_two_pictures(tmp_path):
    rows = Rows(tmp_path / "adversarial.jsonl")
    found = run(quick=True, only="*", rows=rows)
    assert {method: row["error"] for method, row in found["methods"].items()} == dict.fromkeys(METHODS)
    attackers = {method: set(row["attacks"]["0.1"]) for method, row in found["methods"].items()}
    assert attackers["MAP"] == {"FGSM", "PGD", "aware"}
    assert attackers["DeepEnsemble"] == {"FGSM", "transfer", "PGD", "aware"}
    assert "aware of fresh draws, new draws" in attackers["MeanFieldVI"]
    text = to_markdown(found)
    assert all(f"| {method} | PGD |" in text for method in METHODS)
    assert all((tmp_path / f"adversarial_{name}.png").stat().st_size > 10_000 for name in ("accuracy", "scores"))
    assert run(quick=True, only="*", rows=Rows(rows.path))["methods"] == found["methods"]  # nothing is run again


def test_a_failed_row_is_told():
    row = {"error": "broken", "clean": 1.0}
    run_of_one = {"benchmark": "adversarial", "quick": True, "methods": {"MAP": row},
                  "recipe": {"images": 3, "epsilons": [0.1], "curve": [0.1]},
                  "environment": {"knowable": "", "python": "", "packages": {}}}  # fmt: skip
    from unittest.mock import patch

    with patch("benchmarks.study._environment", return_value=""):
        assert "MAP failed: broken" in to_markdown(run_of_one)
