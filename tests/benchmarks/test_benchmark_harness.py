from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from benchmarks.harness import Case, Outcome, Plan, Spread, measure, one_line, turns


def test_spread_has_numpys_quartiles():
    values = [3.0, 1.0, 10.0, 4.0, 7.5, 2.0]
    spread = Spread.of(values)
    expected = np.quantile(values, [0.5, 0.25, 0.75])
    np.testing.assert_allclose([spread.median, spread.lower, spread.upper], expected)
    assert spread.minimum == 1.0


def test_spread_of_one_value_is_that_value():
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 2.0)


def test_ratio_is_taken_within_each_round():
    # 2, 6 and 1 round by round; the ratio of the medians would be 8 / 5
    ours, reference = Outcome([2.0, 30.0, 8.0]), Outcome([1.0, 5.0, 8.0])
    assert ours.ratio(reference) == Spread(median=2.0, lower=1.5, upper=4.0, minimum=1.0)


def test_ratio_to_a_failed_reference_is_missing():
    assert Outcome([1.0]).ratio(Outcome([1.0], error="ValueError: no")) is None


def test_turns_take_everybody_and_let_everybody_begin():
    names = ["a", "b", "c"]
    rounds = [turns(names, number) for number in range(6)]
    assert all(sorted(order) == names for order in rounds)
    assert {order[0] for order in rounds} == set(names)
    assert rounds[0] == names and rounds[1] == ["a", "c", "b"]


def test_rounds_are_interleaved_with_inner_steps_together():
    calls: list[str] = []
    contenders = {name: lambda name=name: lambda: calls.append(name) for name in "ab"}
    outcomes = measure(contenders, Plan(rounds=3, inner=2, warmup=1))
    assert calls[:2] == ["a", "b"]  # warm-up, untimed
    timed = calls[2:]
    assert [timed[start : start + 4] for start in range(0, 12, 4)] == [list("aabb"), list("aabb"), list("aabb")]
    assert all(len(outcome.milliseconds) == 3 for outcome in outcomes.values())


def test_time_of_a_step_is_in_milliseconds():
    outcomes = measure({"sleep": lambda: lambda: time.sleep(0.005)}, Plan(rounds=2, inner=2, warmup=1))
    assert 5.0 <= min(outcomes["sleep"].milliseconds) < 500.0  # sleeping never ends early; a busy machine may add


def test_contender_that_fails_to_import_is_reported_beside_the_others():
    def absent():
        import no_such_package_anywhere  # type: ignore[import-not-found]

        return no_such_package_anywhere.step

    outcomes = measure({"absent": absent, "works": lambda: lambda: None}, Plan(rounds=2, inner=1, warmup=1))
    assert outcomes["absent"].error == "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    assert outcomes["absent"].time() is None
    assert outcomes["works"].error is None and len(outcomes["works"].milliseconds) == 2


def test_contender_that_fails_halfway_is_reported_and_leaves_the_rounds():
    left = iter([None, None])
    contenders = {"tires": lambda: lambda: next(left), "works": lambda: lambda: None}
    outcomes = measure(contenders, Plan(rounds=4, inner=1, warmup=1))
    assert outcomes["tires"].error == "StopIteration"
    assert outcomes["tires"].time() is None
    assert len(outcomes["works"].milliseconds) == 4


@pytest.mark.parametrize("result", [float("nan"), torch.tensor([1.0, float("inf")])])
def test_value_that_is_not_finite_is_a_failure(result):
    outcomes = measure({"nan": lambda: lambda: result}, Plan(rounds=1, inner=1, warmup=1))
    assert outcomes["nan"].error == "FloatingPointError: the step returned a value that is not finite"


def test_error_is_one_short_line_without_folders():
    error = ImportError("cannot import name 'x' from 'y' (/home/someone/lib/y.py)\nmore")
    assert one_line(error) == "ImportError: cannot import name 'x' from 'y' (y.py)"
    assert len(one_line(ValueError("long " * 1000))) <= 200


def test_plan_needs_at_least_one_of_each():
    with pytest.raises(ValueError, match="inner must be at least 1, got 0"):
        Plan(inner=0)


def test_reference_must_be_a_contender():
    with pytest.raises(ValueError, match="reference must be one of"):
        Case("name", "title", {"a": lambda: lambda: None}, reference="b")
