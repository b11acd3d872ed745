"""A fit killed at random moments and resumed ends like one that was not; no folder is ever left half-written."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.storage.folder import is_folder, read_folder
from tests.integration import killed_runs

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.killed_runs"])


@dataclass(frozen=True)
class Whole:
    """A fit that was not interrupted, and how long it took."""

    posterior: kn.Posterior
    seconds: float


@pytest.fixture(scope="module")
def whole() -> Whole:
    started = time.monotonic()
    return Whole(killed_runs.fit(), time.monotonic() - started)


def _start(target, *arguments: str) -> ForkServerProcess:
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def _kill_unless_done(process: ForkServerProcess, seconds: float) -> bool:
    """Let it run that long, then kill it; True if it was still running."""
    process.join(seconds)
    if process.exitcode is not None:
        assert process.exitcode == 0
        return False
    process.kill()
    process.join()
    return True


def _wait_for(path: Path, process: ForkServerProcess, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.is_alive(), "the process ended too soon"
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.002)


def _assert_whole(path: Path, kind: str) -> None:
    """Load works, or there is nothing to load."""
    if is_folder(path):
        read_folder(path, kind)


def _assert_same(resumed: kn.Posterior, expected: kn.Posterior) -> None:
    for name, value in expected._tensors().items():
        assert torch.equal(resumed._tensors()[name], value), name
    assert resumed.diagnostics.history == expected.diagnostics.history
    assert resumed.diagnostics.terms == expected.diagnostics.terms
    assert resumed.log_evidence == expected.log_evidence


def _fit_under_fire(place: Path, kills: int, chance: random.Random, whole: Whole) -> int:
    """Run, kill and run again until the fit is done or has been killed often enough; how many kills hit."""
    checkpoint, artifact = place / "run", place / "posterior"
    hits, patience = 0, whole.seconds
    while not is_folder(artifact):
        process = _start(killed_runs.fit_and_save, str(checkpoint), str(artifact))
        try:
            if hits < kills:
                hits += _kill_unless_done(process, chance.uniform(0.0, patience))
                patience *= 1.05
            else:
                process.join(120)
                assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        _assert_whole(checkpoint, "checkpoint")
        _assert_whole(artifact, "posterior")
    _assert_same(kn.load(artifact), whole.posterior)
    return hits


def _kill_and_resume(tmp_path: Path, kills: int, chance: random.Random, whole: Whole) -> None:
    """Fit after fit, until so many kills have hit one."""
    hits = 0
    for number in itertools.count():
        hits += _fit_under_fire(tmp_path / str(number), kills - hits, chance, whole)
        if hits >= kills:
            return


def test_a_fit_killed_at_random_moments_ends_bit_for_bit_like_one_that_was_not(tmp_path, whole, seed):
    _kill_and_resume(tmp_path, 3, random.Random(seed), whole)


@pytest.mark.slow
def test_fits_killed_ten_times_end_bit_for_bit_like_one_that_was_not(tmp_path, whole, seed):
    _kill_and_resume(tmp_path, 10, random.Random(seed + 1), whole)


@pytest.mark.parametrize("windows", [1, 3])
def test_a_fit_killed_right_after_a_checkpoint_ends_bit_for_bit_like_one_that_was_not(windows, tmp_path, whole):
    checkpoint, artifact = tmp_path / "run", tmp_path / "posterior"
    process = _start(killed_runs.fit_and_save, str(checkpoint), str(artifact))
    try:
        _wait_for(checkpoint / "manifest.json", process)
        while process.is_alive() and len(read_folder(checkpoint, "checkpoint")[0]["state"]["history"]) < windows:
            time.sleep(0.001)
        process.kill()
    finally:
        process.kill()
        process.join()
    _assert_whole(checkpoint, "checkpoint")
    killed_runs.fit_and_save(str(checkpoint), str(artifact))
    _assert_same(kn.load(artifact), whole.posterior)


def _interrupt(tmp_path: Path, times: int, chance: random.Random) -> None:
    for number in range(times):
        checkpoint, artifact = tmp_path / f"run {number}", tmp_path / f"posterior {number}"
        process = _start(killed_runs.fit_until_interrupted, str(checkpoint), str(artifact))
        try:
            _wait_for(checkpoint / "manifest.json", process)
            time.sleep(chance.uniform(0.0, 0.05))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            process.join(60)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        posterior = kn.load(artifact)
        state = read_folder(checkpoint, "checkpoint")[0]["state"]
        assert posterior.diagnostics.message == f"stopped from the keyboard at step {state['step']}"
        assert posterior.diagnostics.history == state["history"]


def test_an_interrupt_from_the_keyboard_leaves_a_posterior_and_a_checkpoint(tmp_path, seed):
    _interrupt(tmp_path, 2, random.Random(seed))


@pytest.mark.slow
def test_fifteen_interrupts_from_the_keyboard_leave_a_posterior_and_a_checkpoint_each(tmp_path, seed):
    _interrupt(tmp_path, 15, random.Random(seed + 1))


def _kill_while_saving(tmp_path: Path, kills: int, chance: random.Random) -> None:
    artifact = tmp_path / "posterior"
    before = 0
    for _ in range(kills):
        process = _start(killed_runs.save_without_end, str(artifact))
        try:
            _wait_for(Path(f"{artifact}.ready"), process)
            time.sleep(chance.uniform(0.0, 0.05))
        finally:
            process.kill()
            process.join()
        Path(f"{artifact}.ready").unlink()
        if not is_folder(artifact):
            continue
        posterior = kn.load(artifact)
        assert all((value == posterior.seed).all() for value in posterior.mean().values())
        before += 1
    assert before > 0


def test_a_save_killed_at_random_moments_never_leaves_a_torn_folder(tmp_path, seed):
    _kill_while_saving(tmp_path, 5, random.Random(seed))


@pytest.mark.slow
def test_twenty_saves_killed_at_random_moments_never_leave_a_torn_folder(tmp_path, seed):
    _kill_while_saving(tmp_path, 20, random.Random(seed + 1))


def test_a_reader_beside_a_saving_process_always_finds_a_whole_posterior(tmp_path):
    artifact = tmp_path / "posterior"
    process = _start(killed_runs.save_without_end, str(artifact))
    try:
        _wait_for(artifact / "manifest.json", process)
        end, seen = time.monotonic() + 1.0, set()
        while time.monotonic() < end:
            posterior = kn.load(artifact)
            assert all((value == posterior.seed).all() for value in posterior.mean().values())
            seen.add(posterior.seed)
    finally:
        process.kill()
        process.join()
    assert len(seen) > 1
