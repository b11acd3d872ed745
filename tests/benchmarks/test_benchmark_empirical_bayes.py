from __future__ import annotations

import pytest
import torch
from benchmarks.empirical_bayes import (
    CASES,
    PRIORS,
    Grouped,
    Plan,
    fit_linear,
    linear_data,
    run,
    to_markdown,
)
from benchmarks.study import Rows

from benchmarks import empirical_bayes

SMALL = Plan(16, 24, network_rows=12, hidden=3, epochs=20, groups=(0, 1, 16), seeds=1, network_seeds=1)


def test_groups_cut_the_weights_without_changing_the_function():
    x = torch.randn(5, 7)
    weights = torch.randn(7)
    for groups in (0, 1, 3, 7):
        net = Grouped(7, groups)
        assert len(net.parts) == max(1, groups) and sum(len(part) for part in net.parts) == 7
        with torch.no_grad():
            for part, value in zip(net.parts, weights.tensor_split(len(net.parts)), strict=True):
                part.copy_(value)
        torch.testing.assert_close(net(x)[:, 0], x @ weights)


def test_evidence_of_a_row_is_that_of_the_targets_themselves():
    # log N(y | 0, s² X Xᵀ + I), at the true scale
    x, y, *_ = linear_data(SMALL, 0)
    covariance = SMALL.scale**2 * x @ x.T + torch.eye(len(x), dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
    assert float(fit_linear(SMALL, 0, x, y).log_evidence) == pytest.approx(marginal.log_prob(y[:, 0]).item(), rel=1e-9)


@pytest.mark.slow
def test_quick_run_fills_every_row_and_skips_what_is_done(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="*", rows=Rows(path))
    assert set(first["cases"]) == set(CASES)
    assert set(first["cases"]["network"]) == set(PRIORS)
    assert all(row["error"] is None for case in first["cases"].values() for rows in case.values() for row in rows)
    text = to_markdown(first)
    assert "| 0 | none: the true one |" in text and "| 6 | 6 groups |" in text and "| 1 | one for all |" in text

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(empirical_bayes, "evaluate", unwanted)
    assert run(quick=True, only="*", rows=Rows(path))["cases"] == first["cases"]
