from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.dropout.batch_norm import batch_statistics, normalisation_layers, random_batches
from knowable.testing import network_case


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)
    )


def data(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((rows, 3), generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["batchnorm_mlp", "batchnorm_cnn", "residual"])
def test_with_the_statistics_of_a_batch_the_network_does_what_it_does_in_training(name, generator):
    case = network_case(name)
    model = case.model()
    layers = normalisation_layers(model)
    assert layers
    batches = [case.x[:6], case.x[5:16]]
    statistics = batch_statistics(model, model.params(), model.buffers(), layers, iter(batches))
    for k, x in enumerate(batches):
        own = {name: value[k] for name, value in statistics.items()}
        evaluated = model.forward(model.params(), x, buffers={**model.buffers(), **own})
        trained = model.forward(model.params(), x, buffers=model.buffers(), training=True)
        assert torch.allclose(evaluated, trained, atol=1e-5)


def test_statistics_of_the_first_layer_vary_as_those_of_random_batches_do(generator):
    # the mean of n of N rows, drawn without replacement, has variance s² / n (1 - n / N) with s² over N - 1
    model = kn.Model(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), kn.Gaussian(0.1))
    x, n, draws = torch.randn((50, 3), generator=generator), 10, 2000
    rows = as_data((x, x[:, :1]), model)
    batches = random_batches(rows, n, draws, seed=3)
    means = batch_statistics(model, model.params(), model.buffers(), ["0"], batches)["0.running_mean"]
    expected = x.var(0) / n * (1 - n / 50)
    assert means.shape == (draws, 3)
    assert ((means.mean(0) - x.mean(0)).abs() < 5 * (expected / draws).sqrt()).all()
    assert ((means.var(0) / expected - 1).abs() < 5 * math.sqrt(2 / draws)).all()


def test_draws_of_a_prediction_are_the_networks_with_these_statistics(generator):
    x, y = data(60, generator)
    model = kn.Model(network(), kn.Gaussian(0.1))
    posterior = kn.MonteCarloBatchNorm(epochs=5, draws=7).fit(model, (x, y))
    prediction = posterior.predict(x, samples=20)
    assert len(posterior) == 7 and len(prediction.samples) == 7
    for k in range(7):
        own = {name: value[k] for name, value in posterior.statistics.items()}
        expected = model.forward(posterior.mean(), x, buffers={**posterior.buffers, **own})
        assert torch.allclose(prediction.samples[k], expected, atol=1e-5)
    assert (prediction.epistemic > 0).all()


def test_fewer_samples_than_batches_are_a_random_choice_of_them(generator):
    x, y = data(60, generator)
    posterior = kn.MonteCarloBatchNorm(epochs=2, draws=9).fit(kn.Model(network(), kn.Gaussian(0.1)), (x, y))
    whole = posterior.predict(x, samples=9).samples
    some = posterior.predict(x, samples=4).samples
    found = [k for each in some for k in range(9) if torch.allclose(each, whole[k], atol=1e-6)]
    assert len(set(found)) == 4
    other = posterior.predict(x, samples=4, generator=generator).samples
    assert torch.equal(some, posterior.predict(x, samples=4).samples) and not torch.equal(some, other)


def test_larger_batches_differ_less(generator):
    x, y = data(200, generator)
    spread = []
    for rows in (8, 100):
        method = kn.MonteCarloBatchNorm(epochs=3, batch_size=rows)
        posterior = method.fit(kn.Model(network(), kn.Gaussian(0.1)), (x, y))
        spread.append(posterior.predict(x).epistemic.mean())
    assert spread[1] < spread[0] / 3  # a twelfth in theory, half of it more for the finite data


def test_the_fit_is_map_in_batches(generator):
    x, y = data(60, generator)
    model = kn.Model(network(), kn.Gaussian(0.1))
    posterior = kn.MonteCarloBatchNorm(epochs=5).fit(model, (x, y), seed=3)
    point = kn.MAP(epochs=5, batch_size=15).fit(model, (x, y), seed=3)
    assert all(torch.equal(value, point.mean()[name]) for name, value in posterior.mean().items())
    assert all(torch.equal(value, point.buffers[name]) for name, value in posterior.buffers.items())
    assert all((value == 0).all() for value in posterior.std().values())


@pytest.mark.parametrize(("size", "rows"), [(4, 2), (60, 15), (5000, 128)])
def test_batches_are_a_quarter_of_the_data_at_most(size, rows):
    assert kn.MonteCarloBatchNorm().rows_per_step(size) == rows
    assert kn.MonteCarloBatchNorm(batch_size=10).rows_per_step(size) == min(10, size)


def test_dropout_is_off_in_the_statistics(generator):
    net = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model = kn.Model(net, kn.Gaussian(0.1))
    x = torch.randn((30, 3), generator=generator)
    found = batch_statistics(model, model.params(), model.buffers(), ["1"], iter([x]))
    assert torch.allclose(found["1.running_mean"][0], x.mean(0), atol=1e-6)
    assert torch.allclose(found["1.running_var"][0], x.var(0, correction=0), atol=1e-6)


def test_a_loader_gives_random_batches_of_its_own_size(generator):
    x, y = data(21, generator)
    model = kn.Model(network(), kn.Gaussian(0.1))
    rows = as_data(DataLoader(TensorDataset(x, y), batch_size=10), model)
    found = list(random_batches(rows, 4, 5, seed=0))
    assert [len(each) for each in found] == [10] * 5
    assert all(torch.equal(one, two) for one, two in zip(found, random_batches(as_data((x, y)), 10, 5, 0), strict=True))
    with pytest.raises(kn.InvalidArgument, match="one row"):
        list(random_batches(as_data(DataLoader(TensorDataset(x, y), batch_size=1), model), 1, 5, seed=0))


@pytest.mark.parametrize("name", ["mlp", "transformer", "frozen_backbone"])
def test_networks_without_free_batch_normalisation_are_refused(name):
    case = network_case(name)
    with pytest.raises(kn.Unsupported, match="batch normalisation"):
        kn.MonteCarloBatchNorm(epochs=1).fit(case.model(), case.data)


def test_what_was_saved_predicts_the_same(generator, tmp_path):
    x, y = data(30, generator)
    posterior = kn.MonteCarloBatchNorm(epochs=2, draws=4).fit(kn.Model(network(), kn.Gaussian(0.1)), (x, y))
    loaded = kn.load(posterior.save(tmp_path / "it"))
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)


@pytest.mark.parametrize("settings", [{"draws": 0}, {"batch_size": 1}], ids=str)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(kn.KnowableError, match=next(iter(settings))):
        kn.MonteCarloBatchNorm(**settings)
