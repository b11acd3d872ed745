"""Tests of MultiSWAG: it is the ensemble of SWAG that it says it is."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from tests.core.cases import DTYPE, batch_norm_net, linear_data, same_params

SETTINGS = {"epochs": 10, "batch_size": 8, "snapshots": 4, "rank": 2}


def test_it_is_an_ensemble_of_swag(tmp_path):
    model, (x, y) = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian()), linear_data()
    posterior = kn.MultiSWAG(2, **SETTINGS).fit(model, (x, y), seed=1)
    same = kn.EnsembleOf(kn.SWAG(**SETTINGS), 2).fit(model, (x, y), seed=1)
    assert same_params(posterior._tensors(), same._tensors())
    assert posterior.diagnostics.method == "MultiSWAG(members=2, epochs=10, batch_size=8, rank=2, snapshots=4)"
    assert all(isinstance(member, kn.SWAGPosterior) for member in posterior.members)
    loaded = kn.load(posterior.save(tmp_path))
    assert torch.equal(loaded.predict(x, 6).samples, posterior.predict(x, 6).samples)


def test_its_members_may_be_weighed_by_held_out_rows_and_not_by_evidence():
    (x, y), model = linear_data(), kn.Model(torch.nn.Linear(2, 1).to(DTYPE), kn.Gaussian())
    posterior = kn.MultiSWAG(2, weights="validation", **SETTINGS).fit(model, (x, y), validation=(x[:5], y[:5]))
    assert posterior.weights.sum().item() == pytest.approx(1.0)
    with pytest.raises(kn.InvalidArgument, match="weights must be one of 'equal', 'validation'; got 'evidence'"):
        kn.MultiSWAG(weights="evidence")
