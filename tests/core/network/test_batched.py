"""Tests of the batched call and its fallback: what counts as a refusal, and what as the user's own error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.func import vmap

from knowable.core.network.batched import batched, no_hidden_loops


def _branch(row):
    return row.exp() if row.sum() > 0 else -row


def _rows(function):
    return lambda x: torch.stack([function(row) for row in x])


def test_an_operation_that_vmap_can_batch_is_batched_every_time():
    calls = []
    call = batched(lambda x: calls.append("together") or vmap(torch.sin)(x), _rows(torch.sin))
    x = torch.randn(3, 2)
    for _ in range(2):
        torch.testing.assert_close(call(x), x.sin())
    assert calls == ["together"] * 2 and not call.refused


def test_what_vmap_refuses_is_looped_over_and_not_tried_again():
    calls = []
    call = batched(lambda x: calls.append("together") or vmap(_branch)(x), _rows(_branch))
    x = torch.randn(3, 2)
    for _ in range(2):
        torch.testing.assert_close(call(x), torch.stack([_branch(row) for row in x]))
    assert calls == ["together"] and call.refused


@pytest.mark.parametrize("error", [RuntimeError("mine, about vmap"), NotImplementedError("mine"), ValueError("mine")])
def test_the_users_own_error_is_raised_and_is_no_refusal(error):
    def wrong(row):
        raise error

    call = batched(vmap(wrong), _rows(wrong))
    with pytest.raises(type(error), match="mine"):
        call(torch.ones(2, 2))
    assert not call.refused


def test_a_matrix_that_cannot_be_factorised_is_no_refusal():
    call = batched(vmap(torch.linalg.cholesky), lambda x: x * torch.nan)
    assert call(-torch.eye(2).expand(3, 2, 2)).isnan().any()
    assert not call.refused
    torch.testing.assert_close(call(torch.eye(2).expand(3, 2, 2)), torch.eye(2).expand(3, 2, 2))


def test_an_operation_that_vmap_would_loop_over_counts_as_refused():
    lstm = torch.nn.LSTM(2, 2, batch_first=True)  # torch has no batching rule for it
    with no_hidden_loops(), pytest.raises(RuntimeError, match=r"[Bb]atching rule|vmap"), torch.no_grad():
        vmap(lambda x: lstm(x)[0])(torch.ones(2, 1, 3, 2))


def test_a_copy_remembers_for_itself():
    call = batched(vmap(_branch), _rows(_branch))
    other = copy.copy(call)
    call(torch.ones(2, 2))
    assert call.refused and not other.refused
