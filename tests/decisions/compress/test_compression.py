from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.decisions.compress import compression
from knowable.decisions.compress.compression import find_masks, mean_params, network_at, prunable_names, score
from tests.core.cases import Tied, diagonal_posterior, full_posterior
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
    monkeypatch.setattr(compression, "largest_difference", lambda *_: 0.1)
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


# --- pruning ----------------------------------------------------------------------------------------------------------


def _posterior(generator: torch.Generator) -> kn.DiagonalNormal:
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    return diagonal_posterior(kn.Model(net, kn.Gaussian(), frozen="3.bias"), generator)


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 3.0])
def test_weights_go_whose_log_alpha_is_above_the_threshold(threshold, generator):
    posterior = _posterior(generator)
    masks = find_masks(posterior, threshold=threshold)
    assert list(masks) == ["0.weight", "3.weight"]
    for name, mask in masks.items():
        mean, std = posterior.loc[name].flatten().tolist(), posterior.scale[name].flatten().tolist()
        expected = [math.log(s**2 / m**2) <= threshold for m, s in zip(mean, std, strict=True)]
        assert mask.flatten().tolist() == expected


def test_thresholds_of_ratio_and_of_log_alpha_are_the_same_thing(generator):
    posterior = _posterior(generator)
    by_alpha = find_masks(posterior, threshold=0.5)
    by_ratio = find_masks(posterior, threshold=math.exp(-0.25), by="snr")
    assert all(torch.equal(by_alpha[name], by_ratio[name]) for name in by_alpha)
    posterior.log_alpha_threshold = 0.5
    for by in ("snr", "log_alpha"):
        assert all(torch.equal(by_alpha[name], mask) for name, mask in find_masks(posterior, by=by).items())


def test_a_mean_of_zero_goes_and_a_weight_without_spread_stays():
    model = kn.Model(nn.Linear(3, 1, bias=False), kn.Gaussian(0.1))
    loc = {"weight": torch.tensor([[0.0, 1e-9, 0.0]])}
    posterior = kn.DiagonalNormal(model, loc, {"weight": torch.tensor([[1e-9, 0.0, 0.0]])})
    assert find_masks(posterior, threshold=50.0)["weight"].tolist() == [[False, True, True]]


def test_other_weights_may_be_named(generator):
    posterior = _posterior(generator)
    assert prunable_names(posterior, "0.*") == ["0.weight", "0.bias"]
    assert prunable_names(posterior, ["3.weight"]) == ["3.weight"]
    with pytest.raises(kn.InvalidArgument, match="where='conv' matches no parameter"):
        prunable_names(posterior, "conv")
    with pytest.raises(kn.InvalidArgument, match="no random weight matrix"):
        prunable_names(diagonal_posterior(kn.Model(nn.Linear(2, 1), kn.Gaussian(), random="bias"), generator))


def test_a_posterior_with_correlations_is_pruned_by_its_marginals(generator):
    posterior = full_posterior(kn.Model(nn.Linear(3, 2), kn.Gaussian(0.1)), generator)
    ratio = posterior.mean()["weight"].abs() / posterior.std()["weight"]
    assert torch.equal(find_masks(posterior, threshold=1.0, by="snr")["weight"], ratio >= 1.0)


def test_a_network_at_given_values_is_a_copy_with_buffers_and_frozen_ones(generator):
    posterior = _posterior(generator)
    net = posterior.model.net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior.buffers["1.running_mean"].fill_(7.0)
    made = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    assert torch.equal(made[0].weight, posterior.loc["0.weight"])
    assert torch.equal(made[3].bias, net[3].bias)
    assert (made[1].running_mean == 7).all() and not made.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"threshold": "high"}, "threshold must be a number"),
        ({"threshold": math.nan}, "threshold must be a finite number"),
        ({"threshold": -1.0, "by": "snr"}, "threshold must be a finite number >= 0"),
        ({"where": 3}, "where must be a name"),
    ],
)
def test_wrong_thresholds_are_named(settings, error, generator):
    with pytest.raises(kn.KnowableError, match=error):
        find_masks(_posterior(generator), **settings)


# --- scoring ----------------------------------------------------------------------------------------------------------


CASES = [
    (kn.Gaussian(), 1, "rmse"),
    (kn.HeteroscedasticGaussian(), 2, "rmse"),
    (kn.Categorical(), 3, "accuracy"),
    (kn.Bernoulli(), 1, "accuracy"),
    (kn.Poisson(), 1, "rmse"),
]


@pytest.mark.parametrize(("likelihood", "outputs", "first"), CASES, ids=lambda value: str(value))
def test_a_network_is_scored_as_the_posterior_with_this_atom_is(likelihood, outputs, first, generator):
    posterior = diagonal_posterior(kn.Model(nn.Linear(2, outputs), likelihood), generator)
    x = torch.randn((50, 2), generator=generator)
    kinds = {3: torch.arange(50) % 3, 2: torch.randn((50, 1), generator=generator)}
    y = kinds.get(outputs, (torch.arange(50) % 2).float().unsqueeze(1))
    net = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    found = score(net, posterior, as_data((x, y), posterior.model))
    atom = {name: value.unsqueeze(0) for name, value in posterior.mean().items()}
    expected = kn.evaluate(kn.Particles(posterior.model, atom, torch.zeros(1)).predict(x), y)
    assert list(found) == [first, "nll"]
    assert found == pytest.approx({name: expected[name] for name in found})


def test_data_that_comes_in_batches_is_scored_whole(generator):
    posterior = diagonal_posterior(kn.Model(nn.Linear(2, 3), kn.Categorical()), generator)
    x, y = torch.randn((50, 2), generator=generator), torch.arange(50) % 3
    net = network_at(posterior.model, mean_params(posterior), posterior.buffers)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    whole = score(net, posterior, as_data((x, y), posterior.model))
    assert score(net, posterior, as_data(loader, posterior.model)) == pytest.approx(whole)
