from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.harness import QUICK, measure
from benchmarks.networks import NETWORKS
from benchmarks.peers import _sum_kl, peer_factories

PEERS = list(peer_factories(NETWORKS["mlp"]))


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_peer_runs_or_is_reported_as_not_installed(peer):
    factory = peer_factories(replace(NETWORKS["mlp"], batch_size=2))[peer]
    outcome = measure({peer: factory}, QUICK)[peer]
    assert outcome.error is None or outcome.error.startswith("ModuleNotFoundError: No module named")


def test_mean_kl_becomes_the_sum():
    layer = SimpleNamespace(kl_div=lambda means, scales: (means * scales).mean())
    _sum_kl(layer)
    means, scales = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    assert layer.kl_div(means, scales) == torch.tensor(30.0)
