from __future__ import annotations

import math

import pytest
import torch

from knowable.core.chains.settings import FEW, Mixing, info_terms

GOOD = {"rhat": 1.005, "ess_bulk": 500.0, "ess_tail": 450.0}


@pytest.mark.parametrize(
    ("change", "mixed"),
    [
        ({}, True),
        ({"rhat": 1.02}, False),
        ({"ess_bulk": 399.0}, False),
        ({"ess_tail": 399.0}, False),
        ({"rhat": math.nan}, None),
    ],
)
def test_chains_have_mixed_where_every_bound_is_kept(change, mixed):
    assert Mixing().reached({**GOOD, **change}, None) is mixed


@pytest.mark.parametrize(
    ("change", "mixed"),
    [({"rhat": 1.04}, True), ({"rhat": 1.06}, False), ({"ess_tail": 120.0}, True), ({"ess_bulk": 80.0}, False)],
)
def test_of_draws_that_were_asked_for_only_what_is_clearly_wrong_is_said(change, mixed):
    assert Mixing().reached({**GOOD, **change}, 1000) is mixed


def test_nothing_is_said_of_a_few_draws_that_were_asked_for():
    assert Mixing().reached({**GOOD, "rhat": 3.0}, FEW - 1) is None
    assert Mixing().reached({**GOOD, "rhat": 3.0}, FEW) is False


def test_terms_are_means_and_sums_over_all_chains():
    info = {
        "acceptance": torch.tensor([[0.5, 1.0], [0.25, 0.25]]),
        "diverging": torch.tensor([[True, False], [False, True]]),
        "steps": torch.tensor([[3, 5], [7, 9]]),
    }
    assert info_terms(info) == {"acceptance": 0.5, "divergences": 2.0, "steps": 6.0}


def test_energies_that_move_slowly_are_told_by_the_worst_chain(generator):
    independent = torch.randn(2, 4000, generator=generator, dtype=torch.float64)
    slow = independent[1].clone()
    for i in range(1, len(slow)):
        slow[i] = 0.99 * slow[i - 1] + math.sqrt(1 - 0.99**2) * independent[1, i]
    found = info_terms({"energy": torch.stack([independent[0], slow])})["ebfmi"]
    steps, spread = slow.diff().square().mean(), slow.var()
    assert math.isclose(found, (steps / spread).item(), rel_tol=1e-12)
    alone = info_terms({"energy": independent[:1]})["ebfmi"]
    assert abs(alone - 2.0) < 5 * math.sqrt(
        8 / 4000
    )  # E (x' - x)² / var = 2; the sd of the mean of squares is below this
    assert "ebfmi" not in info_terms({"energy": torch.ones(3, 1)})
