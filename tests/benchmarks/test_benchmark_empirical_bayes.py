from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks.empirical_bayes import (
    CASES,
    PRIORS,
    Grouped,
    Plan,
    evaluate,
    fit_linear,
    linear_data,
    network_prior,
    rows_of,
    run,
    to_markdown,
)
from benchmarks.study import Rows

import knowable as kn
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


def test_more_scales_never_lower_the_evidence(seed):
    # each grouping contains the one before it. 1e-3 nats: what the search leaves
    found = [evaluate("linear", groups, SMALL, seed) for groups in ("0", "1", "16")]
    evidence = [row["log_evidence"] for row in found]
    assert evidence[0] <= evidence[1] + 1e-3 and evidence[1] <= evidence[2] + 1e-3
    assert [row["scales"] for row in found] == [0, 1, 16]
    assert all(math.isfinite(row["held_out"]) for row in found)


def test_priors_of_the_network_are_what_their_names_say():
    assert network_prior("fixed") == kn.Normal(1.0)
    assert network_prior("layer") == kn.EmpiricalBayes(kn.Normal(1.0), per="layer")
    assert network_prior("weight, hyperprior") == kn.EmpiricalBayes(kn.Normal(1.0), kn.Normal(0.5), per="weight")


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


def test_failed_rows_are_named(monkeypatch):
    def failing(*_, **__):
        raise ValueError("no luck")

    monkeypatch.setattr(empirical_bayes, "evaluate", failing)
    assert "failed: ValueError: no luck" in to_markdown(run(quick=True, only="linear", rows=Rows()))


def test_rows_that_are_kept_do_not_depend_on_how_many_there_are():
    assert str(replace(SMALL, seeds=7, groups=(1,), network_seeds=3)) == str(SMALL)
    assert str(replace(SMALL, rows=25)) != str(SMALL)


def test_rows_follow_the_plan():
    assert rows_of("linear", replace(SMALL, groups=(1, 2))) == ["1", "2"]
    assert rows_of("network", SMALL) == PRIORS
