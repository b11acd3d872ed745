"""Tests of the engine: the precision of the arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.compiling.engine import Engine, as_engine

CPU = torch.device("cpu")


def test_full_precision_is_the_networks_own():
    with Engine().precision_context(CPU):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == torch.float32


def test_bfloat16_runs_the_layers_in_half_precision_and_keeps_the_parameters():
    layer = nn.Linear(2, 2)
    with Engine("bfloat16").precision_context(CPU):
        assert layer(torch.zeros(1, 2)).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32
    assert layer(torch.zeros(1, 2)).dtype == torch.float32


def test_a_fit_in_bfloat16_lands_near_the_one_in_full_precision():
    # bfloat16 keeps 8 bits: outputs err by about 1 in 256, and so may the weights
    x = torch.randn(50, 2)
    y = x.sum(1)
    fits = [
        kn.MAP(epochs=300, learning_rate=0.03).fit(
            kn.Model(nn.Linear(2, 1), kn.Gaussian(0.5)), (x, y), engine=Engine(p)
        )
        for p in ("full", "bfloat16")
    ]
    weights = [fit.mean()["weight"] for fit in fits]
    assert weights[1].dtype == torch.float32
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0.02)
    assert not torch.equal(weights[1], weights[0])


def test_no_engine_is_the_default_one():
    assert as_engine(None) == Engine("full")
    assert as_engine(Engine("bfloat16")).precision == "bfloat16"


def test_what_is_not_an_engine_is_refused():
    with pytest.raises(kn.InvalidType, match=r"engine must be an Engine, workers .* or None, got int"):
        as_engine(16)  # type: ignore[arg-type]
    with pytest.raises(kn.InvalidArgument, match=r"engine must be .* got 'bfloat16'"):
        as_engine("bfloat16")
    with pytest.raises(
        kn.InvalidArgument, match=r"precision must be one of 'full', 'bfloat16'; got 'bfloat'. Did you mean"
    ):
        Engine("bfloat")


@pytest.mark.parametrize("mode", ["auto", "eager", "traced", "compiled"])
def test_every_way_of_computing_gradients_has_a_name(mode):
    assert Engine(mode=mode).mode == mode


def test_a_way_that_does_not_exist_is_refused():
    with pytest.raises(kn.InvalidArgument, match=r"mode must be one of 'auto', 'eager', .*; got 'trace'. Did you mean"):
        Engine(mode="trace")


def test_methods_that_train_run_the_networks_own_code_unless_they_are_told_to_compile():
    x, net = torch.randn(20, 2), nn.Linear(2, 1)
    fits = [
        kn.MAP(epochs=3).fit(kn.Model(net, kn.Gaussian(0.5)), (x, x.sum(1)), engine=Engine(mode=mode))
        for mode in ("auto", "eager")
    ]
    assert torch.equal(fits[0].mean()["weight"], fits[1].mean()["weight"])
