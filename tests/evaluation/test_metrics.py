from __future__ import annotations

import inspect

import pytest
import torch

from knowable.core.chains.convergence import ess_bulk
from knowable.errors import InvalidArgument
from knowable.evaluation import metrics

CONTRACT = """
nll rmse crps accuracy brier ece coverage interval_width auroc aupr tpr_at_fpr agreement total_variation risk_coverage
rhat ess ess_tail
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


def test_chains_are_scored_as_tensors_or_arrays():
    draws = torch.randn((4, 200, 3), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for score in (metrics.rhat, metrics.ess, metrics.ess_tail):
        found = score(draws)
        assert found.shape == (3,) and torch.isfinite(found).all()
        assert torch.equal(score(draws.numpy()), found)
    assert torch.equal(metrics.ess(draws), ess_bulk(draws))
    with pytest.raises(InvalidArgument, match="chains, draws"):
        metrics.rhat(draws[0, :, 0])
