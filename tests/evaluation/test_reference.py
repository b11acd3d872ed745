"""Comparison with a reference posterior against closed forms of normals, SciPy, and repeated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import knowable as kn
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.posterior.particles import Particles
from knowable.errors import InvalidArgument, InvalidType
from knowable.evaluation.reference import compare_predictions, compare_to_reference, distances

X = torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(1)


def bias_model(likelihood=None, outputs: int = 1) -> kn.Model:
    """A network whose output is its bias: every function value is normal with the bias's mean and spread."""
    torch.manual_seed(0)
    return kn.Model(nn.Linear(1, outputs).double(), likelihood or kn.Gaussian(0.5), frozen="weight")


def normal_bias(model: kn.Model, loc: float, scale: float, seed: int = 0) -> DiagonalNormal:
    zeros = torch.zeros_like(model.params()["bias"])
    return DiagonalNormal(model, {"bias": zeros + loc}, {"bias": zeros + scale}, seed=seed)


def test_figures_of_two_normals_are_their_closed_forms(seed):
    model = bias_model()
    found = compare_to_reference(
        normal_bias(model, 1.0, 3.0, seed), normal_bias(model, 0.0, 2.0, seed + 1), X, samples=2000
    )
    # W1 of N(1, 3²) and N(0, 2²) is E|1 + z| for the quantile coupling; the KS distance by its definition on a grid
    grid = np.linspace(-15, 15, 20001)
    expected = {
        "mean_shift": 0.5,
        "sd_ratio": 1.5,
        "predictive_sd_ratio": math.sqrt((9 + 0.25) / (4 + 0.25)),
        "wasserstein": stats.norm.expect(lambda z: abs(1 + z)) / 2,
        "ks": np.abs(stats.norm(1, 3).cdf(grid) - stats.norm(0, 2).cdf(grid)).max(),
    }
    for name, value in expected.items():
        assert abs(found[name] - value) < 4.5 * found.standard_errors[name] + 0.01, name


def test_standard_errors_are_the_spread_of_repeated_comparisons():
    # 60 repetitions: their sd has a relative error of 1 / sqrt(2 * 60) = 0.09; a jackknife of ten groups one of
    # 1 / sqrt(2 * 9) = 0.24 each, averaged over repetitions 0.03
    model = bias_model()
    runs = [
        compare_to_reference(normal_bias(model, 1.0, 3.0, i), normal_bias(model, 0.0, 2.0, i + 1), X[:1], samples=100)
        for i in range(0, 120, 2)
    ]
    for name in ("mean_shift", "sd_ratio", "wasserstein"):
        spread = np.std([run[name] for run in runs])
        said = np.sqrt(np.mean([run.standard_errors[name] ** 2 for run in runs]))
        assert abs(said / spread - 1) < 0.45, name


def test_the_same_posterior_is_as_near_as_it_can_be_seen_to_be(seed):
    model = bias_model()
    runs = [
        compare_to_reference(normal_bias(model, 0.0, 2.0, i), normal_bias(model, 0.0, 2.0, i + 1), X[:1], samples=200)
        for i in range(100 * seed, 100 * seed + 40, 2)
    ]
    for name in ("mean_shift", "wasserstein", "ks"):
        value, same = np.mean([run[name] for run in runs]), np.mean([run.same[name] for run in runs])
        assert 0.5 < value / same < 2, name
    assert np.mean([run["sd_ratio"] for run in runs]) == pytest.approx(1, abs=4 / math.sqrt(200 * 20))


def test_a_posterior_compared_with_itself_is_at_no_distance():
    model = bias_model()
    posterior = normal_bias(model, 0.0, 1.0)
    found = compare_to_reference(posterior, posterior, X)
    assert found["wasserstein"] == found["ks"] == found["mean_shift"] == 0
    assert found["sd_ratio"] == pytest.approx(1) and found["predictive_sd_ratio"] == pytest.approx(1)


def test_classes_are_compared_by_probabilities_and_information(seed):
    model = bias_model(kn.Categorical(), outputs=3)
    sharp = normal_bias(model, 0.0, 0.1, seed)
    wide = normal_bias(model, 0.0, 2.0, seed + 1)
    found = compare_to_reference(sharp, wide, X, samples=500)
    one, two = sharp.predict(X, samples=500), wide.predict(X, samples=500)
    assert found["agreement"] == pytest.approx(kn.metrics.agreement(one, two))
    assert found["total_variation"] == pytest.approx(kn.metrics.total_variation(one, two))
    assert found["epistemic_difference"] == pytest.approx((one.epistemic - two.epistemic).mean().item(), abs=1e-9)
    assert found["entropy_difference"] == pytest.approx((one.total - two.total).mean().item(), abs=1e-9)
    assert found["epistemic_difference"] < -0.1 and found["wasserstein"] > 0.1


def test_binary_labels_and_pixels_are_compared_too():
    model = bias_model(kn.Bernoulli())
    one, two = normal_bias(model, 0.3, 0.5), normal_bias(model, -0.3, 0.5, 1)
    found = compare_to_reference(one, two, X)
    assert found["total_variation"] == pytest.approx(
        kn.metrics.total_variation(one.predict(X, samples=1000), two.predict(X, samples=1000))
    )
    net = nn.Conv2d(1, 3, 1).double()
    pixels = kn.Model(net, kn.Categorical(), frozen="weight")
    x = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    found = compare_to_reference(normal_bias(pixels, 0.0, 1.0), normal_bias(pixels, 0.0, 1.0, 1), x, samples=50)
    assert found.per_input["agreement"].shape == (2,) and 0 <= found["total_variation"] < 0.3


@pytest.mark.parametrize("likelihood", [kn.Gaussian(0.5), kn.Gaussian(), kn.StudentT(), kn.Poisson()])
def test_every_likelihood_over_numbers_is_compared(likelihood):
    torch.manual_seed(0)
    model = kn.Model(nn.Linear(1, 1).double(), likelihood)
    loc = {name: torch.zeros_like(value) for name, value in model.params().items()}
    scale = {name: torch.full_like(value, 0.3) for name, value in loc.items()}
    one, two = (DiagonalNormal(model, loc, scale, seed=seed) for seed in (0, 1))
    found = compare_to_reference(one, two, X, samples=400)
    assert found["predictive_sd_ratio"] == pytest.approx(1, abs=0.1) and found["ks"] < 0.15


def test_an_exact_posterior_is_a_reference_and_a_point_estimate_is_not():
    torch.manual_seed(0)
    model = kn.Model(nn.Linear(1, 1).double(), kn.Gaussian(0.5))
    exact = kn.ExactLinear().fit(model, (X, 2 * X))
    draws = Particles(model, exact._sample_random(1000, torch.Generator().manual_seed(0)))
    found = compare_to_reference(draws, exact, X)
    assert found["sd_ratio"] == pytest.approx(1, abs=0.1) and found["predictive_sd_ratio"] == pytest.approx(1, abs=0.1)
    assert found["mean_shift"] < 0.15
    point = Particles(model, {name: value.unsqueeze(0) for name, value in exact.mean().items()})
    with pytest.raises(InvalidArgument, match="reference has no spread"):
        compare_to_reference(exact, point, X)
    assert compare_to_reference(point, exact, X)["sd_ratio"] == 0


def test_weights_count():
    model = bias_model()
    atoms = {"bias": torch.tensor([[0.0], [1.0]], dtype=torch.float64)}
    posterior = Particles(model, atoms, torch.tensor([0.8, 0.2], dtype=torch.float64).log())
    reference = Particles(model, atoms, torch.tensor([0.5, 0.5], dtype=torch.float64).log())
    found = compare_to_reference(posterior, reference, X)
    assert found["mean_shift"] == pytest.approx(0.3 / 0.5)
    assert found["wasserstein"] == pytest.approx(0.3 / 0.5) and found["ks"] == pytest.approx(0.3)


def test_distances_agree_with_scipy(generator):
    a = torch.randn((40, 3), generator=generator, dtype=torch.float64)
    b = (torch.randn((30, 3), generator=generator, dtype=torch.float64) * 2 + 0.5).round(decimals=1)
    wa, wb = torch.rand(40, generator=generator, dtype=torch.float64), torch.full((30,), 1 / 30, dtype=torch.float64)
    wa = wa / wa.sum()
    w1, _ = distances(a, b, wa, wb)
    expected = [stats.wasserstein_distance(a[:, j], b[:, j], wa, wb) for j in range(3)]
    np.testing.assert_allclose(w1.numpy(), expected, rtol=1e-10)
    _, ks = distances(a, b, torch.full((40,), 1 / 40, dtype=torch.float64), wb)
    np.testing.assert_allclose(ks.numpy(), [stats.ks_2samp(a[:, j], b[:, j]).statistic for j in range(3)], rtol=1e-10)


def test_result_is_a_mapping_that_prints_as_a_table():
    model = bias_model()
    found = compare_to_reference(normal_bias(model, 1.0, 3.0), normal_bias(model, 0.0, 2.0), X, samples=100)
    assert list(found) == ["mean_shift", "sd_ratio", "predictive_sd_ratio", "wasserstein", "ks"] and len(found) == 5
    lines = repr(found).splitlines()
    assert lines[0] == "Comparison with a reference at 7 inputs (100 draws against 100)"
    assert len(lines) == 7 and "if same" in lines[1] and all(len(line) <= 120 for line in lines)
    with pytest.raises(AttributeError):
        found.figures = {}  # type: ignore[misc]


def test_what_cannot_be_compared_is_refused():
    numbers, labels = bias_model(), bias_model(kn.Categorical(), outputs=3)
    posterior = normal_bias(numbers, 0.0, 1.0)
    with pytest.raises(InvalidType, match="reference must be a posterior"):
        compare_to_reference(posterior, posterior.predict(X), X)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="same kind of outcome"):
        compare_to_reference(posterior, normal_bias(labels, 0.0, 1.0), X)
    with pytest.raises(InvalidArgument, match="same outputs"):
        compare_to_reference(posterior, normal_bias(bias_model(outputs=2), 0.0, 1.0), X)
    with pytest.raises(InvalidArgument, match="samples"):
        compare_to_reference(posterior, posterior, X, samples=1)


def test_two_predictions_are_compared_like_the_posteriors_they_come_from():
    model = bias_model()
    one, two = normal_bias(model, 1.0, 3.0, 0), normal_bias(model, 0.0, 2.0, 1)
    found = compare_predictions(one.predict(X, samples=100), two.predict(X, samples=100))
    expected = compare_to_reference(one, two, X, samples=100)
    assert dict(found) == dict(expected) and found.draws == (100, 100)
