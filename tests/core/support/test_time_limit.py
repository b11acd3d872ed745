"""Tests of limits of time: how they nest, how steps are planned by them, and that both loops keep them."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains.kernel import Block, State
from knowable.core.chains.loop import run_chains
from knowable.core.chains.settings import ChainResult, ChainSettings
from knowable.core.method import Method
from knowable.core.model.data import as_data
from knowable.core.support.time_limit import Deadline, share_of_time, time_left, time_limit
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.schedule import Schedule, Settling
from knowable.core.training.settings import TrainingResult, TrainingSettings
from tests.core.cases import linear_data, linear_model, mlp
from tests.core.chain_cases import Counting, normal_target
from tests.core.clock import Clock, clock
from tests.core.training_cases import settings_of

__all__ = ["clock"]  # a fixture

# --- limits ----------------------------------------------------------------------------------------------------------


def test_without_a_limit_there_is_no_end():
    assert time_left() is None
    assert Deadline.within_limit() is None
    with time_limit(None), share_of_time(0.5):
        assert time_left() is None


def test_a_limit_ends_with_its_block(clock: Clock):
    with time_limit(10):
        clock.passes(4)
        assert time_left() == 6
        clock.passes(10)
        assert time_left() == 0
    assert time_left() is None


def test_a_limit_also_ends_where_its_block_fails(clock: Clock):
    with pytest.raises(RuntimeError), time_limit(10):
        raise RuntimeError
    assert time_left() is None


def test_a_limit_within_a_limit_cannot_be_longer(clock: Clock):
    with time_limit(10):
        with time_limit(100):
            assert time_left() == 10
        with time_limit(3):
            assert time_left() == 3
        with share_of_time(0.25):
            assert time_left() == 2.5
        assert time_left() == 10


def test_parts_that_share_what_is_left_use_all_of_it_in_equal_parts(clock: Clock):
    with time_limit(12):
        for k in range(4):
            with share_of_time(1 / (4 - k)):
                assert time_left() == pytest.approx(3)
                clock.passes(3)
        assert time_left() == pytest.approx(0)


def test_there_is_a_share_of_a_time_that_is_up(clock: Clock):
    with time_limit(1):
        clock.passes(2)
        with share_of_time(0.5):
            assert time_left() == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(seconds: float):
    with pytest.raises(kn.InvalidArgument, match="seconds must be"), time_limit(seconds):
        pass


# --- the pace --------------------------------------------------------------------------------------------------------


def test_the_pace_is_judged_by_all_steps_but_the_first(clock: Clock):
    with time_limit(100):
        deadline = Deadline.within_limit()
    assert deadline is not None
    clock.passes(20)  # a first step that had to prepare
    assert deadline.total_steps(1) is None
    clock.passes(2)
    assert deadline.total_steps(2) == 2 + 39  # 78 seconds left, two for each step


def test_the_pace_is_judged_anew_after_a_fiftieth_of_the_time_that_is_left(clock: Clock):
    with time_limit(100):
        deadline = Deadline.within_limit()
    assert deadline is not None
    looks = []
    for step in range(1, 100):
        clock.passes(1)
        if deadline.total_steps(step) is not None:
            looks.append(step)
    assert looks[:3] == [3, 5, 7]  # every 1.98 seconds at first
    assert looks[-3:] == [97, 98, 99]  # every step in the end


def test_a_first_step_that_takes_all_the_time_is_the_last(clock: Clock):
    with time_limit(10):
        deadline = Deadline.within_limit()
    assert deadline is not None
    clock.passes(11)
    assert deadline.total_steps(1) == 1


# --- the schedule ----------------------------------------------------------------------------------------------------


def test_the_rate_falls_in_the_last_third_where_there_is_no_time_to_settle():
    schedule = Schedule(None, Settling(0.0))
    for step in range(0, 900, 10):
        schedule.limit(step, 900)
    assert schedule.fall_from == 600
    assert schedule.total_steps == 900
    assert schedule.factor(599) == 1.0
    assert schedule.factor(750) == pytest.approx(0.5)
    assert schedule.factor(899) < 0.01
    assert schedule.timed and schedule.converged is False


def test_with_much_time_the_fall_is_as_long_as_without_a_limit():
    schedule = Schedule(None, Settling(0.0))
    for step in range(0, 12_000, 100):
        schedule.limit(step, 12_000)
    assert schedule.fall_from == 8_000  # half of it again is 4,000


def test_a_loss_that_settles_in_time_is_not_cut_short():
    schedule = Schedule(None, Settling(1.0))
    for step in range(100, 1_100, 100):
        schedule.limit(step, 10_000)
        schedule.record(step, 1.0)
    assert (schedule.fall_from, schedule.total_steps) == (1_000, 3_000)
    assert not schedule.timed and schedule.converged


def test_fixed_steps_become_fewer_and_fall_in_their_second_half():
    schedule = Schedule(10_000, Settling(0.0))
    schedule.limit(10, 400)
    assert (schedule.fall_from, schedule.total_steps) == (200, 400)
    schedule.limit(100, 600)  # it turned out quicker: the fall begins no later, and lasts longer
    assert (schedule.fall_from, schedule.total_steps) == (200, 600)
    assert schedule.timed


def test_fixed_steps_that_there_is_time_for_stay():
    schedule = Schedule(1_000, Settling(0.0))
    schedule.limit(10, 50_000)
    assert (schedule.fall_from, schedule.total_steps, schedule.timed) == (500, 1_000, False)


def test_cycles_keep_their_length_once_they_have_begun():
    schedule = Schedule(10_000, Settling(0.0), cycles=4)
    schedule.limit(10, 400)
    schedule.limit(50, 900)
    ends = [step for step in range(1, 401) if schedule.ends_cycle(step)]
    assert ends == [100, 200, 300, 400]
    schedule.limit(250, 250)  # time is up
    assert schedule.total_steps == 250


def test_a_constant_rate_ends_with_the_time():
    schedule = Schedule(None, Settling(0.0), shape="constant")
    schedule.limit(10, 70)
    assert schedule.total_steps == 70 and schedule.factor(69) == 1.0
    assert schedule.converged is False


# --- the training loop -----------------------------------------------------------------------------------------------


class Slow(Objective):
    """(θ - y)² / 2, with some seconds of a clock for every step, and more for the first."""

    def __init__(self, clock: Clock, seconds: float, first: float = 0.0):
        super().__init__(linear_model(), 10)
        self.theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.clock, self.seconds, self.first = clock, seconds, first

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.clock.passes(self.seconds + self.first)
        self.first = 0.0
        return 0.5 * (self.theta - y).square().mean(), {}

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(len(x))


def trained(
    objective: Objective, training: TrainingSettings | None = None
) -> tuple[TrainingResult, list[type[Warning]]]:
    data = as_data((torch.zeros(10, 2, dtype=torch.float64), torch.ones(10, dtype=torch.float64)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return train(objective, data, training or settings_of()), [each.category for each in caught]


@pytest.mark.parametrize("training", [settings_of(), settings_of(epochs=100_000)], ids=["free", "fixed"])
@pytest.mark.parametrize("first", [0.0, 6.0])
def test_training_keeps_a_limit_and_lets_its_rate_fall(clock: Clock, training: TrainingSettings, first: float):
    began = clock.now
    with time_limit(60):
        result, _ = trained(Slow(clock, 0.1, first), training)
    assert 55 <= clock.now - began <= 60.2  # one step more at the most, and a fiftieth of the time less
    assert result.history[-1]["learning_rate"] < 0.01 * result.history[0]["learning_rate"]
    assert "time limit" in result.message and result.out_of_time


def test_training_that_was_cut_short_warns(clock: Clock):
    with time_limit(30):
        result, kinds = trained(Slow(clock, 0.1))
    assert result.converged is False
    assert kinds == [kn.ConvergenceWarning]


def test_a_step_that_takes_longer_than_the_limit_is_the_only_one(clock: Clock):
    with time_limit(10):
        result, _ = trained(Slow(clock, 50.0))
    assert result.steps == 1


def test_a_limit_that_is_far_away_changes_nothing(clock: Clock):
    free, limited = Slow(clock, 0.0), Slow(clock, 0.001)
    expected, _ = trained(free)
    with time_limit(1e6):
        found, kinds = trained(limited)
    assert torch.equal(free.theta, limited.theta)
    assert (found.message, found.converged, kinds) == (expected.message, expected.converged, [])


# --- the chain loop --------------------------------------------------------------------------------------------------


class SlowChains(Counting):
    """Chains that take some seconds of a clock for a transition."""

    def __init__(self, clock: Clock, seconds: float):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def advance(self, target, state: State, n: int, *, generator, warmup=None) -> tuple[State, Block]:
        self.clock.passes(n * self.seconds)
        return super().advance(target, state, n, generator=generator, warmup=warmup)


def chains(kernel: Counting, **settings) -> ChainResult:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        return run_chains(
            kernel, normal_target(), torch.zeros(3, 2, dtype=torch.float64), ChainSettings(chains=3, **settings),
            warmup=500, monitor=lambda positions: positions.clone(),
        )  # fmt: skip


@pytest.mark.parametrize("draws", [None, 1000])
def test_chains_keep_a_limit_and_half_of_it_for_draws(clock: Clock, draws: int | None):
    began = clock.now
    kernel = SlowChains(clock, 1.0)
    with time_limit(100):
        found = chains(kernel, draws=draws)
    assert clock.now - began <= 105  # a block takes a twentieth of what is left
    assert 45 <= found.draws.shape[1] <= 60
    assert "time was up" in found.message and found.out_of_time
    assert kernel.warmups[-1].total <= 55


def test_chains_that_have_no_time_for_draws_warn(clock: Clock):
    with time_limit(10), pytest.warns(kn.ConvergenceWarning, match="too few draws to tell"):
        found = run_chains(
            SlowChains(clock, 20.0), normal_target(), torch.zeros(3, 2, dtype=torch.float64), ChainSettings(chains=3),
            warmup=500, monitor=lambda positions: positions.clone(),
        )  # fmt: skip
    assert found.converged is None and found.out_of_time


def test_a_single_slow_block_does_not_end_the_warm_up(clock: Clock):
    """The compiler may take some seconds, once."""

    class Compiling(SlowChains):
        def advance(self, target, state: State, n: int, *, generator, warmup=None) -> tuple[State, Block]:
            self.clock.passes(10.0 if state.count == 5 else 0.0)
            return super().advance(target, state, n, generator=generator, warmup=warmup)

    kernel = Compiling(clock, 0.01)
    with time_limit(60):
        chains(kernel, draws=10)
    assert kernel.warmups[-1].total == 500


def test_chains_that_have_time_enough_run_as_without_a_limit(clock: Clock):
    expected = chains(Counting(), draws=60)
    with time_limit(1e6):
        found = chains(SlowChains(clock, 0.01), draws=60)
    assert torch.equal(found.draws, expected.draws)
    assert found.message == expected.message and not found.out_of_time


def test_chains_without_time_for_a_single_draw_say_where_they_are(clock: Clock):
    with time_limit(1):
        found = chains(SlowChains(clock, 50.0), draws=10)
    assert found.draws.shape[1] == 1


class LongTrajectories(Counting):
    """Chains whose transitions take one gradient, of a second of a clock, and from some number on a thousand."""

    def __init__(self, clock: Clock, long_from: int):
        super().__init__()
        self.clock, self.long_from = clock, long_from

    def advance(self, target, state: State, n: int, *, generator, warmup=None) -> tuple[State, Block]:
        for number in range(state.count, state.count + n):
            for _ in range(1000 if number >= self.long_from else 1):
                self.clock.passes(1.0)
                target.count(3, 1)
        return super().advance(target, state, n, generator=generator, warmup=warmup)


@pytest.mark.parametrize("long_from", [70, 100, 130])
def test_a_trajectory_that_goes_beyond_the_limit_is_given_up(clock: Clock, long_from: int):
    began = clock.now
    with time_limit(200):
        found = chains(LongTrajectories(clock, long_from), draws=1000)
    assert clock.now - began <= 201  # one gradient
    assert found.out_of_time
    transitions = found.draws[0, -1, 0].item() / 1000
    assert long_from - 6 < transitions <= long_from and transitions == int(transitions)  # those of the last whole block


class Slowing(Counting):
    """Chains whose transitions take a hundredth of a second of a clock, and from some number on a second."""

    def __init__(self, clock: Clock, slow_from: int):
        super().__init__()
        self.clock, self.slow_from, self.made = clock, slow_from, 0

    def advance(self, target, state: State, n: int, *, generator, warmup=None) -> tuple[State, Block]:
        for i in target.in_time(n):
            self.clock.passes(1.0 if state.count + i >= self.slow_from else 0.01)
        self.made = state.count + i + 1
        return super().advance(target, state, i + 1, generator=generator, warmup=warmup)


def test_a_block_that_becomes_slow_ends_with_what_it_has_when_its_time_is_over(clock: Clock):
    began, kernel = clock.now, Slowing(clock, slow_from=600)  # among the draws
    with time_limit(100):
        found = chains(kernel, draws=1000)
    assert clock.now - began <= 101.1  # a transition
    assert found.draws[0, -1, 0] == 1000 * kernel.made  # none is lost
    assert 190 <= found.draws.shape[1] <= 200


def test_without_a_limit_there_is_time_for_all_transitions():
    assert list(normal_target().in_time(4)) == [0, 1, 2, 3]


def test_the_first_block_says_nothing_of_the_pace(clock: Clock):
    clock.passes(10.0)
    span = Deadline(clock.now, clock.now + 100.0)
    clock.passes(20.0)
    assert span.steps_left(1, until=0.5) is None  # 20 s for one, of 50: it may have had to record or to compile
    clock.passes(2.0)
    assert span.steps_left(5, until=0.5) == 56  # half a second each, 28 s left
    clock.passes(30.0)
    assert span.steps_left(10, until=0.5) == 0


def test_a_first_block_that_takes_all_of_the_warm_up_ends_it(clock: Clock):
    span = Deadline(clock.now, clock.now + 100.0)
    clock.passes(50.0)
    assert span.steps_left(1, until=0.5) == 0


def test_a_warm_up_that_is_given_up_leaves_half_of_the_time_for_draws(clock: Clock):
    class Settles(LongTrajectories):
        def advance(self, target, state: State, n: int, *, generator, warmup=None) -> tuple[State, Block]:
            self.long_from = 30 if warmup is not None else 10**9
            return super().advance(target, state, n, generator=generator, warmup=warmup)

    began = clock.now
    with time_limit(200):
        found = chains(Settles(clock, 30), draws=1000)
    assert clock.now - began <= 201
    assert found.draws.shape[1] >= 90


# --- whole fits, on the clock of the machine -------------------------------------------------------------------------

METHODS = [
    kn.DeepEnsemble(members=3),
    kn.DeepEnsemble(members=3, vectorise=False),
    kn.MeanFieldVI(start="map"),
    kn.Laplace(structure="full"),
    kn.SWAG(),
    kn.SnapshotEnsemble(cycles=3),
    kn.EnsembleOf(kn.MAP(), members=2),
    kn.MCDropout(0.1),
    kn.NUTS(chains=4),
    kn.MCLMC(chains=4),
    kn.SGLD(chains=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_fit_keeps_its_limit_within_a_fifth(method: Method, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "monotonic", time.process_time)  # what runs beside the test does not count
    x, y = linear_data(400, generator=torch.Generator().manual_seed(0))
    model = kn.Model(mlp(width=40).double(), kn.Gaussian())
    seconds, began = 6.0, time.process_time()
    with warnings.catch_warnings(), time_limit(seconds):
        warnings.simplefilter("ignore", kn.KnowableWarning)
        posterior = method.fit(model, (x, y))
    assert time.process_time() - began <= 1.2 * seconds
    assert torch.isfinite(posterior.predict(x).mean).all()
