from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from knowable.errors import InvalidData, InvalidType
from knowable.evaluation.inputs import class_table, classes_and_target, means_and_target, score_tensor, target

from .cases import DTYPE, binary, classes, normals


@pytest.mark.parametrize(
    "given",
    [
        [1.0, 2.0],
        (1.0, 2.0),
        np.array([1.0, 2.0], dtype=np.float32),
        np.array([2.0, 1.0])[::-1],
        np.array([1.0, 2.0], dtype=">f8"),
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 2.0], requires_grad=True),
    ],
)
def test_numbers_of_every_kind_become_double_precision(given):
    made = score_tensor("y", given)
    assert made.dtype == torch.float64 and made.tolist() == [1.0, 2.0] and not made.requires_grad


@pytest.mark.parametrize("given", [[True, False], np.array([1, 0], dtype=np.uint8), torch.tensor([True, False])])
def test_labels_of_every_kind_become_integers(given):
    made = score_tensor("y", given)
    assert made.dtype == torch.int64 and made.tolist() == [1, 0]


def test_what_is_not_numbers_is_refused_by_name():
    for bad in ("abc", ["cat", "dog"], None, [[1.0], [1.0, 2.0]], object()):
        with pytest.raises(InvalidType, match=r"^labels must be a tensor, an array or a data frame of numbers"):
            score_tensor("labels", bad)
    with pytest.raises(InvalidType, match="labels must be of real numbers"):
        score_tensor("labels", torch.zeros(2, dtype=torch.complex64))


def test_target_checks_rows_and_missing_values():
    with pytest.raises(InvalidData, match="y must have 3 rows"):
        target([1.0, 2.0], 3)
    with pytest.raises(InvalidData, match=r"y has missing or infinite values in row 0, 2"):
        target([math.inf, 1.0, math.nan], 3)
    with pytest.raises(InvalidData, match="y is empty"):
        target(np.zeros((0, 1)), 0)
    with pytest.raises(InvalidData, match="single number 3"):
        target(3, 1)


def test_a_vector_never_broadcasts_against_a_column():
    mean, y, _ = means_and_target(torch.zeros(4, 1), torch.arange(4))
    assert mean.shape == y.shape == (4, 1)
    mean, y, _ = means_and_target(normals(torch.zeros(2, 4), torch.ones(2, 4)), torch.arange(4))
    assert mean.shape == y.shape == (4, 1)
    with pytest.raises(InvalidData, match=r"y has shape \(4,\)"):
        means_and_target(torch.zeros(4, 4), torch.zeros(4))
    with pytest.raises(InvalidData, match="prediction has missing"):
        means_and_target([math.nan], [0.0])


def test_binary_probabilities_become_two_classes():
    for given in ([0.25, 1.0], [[0.25], [1.0]], binary(torch.tensor([[0.25, 1 - 1e-12]], dtype=DTYPE))):
        table = class_table(given)
        assert table.probs.shape == (2, 1, 2) and table.labels.tolist() == [[0], [1]]
        np.testing.assert_allclose(table.probs[:, 0], [[0.75, 0.25], [0.0, 1.0]], atol=1e-11)


def test_classes_are_dimension_one_and_pixels_are_kept_in_order():
    probs = torch.randn(2, 3, 4, 5, dtype=DTYPE).softmax(1)
    for given in (probs, classes(probs.unsqueeze(0))):
        table = class_table(given)
        assert table.shape == (2, 4, 5)
        torch.testing.assert_close(table.probs[1, 2 * 5 + 3], probs[1, :, 2, 3])
        assert table.labels[1, 2 * 5 + 3] == probs[1, :, 2, 3].argmax()


def test_a_tie_goes_to_the_first_class_in_every_encoding():
    half = torch.full((1, 1), 0.5, dtype=DTYPE)
    for given in ([0.5], [[0.5, 0.5]], binary(half), classes(torch.full((1, 1, 2), 0.5))):
        assert class_table(given).labels.tolist() == [[0]]


def test_one_hot_targets_and_logits_are_recognised():
    with pytest.raises(InvalidData, match=r"as if it were one-hot.*y\.argmax\(1\)"):
        classes_and_target([[0.2, 0.8], [0.5, 0.5]], [[0, 1], [1, 0]])
    with pytest.raises(InvalidData, match=r"between 0 and 1, got values from -3 to 2.*sigmoid"):
        classes_and_target([-3.0, 2.0], [0, 1])
    with pytest.raises(InvalidData, match=r"sums from -1 to 4.*softmax"):
        classes_and_target([[-3.0, 2.0], [1.0, 3.0]], [0, 1])
    with pytest.raises(InvalidData, match="prediction has missing"):
        classes_and_target([math.nan, 0.5], [0, 1])


def test_labels_are_checked_against_the_classes():
    for bad in ([0, -1], [0, 3], [0.0, 0.5]):
        with pytest.raises(InvalidData, match=r"whole numbers from 0 to 2; got .* in row 1"):
            classes_and_target(torch.full((2, 3), 1 / 3), bad)
    _, y, _ = classes_and_target(torch.full((2, 3), 1 / 3), [[2.0], [0.0]])
    assert y.tolist() == [[2], [0]]
