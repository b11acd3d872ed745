"""Hostile artifacts are refused with a sentence, in bounded time and memory, and no code of theirs is run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.core.artifacts import make_originals
from tests.integration.hostile_artifacts import MAY_BE_GOOD, MEMORY, RAN, SECONDS, make_hostile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    return make_originals(tmp_path_factory.mktemp("originals"))


def _attack(originals: dict[str, Path], place: Path, count: int, seed: int) -> Counter[str]:
    """Make ``count`` hostile artifacts, load them in another process, and judge what became of each."""
    rng, attacks = random.Random(seed), dict[str, str]()
    (place / "good").mkdir()
    for name, path in originals.items():
        shutil.copytree(path, place / "good" / name)
    for number in range(count):
        (place / str(number)).mkdir()
        attack, path = make_hostile(rng, originals, place / str(number))
        attacks[str(path)] = attack
    (place / "paths").write_text("\n".join(attacks))
    command = [sys.executable, "-m", "tests.integration.hostile_artifacts", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stdout[-1000:], done.stderr[-2000:])
    *outcomes, last = lines
    assert len(outcomes) == count
    assert [each for each in outcomes if not _is_fine(attacks[each["path"]], **each)] == []
    assert last["memory"] < MEMORY
    assert not list(ROOT.glob(RAN)) and not list(place.rglob(RAN))
    found = Counter(each["outcome"] for each in outcomes)
    slowest = max(each["seconds"] for each in outcomes)
    memory = last["memory"] / 2**20
    print(f"{dict(found)}; most CPU seconds {slowest:.2f}; memory {memory:.0f} MiB; {Counter(attacks.values())}")
    return found


def _is_fine(attack: str, path: str, outcome: str, said: str, seconds: float) -> bool:
    """Whether an artifact was refused with a sentence, or may be a good one, and did not take long."""
    sentence = 10 < len(said) < 1500 and " " in said
    return seconds < SECONDS and (
        (outcome == "refused" and sentence) or (outcome == "loaded" and attack in MAY_BE_GOOD)
    )


def test_thirty_hostile_artifacts_are_refused(originals, tmp_path, seed):
    assert _attack(originals, tmp_path, 30, seed)["refused"] > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_more_than_a_thousand_hostile_artifacts_are_refused(originals, tmp_path, seed):
    assert _attack(originals, tmp_path, 1500, seed)["refused"] > 1000
