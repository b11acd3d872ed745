"""Time is shared out evenly, what is left over goes on, and what does not heed its share is not begun again."""

from __future__ import annotations

import math

from knowable.comparison.budget import Budget


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(budget: Budget, clock: Clock, method: str, fit: float, beside: float = 0.0) -> None:
    began = budget.left
    clock.now += fit + beside
    budget.count(method, began=began, fit=fit)


def test_without_a_limit_everything_is_allowed():
    budget = Budget(None, 3)
    assert budget.left == math.inf and budget.for_fit("a") is None and budget.allows("a")
    budget.count("a", began=budget.left, fit=1.0)
    assert budget.for_fit("a") is None and budget.allows("a")


def test_every_fit_gets_an_equal_share_and_the_rest_goes_on():
    clock = Clock()
    budget = Budget(45.0, 4, clock=clock)
    assert budget.for_fit("quick") == 10.0  # and half a share in reserve
    work(budget, clock, "quick", 3.0)
    assert budget.for_fit("other") == 12.0  # 42 seconds for three and a half
    budget.skip()
    assert budget.for_fit("other") == 42.0 / 2.5
    budget.skip()
    assert 0.9 * 42.0 < (budget.for_fit("other") or 0.0) < 42.0  # the last has nearly all that is left


def test_predicting_and_scoring_come_out_of_the_share():
    clock = Clock()
    budget = Budget(55.0, 5, clock=clock)
    work(budget, clock, "a", 6.0, beside=4.0)
    work(budget, clock, "b", 8.0, beside=2.0)
    assert budget.for_fit("a") == 10.0 - 4.0
    assert budget.for_fit("b") == 10.0 - 2.0
    assert budget.for_fit("new") == 10.0 - 3.0


def test_a_fit_that_takes_a_little_longer_does_not_cost_the_last_its_place():
    clock = Clock()
    budget = Budget(100.0, 5, clock=clock)
    for _ in range(4):
        work(budget, clock, "a", 1.15 * (budget.for_fit("a") or 0.0))
    assert budget.allows("b") and (budget.for_fit("b") or 0.0) > 10.0


def test_fits_that_use_all_they_are_given_end_in_time():
    clock = Clock()
    budget = Budget(60.0, 30, clock=clock)
    for number in range(30):
        assert budget.allows("a")
        share = budget.for_fit("a")
        assert share is not None
        work(budget, clock, "a", share, beside=0.3 + 0.2 * (number % 2))
    assert clock.now - 100.0 <= 60.0


def test_nothing_is_begun_when_the_time_is_up():
    clock = Clock()
    budget = Budget(10.0, 2, clock=clock)
    work(budget, clock, "slow", 11.0)
    assert budget.left == 0.0 and not budget.allows("other")


def test_a_method_that_does_not_heed_its_share_is_not_begun_without_the_time_it_needs():
    clock = Clock()
    budget = Budget(30.0, 6, clock=clock)  # shares of 5
    work(budget, clock, "stubborn", 20.0)
    assert not budget.allows("stubborn")  # it would take 20 of the 10 that are left
    assert budget.allows("other")


def test_time_spent_before_a_kill_counts():
    clock = Clock()
    assert Budget(45.0, 3, spent=10.0, clock=clock).for_fit("a") == 10.0
    assert not Budget(40.0, 3, spent=50.0, clock=clock).allows("a")
