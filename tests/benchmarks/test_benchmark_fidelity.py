"""The model of the recipes has the posterior that they are held to, and distances are those of distributions."""

from __future__ import annotations

import pytest
import torch
from benchmarks.fidelity_recipes import Parallel, Setting, data, plain_linear, ratio

import knowable as kn
from benchmarks import fidelity


@pytest.mark.parametrize(("layers", "width"), [(1, 4), (3, 5)])
def test_the_right_width_is_that_of_the_exact_posterior(layers: int, width: int):
    setting = Setting(layers=layers, width=width, noise=0.7)
    model = kn.Model(Parallel(setting, plain_linear), kn.Gaussian(noise=setting.noise), kn.Normal(1.0))
    exact = kn.ExactLinear().fit(model, data(setting), progress=False)
    assert ratio(lambda _: torch.cat([each.flatten() for each in exact.std().values()]), setting) == pytest.approx(
        1.0, rel=1e-4
    )


def test_the_distance_of_disjoint_distributions_is_one():
    assert fidelity.distance([[1.0, 0.0]], [[0.0, 1.0]]) == 1.0
    assert fidelity.distance([[0.5, 0.5]], [[0.75, 0.25]]) == 0.25


def test_a_density_is_cut_into_bins_that_sum_to_one():
    model, rows, grid = fidelity.sine()
    prediction = kn.MAP(epochs=2).fit(model, rows, progress=False).predict(grid[:3])
    assert torch.allclose(fidelity.predictive(prediction).sum(1), torch.ones(3, dtype=torch.float64))
