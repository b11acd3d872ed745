"""A comparison killed at random moments and resumed ends with the scores of one that was not."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

import knowable as kn
from tests.integration import killed_comparisons

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.integration.killed_comparisons"])
TIMED = ("seconds", "predict_seconds", "memory_mb")


@pytest.fixture(scope="module")
def whole() -> tuple[kn.Comparison, float]:
    """A comparison that was not disturbed, and how long it took."""
    started = time.monotonic()
    return killed_comparisons.compare(), time.monotonic() - started


def _start(out: Path, table: Path) -> ForkServerProcess:
    process = CONTEXT.Process(target=killed_comparisons.compare_and_export, args=(str(out), str(table)))
    process.start()
    return process


def _finished(out: Path) -> list[str]:
    """Whole lines of the file, but for the first."""
    return out.read_text().split("\n")[1:-1] if out.exists() else []


def _untimed(comparison: kn.Comparison) -> list[tuple[object, ...]]:
    return [
        (
            record.method,
            record.fold,
            {name: value for name, value in record.scores.items() if name not in TIMED},
            record.agreement,
            record.message,
        )
        for record in comparison.records
    ]


def _run_under_fire(out: Path, table: Path, kills: int, chance: random.Random, seconds: float) -> int:
    """Run, kill and run again until it is done or has been killed often enough; how many kills hit."""
    hits = 0
    while not table.exists():
        before = _finished(out)
        process = _start(out, table)
        try:
            process.join(chance.uniform(0.0, seconds) if hits < kills else 120)
            if process.exitcode is None:
                process.kill()
                hits += 1
            else:
                assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
        assert _finished(out)[: len(before)] == before  # what was finished stays, to the letter
    return hits


def _assert_same_as(whole: kn.Comparison, out: Path, table: Path) -> None:
    lines = _finished(out)
    assert len(lines) == 3 * killed_comparisons.FOLDS
    resumed = killed_comparisons.compare(str(out))  # reads everything back
    assert _finished(out) == lines
    assert _untimed(resumed) == _untimed(whole)
    assert resumed.best == whole.best == json.loads(table.read_text())["best"]
    assert [place.method for place in resumed.ranking()] == [place.method for place in whole.ranking()]


@pytest.mark.slow
@pytest.mark.parametrize("fits", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_comparison_killed_right_after_a_fit_ends_with_the_same_scores(fits, tmp_path, whole):
    out, table = tmp_path / "fits.jsonl", tmp_path / "table.json"
    process = _start(out, table)
    try:
        end = time.monotonic() + 60.0
        while len(_finished(out)) < fits and process.is_alive() and time.monotonic() < end:
            time.sleep(0.001)
        process.kill()
    finally:
        process.kill()
        process.join()
    assert fits <= len(_finished(out)) < 3 * killed_comparisons.FOLDS
    killed_comparisons.compare_and_export(str(out), str(table))
    _assert_same_as(whole[0], out, table)


@pytest.mark.slow
def test_comparisons_killed_eight_times_end_with_the_same_scores(tmp_path, whole, seed):
    comparison, seconds = whole
    chance, hits, number = random.Random(seed + 1), 0, 0
    while hits < 8:
        place = tmp_path / str(number)
        place.mkdir()
        hits += _run_under_fire(place / "fits.jsonl", place / "table.json", 8 - hits, chance, seconds)
        _assert_same_as(comparison, place / "fits.jsonl", place / "table.json")
        number += 1
