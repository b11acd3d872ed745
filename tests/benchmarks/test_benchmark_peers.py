from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.harness import QUICK, measure
from benchmarks.networks import NETWORKS
from benchmarks.peers import _sum_kl, peer_factories, torchvision_stand_in, training_step

PEERS = list(peer_factories(NETWORKS["mlp"]))


@pytest.mark.parametrize("peer", PEERS)
def test_peer_runs_or_is_reported_as_not_installed(peer):
    factory = peer_factories(replace(NETWORKS["mlp"], batch_size=2))[peer]
    outcome = measure({peer: factory}, QUICK)[peer]
    assert outcome.error is None or outcome.error.startswith("ModuleNotFoundError: No module named")


def test_training_step_takes_an_adam_step_downhill():
    # Adam's first step has the size of its learning rate, 1e-3, against the gradient's sign
    weight = torch.tensor([2.0, -3.0], requires_grad=True)
    step = training_step([weight], lambda: (weight**2).sum())
    assert step() == torch.tensor(13.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([1.999, -2.999]))


def test_mean_kl_becomes_the_sum():
    layer = SimpleNamespace(kl_div=lambda means, scales: (means * scales).mean())
    _sum_kl(layer)
    means, scales = torch.arange(6.0).reshape(2, 3), torch.full((2, 3), 2.0)
    assert layer.kl_div(means, scales) == torch.tensor(30.0)


def test_stand_in_is_there_for_one_import_and_gone_after_it():
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed and needs no stand-in")
    with torchvision_stand_in():
        transforms = importlib.import_module("torchvision.transforms")
        assert transforms.InterpolationMode.NEAREST
        assert importlib.import_module("torchvision.transforms.functional") is transforms.functional
    assert not any(name.partition(".")[0] == "torchvision" for name in sys.modules)
