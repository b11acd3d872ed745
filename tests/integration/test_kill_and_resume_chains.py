"""Chains killed at random moments and resumed are bit for bit those that were not."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.chains import run as chain_run
from knowable.core.storage.folder import is_folder, read_folder
from knowable.inference.sampling import initial_positions
from tests.integration import killed_chains

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.killed_chains", "tests.integration.killed_runs"])


@dataclass(frozen=True)
class Whole:
    """A fit that was not interrupted, and how long it took."""

    posterior: kn.Posterior
    seconds: float


@pytest.fixture(scope="module")
def whole() -> Whole:
    with pytest.MonkeyPatch.context() as patch:  # put back what the fit sets in its own process
        patch.setattr(chain_run, "_BLOCK", chain_run._BLOCK)
        patch.setattr(initial_positions, "_STEPS", initial_positions._STEPS)
        started = time.monotonic()
        return Whole(killed_chains.fit(), time.monotonic() - started)


def _parts(checkpoint: Path) -> list[str]:
    """The parts of a run that have a saved state; reading them shows that they are whole."""
    found = [each.parent for each in checkpoint.rglob("manifest.json")] if checkpoint.is_dir() else []
    for folder in found:
        read_folder(folder, "checkpoint")
    return sorted(folder.name for folder in found)


def _assert_same(found: kn.Posterior, expected: kn.Posterior) -> None:
    for name, value in expected._tensors().items():
        assert torch.equal(found._tensors()[name], value), name
    assert found.diagnostics.terms == expected.diagnostics.terms
    assert found.diagnostics.message == expected.diagnostics.message


def _fit_under_fire(place: Path, kills: int, chance: random.Random, whole: Whole) -> tuple[int, set[str]]:
    """Run, kill and run again until the fit is done; how many kills hit, and which parts they left behind."""
    checkpoint, artifact = place / "run", place / "posterior"
    hits, patience, seen = 0, whole.seconds, set()
    while not is_folder(artifact):
        process = CONTEXT.Process(target=killed_chains.fit_and_save, args=(str(checkpoint), str(artifact)))
        process.start()
        try:
            process.join(chance.uniform(0.0, patience) if hits < kills else 240)
            if process.exitcode is None:
                assert hits < kills, "it takes too long"
                hits += 1
                patience *= 1.1
            else:
                assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        seen |= set(_parts(checkpoint))
    _assert_same(kn.load(artifact), whole.posterior)
    return hits, seen


def _kill_and_resume(tmp_path: Path, kills: int, chance: random.Random, whole: Whole) -> set[str]:
    """Fit after fit, until so many kills have hit one."""
    hits, seen = 0, set()
    for number in itertools.count():
        found = _fit_under_fire(tmp_path / str(number), kills - hits, chance, whole)
        hits, seen = hits + found[0], seen | found[1]
        if hits >= kills:
            return seen
    raise AssertionError


def test_chains_killed_at_random_moments_are_bit_for_bit_those_that_were_not(tmp_path, whole, seed):
    assert _kill_and_resume(tmp_path, 3, random.Random(seed), whole) == {"start", "chains"}


@pytest.mark.slow
def test_chains_killed_ten_times_are_bit_for_bit_those_that_were_not(tmp_path, whole, seed):
    _kill_and_resume(tmp_path, 10, random.Random(seed + 1), whole)


@pytest.mark.parametrize("done", [8, 104])
def test_chains_killed_right_after_a_checkpoint_are_bit_for_bit_those_that_were_not(done, tmp_path, whole):
    # in the warm-up, and after memory made the store let go of some draws
    checkpoint, artifact = tmp_path / "run", tmp_path / "posterior"
    process = CONTEXT.Process(target=killed_chains.fit_and_save, args=(str(checkpoint), str(artifact)))
    process.start()
    try:
        while process.is_alive() and _done(checkpoint / "chains") < done:
            time.sleep(0.001)
    finally:
        process.kill()
        process.join()
    assert _done(checkpoint / "chains") >= done
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_run, "_BLOCK", chain_run._BLOCK)
        patch.setattr(initial_positions, "_STEPS", initial_positions._STEPS)
        _assert_same(killed_chains.fit(str(checkpoint)), whole.posterior)


def _done(folder: Path) -> int:
    return read_folder(folder, "checkpoint")[0]["state"]["done"] if is_folder(folder) else 0
