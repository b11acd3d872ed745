"""Tests of when training stops and how fast it steps."""

from __future__ import annotations

import math

import pytest

from knowable.core.training import schedule as module
from knowable.core.training.schedule import WINDOW, Schedule, Settling


def _settling(losses: list[float], tolerance: float = 1e-4) -> Settling:
    settling = Settling(tolerance)
    for loss in losses:
        settling.add(loss)
    return settling


def test_it_takes_ten_records_to_settle():
    assert not _settling([1.0] * 9).settled
    assert _settling([1.0] * 10).settled


def test_a_loss_that_falls_by_more_than_the_tolerance_has_not_settled():
    assert not _settling([10.0 - k for k in range(10)]).settled
    assert _settling([10.0 - 1e-6 * k for k in range(10)]).settled


def test_a_gain_below_one_standard_error_of_the_difference_is_noise():
    # both blocks vary by 1 around their mean: variance 1.2, error sqrt(2 x 1.2 / 5) = 0.69
    noise = [1.0, -1.0, 1.0, -1.0, 0.0]
    assert not _settling([5.0 + n for n in noise] + [4.2 + n for n in noise]).settled
    assert _settling([5.0 + n for n in noise] + [4.4 + n for n in noise]).settled


def test_a_rising_loss_has_settled():
    assert _settling([1.0] * 5 + [2.0] * 5).settled


def test_only_the_last_ten_records_count():
    settling = _settling([100.0, 50.0, 20.0] + [1.0] * 10)
    assert settling.settled
    assert len(settling.losses) == 10


def test_with_a_fixed_number_of_steps_the_rate_is_constant_and_then_falls_along_a_cosine():
    schedule = Schedule(1_000, Settling(0.0))
    assert schedule.total_steps == 1_000
    assert [schedule.factor(step) for step in (0, 250, 499)] == [1.0, 1.0, 1.0]
    for step in (500, 600, 750, 900):
        expected = 0.5 * (1 + math.cos(math.pi * (step - 500) / 500))
        assert schedule.factor(step) == pytest.approx(max(expected, 1e-3))
    factors = [schedule.factor(step) for step in range(500, 1_000)]
    assert factors == sorted(factors, reverse=True)
    assert min(factors) >= 1e-3


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs_step_at_all(steps):
    schedule = Schedule(steps, Settling(0.0))
    assert all(schedule.factor(step) > 0 for step in range(steps))


def test_without_one_the_rate_falls_only_once_the_loss_has_settled():
    schedule = Schedule(None, Settling(1e-4))
    for k in range(9):
        schedule.record(WINDOW * (k + 1), 1.0)
        assert schedule.fall_from is None
    schedule.record(WINDOW * 10, 1.0)
    assert schedule.fall_from == WINDOW * 10
    assert schedule.factor(WINDOW * 10) == 1.0
    assert schedule.total_steps > WINDOW * 10
    assert schedule.factor(schedule.total_steps - 1) < 0.01
    assert schedule.converged is True


def test_the_fall_lasts_half_as_long_as_what_came_before_and_not_less_than_its_least():
    short, long = Schedule(None, Settling(0.0), fall_from=1_000), Schedule(None, Settling(0.0), fall_from=10_000)
    assert short.total_steps == 1_000 + module._SHORTEST_FALL
    assert long.total_steps == 15_000


def test_a_loss_that_never_settles_ends_at_the_longest_run_and_is_not_called_converged():
    schedule = Schedule(None, Settling(1e-4))
    for step in range(WINDOW, module._LONGEST + 1, WINDOW):
        schedule.record(step, -float(step))
    assert schedule.forced
    assert schedule.fall_from == module._LONGEST
    assert schedule.converged is False


def test_a_fixed_run_says_whether_it_settled_or_that_it_was_too_short_to_tell():
    short, flat, falling = (Schedule(2_000, Settling(1e-4)) for _ in range(3))
    short.record(100, 1.0)
    for k in range(10):
        flat.record(100 * (k + 1), 1.0)
        falling.record(100 * (k + 1), -float(k))
    assert (short.converged, flat.converged, falling.converged) == (None, True, False)
    assert flat.total_steps == 2_000


def test_halving_scales_every_factor():
    schedule = Schedule(1_000, Settling(0.0))
    before = [schedule.factor(step) for step in (0, 700)]
    schedule.scale = 0.25
    assert [schedule.factor(step) for step in (0, 700)] == [0.25 * factor for factor in before]


def test_a_restored_schedule_goes_on_as_the_saved_one():
    saved = Schedule(None, Settling(1e-4), scale=0.5)
    for k in range(12):
        saved.record(100 * (k + 1), 1.0 / (k + 1))
    restored = Schedule(None, Settling(1e-4))
    restored.restore(saved.state())
    for k in range(12, 40):
        for each in (saved, restored):
            each.record(100 * (k + 1), 0.01)
    assert restored.state() == saved.state()
    assert [restored.factor(step) for step in range(0, 6_000, 500)] == [saved.factor(s) for s in range(0, 6_000, 500)]


# --- cycles, and a rate that stays -----------------------------------------------------------------------------------


def test_in_cycles_the_rate_follows_the_formula_of_snapshot_ensembles():
    schedule = Schedule(1_000, Settling(0.0), cycles=4)
    for step in range(1_000):
        expected = 0.5 * (1 + math.cos(math.pi * (step % 250) / 250))
        assert schedule.factor(step) == pytest.approx(max(expected, 1e-3))
    assert [step for step in range(1, 1_001) if schedule.ends_cycle(step)] == [250, 500, 750, 1_000]
    assert schedule.converged is None


@pytest.mark.parametrize(("steps", "cycles"), [(10, 3), (7, 7), (11, 4), (2, 2)])
def test_cycles_that_do_not_divide_the_steps_are_as_even_as_can_be(steps, cycles):
    schedule = Schedule(steps, Settling(0.0), cycles=cycles)
    ends = [step for step in range(1, steps + 1) if schedule.ends_cycle(step)]
    assert len(ends) == cycles and ends[-1] == steps
    lengths = [last - first for first, last in zip([0, *ends], ends, strict=False)]
    assert max(lengths) - min(lengths) <= 1
    assert all(schedule.factor(end) == 1.0 for end in ends[:-1])  # each begins at the full rate


def test_without_a_number_of_steps_the_first_cycle_waits_until_settled_and_the_others_are_as_long_as_its_fall():
    schedule = Schedule(None, Settling(0.0), fall_from=10_000, cycles=3)
    assert schedule.total_steps == 10_000 + 3 * 5_000
    assert schedule.factor(9_999) == schedule.factor(10_000) == schedule.factor(15_000) == 1.0
    assert schedule.factor(12_500) == pytest.approx(0.5)
    ends = [step for step in range(9_000, 25_001) if schedule.ends_cycle(step)]
    assert ends == [15_000, 20_000, 25_000]


def test_one_fall_ends_one_cycle_where_the_run_ends():
    fixed, settled = Schedule(1_000, Settling(0.0)), Schedule(None, Settling(0.0), fall_from=1_000)
    for schedule in (fixed, settled):
        total = schedule.total_steps
        assert [step for step in range(1, total + 1) if schedule.ends_cycle(step)] == [total]
    assert not Schedule(None, Settling(0.0)).ends_cycle(500)


def test_a_constant_rate_stays_and_ends_no_cycle():
    schedule = Schedule(1_000, Settling(0.0), shape="constant", scale=0.5)
    assert {schedule.factor(step) for step in range(1_000)} == {0.5}
    assert schedule.total_steps == 1_000
    assert not any(schedule.ends_cycle(step) for step in range(1_001))


def test_a_constant_rate_without_a_number_of_steps_ends_once_settled():
    schedule = Schedule(None, Settling(1e-4), shape="constant")
    for k in range(10):
        assert schedule.total_steps > 1_000
        schedule.record(WINDOW * (k + 1), 1.0)
    assert schedule.total_steps == 1_000
    assert schedule.converged is True
