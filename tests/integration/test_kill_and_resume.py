"""A fit that is killed at random moments and resumed ends like one that was not; no folder is ever left half-written."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.storage import is_folder, read_folder
from tests.integration import killed_runs

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.killed_runs"])


@pytest.fixture(scope="module")
def uninterrupted() -> kn.Posterior:
    return killed_runs.fit()


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


def _kill_and_resume(tmp_path: Path, kills: int, chance: random.Random, expected: kn.Posterior) -> int:
    """Run, kill and run again until the fit is done; how many kills hit a running fit."""
    checkpoint, artifact = tmp_path / "run", tmp_path / "posterior"
    hits = 0
    longest = 0.4  # seconds; longer each time the fit was killed before it got anywhere
    while not is_folder(artifact):
        process = _start(killed_runs.fit_and_save, str(checkpoint), str(artifact))
        try:
            if hits < kills:
                hits += _kill_unless_done(process, chance.uniform(0.0, longest))
                longest *= 1.05
            else:
                process.join(120)
                assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        _assert_whole(checkpoint, "checkpoint")
        _assert_whole(artifact, "posterior")
    _assert_same(kn.load(artifact), expected)
    return hits


def test_a_fit_killed_three_times_ends_bit_for_bit_like_one_that_was_not(tmp_path, uninterrupted, seed):
    assert _kill_and_resume(tmp_path, 3, random.Random(seed), uninterrupted) > 0


@pytest.mark.slow
def test_a_fit_killed_twenty_times_ends_bit_for_bit_like_one_that_was_not(tmp_path, uninterrupted, seed):
    chance, hits = random.Random(seed + 1), 0
    while hits < 20:
        place = tmp_path / str(hits)
        place.mkdir()
        hits += _kill_and_resume(place, 20 - hits, chance, uninterrupted)


@pytest.mark.parametrize("windows", [1, 3])
def test_a_fit_killed_right_after_a_checkpoint_ends_bit_for_bit_like_one_that_was_not(windows, tmp_path, uninterrupted):
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
    _assert_same(kn.load(artifact), uninterrupted)


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
def test_forty_saves_killed_at_random_moments_never_leave_a_torn_folder(tmp_path, seed):
    _kill_while_saving(tmp_path, 40, random.Random(seed + 1))


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
