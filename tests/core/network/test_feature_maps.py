from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.preprocessing import PolynomialFeatures

import knowable as kn
from knowable.core.posterior.structure import build, describe

MAPS = [
    kn.features.Polynomial(3, inputs=2),
    kn.features.Fourier(3, inputs=2, period=2.5),
    kn.features.RBF(torch.tensor([[0.1, 0.2], [-1.0, 0.7], [0.3, 0.3]]), width=0.4),
]


@pytest.mark.parametrize(("degree", "inputs"), [(1, 1), (4, 1), (1, 3), (3, 2), (2, 4)])
def test_polynomials_are_those_of_scikit_learn(seed, degree, inputs):
    x = torch.randn(6, inputs, dtype=torch.float64)
    found = kn.features.Polynomial(degree, inputs=inputs)
    expected = PolynomialFeatures(degree, include_bias=False).fit_transform(x.numpy())
    np.testing.assert_allclose(found(x), expected, rtol=1e-13)
    assert found.out_features == expected.shape[1]


def test_fourier_features_are_orthogonal_over_a_period_and_repeat_after_it():
    x = torch.arange(64, dtype=torch.float64).unsqueeze(1) * 2.5 / 64
    found = kn.features.Fourier(5, period=2.5)(x)
    torch.testing.assert_close(found.T @ found, 32 * torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(kn.features.Fourier(5, period=2.5)(x + 2.5), found, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[:, 1], torch.sin(4 * math.pi * x[:, 0] / 2.5), rtol=0, atol=1e-12)


def test_radial_basis_functions_are_bumps_at_their_centres(seed):
    centres, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = torch.exp(-(torch.cdist(x, centres) ** 2) / (2 * 0.7**2))
    torch.testing.assert_close(kn.features.RBF(centres, width=0.7)(x), expected, rtol=1e-12, atol=1e-14)
    assert kn.features.RBF([0.0, 0.5], width=1.0)(torch.zeros(2, 1))[0].tolist() == pytest.approx([1.0, 0.8824969])


@pytest.mark.parametrize("features", MAPS, ids=lambda each: type(each).__name__)
def test_maps_have_no_weights_follow_the_dtype_and_can_be_described(seed, features):
    net = features.linear(outputs=2)
    assert [name for name, _ in net.named_parameters()] == ["1.weight", "1.bias"]
    x = torch.randn(4, 2)
    assert net(x).shape == (4, 2) and net.double()(x.double()).dtype == torch.float64
    made = build(describe(net))[0]
    assert repr(made) == repr(features)
    torch.testing.assert_close(made(x.double()), features(x.double()), rtol=0, atol=0)


@pytest.mark.parametrize("features", MAPS, ids=lambda each: type(each).__name__)
def test_posterior_of_a_feature_map_is_saved_and_loaded_without_its_network(seed, features, tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20)
    posterior = kn.ExactLinear().fit(kn.Model(features.linear(), kn.Gaussian(0.5)), (x, y))
    posterior.save(tmp_path / "fit")
    torch.testing.assert_close(kn.load(tmp_path / "fit").predict(x).mean, posterior.predict(x).mean, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: kn.features.Polynomial(0), "degree must be"),
        (lambda: kn.features.Polynomial(20, inputs=20), "makes .* features"),
        (lambda: kn.features.Fourier(2, period=0.0), "period"),
        (lambda: kn.features.RBF(torch.zeros(2, 3, 4)), "centres must have shape"),
        (lambda: kn.features.RBF([0.0, math.nan]), "centres has 1 missing"),
        (lambda: kn.features.Polynomial(2)(torch.zeros(3, 2)), "inputs=2"),
    ],
)
def test_wrong_arguments_are_refused(make, words):
    with pytest.raises(kn.KnowableError, match=words):
        make()
