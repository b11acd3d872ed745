from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.study import Rows
from benchmarks.uci_chains import synthetic
from benchmarks.uci_tables import CONTENDERS, bayesian_ridge, run, to_markdown

from benchmarks import uci_tables


def test_the_score_of_a_linear_neighbour_on_a_noisy_plane_is_that_of_its_noise():
    # noise 1: -log N(e | 0, 1) has mean 0.5 log(2 pi e) = 1.42 and sd 0.71; ten rows, and thirty to learn from
    scores = bayesian_ridge(synthetic(), 0, True)
    assert -scores.mean() == pytest.approx(0.5 * math.log(2 * math.pi * math.e), abs=4 * 0.71 / math.sqrt(10))


def test_a_quick_run_has_a_row_for_every_contender_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    calls = []

    def contender(split, seed, quick):
        calls.append(seed)
        return np.full(len(split.test_y), -2.0)

    monkeypatch.setattr(uci_tables, "CONTENDERS", dict.fromkeys(CONTENDERS, contender))
    for _ in range(2):
        found = run(quick=True, only="yacht", rows=Rows(tmp_path / "rows.jsonl"))
    assert len(calls) == len(CONTENDERS)
    assert found["data"]["yacht"]["NGBoost"]["nll"][0] == 2.0
    text = to_markdown(found)
    assert "| yacht | 2.000 ± nan" in text and all(who in text for who in CONTENDERS)
