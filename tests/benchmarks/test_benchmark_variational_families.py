from __future__ import annotations

import math

import pytest
import torch
from benchmarks.study import Rows
from benchmarks.variational_families import CONTENDERS, PROBLEMS, evaluate, run, to_markdown

from benchmarks import variational_families
from knowable.registry import METHODS


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_evidence_is_joint_over_posterior_everywhere(name):
    # Bayes' rule ties the evidence, the posterior and the model of each problem together
    problem = PROBLEMS[name]()
    model = problem.model()
    params = {key: value + 0.3 * torch.ones_like(value) for key, value in model.params().items()}
    joint = model.log_joint(params, *problem.data, size=len(problem.data[0])).item()
    posterior = problem.log_posterior({key: value.unsqueeze(0) for key, value in params.items()}).item()
    assert joint - posterior == pytest.approx(problem.log_evidence, rel=1e-7)


def test_bound_and_divergence_add_up_to_the_evidence():
    problem = PROBLEMS["correlated"]()
    found = evaluate(problem, "full rank", quick=True)
    error = math.hypot(found["kl_error"], found["bound_error"])
    assert abs(found["kl"] + found["bound"] - problem.log_evidence) < 5 * error


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_method_there_is_and_skips_what_is_done(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="banana", rows=Rows(path))
    families = first["problems"]["banana"]["families"]
    assert list(families) == [name for name, (method, _) in CONTENDERS.items() if method in METHODS]
    assert all(row["error"] is None for row in families.values())
    text = to_markdown(first)
    assert all(f"| {name} |" in text for name in families)

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(variational_families, "evaluate", unwanted)
    assert run(quick=True, only="banana", rows=Rows(path))["problems"] == first["problems"]
