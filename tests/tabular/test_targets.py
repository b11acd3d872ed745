"""Tests of targets: numbers in the user's units, classes with the user's labels."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import knowable as kn
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.tabular import read_table
from knowable.tabular.schema import Schema
from knowable.tabular.targets import (
    ClassTargets,
    NumberTargets,
    asked_of_numbers,
    infer_task,
    label_array,
    recognise,
    target_values,
    targets_from_json,
)


def test_numbers_are_centred_and_scaled_by_output(seed: int):
    y = np.random.default_rng(seed).normal([10.0, -3.0], [5.0, 0.1], size=(50, 2))
    targets = NumberTargets.learn(y)
    scaled = targets.scale(y)
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled.std(0), 1)
    assert (targets.outputs, targets.flat) == (2, False)


def test_one_number_a_row_is_flat_and_a_column_of_one_is_not():
    assert NumberTargets.learn(np.arange(5.0)).flat
    assert not NumberTargets.learn(np.arange(5.0).reshape(-1, 1)).flat
    assert NumberTargets.learn(np.arange(5.0)).scale(np.arange(5.0)).shape == (5, 1)


def test_a_constant_is_centred_and_not_divided():
    assert NumberTargets.learn(np.full(4, 1e6)).scales == (1.0,)
    assert NumberTargets.learn(np.array([1e-9, 2e-9])).scales[0] == pytest.approx(5e-10)


def test_a_prediction_comes_back_in_the_users_units_with_its_density(generator: torch.Generator):
    y = np.array([100.0, 300.0, 500.0])
    targets = NumberTargets.learn(y)
    loc = torch.randn((1, 3, 1), generator=generator, dtype=torch.float64)
    prediction = RegressionPrediction(NormalComponents(loc, torch.full_like(loc, 0.5)), torch.zeros(1).double())
    restored = targets.restore(prediction)
    assert isinstance(restored, RegressionPrediction)
    mean, std = y.mean() + y.std() * loc[0, :, 0].numpy(), 0.5 * y.std()
    np.testing.assert_allclose(restored.mean[:, 0], mean, rtol=1e-12)
    np.testing.assert_allclose(restored.log_prob(torch.tensor(y)), stats.norm.logpdf(y, mean, std), rtol=1e-10)


@pytest.mark.parametrize("labels", [["b", "a", "b"], [3, 1, 3], [True, False, True], [0.5, 2.0, 0.5]])
def test_labels_of_all_types_go_to_codes_and_back(labels: list):
    y = label_array(np.array(labels))
    targets = ClassTargets.learn(y)
    codes = targets.codes(y)
    assert codes.tolist() == [sorted(set(labels)).index(label) for label in labels]
    assert targets.labels(codes).tolist() == labels
    assert list(targets.classes) == sorted(set(labels))


def test_a_class_that_was_not_there_is_named():
    with pytest.raises(kn.InvalidData, match=r"classes that were not there before: c. The classes are a, b"):
        ClassTargets.learn(np.array(["a", "b"])).codes(np.array(["a", "c"]))


@pytest.mark.parametrize(
    "targets",
    [
        NumberTargets((1.0, 2.0), (3.0, 4.0), False, ("a", "b")),
        ClassTargets(("no", "yes"), ("sick",)),
        ClassTargets((1, 2)),
        ClassTargets((False, True)),
    ],
    ids=repr,
)
def test_targets_go_to_json_and_back(targets):
    assert targets_from_json(json.loads(json.dumps(targets.to_json()))) == targets


def test_damaged_targets_are_told():
    with pytest.raises(kn.DamagedArtifact):
        targets_from_json({"task": "regression", "names": []})


@pytest.mark.parametrize(
    ("values", "task"),
    [
        ([1.5, 2.5, 3.0], "regression"),
        ([1, 2, 3], "regression"),
        ([0, 1, 1], "classification"),
        ([0.5, 1.5, 0.5], "regression"),
        (["a", "b", "a"], "classification"),
        ([True, False, True], "classification"),
        (pd.Categorical([1, 2, 3]), "classification"),
        (["1", "2", "3", "4", "x"], "regression"),
    ],
    ids=str,
)
def test_the_task_is_told_from_the_target(values, task: str):
    assert infer_task(read_table(pd.DataFrame({"y": values})), ("y",)) == task


def test_several_targets_are_numbers():
    table = read_table({"a": [0, 1], "b": [1.0, 2.0]})
    assert infer_task(table, ("a", "b")) == "regression"
    assert target_values(table, ("a", "b"), "regression").tolist() == [[0.0, 1.0], [1.0, 2.0]]
    with pytest.raises(kn.InvalidData, match="Classification has one target"):
        target_values(table, ("a", "b"), "classification")


def test_labels_of_mixed_types_become_texts():
    assert label_array(np.array(["a", 1], dtype=object)).tolist() == ["a", "1"]
    assert label_array(np.array([1, 2], dtype=object)).dtype.kind == "i"


# --- which likelihood fits -------------------------------------------------------------------------------------------


def _targets(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(400, 3))
    line = x @ [0.5, -0.4, 0.3]
    y = {
        "number": 5 + line + 0.3 * rng.normal(size=400),
        "count": rng.poisson(np.exp(1 + line)),
        "zero_inflated": rng.poisson(np.exp(1 + line)) * (rng.random(400) < 0.3),
        "log_normal": np.exp(3 + line + 0.5 * rng.normal(size=400)),
        "logit_normal": 1 / (1 + np.exp(-3 * line - rng.normal(size=400))),
        "gaussian": np.exp(line + rng.normal(size=400)) * (rng.random(400) < 0.35),  # amounts, most of them zero
    }[kind]
    return y.astype(float), x


@pytest.mark.parametrize("kind", ["number", "count", "zero_inflated", "log_normal", "logit_normal", "gaussian"])
def test_targets_drawn_from_a_distribution_are_recognised(kind: str, seed: int):
    assert recognise(*_targets(kind, seed)) == kind


def test_a_change_of_unit_does_not_change_what_a_target_is(seed: int):
    for kind in ("number", "log_normal"):
        y, x = _targets(kind, seed)
        assert recognise(1e4 * y, x) == recognise(1e-4 * y, x) == kind


def test_few_rows_and_several_targets_are_plain_numbers(seed: int):
    y, x = _targets("log_normal", seed)
    assert recognise(y[:20], x[:20]) == "number"
    assert recognise(np.column_stack([y, y]), x) == "number"
    assert recognise(np.arange(400.0), x) == "number"  # whole numbers that hardly repeat


@pytest.mark.parametrize(
    ("transform", "y", "words"), [("log", [1.0, 0.0], "above 0"), ("logit", [0.5, 1.0], "between 0 and 1")]
)
def test_a_transform_that_is_not_defined_is_refused(transform: str, y: list[float], words: str):
    with pytest.raises(kn.InvalidData, match=words):
        NumberTargets.learn(np.array(y), transform=transform)


def test_transformed_targets_survive_json():
    learned = NumberTargets.learn(np.array([1.0, 2.0, 5.0]), transform="log")
    assert targets_from_json(json.loads(json.dumps(learned.to_json()))) == learned
    np.testing.assert_allclose(learned.scale(np.exp(np.array([learned.means[0]]))), [[0.0]], atol=1e-12)


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ([0, 1, 2] * 50, "the whole numbers 0 to 2: are they classes?"),
        ([1, 2, 3, 4] * 20, "the whole numbers 1 to 4: are they classes?"),
        ([0, 1, 2, 3, 7, 12] * 50, None),  # a count with gaps
        ([0.0, 0.5, 1.0] * 50, None),
        ([5, 6, 7] * 50, None),
        (list(range(11)) * 50, None),
        ([0, 1, 2, 0], None),  # too few to tell
    ],
)
def test_numbers_that_may_name_classes_are_asked_about(values, asked):
    found = asked_of_numbers("species", np.array(values, dtype=float))
    assert (asked is None and found == []) or (asked in found[0] and "--task classification" in found[0])
    table = read_table({"x": list(range(len(values))), "species": values})
    assert any("are they classes?" in note for note in Schema.learn(table, "species").notes) is (asked is not None)
    assert not any("classes?" in note for note in Schema.learn(table, "species", "regression").notes)
