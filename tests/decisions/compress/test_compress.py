"""Tests of the whole of compression: what is left, what it costs, and what it says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.decisions.compress import compress as compressing
from tests.core.cases import Tied
from tests.decisions.compress.cases import NETWORKS, make, posterior_of, random_masks


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_small_network_computes_what_the_masked_one_does(name, share, generator):
    net, x = make(name, generator=generator)
    masks = random_masks(net, share, generator=generator)
    compressed = kn.compress(posterior_of(net, masks), example=x, repeats=0)
    values, zeroed = dict(net.named_parameters()), dict(compressed.masked.named_parameters())
    assert all(torch.equal(zeroed[key], values[key] * masks[key]) for key in masks)
    assert all(torch.equal(zeroed[key], value) for key, value in values.items() if key not in masks)
    other = torch.randn((4, *x.shape[1:]), generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(compressed.net(other), compressed.masked(other), rtol=1e-5, atol=1e-5)
    assert compressed.difference <= 1e-5
    assert not compressed.net.training and not compressed.masked.training


def test_the_numbers_are_those_counted_by_hand():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    masks = {"0.weight": torch.zeros(6, 4, dtype=torch.bool), "2.weight": torch.ones(2, 6, dtype=torch.bool)}
    masks["0.weight"][:2] = True
    compressed = kn.compress(posterior_of(net, masks), example=torch.randn(5, 4), repeats=3)
    first, second = compressed.layers
    assert (first.name, first.weights, first.nonzero, first.before, first.after) == ("0.weight", 24, 8, (6, 4), (2, 4))
    assert (second.nonzero, second.before, second.after) == (12, (2, 6), (2, 2))
    assert first.sparsity == pytest.approx(2 / 3)
    assert compressed.sparsity == pytest.approx(1 - 20 / 36)
    assert compressed.compression == pytest.approx(36 / 20)
    assert (compressed.parameters.before, compressed.parameters.after) == (24 + 6 + 12 + 2, 8 + 2 + 4 + 2)
    assert (compressed.multiply_adds.before, compressed.multiply_adds.after) == (36, 12)
    assert compressed.compression_by_bits == pytest.approx(36 / 12)  # dense: nothing in the small layers is zero
    assert compressed.latency is not None and compressed.latency.after > 0
    assert compressed.notes == () and compressed.scores == {}


def test_bits_of_the_posterior_round_within_its_spread(generator):
    net, x = make("mlp", generator=generator)
    masks = random_masks(net, 0.0, generator=generator)
    for mask in masks.values():
        mask[::2, ::2] = False
    posterior = posterior_of(net, masks, spread=0.2)
    compressed = kn.compress(posterior, example=x, bits="posterior", repeats=0)
    values = dict(compressed.masked.named_parameters())
    for layer in compressed.layers:
        mask = masks[layer.name]
        spread = posterior.scale[layer.name][mask].square().mean().sqrt()
        assert 2 <= layer.bits <= 16
        off = (values[layer.name] - posterior.loc[layer.name])[mask].abs().max()
        assert off <= spread / 2 * (1 + 1e-5)
        assert len(values[layer.name].unique()) <= 2**layer.bits - 1
    stored = sum(layer.stored_bits for layer in compressed.layers)
    assert compressed.compression_by_bits == pytest.approx(32 * compressed.weights / stored)
    plain = kn.compress(posterior, example=x, repeats=0)
    assert compressed.compression_by_bits > 2 * plain.compression_by_bits


@pytest.mark.parametrize("bits", [None, 3])
def test_scores_are_those_of_the_networks_before_and_after(bits, generator):
    net, x = make("lenet", generator=generator)
    x = torch.randn((40, *x.shape[1:]), generator=generator)
    y = net(x).argmax(1)
    posterior = posterior_of(net, random_masks(net, 0.3, generator=generator))
    compressed = kn.compress(posterior, data=(x, y), bits=bits, repeats=0)
    accuracy = (compressed.net(x).argmax(1) == y).float().mean().item()
    assert compressed.scores["accuracy"].before == 1.0
    assert compressed.scores["accuracy"].after == pytest.approx(accuracy)
    expected = nn.functional.cross_entropy(compressed.net(x), y).item()
    assert compressed.scores["nll"].after == pytest.approx(expected, rel=1e-4)


def test_networks_that_differ_on_the_example_are_not_handed_out(generator, monkeypatch):
    net, x = make("mlp", generator=generator)
    posterior = posterior_of(net, random_masks(net, 0.8, generator=generator))
    monkeypatch.setattr(compressing, "agrees", lambda *_: 0.1)
    compressed = kn.compress(posterior, example=x, repeats=0)
    assert compressed.net is compressed.masked
    assert "differed by 1.0e-01 on the example" in compressed.notes[0]
    assert compressed.layers[0].after == compressed.layers[0].before


def test_the_users_network_and_the_posterior_are_left_alone(generator):
    net, x = make("residual", generator=generator)
    posterior = posterior_of(net, random_masks(net, 0.8, generator=generator))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    loc = {key: value.clone() for key, value in posterior.loc.items()}
    kn.compress(posterior, example=x, bits=4, repeats=1)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(torch.equal(value, loc[key]) for key, value in posterior.loc.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_compressed_too(dtype, tmp_path, generator):
    net, x = make("lenet", generator=generator)
    posterior = posterior_of(net.to(dtype), random_masks(net, 0.8, generator=generator))
    compressed = kn.compress(posterior, example=x, repeats=0)
    assert next(compressed.net.parameters()).dtype == dtype
    again = kn.load_compressed(compressed.save(tmp_path / "small"))
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in compressed.net.state_dict().items())


def test_a_fitted_posterior_is_compressed(generator):
    x = torch.randn((60, 3), generator=generator)
    y = x[:, :1] - 2 * x[:, 1:2]
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    posterior = kn.MeanFieldVI(epochs=20).fit(kn.Model(net, kn.Gaussian()), (x, y))
    compressed = kn.compress(posterior, data=(x, y), threshold=0.0, repeats=0)
    assert compressed.scores.keys() == {"rmse", "nll"}
    mean, std = posterior.mean(), posterior.std()
    expected = sum(int((mean[name].abs() >= std[name]).sum()) for name in ("0.weight", "2.weight"))
    assert compressed.nonzero == expected


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, "give example= or data="),
        ({"example": "digits"}, "example must be a tensor"),
        ({"example": torch.zeros(2, 7), "repeats": -1}, "repeats must be a whole number >= 0"),
        ({"example": torch.zeros(2, 7), "bits": 1}, "bits must be a whole number >= 2"),
        ({"example": torch.zeros(2, 7), "by": "size"}, "by must be one of"),
        ({"data": torch.zeros(2, 7)}, "data must be a pair"),
        ({"example": torch.full((2, 7), torch.nan)}, "example has 14 missing"),
        ({"example": torch.zeros(2, 5)}, r"The network cannot take x of shape \(2, 5\)"),
    ],
)
def test_wrong_arguments_are_named(settings, error, generator):
    net, _ = make("mlp", generator=generator)
    posterior = posterior_of(net, random_masks(net, 0.5, generator=generator))
    with pytest.raises(kn.KnowableError, match=error):
        kn.compress(posterior, **settings)


def test_what_is_not_a_posterior_is_refused():
    with pytest.raises(kn.InvalidType, match="posterior must be a fitted posterior"):
        kn.compress(nn.Linear(2, 1), example=torch.zeros(1, 2))  # type: ignore[arg-type]


def test_one_layer_alone_tied_weights_and_whole_numbers_are_compressed(generator):
    embedding = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    whole = torch.randint(5, (4, 2), generator=generator)
    for net, x in ((nn.Linear(2, 3), torch.randn(4, 2)), (Tied(), torch.randn(4, 2)), (embedding, whole)):
        masks = random_masks(net, 0.6, generator=generator)
        compressed = kn.compress(posterior_of(net, masks), example=x, repeats=0)
        with torch.no_grad():
            torch.testing.assert_close(compressed.net(x), compressed.masked(x))


class Looking(nn.Module):
    """A network that looks at values before it does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make("lenet", generator=torch.Generator().manual_seed(0))[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if bool(x.sum() > -1e9) else x


def test_a_network_that_cannot_be_traced_is_masked_and_says_so(generator):
    net, x = Looking().eval(), torch.randn((3, 1, 8, 8), generator=generator)
    compressed = kn.compress(posterior_of(net, random_masks(net, 0.5, generator=generator)), example=x, repeats=0)
    assert compressed.parameters.before == compressed.parameters.after
    assert compressed.notes == ("Looking cannot be traced by torch.fx: no unit was removed",)
    assert compressed.compression_by_bits > 1.3
