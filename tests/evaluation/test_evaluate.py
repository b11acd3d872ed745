from __future__ import annotations

import copy
import json
import math
import pickle

import numpy as np
import pytest
import torch

from knowable.errors import InvalidData, InvalidType
from knowable.evaluation import metrics
from knowable.evaluation.evaluate import Scores, evaluate
from knowable.likelihoods import Poisson

from .cases import DTYPE, binary, classes, counts, normals, student

NUMBER_SCORES = ["nll", "rmse", "crps", "coverage_90", "interval_width_90", "ece", "mean_std"]
CLASS_SCORES = ["nll", "accuracy", "brier", "ece", "mean_entropy", "mean_mutual_information"]


def _numbers(rows: int = 40):
    return normals(torch.randn(3, rows), torch.rand(3, rows) + 0.2), torch.randn(rows, dtype=DTYPE)


def _labels(rows: int = 40):
    return classes(torch.randn(3, rows, 4, dtype=DTYPE).softmax(2)), torch.randint(4, (rows,))


def test_scores_of_numbers_are_those_of_the_metrics_in_a_stable_order():
    prediction, y = _numbers()
    scores = evaluate(prediction, y)
    assert list(scores) == NUMBER_SCORES and len(scores) == 7
    expected = {
        "nll": metrics.nll(prediction, y),
        "rmse": metrics.rmse(prediction, y),
        "crps": metrics.crps(prediction, y),
        "coverage_90": metrics.coverage(prediction, y),
        "interval_width_90": metrics.interval_width(prediction),
        "ece": metrics.ece(prediction, y),
        "mean_std": prediction.std.mean().item(),
    }
    assert scores.to_dict() == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in scores.values())


def test_scores_of_classes_are_those_of_the_metrics_in_a_stable_order():
    prediction, y = _labels()
    scores = evaluate(prediction, y)
    assert list(scores) == CLASS_SCORES
    expected = {
        "nll": metrics.nll(prediction, y),
        "accuracy": metrics.accuracy(prediction, y),
        "brier": metrics.brier(prediction, y),
        "ece": metrics.ece(prediction, y),
        "mean_entropy": prediction.total.mean().item(),
        "mean_mutual_information": prediction.epistemic.mean().item(),
    }
    assert scores.to_dict() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("prediction", "y", "names"),
    [
        (counts(torch.full((2, 5), 2.0)), [0, 1, 2, 3, 4], NUMBER_SCORES),
        (student(2.0, torch.zeros(2, 5), 1.0), [0.0, 1.0, 2.0, 3.0, 4.0], NUMBER_SCORES),
        (binary(torch.full((2, 5), 0.3)), [0, 1, 0, 0, 1], CLASS_SCORES),
        (binary(torch.full((2, 5, 1), 0.3)), [False, True, False, False, True], CLASS_SCORES),
        (classes(torch.full((2, 5, 3, 2, 2), 1 / 3)), np.zeros((5, 2, 2), dtype=np.int32), CLASS_SCORES),
    ],
)
def test_every_kind_of_prediction_is_scored(prediction, y, names: list[str]):
    scores = evaluate(prediction, y)
    assert list(scores) == names
    finite = {name for name, value in scores.items() if math.isfinite(value)}
    infinite = set(names) - finite
    assert infinite == ({"mean_std"} if not torch.isfinite(prediction.total).all() else set())
    assert all(len(values) == 5 for values in scores.per_row.values())


def test_standard_errors_come_from_the_rows():
    for prediction, y in (_numbers(), _labels()):
        scores = evaluate(prediction, y)
        assert set(scores.standard_errors) == set(scores)
        for name in set(scores.per_row) & set(scores):
            rows = scores.per_row[name].numpy()
            assert scores[name] == pytest.approx(rows.mean(), rel=1e-12)
            assert scores.standard_errors[name] == pytest.approx(rows.std(ddof=1) / math.sqrt(40), rel=1e-12)
    accuracy, rows = scores["accuracy"], 40  # the binomial formula, with n - 1
    assert scores.standard_errors["accuracy"] == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / (rows - 1)))


def test_standard_error_of_rmse_is_the_spread_over_repeated_samples(seed: int, generator: torch.Generator):
    # errors N(0, 1), n = 200: the sd of rmse over 2000 repetitions has a relative error of 1/sqrt(4000) = 1.6%; single
    # estimates scatter by about 10%, so that the mean of 40 has 1.6% too; the delta method is off by O(1/n) = 0.5%
    rows, repeats = 200, 2000
    errors = torch.randn(repeats, rows, dtype=DTYPE, generator=generator)
    spread = errors.square().mean(1).sqrt().std().item()
    estimates = [
        evaluate(normals(torch.zeros(1, rows), torch.ones(1, rows)), y).standard_errors["rmse"] for y in errors[:40]
    ]
    assert np.mean(estimates) == pytest.approx(spread, rel=4 * (0.016 + 0.1 / math.sqrt(40) + 0.005))


def test_a_single_row_has_no_standard_error_and_a_perfect_fit_has_none_to_speak_of():
    one = evaluate(normals(torch.zeros(1, 1), torch.ones(1, 1)), [0.5])
    assert all(math.isnan(error) for error in one.standard_errors.values())
    assert "±" not in repr(one) and "on 1 row\n" in repr(one)
    exact = evaluate(normals(torch.zeros(1, 3), torch.ones(1, 3)), [0.0, 0.0, 0.0])
    assert exact["rmse"] == 0.0 and exact.standard_errors["rmse"] == 0.0


def test_scores_do_not_depend_on_the_order_of_rows():
    loc, scale, y = torch.randn(3, 30), torch.rand(3, 30) + 0.2, torch.randn(30)
    order = torch.randperm(30)
    shuffled = evaluate(normals(loc[:, order], scale[:, order]), y[order])
    assert shuffled.to_dict() == pytest.approx(evaluate(normals(loc, scale), y).to_dict(), rel=1e-12)


def test_scores_print_as_an_aligned_table():
    lines = repr(evaluate(*_numbers())).splitlines()
    assert lines[0] == "Scores on 40 rows"
    assert [line.split()[0] for line in lines[1:]] == NUMBER_SCORES
    assert len({line.index("±") for line in lines if "±" in line}) == 1


def test_scores_are_a_mapping_that_can_be_stored_and_not_changed():
    scores = evaluate(*_numbers())
    assert dict(scores) == scores.to_dict() == json.loads(json.dumps(scores.to_dict()))
    assert scores == scores.to_dict() and "crps" in scores and "accuracy" not in scores
    for other in (pickle.loads(pickle.dumps(scores)), copy.deepcopy(scores)):
        assert isinstance(other, Scores) and other == scores
    with pytest.raises(TypeError):
        scores["nll"] = 0.0  # pyright: ignore
    scores.to_dict()["nll"] = math.inf
    assert math.isfinite(scores["nll"])


def test_scoring_builds_no_graph():
    loc = torch.randn(2, 4, requires_grad=True)
    scores = evaluate(normals(loc, torch.ones(2, 4)), torch.zeros(4, requires_grad=True))
    assert not any(rows.requires_grad for rows in scores.per_row.values())


def test_bad_input_is_named():
    prediction, y = _numbers(4)
    with pytest.raises(InvalidType, match=r"prediction must be a Prediction.*got a Tensor.*knowable\.metrics"):
        evaluate(prediction.mean, y)
    with pytest.raises(InvalidData, match="y must have 4 rows"):
        evaluate(prediction, y[:3])
    with pytest.raises(InvalidData, match="y has missing or infinite values in row 2"):
        evaluate(prediction, [0.0, 0.0, math.nan, 0.0])
    with pytest.raises(InvalidData, match="empty"):
        evaluate(normals(torch.zeros(1, 0), torch.ones(1, 0)), [])
    with pytest.raises(InvalidType, match="y must be a tensor, an array or a data frame of numbers"):
        evaluate(_labels(2)[0], ["cat", "dog"])


def test_a_share_of_which_all_were_seen_has_a_standard_error():
    prediction = Poisson().predict(torch.zeros(1, 40, 1), {}, torch.zeros(1))
    scores = evaluate(prediction, torch.ones(40, 1))
    assert scores["coverage_90"] == 1.0
    share = 42 / 44  # 40 rows and 4 more, of which 2 were inside (Agresti and Coull, 1998)
    assert scores.standard_errors["coverage_90"] == pytest.approx((share * (1 - share) / 40) ** 0.5)
