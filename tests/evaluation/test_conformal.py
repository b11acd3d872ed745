from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation import conformal

from .conformal_cases import ALPHAS, NEW, ROWS, labels, probabilities, residuals, scales, uniforms

# What MAPIE 1.6.0 (lac, aps, raps, cqr) and crepes 0.9.1 (split, normalised, groups, p) find for the same input.
OTHERS = {
    "lac": (0.9489941524751602, 0.8662002460068455, 0.719503061823426),
    "aps": (0.960564484439477, 0.9260342087418297, 0.760821215580639),
    "raps": (0.990564484439477, 0.9560342087418298, 0.770821215580639),
    "split": (2.4254426772808464, 2.057515925299997, 1.0236748668339137),
    "normalised": (1.7935550093650814, 1.684099781513214, 1.0920042872428892),
    "cqr": (0.9923436795237168, 0.8655388416169831, 0.10375714208247233),
}
GROUPS = {0.05: (2.59598914199042, 2.4254426772808464), 0.3: (1.0752374268638893, 0.9843156239468505)}
P_VALUES = np.array([
    [24, 1, 10, 34, 6], [12, 1, 2, 1, 54], [1, 12, 1, 54, 1],
]) / 58  # fmt: skip
SCORES = st.lists(st.integers(0, 6).map(float), min_size=9, max_size=40)  # few values, so that ties abound


def class_scores(name: str) -> torch.Tensor:
    probs = torch.from_numpy(probabilities()[:ROWS])
    uniform = torch.from_numpy(uniforms(ROWS, 6))
    every = {
        "lac": conformal.lac_scores(probs),
        "aps": conformal.aps_scores(probs, uniform),
        "raps": conformal.raps_scores(probs, uniform, penalty=0.01, free=1),
    }[name]
    return every[torch.arange(ROWS), torch.from_numpy(labels()[:ROWS])]


def number_scores(name: str) -> torch.Tensor:
    y, std, zero = residuals(), scales(), np.zeros(ROWS)
    return {
        "split": conformal.split_scores(zero, y),
        "normalised": conformal.normalised_scores(zero, std, y),
        "cqr": conformal.cqr_scores(-std, std, y),
    }[name]


@pytest.mark.parametrize("name", list(OTHERS))
def test_thresholds_are_those_of_other_libraries(name: str):
    scores = class_scores(name) if name in ("lac", "aps", "raps") else number_scores(name)
    for alpha, expected in zip(ALPHAS, OTHERS[name], strict=True):
        assert conformal.threshold(scores, alpha) == pytest.approx(expected, abs=1e-9)


def test_thresholds_of_groups_are_those_of_another_library():
    groups = np.arange(ROWS) % 2
    for alpha, expected in GROUPS.items():
        found = conformal.group_thresholds(number_scores("split"), alpha, groups)
        assert tuple(found.values()) == pytest.approx(expected, abs=1e-9)


def test_p_values_are_those_of_another_library():
    scores = class_scores("lac")
    found = conformal.p_values(scores, 1 - probabilities()[ROWS:].ravel()).view(NEW, -1)
    assert found.numpy() == pytest.approx(P_VALUES, abs=1e-12)


@pytest.mark.parametrize("name", ["lac", "aps", "raps"])
def test_sets_are_the_labels_that_a_loop_finds(name: str):
    probs, y = probabilities(), labels()
    found = conformal.prediction_sets(probs[:ROWS], y[:ROWS], probs[ROWS:], 0.1, score=name)

    def score(row: np.ndarray, label: int) -> float:
        above = sum(p for p in row if p > row[label])
        rank = 1 + sum(p > row[label] for p in row)
        through = above + row[label]
        return {"lac": 1 - row[label], "aps": through, "raps": through + 0.01 * (rank - 1)}[name]

    own = sorted(score(row, label) for row, label in zip(probs[:ROWS], y[:ROWS], strict=True))
    q = own[math.ceil((ROWS + 1) * 0.9) - 1]
    for row, labels_of_row in zip(probs[ROWS:], found, strict=True):
        assert [score(row, label) <= q + 1e-12 for label in range(5)] == labels_of_row.tolist()


@pytest.mark.parametrize("name", ["split", "normalised", "cqr"])
def test_intervals_hold_exactly_the_numbers_whose_score_is_small_enough(name: str):
    y, std, zero = residuals(), scales(), np.zeros(ROWS)
    held = {"split": zero, "normalised": (zero, std), "cqr": (-std, std)}[name]
    low, high = conformal.prediction_intervals(held, y, held, 0.2, score=name)
    inside = (torch.from_numpy(y) >= low) & (torch.from_numpy(y) <= high + 1e-12)
    assert torch.equal(inside, number_scores(name) <= conformal.threshold(number_scores(name), 0.2) + 1e-12)
    assert inside.sum() == math.ceil((ROWS + 1) * 0.8)


@settings(deadline=None, max_examples=50)
@given(SCORES, st.sampled_from([0.1, 0.2, 0.25, 0.5]))
def test_the_threshold_is_the_smallest_that_a_new_row_passes_often_enough(scores: list[float], alpha: float):
    q = conformal.threshold(scores, alpha)
    n = len(scores)

    def passes(limit: float) -> float:  # at least: a new row is in any place among the held-out ones
        return sum(each <= limit for each in scores) / (n + 1)

    assert passes(q) >= 1 - alpha - 1e-12
    assert all(passes(each) < 1 - alpha - 1e-12 for each in scores if each < q)


@settings(deadline=None, max_examples=50)
@given(SCORES, st.randoms(use_true_random=False))
def test_thresholds_ignore_the_order_and_fall_as_alpha_rises(scores: list[float], random):
    shuffled = random.sample(scores, len(scores))
    found = [conformal.threshold(scores, alpha) for alpha in (0.1, 0.2, 0.3, 0.7)]
    assert found == [conformal.threshold(shuffled, alpha) for alpha in (0.1, 0.2, 0.3, 0.7)]
    assert found == sorted(found, reverse=True)


@settings(deadline=None, max_examples=50)
@given(SCORES)
def test_p_values_of_ties_are_those_of_a_loop_and_fall_as_scores_rise(scores: list[float]):
    new = torch.arange(-1.0, 8.0)
    found = conformal.p_values(scores, new)
    slow = [(1 + sum(each >= value for each in scores)) / (len(scores) + 1) for value in new.tolist()]
    assert found.tolist() == slow
    assert (found.diff() <= 0).all()


def test_alpha_is_the_fraction_that_was_meant():
    scores = np.arange(1.0, 30.0)  # 29 rows: (29 + 1) 0.9 is 27, but 30 (1 - (1 - 0.9)) rounds above it
    assert conformal.threshold(scores, 0.1) == conformal.threshold(scores, 1 - 0.9) == 27
    assert conformal.rows_needed(1 - 0.9) == 9
    assert conformal.rows_needed(0.05) == 19
    assert conformal.rows_needed(0.3) == 3


def test_several_outputs_have_the_smallest_threshold_that_risk_control_allows(generator: torch.Generator):
    scores = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    q = conformal.threshold(scores, 0.1)
    every = scores.flatten().sort().values

    def bound(limit: torch.Tensor | float) -> float:
        return (1 + (scores > limit).double().mean(1).sum().item()) / 41

    assert bound(q) <= 0.1 + 1e-12
    assert bound(every[every < q][-1]) > 0.1
    some = scores.clone()
    some[0, 1:] = torch.nan  # then its one output counts for the whole row
    q = conformal.threshold(some, 0.1)
    share = ((some > q) / (~some.isnan()).sum(1, keepdim=True)).sum()
    assert (1 + share) / 41 <= 0.1 + 1e-12
    assert torch.equal(
        torch.tensor(conformal.threshold(scores[:, :1], 0.1)), torch.tensor(conformal.threshold(scores[:, 0], 0.1))
    )


def test_random_sets_are_smaller_and_repeat_with_the_seed():
    probs, y = probabilities(), labels()
    args = probs[:ROWS], y[:ROWS], np.tile(probs, (20, 1)), 0.1
    plain = conformal.prediction_sets(*args, score="aps").sum()
    random = conformal.prediction_sets(*args, score="aps", seed=1)
    assert random.sum() < plain
    assert torch.equal(random, conformal.prediction_sets(*args, score="aps", seed=1))


def test_scores_follow_classes_that_change_their_places():
    probs, places = torch.from_numpy(probabilities()), torch.tensor([3, 1, 4, 0, 2])
    for scores in (conformal.lac_scores, conformal.aps_scores, conformal.raps_scores):
        assert torch.allclose(scores(probs)[:, places], scores(probs[:, places]), atol=1e-12)


def test_each_class_and_each_group_is_covered(generator: torch.Generator):
    # class 1 is hard: one threshold for all would miss it too often
    y = torch.randint(2, (4000,), generator=generator)
    hard = torch.rand(4000, generator=generator, dtype=torch.float64)
    right = torch.where(y == 1, 0.2 + 0.6 * hard, 0.8 + 0.2 * hard)
    probs = torch.stack([torch.where(y == 0, right, 1 - right), torch.where(y == 1, right, 1 - right)], 1)
    held, new = slice(0, 2000), slice(2000, None)
    by_label = conformal.prediction_sets(probs[held], y[held], probs[new], 0.1, groups="label")
    by_group = conformal.prediction_sets(probs[held], y[held], probs[new], 0.1, groups=y[held], new_groups=y[new])
    one = conformal.prediction_sets(probs[held], y[held], probs[new], 0.1)
    for each in (0, 1):
        rows = y[new] == each
        band = 4 * (0.1 * 0.9 * (1 / 900 + 1 / 900)) ** 0.5  # of about 1,000 held-out and 1,000 new rows
        for sets in (by_label, by_group):
            assert abs(sets[rows, each].double().mean().item() - 0.9) < band
    assert one[y[new] == 1, 1].double().mean() < 0.85


def test_one_output_of_several_has_its_own_place():
    probs = torch.tensor([[0.9, 0.2], [0.4, 0.7], [0.8, 0.6], [0.3, 0.1]])  # P(y=1) of two outputs
    y = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]])
    p = torch.stack([1 - probs, probs], 1)  # (rows, classes, outputs)
    sets = conformal.prediction_sets(p, y, p, alpha=0.5)
    assert sets.shape == (4, 2, 2)
    assert torch.equal(sets[:, 1], (1 - probs) <= conformal.threshold(1 - p.gather(1, y[:, None])[:, 0], 0.5))


def test_too_few_rows_are_refused_with_the_number_that_is_needed():
    with pytest.raises(InvalidData, match="at least 9 held-out rows, got 8"):
        conformal.threshold(np.arange(8.0), 0.1)
    assert conformal.threshold(np.arange(9.0), 0.1) == 8
    with pytest.raises(InvalidData, match="at least 9 held-out rows, got 5 in group 'b'"):
        conformal.group_thresholds(np.arange(20.0), 0.1, ["a"] * 15 + ["b"] * 5)
    with pytest.raises(InvalidData, match="Class 2 has no held-out rows"):
        conformal.prediction_sets(np.full((20, 3), 1 / 3), [0, 1] * 10, np.full((2, 3), 1 / 3), groups="label")


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, math.nan])
def test_alpha_outside_zero_and_one_is_refused(alpha: float):
    with pytest.raises(InvalidArgument, match="alpha"):
        conformal.threshold(np.arange(30.0), alpha)


def test_bad_predictions_are_refused():
    probs, y = np.full((20, 2), 0.5), np.zeros(20)
    with pytest.raises(InvalidData, match="sum to one"):
        conformal.prediction_sets(2 * probs, y, probs)
    with pytest.raises(InvalidData, match="sum to one"):
        conformal.lac_scores(2 * probs)
    with pytest.raises(InvalidData, match="missing or infinite"):
        conformal.lac_scores([[math.nan, 0.5]])
    with pytest.raises(InvalidData, match="must have the outputs and classes"):
        conformal.prediction_sets(probs, y, np.full((2, 3), 1 / 3))
    with pytest.raises(InvalidData, match="std must be positive"):
        conformal.prediction_intervals((y, y), y, (y, y), score="normalised")
    with pytest.raises(InvalidData, match=r"missing or infinite values in row 1"):
        conformal.prediction_intervals(y, [0.0, math.nan] * 10, y)
    with pytest.raises(InvalidArgument, match=r"pair of arrays \(low, high\)"):
        conformal.prediction_intervals(y, y, y, score="cqr")
    with pytest.raises(InvalidArgument, match="Did you mean 'normalised'"):
        conformal.prediction_intervals(y, y, y, score="normalized")
    with pytest.raises(InvalidArgument, match="new_groups"):
        conformal.prediction_intervals(y, y, y, groups=[0] * 20)
    with pytest.raises(InvalidData, match="of group 1, which had no held-out rows"):
        conformal.prediction_intervals(y, y, y, groups=[0] * 20, new_groups=[0] * 19 + [1])
    with pytest.raises(InvalidData, match="uniform"):
        conformal.aps_scores(probs, np.full(20, 1.5))
    with pytest.raises(InvalidData, match="is empty"):
        conformal.threshold([], 0.1)
    with pytest.raises(InvalidData, match="new has missing values"):
        conformal.p_values([1.0], [math.nan])


def test_coverage_over_resplits_is_what_was_promised(seed: int):
    """The beta-binomial law of coverage, and of false alarms, over 200 resplits."""
    n, new, resplits, alpha = 100, 400, 200, 0.1
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n + new, generator=generator, dtype=torch.float64).exp()
    covered, alarms = [], []
    for _ in range(resplits):
        order = torch.randperm(n + new, generator=generator)
        held, rest = scores[order[:n]], scores[order[n:]]
        covered.append((rest <= conformal.threshold(held, alpha)).double().mean())
        alarms.append((conformal.p_values(held, rest) <= alpha).double().mean())
    for found, inside in ((covered, 91), (alarms, 10)):  # of n + 1 places
        mean = inside / (n + 1)
        variance = mean * (1 - mean) * (n + 1 + new) / (new * (n + 2))
        assert abs(torch.stack(found).mean().item() - mean) < 4 * (variance / resplits) ** 0.5
