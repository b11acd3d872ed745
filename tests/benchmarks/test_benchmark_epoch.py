from __future__ import annotations

import pytest
import torch
from benchmarks.epoch import knowable_feed, loader_feed
from benchmarks.run import run_benchmark


@pytest.mark.slow
def test_quick_mode_runs_every_case_with_every_contender():
    cases = run_benchmark("benchmarks.epoch", quick=True)["cases"]
    assert [case["name"] for case in cases] == ["wide", "narrow", "streamed"]
    for case, contenders in zip(cases, (4, 4, 3), strict=True):
        errors = {name: contender["error"] for name, contender in case["contenders"].items()}
        assert len(errors) == contenders and errors == dict.fromkeys(errors)


@pytest.mark.parametrize("feed", [loader_feed, knowable_feed])
def test_feeds_give_every_row_once_an_epoch_in_an_order_that_changes(feed):
    x = torch.arange(300.0).unsqueeze(1)
    batches = feed(x, torch.arange(300))
    first, second = (torch.cat([labels for _, labels in batches()]) for _ in range(2))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(300))
    assert first.tolist() != second.tolist()
