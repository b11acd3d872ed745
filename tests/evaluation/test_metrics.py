from __future__ import annotations

import inspect

import pytest

from knowable.evaluation import metrics

CONTRACT = """
nll rmse crps accuracy brier ece coverage interval_width auroc aupr tpr_at_fpr agreement total_variation risk_coverage
"""


@pytest.mark.parametrize("name", CONTRACT.split())
def test_every_score_of_the_contract_is_there_and_documented(name: str):
    score = getattr(metrics, name)
    assert name in metrics.__all__
    assert "Args:" in inspect.getdoc(score) and "Returns:" in inspect.getdoc(score)


def test_all_lists_what_there_is():
    assert len(set(metrics.__all__)) == len(metrics.__all__)
    public = {name for name, value in vars(metrics).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert public == set(metrics.__all__)
