"""Kills processes that save: ``python -m tests.integration.killed_saves FOLDER KILLS SEED``.

Each save has other numbers, all equal to the count of saves, so that a mixture of two saves would show. The processes
are forks of this one, which saves the time to start them.
"""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import knowable as kn
from knowable.core.posterior.particles import Particles
from knowable.core.storage.folder import Checkpoint

KINDS = {"folder": "saved", "file": "saved.knowable", "checkpoint": "state"}
NUMBERS = 30_000  # of an artifact, so that writing it takes a while


def posterior(count: int) -> Particles:
    """Atoms that all equal ``count``, as does the seed."""
    net = torch.nn.Sequential(torch.nn.Linear(NUMBERS // 4, 4, bias=False))
    model = kn.Model(net, kn.Gaussian(noise=1.0))
    return Particles(model, {"0.weight": torch.full((1, 4, NUMBERS // 4), float(count))}, seed=count)


def save(kind: str, path: Path, made: Any, count: int) -> None:
    """Save in one of the ways there are."""
    if kind == "checkpoint":
        checkpoint = Checkpoint(path, seconds=0)
        checkpoint.begin({"fit": "this one"})
        checkpoint.save({"count": count}, {"value": torch.full((NUMBERS,), float(count))})
    else:
        made.seed = count
        made.stack = {name: torch.full_like(value, float(count)) for name, value in made.stack.items()}
        made.save(path, overwrite=True)


def saved(kind: str, path: Path) -> int:
    """The count of what is there; an assertion fails if it is of two minds."""
    if kind == "checkpoint":
        checkpoint = Checkpoint(path)
        checkpoint.begin({"fit": "this one"})
        found = checkpoint.load()
        assert found is not None
        count, value = found[0]["count"], found[1]["value"]
    else:
        loaded = kn.load(path)
        count, value = loaded.seed, loaded.stack["0.weight"]
    assert bool((value == count).all())
    return count


def save_for_ever(kind: str, path: Path, first: int, told: int) -> NoReturn:
    """Save again and again; each count is written to the pipe ``told`` once it is saved."""
    made = posterior(0)
    for count in itertools.count(first):
        save(kind, path, made, count)
        os.write(told, count.to_bytes(8, "little"))
    raise AssertionError


def kill_one(kind: str, path: Path, first: int, seconds: float) -> tuple[int, int]:
    """Begin to save, kill that after ``seconds``: the last count of which it was said that it is saved, and what is."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(kind, path, first, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read(8)  # the first save is done
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        said += pipe.read()
    os.waitpid(child, 0)
    return int.from_bytes(said[-8:], "little"), saved(kind, path)


def main(folder: Path, kills: int, seed: str) -> None:
    """Kill at random moments, and judge each."""
    for kind, name in KINDS.items():
        rng, between, last = random.Random(f"{seed} {kind}"), 0, -1
        for _ in range(kills):
            told, last = kill_one(kind, folder / name, last + 1, rng.uniform(0.0, 0.1))
            assert last in (told, told + 1), (told, last)  # the last one that was said, or the one after it
            between += last == told + 1
        save(kind, folder / name, posterior(0), 10**6)  # and what they left behind is cleared away
        assert saved(kind, folder / name) == 10**6
        print(f"{kind}: {kills} kills, {between} of them when the new one was in place and that was not yet said")


def without_room(folder: Path) -> None:
    """Save over a good one where no file may be longer than 50,000 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for kind, name in KINDS.items():
        save(kind, folder / name, posterior(0), 7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    for kind, name in KINDS.items():
        before = sorted(folder.rglob("*"))
        with pytest.raises(kn.CannotSave, match="is unchanged"):
            save(kind, folder / name, posterior(0), 8)
        assert saved(kind, folder / name) == 7
        assert sorted(folder.rglob("*")) == before  # nothing half-written stays to fill the disk


if __name__ == "__main__":
    if sys.argv[1] == "--without-room":
        without_room(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
