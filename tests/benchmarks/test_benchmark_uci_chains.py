from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.study import Rows
from benchmarks.uci_chains import Recipe, evaluate, run, to_markdown
from benchmarks.uci_data import cut

from benchmarks import uci_chains

TINY = Recipe(hidden=(3,), chains=2, warmup=2, draws=4, start="prior")


def test_log_likelihood_is_in_the_units_of_the_target():
    # the same data in units 1,024 times smaller: densities fall by that factor, errors grow by it. A power of two
    # scales without rounding, so that both fits see the same standardised numbers; what is left is float32's 1e-7
    generator = np.random.default_rng(1)
    x = generator.standard_normal((24, 2))
    y, test = x.sum(1), np.arange(24) % 4 == 0
    one, many = (evaluate(cut(x, scale * y, test), TINY, seed=0) for scale in (1.0, 1024.0))
    assert many["log_likelihood"] == pytest.approx(one["log_likelihood"] - math.log(1024), abs=1e-4)
    assert many["rmse"] == pytest.approx(1024 * one["rmse"], rel=1e-4)


@pytest.mark.slow
def test_quick_run_needs_no_data_and_skips_what_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="yacht", rows=Rows(path))
    assert first["data"]["yacht"]["splits"] == 1 and first["data"]["yacht"]["error"] is None
    assert "| yacht | 1 |" in to_markdown(first)

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(uci_chains, "evaluate", unwanted)
    assert run(quick=True, only="yacht", rows=Rows(path))["splits"] == first["splits"]
