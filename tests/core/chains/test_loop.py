"""Tests of the chain loop: what is kept, when it stops, and that a run can be stopped anywhere and taken up again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import knowable as kn
from knowable.core.chains import run as chain_run
from knowable.core.chains.convergence import convergence_terms
from knowable.core.chains.draw_store import DrawStore
from knowable.core.chains.kernel import Info, state_tensors
from knowable.core.chains.loop import run_chains
from knowable.core.chains.run import ChainRun
from knowable.core.chains.settings import ChainResult, ChainSettings, ChainStorage, Mixing
from knowable.core.compiling.recorder import BatchedGradient
from knowable.core.support.progress import Bar, progress_bar
from knowable.inference.sampling.hmc import HMC
from tests.core.chain_cases import Autoregressive, Counting, normal_target

CHAINS = 3


def everything(positions: Tensor) -> Tensor:
    return positions.clone()


def settings_of(**more) -> ChainSettings:
    """Settings of chains and of their storage in one."""
    storage = {k: more.pop(k) for k in list(more) if k in ChainStorage.__dataclass_fields__}
    return ChainSettings(**{"chains": CHAINS, **more}, storage=ChainStorage(**storage))


def run(kernel, *, warmup: int = 0, start: Tensor | None = None, **more) -> ChainResult:
    """A run of short chains; settings of the sampling and of the loop in one."""
    fields = {*ChainSettings.__dataclass_fields__, *ChainStorage.__dataclass_fields__}
    sampling = settings_of(**{k: v for k, v in more.items() if k in fields})
    first = torch.zeros(sampling.chains, 2, dtype=torch.float64) if start is None else start
    loop = {k: v for k, v in more.items() if k not in fields}
    return run_chains(kernel, normal_target(), first, sampling, warmup=warmup, monitor=everything, **loop)


def quietly(*arguments, **settings) -> tuple[ChainResult, list[type[Warning]]]:
    """A run, and the kinds of warnings it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return run(*arguments, **settings), [each.category for each in caught]


def assert_same_result(found: ChainResult, expected: ChainResult) -> None:
    assert torch.equal(found.draws, expected.draws)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.monitored, expected.monitored)
    assert found.info.keys() == expected.info.keys()
    assert all(torch.equal(found.info[name], expected.info[name]) for name in found.info)
    states = state_tensors(found.state), state_tensors(expected.state)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert found.terms == expected.terms
    assert (found.converged, found.message) == (expected.converged, expected.message)


# --- what is kept ----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    draws=st.integers(1, 60), thin=st.integers(1, 12), warmup=st.integers(0, 40), rows=st.integers(8, 40),
    block=st.integers(1, 30),
)  # fmt: skip
def test_the_last_of_every_thin_transitions_is_kept_as_far_as_memory_goes(draws, thin, warmup, rows, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_run, "_BLOCK", block)
        found = run(Counting(), draws=draws, thin=thin, warmup=warmup, max_memory=rows * CHAINS * 2 * 8)
    stride = 1
    while -(-draws // stride) > rows:
        stride *= 2
    expected = 1000.0 * (warmup + thin * torch.arange(1, draws + 1, stride))
    assert found.draws[0, :, 0].tolist() == expected.tolist()
    assert torch.equal(found.values, found.draws[..., 0]), "values belong to other draws"
    assert torch.equal(found.info["number"], found.draws[..., 0]), "info belongs to other draws"


def test_the_warm_up_is_told_where_it_is():
    kernel = Counting()
    run(kernel, draws=10, warmup=120)
    assert [each.first for each in kernel.warmups] == [0, 50, 100]
    assert {each.total for each in kernel.warmups} == {120}


def test_draws_are_stored_as_asked(tmp_path):
    exact = run(Autoregressive(), draws=70)
    short = run(Autoregressive(), draws=70, dtype="bfloat16")
    in_file = run(Autoregressive(), draws=70, file=tmp_path / "draws")
    assert short.draws.dtype == torch.bfloat16
    assert torch.equal(short.draws, exact.draws.bfloat16())
    assert torch.equal(in_file.draws, exact.draws)
    assert (tmp_path / "draws").stat().st_size == exact.draws.numel() * 8


def test_blocks_are_small_where_draws_are_large(monkeypatch):
    monkeypatch.setattr(chain_run, "_BLOCK_BYTES", 3 * CHAINS * 2 * 8)
    kernel = Counting()
    run(kernel, draws=10, warmup=10)
    assert [each.first for each in kernel.warmups] == [0, 3, 6, 9]


def test_the_size_of_a_block_makes_no_difference(monkeypatch):
    expected = run(HMC(step_size=0.5, steps=2).kernel(2), draws=60, warmup=30)
    monkeypatch.setattr(chain_run, "_BLOCK", 7)
    assert_same_result(run(HMC(step_size=0.5, steps=2).kernel(2), draws=60, warmup=30), expected)


# --- when it stops ---------------------------------------------------------------------------------------------------


def test_chains_that_mix_stop_at_the_first_look():
    found = run(Autoregressive(), chains=4, mixing=Mixing(first=200, most=3000))
    assert found.draws.shape == (4, 200, 2)
    assert found.converged is True
    assert found.message == "mixed after 200 transitions of 4 chains"


def test_chains_that_mix_slowly_go_on_to_twice_as_many_until_it_is_enough():
    # rho = 0.9: 19 draws are worth one, so that 400 effective draws of 4 chains take about 1900 of each
    found = run(Autoregressive(0.9), chains=4, mixing=Mixing(first=100, most=100_000))
    assert found.converged is True
    assert found.draws.shape[1] in (1600, 3200, 6400)
    assert min(found.terms["ess_bulk"], found.terms["ess_tail"]) >= 400


def test_chains_that_do_not_mix_give_up_and_say_so():
    apart = torch.tensor([[-50.0], [50.0], [0.0]]).expand(3, 2).double()
    with pytest.warns(kn.ConvergenceWarning, match="not mixed after 400 transitions of 3 chains: R-hat"):
        found = run(Autoregressive(0.9999), start=apart, mixing=Mixing(first=100, most=400))
    assert found.converged is False
    assert found.draws.shape[1] == 400


@pytest.mark.parametrize(("error", "converged"), [(0.009, None), (0.011, False), (float("nan"), False)])
def test_chains_that_disagree_are_no_failure_where_their_predictions_are_known(error, converged):
    apart = torch.tensor([[-50.0], [50.0], [0.0]]).expand(3, 2).double()
    found, said = quietly(
        Autoregressive(0.9999), start=apart, mixing=Mixing(first=100, most=400),
        prediction_terms=lambda draws: {"prediction_error": error, "between_chains": float(draws.shape[1] == 400)},
    )  # fmt: skip
    assert found.converged is converged and found.terms["between_chains"] == 1.0 and found.terms["rhat"] > 1.5
    assert (kn.ConvergenceWarning in said) is (converged is False)
    assert ("predictions are known to 0.009 nats a row" in found.message) is (converged is None)


def test_looks_are_at_draws_and_not_at_transitions():
    found = run(Autoregressive(), chains=4, thin=3, mixing=Mixing(first=200, most=3000))
    assert found.draws.shape[1] == 200
    assert "600 transitions" in found.message


def test_the_most_may_lie_between_two_looks():
    with pytest.warns(kn.ConvergenceWarning):
        found = run(Autoregressive(0.9999), mixing=Mixing(first=100, most=250))
    assert found.draws.shape[1] == 250


@pytest.mark.parametrize("draws", [1, 2, 3, 4, 20])
def test_a_few_draws_that_were_asked_for_are_given_without_a_word(draws):
    found, said = quietly(Autoregressive(0.9999), draws=draws)
    assert not said
    assert found.converged is None
    assert found.draws.shape[1] == draws


def test_many_draws_that_were_asked_for_are_all_given_whether_mixed_or_not():
    assert run(Autoregressive(), draws=300).draws.shape[1] == 300
    found, said = quietly(Autoregressive(0.9999), draws=300)
    assert said == [kn.ConvergenceWarning]
    assert found.draws.shape[1] == 300 and found.converged is False


def test_terms_are_finite_numbers_even_if_nothing_moves():
    found, _ = quietly(Autoregressive(1.0), draws=150, start=torch.randn(3, 2, dtype=torch.float64))
    assert all(value == value and abs(value) < float("inf") for value in found.terms.values())


def test_the_worst_of_all_quantities_is_reported():
    draws = torch.randn(4, 500, 3, dtype=torch.float64)
    draws[0, :, 1] += 5
    draws[..., 2] = 1.0  # one that never moves is left out
    found = convergence_terms(draws)
    assert found["rhat"] == pytest.approx(convergence_terms(draws[..., 1:2])["rhat"])
    assert found["ess_bulk"] == pytest.approx(convergence_terms(draws[..., 1:2])["ess_bulk"])


@dataclass(frozen=True)
class Diverging(Autoregressive):
    """Some transitions diverge."""

    def advance(self, target, state, n, *, generator, warmup=None):
        state, block = super().advance(target, state, n, generator=generator, warmup=warmup)
        diverging = (block.positions[..., 0] > 2.0).double()
        return state, replace(block, info=Info(diverging=diverging))


def test_divergences_are_counted_and_said():
    with pytest.warns(kn.ConvergenceWarning, match="transitions diverged"):
        found = run(Diverging(), draws=500)
    assert found.terms["divergences"] == (found.draws[..., 0] > 2.0).sum().item() > 0


@dataclass(frozen=True)
class Exploding(Autoregressive):
    """Becomes infinite."""

    def advance(self, target, state, n, *, generator, warmup=None):
        state, block = super().advance(target, state, n, generator=generator, warmup=warmup)
        block.positions[-1, 0, 0] = float("inf")
        return state, block


def test_a_chain_that_leaves_the_finite_numbers_is_an_error():
    with pytest.raises(kn.Diverged, match="became NaN or infinite"):
        run(Exploding(), draws=100)


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 19, 20, 30, 39, 40, 59, 61, 129])
@pytest.mark.parametrize("thin", [1, 3, 30])
def test_an_interrupt_anywhere_leaves_the_draws_so_far_and_a_run_that_goes_on(stop, thin, tmp_path, monkeypatch):
    monkeypatch.setattr(chain_run, "_BLOCK", 20)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    settings = {"draws": 90 // thin, "thin": thin, "warmup": 40}
    whole = run(Counting(), **settings)
    kept = (stop // 20 * 20 - 40) // thin  # of whole blocks
    what = "draws so far" if kept > 3 else "positions"
    with pytest.warns(kn.Interrupted, match=f"stopped from the keyboard .* {what}"):
        partial = run(Counting(stops_at=stop), **settings, checkpoint=checkpoint)
    if kept <= 0:  # no draws yet: where the chains are
        assert partial.draws.shape == (CHAINS, 1, 2)
        assert partial.draws[0, 0, 0] == 1000 * (stop // 20 * 20)
    else:
        assert torch.equal(partial.draws, whole.draws[:, :kept])
    assert partial.interrupted and partial.converged is False
    assert partial.values.shape == partial.draws.shape[:2]
    assert_same_result(run(Counting(), **settings, checkpoint=checkpoint), whole)


def test_an_interrupt_while_room_is_made_leaves_a_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_run, "_BLOCK", 20)
    settings = {"draws": 95, "max_memory": 10 * CHAINS * 2 * 8}
    whole = run(Counting(), **settings)
    make_room = DrawStore._make_room

    def interrupted(store: DrawStore) -> None:
        make_room(store)
        if store.stride == 8:
            raise KeyboardInterrupt

    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    with monkeypatch.context() as patch:
        patch.setattr(DrawStore, "_make_room", interrupted)
        with pytest.warns(kn.Interrupted):
            partial = run(Counting(), **settings, checkpoint=checkpoint)
    assert partial.draws[0, :, 0].diff().tolist() == [8000.0] * (partial.draws.shape[1] - 1)
    assert torch.equal(partial.values, partial.draws[..., 0])
    assert_same_result(run(Counting(), **settings, checkpoint=checkpoint), whole)


def test_a_crash_goes_on_from_the_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_run, "_BLOCK", 20)
    whole = run(Counting(), draws=80, warmup=20)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    for stop in (10, 25, 26, 61, 99):
        with pytest.raises(OSError, match="on purpose"):
            run(Counting(stops_at=stop, error=OSError), draws=80, warmup=20, checkpoint=checkpoint)
    kernel = Counting()
    assert_same_result(run(kernel, draws=80, warmup=20, checkpoint=checkpoint), whole)
    assert not kernel.warmups, "it began again"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def chain_run_of(settings: dict, **sampling) -> ChainRun:
    return ChainRun(HMC(**settings).kernel(2), normal_target(), settings_of(**sampling), 60, everything, Mixing(), 5)


@pytest.mark.parametrize("settings", [{"mass": "dense"}, {"mass": "diagonal", "jitter": False}], ids=str)
@pytest.mark.parametrize(
    "sampling", [{"draws": 60}, {"draws": 20, "thin": 3}, {"draws": 60, "max_memory": 10 * CHAINS * 2 * 8}], ids=str
)
def test_a_run_saved_and_taken_up_at_every_block_ends_with_the_same_bits(settings, sampling, tmp_path, monkeypatch):
    monkeypatch.setattr(chain_run, "_BLOCK", 17)
    start = torch.randn(CHAINS, 2, dtype=torch.float64)
    whole = chain_run_of(settings, **sampling)
    whole.begin(start)
    with progress_bar("", False) as bar:
        while not whole.finished:
            whole.block(bar)
        expected = whole.result(False, 0.0)
        checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
        blocks = 0
        while True:
            passing = chain_run_of(settings, **sampling)  # each block in a run of its own
            if not passing.resume(checkpoint, start):
                passing.begin(start)
            if passing.finished:
                break
            passing.block(bar)
            checkpoint.save(*passing.saved())
            blocks += 1
    assert blocks >= 7
    assert_same_result(passing.result(False, 0.0), expected)


def test_a_checkpoint_changes_nothing_and_a_finished_run_is_not_run_again(tmp_path):
    expected = run(Autoregressive(0.5), draws=90, warmup=10)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    assert_same_result(run(Autoregressive(0.5), draws=90, warmup=10, checkpoint=checkpoint), expected)

    class Unused(Autoregressive):
        def advance(self, *arguments, **more):
            raise AssertionError("it is run again")

    assert_same_result(run(Unused(), draws=90, warmup=10, checkpoint=checkpoint), expected)


def test_a_checkpoint_whose_state_has_other_fields_is_refused(tmp_path):
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    run(Autoregressive(0.5), draws=20, checkpoint=checkpoint)
    with pytest.raises(kn.InvalidArgument, match=r"older version of knowable.*new folder"):
        run(Counting(), draws=20, checkpoint=checkpoint)


@pytest.mark.parametrize("change", [{"seed": 1}, {"identity": {"density": "b"}}])
def test_a_checkpoint_of_another_run_is_refused(change, tmp_path):
    settings = {"draws": 20, "identity": {"density": "a"}, "checkpoint": kn.Checkpoint(tmp_path / "run", seconds=0)}
    run(Autoregressive(), **settings)
    with pytest.raises(kn.InvalidArgument, match="belongs to another fit"):
        run(Autoregressive(), **{**settings, **change})


def test_a_run_whose_draws_are_in_a_file_is_taken_up_where_it_was(tmp_path):
    whole = run(Counting(), draws=90)
    settings = {"draws": 90, "file": tmp_path / "draws", "checkpoint": kn.Checkpoint(tmp_path / "run", seconds=0)}
    with pytest.warns(kn.Interrupted):
        run(Counting(stops_at=70), **settings)
    assert_same_result(run(Counting(), **settings), whole)


# --- randomness ------------------------------------------------------------------------------------------------------


def test_the_seed_fixes_the_chains_and_nothing_global_moves():
    before = torch.get_rng_state()
    first = run(Autoregressive(), draws=20, seed=3)
    torch.manual_seed(123)
    again, other = run(Autoregressive(), draws=20, seed=3), run(Autoregressive(), draws=20, seed=4)
    assert torch.equal(first.draws, again.draws)
    assert not torch.equal(first.draws, other.draws)
    torch.set_rng_state(before)
    run(Autoregressive(), draws=20, seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_of_the_whole_run_are_counted():
    found = run(HMC(step_size=0.1, steps=3, jitter=False).kernel(2), draws=20, warmup=10)
    assert found.terms["gradients"] == CHAINS * (1 + 3 * 30)


def test_the_bar_says_so_once_when_a_block_may_have_to_wait_for_the_compiler(monkeypatch):
    monkeypatch.setattr(BatchedGradient, "compiling", property(lambda self: self.calls > 0))
    said: list[str] = []

    class Recorder(Bar):
        def update(self, done, total, text, terms=None, make=None):
            said.append(text)

    monkeypatch.setattr(chain_run, "_BLOCK", 10)
    under_way = ChainRun(
        Counting(), normal_target(), ChainSettings(chains=CHAINS, draws=30), 10, everything, Mixing(), seed=0
    )
    under_way.begin(torch.zeros(CHAINS, 2, dtype=torch.float64))
    under_way.block(Recorder())
    under_way.target.function.calls = 1
    while not under_way.finished:
        under_way.block(Recorder())
    assert said == ["warm-up", "compiling", "drawing", "drawing", "drawing"]
