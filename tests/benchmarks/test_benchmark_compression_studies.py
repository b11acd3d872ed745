"""The studies of compression in their quick mode: no data is needed, and what is done is not done again."""

from __future__ import annotations

import pytest
import torch
from benchmarks.compression import lenets, random_labels, recurrent, rewriting, variance_networks, vgg_width
from benchmarks.compression.recurrent import KINDS, Plan, chance_percent, sequences
from benchmarks.study import Rows

# study, where its rows are, which of them, and how many
STUDIES = {
    "lenets": (lenets, "networks", "*seed 0", 2),
    "random labels": (random_labels, "fits", "*", 4),
    "vgg width": (vgg_width, "widths", "*", 2),
    "recurrent": (recurrent, "cells", "*", 2),
    "rewriting": (rewriting, "networks", "LeNet-300*", 2),
    "variance networks": (variance_networks, "networks", "*", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_quick_run_needs_no_data_and_skips_what_is_done(name, tmp_path, monkeypatch):
    study, part, only, count = STUDIES[name]
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = study.run(quick=True, only=only, rows=Rows(path))
    assert [row["error"] for row in first[part].values()] == [None] * count
    text = study.to_markdown(first)
    assert all(f"| {row} |" in text for row in first[part]) and "Quick run" in text
    monkeypatch.setattr("benchmarks.compression.working.Fits.fit", None)  # what is known is not fitted again
    again = study.run(quick=True, only=only, rows=Rows(path))
    assert again[part].keys() == first[part].keys()
    assert [row["error"] for row in again[part].values()] == [None] * count


def test_who_sees_only_the_present_symbol_is_wrong_as_often_as_said():
    # the best guess for a symbol that is noise is the commonest answer at that place; all others are seen
    plan = Plan(rows=20_000, test=1, length=8)
    data = sequences(plan)
    wrong = 0.0
    for place in range(plan.length):
        answers = data.y[data.x[:, place] >= KINDS, place]
        wrong += len(answers) - torch.bincount(answers).max().item()
    found = 100.0 * wrong / data.y.numel()
    # places of a sequence depend on each other: at most as if each sequence were one Bernoulli draw
    assert found == pytest.approx(chance_percent(plan), abs=4 * 50 / plan.rows**0.5)
