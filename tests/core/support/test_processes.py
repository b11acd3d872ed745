"""Tests of the processes of a fit, as far as one process can tell; exchanges are in tests/engines."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.support.processes import ALONE, Processes, _exchange


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64])
def test_shares_are_all_rows_once_and_of_two_rows_at_least(count, rows):
    whole = (torch.arange(rows), torch.arange(rows) + 0.5)
    shares = [Processes(rank, count).share(whole) for rank in range(count)]
    for place in (0, 1):
        assert torch.cat([each[place] for each in shares]).equal(whole[place])
    sizes = [len(each[0]) for each in shares]
    assert all(size == 0 or size >= 2 or rows < 2 for size in sizes)
    assert max(sizes) - min(size for size in sizes if size or rows == 0) <= 1


def test_one_process_alone_exchanges_nothing():
    value = torch.tensor([1.0, 2.0])
    ALONE.add(value)
    ALONE.copy_from_first([value])
    assert value.tolist() == [1.0, 2.0]
    assert ALONE.from_first(lambda: 3) == 3 and ALONE.gather("a") == ["a"] and list(ALONE.in_turn([1, 2])) == [1, 2]
    assert ALONE.all_finite([value]) and not ALONE.all_finite([value, torch.tensor(torch.nan)])
    ALONE.agree("Settings", 1, "")


@pytest.mark.parametrize(
    ("said", "meant"), [("Timed out waiting 5000ms for recv", "did not answer"), ("Connection closed", "has gone")]
)
def test_errors_of_an_exchange_say_what_to_do(said, meant):
    with pytest.raises(kn.ProcessLost, match=f"{meant}.*checkpoint=.*max-restarts"), _exchange():
        raise RuntimeError(said)
