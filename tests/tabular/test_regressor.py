"""Tests of the regressor: what it predicts, in the units of the targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import knowable as kn
from knowable.tabular import read_table
from tests.tabular.cases import QUICK, linear_network, mixed_frame, small_network


def exact(seed: int, noise: float = 0.3, rows: int = 60) -> tuple[kn.BayesianRegressor, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal([100.0, -3.0], [20.0, 0.1], size=(rows, 2))
    y = 1e4 + 50 * X[:, 0] + 3000 * X[:, 1] + 100 * rng.normal(size=rows)
    return kn.BayesianRegressor("exact", likelihood=kn.Gaussian(noise), random_state=0).fit(X, y), X, y


def closed_form(model: kn.BayesianRegressor, X: np.ndarray, y: np.ndarray, noise: float, new: np.ndarray):
    """Mean and standard deviation of Bayesian linear regression on standardised data, in original units."""
    scale = lambda z: (z - X.mean(0)) / X.std(0)  # noqa: E731
    design, there = (np.column_stack([scale(each), np.ones(len(each))]) for each in (X, new))
    target = (y - y.mean()) / y.std()
    covariance = np.linalg.inv(design.T @ design / noise**2 + np.eye(3))
    mean = there @ covariance @ design.T @ target / noise**2
    variance = np.einsum("ij,jk,ik->i", there, covariance, there) + noise**2
    return y.mean() + y.std() * mean, y.std() * np.sqrt(variance)


def test_an_exact_posterior_predicts_what_the_closed_form_says_in_the_users_units(seed: int):
    model, X, y = exact(seed)
    new = X[:7] + 1.0
    mean, std = model.predict(new, return_std=True)
    expected_mean, expected_std = closed_form(model, X, y, 0.3, new)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-5)  # inputs are in single precision
    np.testing.assert_allclose(std, expected_std, rtol=1e-4)


def test_intervals_quantiles_and_densities_are_those_of_that_normal(seed: int):
    model, X, y = exact(seed)
    mean, std = model.predict(X, return_std=True)
    low, high = model.predict_interval(X, level=0.8)
    np.testing.assert_allclose(low, mean - 1.2815515655 * std, rtol=1e-6)
    np.testing.assert_allclose(high, mean + 1.2815515655 * std, rtol=1e-6)
    found = model.predict_dist(X).log_prob(torch.from_numpy(y))
    np.testing.assert_allclose(found, stats.norm.logpdf(y, mean, std), rtol=1e-6)


def test_a_change_of_units_changes_nothing_but_the_units(seed: int):
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(40, 2)), rng.normal(size=40)
    model = lambda: kn.BayesianRegressor(QUICK["map"], network=small_network, random_state=0)  # noqa: E731
    plain = model().fit(X, y)
    other = model().fit(X, 1024.0 * y)  # a power of two, so that scaling is exact
    for first, second in zip(plain.predict(X, return_std=True), other.predict(X, return_std=True), strict=True):
        np.testing.assert_allclose(1024.0 * first, second, rtol=1e-6)


def test_several_targets_are_predicted_together(seed: int):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 2))
    Y = np.column_stack([100 * X[:, 0], 0.01 * X[:, 1], X.sum(1)])
    model = kn.BayesianRegressor(QUICK["map"], network=linear_network, random_state=0).fit(X, Y)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 3)
    low, high = model.predict_interval(X)
    assert (low < mean).all() and (mean < high).all()
    assert model.score(X, Y) > 0.8
    assert model.predict_dist(X).log_prob(torch.from_numpy(Y)).shape == (60,)


def test_a_column_of_one_target_comes_back_as_a_column():
    X, y = np.linspace(0, 1, 20).reshape(-1, 1), np.linspace(5, 6, 20)
    model = kn.BayesianRegressor(QUICK["map"], network=small_network, random_state=0)
    flat, column = model.fit(X, y).predict(X), model.fit(X, y[:, None]).predict(X)
    assert flat.shape == (20,) and column.shape == (20, 1)
    np.testing.assert_array_equal(flat, column[:, 0])


@pytest.mark.parametrize(
    ("rows", "method", "expected"),
    [
        (99, kn.MAP(epochs=1), kn.Gaussian),
        (100, kn.MeanFieldVI(epochs=1), kn.HeteroscedasticGaussian),
        (99, kn.MeanFieldVI(epochs=1), kn.Gaussian),
        (4_999, kn.MAP(epochs=1), kn.Gaussian),
        (5_000, kn.MAP(epochs=1), kn.HeteroscedasticGaussian),
        (100, kn.Laplace(epochs=1), kn.Gaussian),
        (100, kn.ExactLinear(), kn.Gaussian),
    ],
)
def test_the_spread_depends_on_the_input_where_there_are_rows_to_tell(rows: int, method, expected: type):
    X = np.random.default_rng(0).normal(size=(rows, 1))
    model = kn.BayesianRegressor(method).fit(X, X[:, 0])
    assert type(model.model_.likelihood) is expected


def test_the_spread_is_found_where_it_varies(seed: int):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, size=(600, 1))
    y = 10 * rng.normal(size=600) * np.where(X[:, 0] > 0, 5.0, 1.0)
    model = kn.BayesianRegressor(kn.MeanFieldVI(epochs=1500), network=small_network, random_state=0).fit(X, y)
    _, std = model.predict([[-0.6], [0.6]], return_std=True)
    # each half has 300 rows: the sd of a log standard deviation is 1 / sqrt(600), their ratio's 6%
    assert std[1] / std[0] == pytest.approx(5.0, rel=0.35)


def test_counts_keep_their_units(seed: int):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(200, 1))
    y = rng.poisson(np.exp(1 + 0.5 * X[:, 0]))
    model = kn.BayesianRegressor(QUICK["map"], network=small_network, likelihood=kn.Poisson(), random_state=0).fit(X, y)
    assert (model.predict(X) > 0).all()
    low, high = model.predict_interval(X)
    assert (low == low.round()).all() and (high == high.round()).all()


def test_a_likelihood_of_labels_is_refused():
    X, y = np.linspace(0, 1, 20).reshape(-1, 1), np.arange(20) % 2
    model = kn.BayesianRegressor(QUICK["map"], network=small_network, likelihood=kn.Bernoulli())
    with pytest.raises((kn.Unsupported, kn.InvalidData)):
        model.fit(X, y).predict(X)


def test_an_unseen_category_is_less_certain_than_a_seen_one():
    frame, y = mixed_frame(200)
    frame = frame[["size", "colour"]].fillna({"size": 100.0, "colour": "blue"})
    model = kn.BayesianRegressor("exact", likelihood=kn.Gaussian(0.1), random_state=0).fit(frame, y)
    seen = model.predict_dist(frame.head(1)).epistemic.item()
    with pytest.warns(kn.KnowableWarning, match="'violet'"):
        unseen = model.predict_dist(frame.head(1).assign(colour="violet")).epistemic.item()
    assert unseen > 10 * seen


def test_names_of_targets_are_kept():
    frame, y = mixed_frame(30)
    import pandas as pd

    model = kn.BayesianRegressor(kn.MAP(epochs=1)).fit(frame, pd.Series(y, name="price"))
    assert model.schema_.target == ("price",)
    table = read_table(frame.assign(a=y, b=-y))
    assert kn.BayesianRegressor(kn.MAP(epochs=1)).fit(table, ["a", "b"]).predict(table).shape == (30, 2)


@pytest.mark.parametrize(
    ("likelihood", "expected"),
    [
        (None, kn.NegativeBinomial(base=2.02, zeros=True)),
        ("negative_binomial", kn.NegativeBinomial(base=2.02)),
        ("poisson", kn.Poisson()),
        ("student_t", kn.StudentT()),
        ("gaussian", kn.Gaussian()),
    ],
)
def test_counts_with_many_zeros_are_recognised_and_a_name_sets_the_likelihood(likelihood, expected):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(100, 2)), np.array([0] * 60 + [3] * 10 + [4] * 18 + [10] * 10 + [0] * 2, dtype=float)
    model = kn.BayesianRegressor(kn.MAP(epochs=5), likelihood=likelihood, random_state=0).fit(X, y)
    assert model.model_.likelihood == expected
    low, _ = model.predict_interval(X)
    assert low.min() >= 0 or not isinstance(expected, kn.NegativeBinomial | kn.Poisson)


def test_positive_targets_with_a_long_tail_are_log_normal_and_scored_in_their_own_units(seed: int, tmp_path):
    """The density of y is that of log y over y."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 2))
    y = np.exp(2 + X[:, 0] + 0.3 * rng.normal(size=60))
    settings = {"likelihood": kn.Gaussian(), "random_state": 0}
    plain = kn.BayesianRegressor(kn.MAP(epochs=50), **settings).fit(X, np.log(y))
    found = kn.BayesianRegressor(kn.MAP(epochs=50), random_state=0).fit(X, y)
    expected = plain.predict_dist(X).log_prob(torch.from_numpy(np.log(y))) - torch.from_numpy(np.log(y))
    torch.testing.assert_close(found.predict_dist(X).log_prob(torch.from_numpy(y)), expected)
    low, high = found.predict_interval(X)
    np.testing.assert_allclose(np.log(high), plain.predict_interval(X)[1], rtol=1e-8)
    assert (low > 0).all()
    found.save(tmp_path / "model")
    np.testing.assert_array_equal(kn.BayesianRegressor.load(tmp_path / "model").predict(X), found.predict(X))


def test_a_single_network_with_learned_noise_does_not_end_at_a_network_through_all_rows():
    """The joint mode of weights and noise has next to no noise; a tenth of the rows, kept apart, says when to stop."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(120, 3))
    y = x[:, 0] - x[:, 1] + 0.5 * generator.normal(size=120)
    fitted = kn.BayesianRegressor("map", random_state=0).fit(x[:80], y[:80])
    assert "validation" in fitted.posterior_.diagnostics.message
    prediction = fitted.predict_dist(x[80:])
    assert 0.25 < prediction.std.mean() < 1.0  # of 40 new rows, the noise is 0.5
    assert kn.metrics.nll(prediction, torch.from_numpy(y[80:])) < 2.0
