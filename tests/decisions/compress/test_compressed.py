"""Tests of the result object."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.decisions.compress import Change
from tests.decisions.compress.cases import make, posterior_of, random_masks


def _compressed(generator: torch.Generator, share: float = 0.5) -> kn.Compressed:
    net, x = make("lenet", generator=generator)
    posterior = posterior_of(net, random_masks(net, share, generator=generator))
    return kn.compress(posterior, data=(x, torch.arange(5) % 3), bits=5, repeats=2)


def test_the_dict_has_every_number_and_is_plain(generator):
    compressed = _compressed(generator)
    found = json.loads(json.dumps(compressed.as_dict()))
    assert found["compression"] == pytest.approx(found["weights"] / found["nonzero"])
    assert found["nonzero"] == sum(layer["nonzero"] for layer in found["layers"])
    assert found["sparsity"] == pytest.approx(1 - found["nonzero"] / found["weights"])
    assert found["compression_on_disk"] == pytest.approx(found["bytes_dense"]["before"] / found["bytes_sparse"])
    assert found["scores"].keys() == {"accuracy", "nll"} and found["latency"].keys() == {"before", "after"}
    assert found["layers"][0]["before"] == [6, 1, 3, 3] and found["notes"] == []


def test_everything_pruned_is_infinitely_compressed(generator):
    compressed = _compressed(generator, share=1.0)
    assert compressed.compression == compressed.compression_by_bits == math.inf or compressed.nonzero == 0
    assert compressed.sparsity == 1.0
    with torch.no_grad():
        outputs = compressed.net(torch.randn(6, 1, 8, 8))
    torch.testing.assert_close(outputs, outputs[:1].expand_as(outputs))  # the network is a constant


def test_a_change_says_how_many_times_smaller():
    assert Change(10.0, 4.0).ratio == 2.5
    assert Change(10.0, 0.0).ratio == math.inf


def test_a_layer_that_is_no_longer_there_has_no_shape(generator):
    net, x = make("residual", generator=generator)
    masks = random_masks(net, 0.0, generator=generator)
    masks["four.weight"][:] = False
    nn.init.zeros_(net.four.bias)
    compressed = kn.compress(posterior_of(net, masks), example=x, repeats=0)
    after = {layer.name: layer.after for layer in compressed.layers}
    assert after["four.weight"] is None and after["three.weight"] is None and after["head.weight"] == (3, 6)
