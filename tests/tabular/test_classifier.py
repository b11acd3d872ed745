"""Tests of the classifier: labels of all types, probabilities, and how sure they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight

import knowable as kn
from tests.tabular.cases import QUICK, small_network


def blobs(labels: list, seed: int = 0, rows: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = np.arange(rows) % len(labels)
    X = rng.normal(size=(rows, 2)) + 4 * np.column_stack([np.cos(codes), np.sin(codes)])
    return X, np.array(labels)[codes]


def fitted(X, y, method: str = "map", **more) -> kn.BayesianClassifier:
    return kn.BayesianClassifier(QUICK[method], network=small_network, random_state=0, **more).fit(X, y)


@pytest.mark.parametrize("labels", [["no", "yes"], [3, 1, 2], [True, False], [0.5, 1.5], ["a", "b", "c"]])
def test_labels_of_all_types_are_told_and_come_back(labels: list):
    # the classes 0.5 and 1.5 are floats that are not whole, which scikit-learn takes for numbers
    X, y = blobs(labels)
    if labels == [0.5, 1.5]:
        with pytest.raises(ValueError, match="Unknown label type"):
            fitted(X, y)
        return
    model = fitted(X, y)
    assert model.classes_.tolist() == sorted(labels)
    assert set(model.predict(X).tolist()) <= set(labels)
    assert model.score(X, y) > 0.8


def test_probabilities_are_those_of_the_prediction_in_the_order_of_the_classes():
    X, y = blobs(["c", "a", "b"])
    model = fitted(X, y, "deep_ensemble")
    probs = model.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1)
    np.testing.assert_allclose(probs, model.predict_dist(X).probs)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), probs)
    assert (model.classes_[probs.argmax(1)] == model.predict(X)).all()
    codes = torch.from_numpy(np.searchsorted(model.classes_, y))
    np.testing.assert_allclose(
        model.predict_dist(X).log_prob(codes), np.log(probs[np.arange(len(y)), codes]), rtol=1e-9
    )


def test_total_uncertainty_is_the_entropy_of_the_probabilities():
    X, y = blobs(["a", "b"])
    model = fitted(X, y, "nuts")
    probs = model.predict_proba(X)
    expected = -(probs * np.log(probs)).sum(1)
    np.testing.assert_allclose(model.predict_dist(X).total, expected, rtol=1e-6, atol=1e-9)


def test_two_classes_may_have_a_bernoulli_likelihood():
    X, y = blobs(["no", "yes"])
    model = fitted(X, y, likelihood=kn.Bernoulli())
    assert model.predict_proba(X).shape == (90, 2)
    assert model.score(X, y) > 0.8
    with pytest.raises(kn.InvalidArgument, match="for two classes, there are 3"):
        fitted(*blobs(["a", "b", "c"]), likelihood=kn.Bernoulli())


def test_a_single_class_is_refused():
    with pytest.raises(kn.InvalidData, match=r"one class only \(a\)"):
        fitted(np.eye(3), ["a", "a", "a"])


def test_missing_labels_are_refused():
    with pytest.raises(kn.InvalidData, match="no label in row 1"):
        fitted(np.eye(3), np.array(["a", None, "b"], dtype=object))


def test_all_classes_can_be_announced_before_they_are_seen():
    X, y = blobs(["a", "b", "c"])
    model = kn.BayesianClassifier(QUICK["mean_field_vi"], network=small_network, random_state=0)
    first = y != "c"
    with pytest.warns(kn.ModelWarning, match="no row of class 2"):
        model.partial_fit(X[first], y[first], classes=["a", "b", "c"])
    assert model.predict_proba(X).shape == (90, 3)
    model.partial_fit(X, y)
    assert model.classes_.tolist() == ["a", "b", "c"]
    with pytest.raises(kn.InvalidData, match="classes that were not there before: d"):
        model.partial_fit(X, np.where(y == "c", "d", y))


def test_a_fit_forgets_classes_that_were_announced():
    X, y = blobs(["a", "b"])
    model = kn.BayesianClassifier(QUICK["mean_field_vi"], network=small_network, random_state=0)
    with pytest.warns(kn.ModelWarning, match="no row of class 2"):
        model.partial_fit(X, y, classes=["a", "b", "c"])
    assert model.fit(X, y).classes_.tolist() == ["a", "b"]


def test_before_it_is_fitted_it_has_no_classes():
    with pytest.raises(AttributeError, match="before it is fitted"):
        _ = kn.BayesianClassifier().classes_


def test_a_likelihood_of_numbers_is_refused():
    X, y = blobs(["a", "b"])
    with pytest.raises((kn.Unsupported, kn.InvalidData)):
        fitted(X, y, likelihood=kn.Gaussian()).predict(X)


# --- class weights ---------------------------------------------------------------------------------------------------


def test_class_weights_are_weights_of_rows(tmp_path):
    X, y = blobs(["no", "yes"])
    keep = (y == "no") | (np.arange(len(y)) % 3 == 0)
    X, y = X[keep], y[keep]
    plain, balanced = fitted(X, y), fitted(X, y, class_weight="balanced")
    rows = compute_sample_weight("balanced", y)
    by_row = kn.BayesianClassifier(QUICK["map"], network=small_network, random_state=0).fit(X, y, rows)
    np.testing.assert_array_equal(balanced.predict_proba(X), by_row.predict_proba(X))
    assert balanced.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean()
    counts = {"no": 1.0, "yes": 2.0}
    named = fitted(X, y, class_weight=counts)
    again = kn.BayesianClassifier.load(named.save(tmp_path / "model"), network=small_network(2, 2))
    assert again.class_weight == counts
    with pytest.raises(kn.InvalidArgument, match="class_weight must be"):
        fitted(X, y, class_weight="even")
