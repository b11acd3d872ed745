from __future__ import annotations

import json
import math
import time

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.decisions.compress import Change
from knowable.decisions.compress.compressed import count_parameters, latencies, multiply_adds
from tests.core.cases import Tied
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


# --- cost -------------------------------------------------------------------------------------------------------------


def test_multiply_adds_are_those_counted_by_hand():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),  # 8 x 8 pixels, each 8 outputs of 3 x 9 products
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8),  # 4 x 4 pixels, 8 outputs of 9
        nn.ConvTranspose2d(8, 4, 2, stride=2),  # 4 x 4 pixels, each of 8 spreads to 4 x 4 places
        nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )
    by_hand = 64 * 8 * 27 + 16 * 8 * 9 + 16 * 8 * 4 * 4 + 256 * 10
    assert multiply_adds(net, torch.randn(5, 3, 8, 8)) == by_hand
    assert multiply_adds(net, torch.randn(1, 3, 8, 8)) == by_hand
    assert not any(module._forward_hooks for module in net.modules())


def test_a_layer_over_tokens_counts_once_for_each():
    assert multiply_adds(nn.Linear(3, 5), torch.randn(2, 7, 3)) == 7 * 15


def test_tied_parameters_count_once():
    assert count_parameters(nn.Linear(3, 5)) == 20
    assert count_parameters(Tied()) == 6


class Slow(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.threads = seconds, set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.add(torch.get_num_threads())
        time.sleep(self.seconds)
        return x


def test_latencies_are_medians_on_one_thread_and_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        slow, quick = Slow(0.02), Slow(0.0)
        times = latencies([slow, quick], torch.zeros(1), 5)
        assert times[0] >= 0.02 > times[1]
        assert slow.threads == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_table_says_what_was_gained():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    masks = {"0.weight": torch.zeros(6, 4, dtype=torch.bool), "2.weight": torch.ones(2, 6, dtype=torch.bool)}
    masks["0.weight"][:2] = True
    data = torch.randn(5, 4), torch.arange(5) % 2
    text = repr(kn.compress(posterior_of(net, masks), data=data))
    lines = text.splitlines()
    assert lines[0] == "Compressed: 20 of 36 weights left (44.44% zero, 1.8 times fewer)"
    assert lines[2].split() == ["weight", "weights", "nonzero", "sparsity", "before", "after", "bits"]
    assert lines[3].split() == ["0.weight", "24", "8", "66.67%", "6x4", "2x4", "32"]
    assert any(line.split() == ["parameters", "44", "16", "2.75x"] for line in lines)
    assert any(line.startswith("milliseconds a batch") for line in lines)
    assert any(line.startswith("accuracy") for line in lines)
    assert lines[-1].startswith("sparse on disk: ")


def test_notes_and_missing_measurements_show():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.norm(self.first(x)))

    net = Odd()
    masks = {"first.weight": torch.ones(6, 4, dtype=torch.bool)}
    text = repr(kn.compress(posterior_of(net, masks), example=torch.randn(3, 4), repeats=0))
    assert "milliseconds" not in text and "accuracy" not in text
    assert text.splitlines()[-1] == "note: norm (LayerNorm) was left as it is"
