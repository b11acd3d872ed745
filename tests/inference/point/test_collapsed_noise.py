"""Tests of the warning that a learned noise has collapsed: it comes where new rows are missed, and only there."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import knowable as kn

TOO_FEW, ENOUGH = 26, 45  # rows for the 26 weights of a linear model


def _linear(generator, rows: int, new: int = 200):
    x = torch.randn(rows + new, 25, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(25, generator=generator, dtype=torch.float64) / 5
    y = y + 0.2 * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def _curve(generator, rows: int, new: int = 200):
    x = torch.rand(rows + new, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(len(x), generator=generator)
    return (x[:rows], y[:rows]), (x[rows:], y[rows:])


def _fitted(method, net, data, prior=None, likelihood=None, **options):
    """The posterior, and what was said of its noise."""
    model = kn.Model(net, likelihood or kn.Gaussian(), prior or kn.Normal(1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.fit(model, data, **options)
    return posterior, [str(each.message) for each in caught if "collapsed" in str(each.message)]


def _error_over_noise(posterior, data):
    x, y = data
    noise = posterior.mean()["likelihood.log_noise"].exp()
    return ((posterior.predict(x).mean - y).square().mean().sqrt() / noise).item()


@pytest.mark.parametrize(
    "method",
    [
        kn.MAP(),
        kn.MaximumLikelihood(),
        kn.DeepEnsemble(2),
        kn.BayesianBootstrap(2),
        kn.SWAG(snapshots=5),
        kn.SnapshotEnsemble(cycles=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_a_network_through_all_rows_is_told_of(method, generator):
    data, new = _linear(generator, TOO_FEW)
    posterior, said = _fitted(method, nn.Linear(25, 1).double(), data, kn.Normal(10.0))
    assert _error_over_noise(posterior, new) > 4
    assert len(said) == 1 and "errors on the others are" in said[0] and "Pass validation=(x, y)" in said[0]
    assert any("has collapsed" in note for note in posterior.diagnostics.notes)


def test_the_warning_is_one_of_convergence(generator):
    data, _ = _linear(generator, TOO_FEW)
    with pytest.warns(kn.ConvergenceWarning, match="has collapsed"):
        kn.MAP().fit(kn.Model(nn.Linear(25, 1).double(), kn.Gaussian(), kn.Normal(10.0)), data)


@pytest.mark.parametrize("method", [kn.MAP(), kn.DeepEnsemble(2)], ids=["map", "ensemble"])
def test_well_posed_fits_are_left_in_peace(method, generator):
    data, new = _linear(generator, 4 * ENOUGH)
    posterior, said = _fitted(method, nn.Linear(25, 1).double(), data)
    assert not said and _error_over_noise(posterior, new) < 2
    # more weights than rows, but a curve of one input that many of them together hardly bend
    data, new = _curve(generator, 60)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    posterior, said = _fitted(method, net, data)
    assert not said and _error_over_noise(posterior, new) < 2


def test_what_keeps_the_noise_from_collapsing_is_not_warned_of(generator):
    data, new = _linear(generator, TOO_FEW)
    net, wide = nn.Linear(25, 1).double(), kn.Normal(10.0)
    assert not _fitted(kn.MAP(), net, data, wide, kn.Gaussian(noise=0.2))[1]
    assert not _fitted(kn.MAP(), net, data, wide, validation=new)[1]
    assert not _fitted(kn.MAP(epochs=20), net, data, wide)[1]  # it hardly moved
    assert not _fitted(kn.Laplace(), net, data)[1]
    outliers = data[0], torch.where(torch.arange(len(data[1])) % 9 == 0, torch.nan, data[1])
    assert _fitted(kn.MAP(), net, outliers, wide, kn.Gaussian(missing=True))[1]


def test_weights_from_elsewhere_are_doubted_and_not_fitted_again(generator):
    x = torch.randn(100, 5, generator=generator)
    y = torch.sin(2 * x.sum(1) / 5**0.5) + 0.3 * torch.randn(100, generator=generator)
    net = nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(1500):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x).squeeze(1), y).backward()
        optimiser.step()
    said = _fitted(kn.SWAG(snapshots=5), net, (x, y), start="network")[1]
    assert len(said) == 1 and "may have collapsed" in said[0]
