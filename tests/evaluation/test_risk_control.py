from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation.risk_control import (
    accepting_rule,
    control_risk,
    missed_shares,
    outside_shares,
    rejection_rule,
    risk_bound,
    risk_p_value,
    rows_for_risk,
)

from .conformal_cases import ROWS, losses

# What MAPIE 1.6.0 finds for the same losses at alpha = 0.2, and the first settings that its risk control allows.
HOEFFDING_BENTKUS = (1.0,) * 7 + (0.8069577806557208, 0.19572688645692152, 0.007481591986802945, 2.993155353253689e-06)
CONFORMAL_RISK_CONTROL = {0.1: 9, 0.3: 5, 0.6: 0}
THREE_OF_57 = 0.0017126460786898506


def test_p_values_are_those_of_another_library():
    assert risk_p_value(losses(), 0.2).numpy() == pytest.approx(HOEFFDING_BENTKUS, abs=1e-12)
    assert risk_p_value(np.arange(ROWS) < 3, 0.2).item() == pytest.approx(THREE_OF_57, abs=1e-12)


def test_conformal_risk_control_is_that_of_another_library():
    for alpha, index in CONFORMAL_RISK_CONTROL.items():
        assert control_risk(losses(), alpha).index == index


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 60), st.integers(0, 60), st.sampled_from([0.01, 0.05, 0.3]))
def test_bounds_of_counts_are_those_of_clopper_and_pearson(n: int, wrong: int, delta: float):
    wrong = min(wrong, n)
    bound = risk_bound(np.arange(n) < wrong, delta).item()
    expected = 1.0 if wrong == n else beta.ppf(1 - delta, wrong + 1, n - wrong)
    assert bound == pytest.approx(expected, abs=1e-9)
    assert wrong == n or binom.cdf(wrong, n, bound) == pytest.approx(delta, abs=1e-9)


def test_bounds_are_where_p_values_reach_delta():
    for column, bound in zip(losses().T, risk_bound(losses(), 0.1), strict=True):
        if bound < 1:
            assert risk_p_value(column, bound.item()).item() <= 0.1 + 1e-9
            assert risk_p_value(column, bound.item() - 1e-6).item() > 0.1 - 1e-3


@pytest.mark.parametrize("delta", [None, 0.1])
@pytest.mark.parametrize("binary", [True, False])
def test_the_first_setting_within_the_bound_is_taken(delta: float | None, binary: bool):
    values = losses() > 0.5 if binary else losses()
    found = control_risk(values, 0.3, delta)
    columns = values.astype(float)
    n = len(columns)
    for index in range(columns.shape[1]):
        if delta is None:
            good = (columns[:, index].sum() + 1) / (n + 1) <= 0.3
        elif binary:
            good = binom.cdf(columns[:, index].sum(), n, 0.3) <= delta
        else:
            good = risk_p_value(columns[:, index], 0.3).item() <= delta
        assert good == (index >= found.index)
    assert found.risk == pytest.approx(columns[:, found.index].mean())
    assert found.bound <= 0.3
    assert ("0.3" in found.statement) and (delta is None or "probability 0.9" in found.statement)


def test_risk_is_controlled_over_many_calibrations(seed: int):
    # the loss at setting t of a row is 1[u > t], u uniform: its risk is 1 - t
    generator = torch.Generator().manual_seed(seed)
    grid, wrong, risks = torch.linspace(0, 1, 201, dtype=torch.float64), 0, []
    for _ in range(300):
        u = torch.rand(200, generator=generator, dtype=torch.float64)
        above = u[:, None] > grid
        wrong += bool(1 - grid[control_risk(above, 0.2, 0.1).index] > 0.2)
        risks.append(1 - grid[control_risk(above, 0.2).index])
    assert wrong <= binom.ppf(0.9999, 300, 0.1)
    spread = 4 * (0.2 * 0.8 / 200 / 300) ** 0.5
    assert 0.2 - 2 / 201 - 1 / 200 - spread < torch.stack(risks).mean() < 0.2 + spread


def test_losses_that_cannot_be_used_are_refused():
    good = np.linspace(1, 0, 5)[None].repeat(40, 0)
    with pytest.raises(InvalidData, match="must not grow along the grid, those of row 0"):
        control_risk(good[:, ::-1], 0.2)
    with pytest.raises(InvalidData, match="between 0 and 1"):
        control_risk(3 * good, 0.2)
    assert control_risk(3 * good, 0.6, largest=3.0).index == control_risk(good, 0.2).index
    with pytest.raises(InvalidData, match="not all 0 or 1"):
        control_risk((3 * good).round().astype(int), 0.2)
    with pytest.raises(InvalidData, match=r"9 rows would be needed"):
        control_risk(good[:5], 0.1)
    with pytest.raises(InvalidData, match=r"29 rows would be needed"):
        control_risk((good[:5] > 0.5), 0.1, 0.05)
    with pytest.raises(InvalidData, match="row 2"):
        control_risk(np.where(np.arange(40)[:, None] == 2, np.nan, good), 0.2)
    with pytest.raises(InvalidData, match="shape"):
        control_risk(good[:, 0], 0.2)
    with pytest.raises(InvalidArgument, match="alpha"):
        control_risk(good, 1.5)
    with pytest.raises(InvalidArgument, match="delta"):
        control_risk(good, 0.2, 1.0)


@pytest.mark.parametrize(("alpha", "delta"), [(0.1, 0.05), (0.02, 0.1), (0.5, 0.2)])
def test_rows_that_are_needed_are_the_fewest_that_can_reject(alpha: float, delta: float):
    rows = rows_for_risk(alpha, delta)
    assert risk_p_value(np.zeros(rows, dtype=int), alpha) <= delta < risk_p_value(np.zeros(rows - 1, dtype=int), alpha)


def test_missed_and_outside_shares_are_those_of_a_loop(generator: torch.Generator):
    probs = torch.rand(6, 3, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 3, 4, generator=generator) < 0.4
    mask[2] = False
    grid = torch.linspace(1, 0, 9, dtype=torch.float64)
    missed = missed_shares(probs, mask, grid)
    for row in range(6):
        for place, limit in enumerate(grid):
            inside = [p < limit for p, true in zip(probs[row].flatten(), mask[row].flatten(), strict=True) if true]
            assert missed[row, place].item() == pytest.approx(sum(inside) / max(1, len(inside)))
    assert (missed[:, -1] == 0).all()
    assert (missed[2] == 0).all()
    scores = probs.clone()
    scores[0, 0, 0] = torch.nan
    outside = outside_shares(scores, grid.flip(0))
    assert outside[1, 4].item() == pytest.approx((probs[1] > 0.5).double().mean().item())
    assert outside[0, 0].item() == pytest.approx(1.0)
    assert control_risk(missed, 0.5).risk <= 0.5
    with pytest.raises(InvalidData, match="mask must have the shape"):
        missed_shares(probs, mask[:, :2], grid)
    with pytest.raises(InvalidData, match="0 and 1"):
        missed_shares(probs, 2 * mask.long(), grid)


# --- rejection --------------------------------------------------------------------------------------------------------


def slow_rule(u: list[float], wrong: list[int], start: float, alpha: float, delta: float) -> float:
    """One threshold after the other."""
    found = -math.inf
    for limit in [start, *sorted(each for each in u if each > start)]:
        kept = [loss for each, loss in zip(u, wrong, strict=True) if each <= limit]
        if binom.cdf(sum(kept), len(kept), alpha) > delta:
            break
        found = max(each for each in u if each <= limit)
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=10, max_size=60), st.integers(0, 12))
def test_the_rule_is_that_of_a_loop_over_thresholds(rows: list[tuple[int, bool]], start: int):
    u, wrong = [float(each) for each, _ in rows], [int(bad and each > 3) for each, bad in rows]
    found = rejection_rule(u, wrong, 0.3, 0.2, start=float(start))
    assert found.threshold == slow_rule(u, wrong, float(start), 0.3, 0.2)
    kept = [loss for each, loss in zip(u, wrong, strict=True) if each <= found.threshold]
    assert found.accepted == pytest.approx(len(kept) / len(u))
    if found.certified:
        assert found.risk == pytest.approx(sum(kept) / len(kept))
        assert found.bound <= 0.3 + 1e-9


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("monotone", [True, False])
def test_the_risk_of_accepted_rows_is_kept_as_often_as_promised(seed: int, binary: bool, monotone: bool):
    """Risk known exactly: u is uniform, and the chance of an error at u is u/2, or waves around it."""
    generator = torch.Generator().manual_seed(seed)
    alpha, delta, trials = 0.2, 0.1, 400
    grid = torch.linspace(0, 1, 20_001, dtype=torch.float64)

    def chance(u: torch.Tensor) -> torch.Tensor:
        return u / 2 if monotone else (u / 2 + 0.2 * torch.sin(40 * u)).clamp(0, 1)

    risk = chance(grid).cumsum(0) / torch.arange(1, len(grid) + 1)
    failed = accepted = 0
    for trial in range(trials):
        u = torch.rand(300, generator=generator, dtype=torch.float64)
        wrong = torch.rand(300, generator=generator, dtype=torch.float64) < chance(u)
        rule = rejection_rule(u, wrong if binary else wrong.double(), alpha, delta, seed=trial)
        accepted += rule.certified
        failed += rule.certified and risk[int(rule.threshold * 20_000)].item() > alpha
    assert failed <= binom.ppf(0.9999, trials, delta)
    assert accepted > (0.5 * trials if binary or monotone else 0)  # it is not kept by accepting nothing


def test_without_errors_all_rows_are_accepted_and_only_errors_none():
    u = torch.arange(100.0)
    assert rejection_rule(u, torch.zeros(100, dtype=torch.bool), 0.1).threshold == pytest.approx(99.0, abs=0.1 * 99)
    nothing = rejection_rule(u, torch.ones(100, dtype=torch.bool), 0.1)
    assert not nothing.certified
    assert nothing.accepted == 0
    assert nothing.bound == 1
    same = rejection_rule(torch.zeros(100), torch.zeros(100, dtype=torch.bool), 0.1)
    assert same.threshold == 0
    assert same.accepted == 1


def test_a_threshold_of_other_rows_has_the_bound_of_its_accepted_ones():
    rule = accepting_rule([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1], 0.3, 0.1)
    assert rule.accepted == 0.75
    assert rule.bound == pytest.approx(beta.ppf(0.9, 2, 2))


def test_rules_that_cannot_be_are_refused():
    with pytest.raises(InvalidData, match="at least 29 held-out rows, got 28"):
        rejection_rule(np.arange(28.0), np.zeros(28, dtype=int), 0.1, 0.05)
    assert rejection_rule(np.arange(29.0), np.zeros(29, dtype=int), 0.1, 0.05).accepted == 1
    with pytest.raises(InvalidData, match="missing in row 3"):
        rejection_rule(np.where(np.arange(40) == 3, np.nan, 1.0), np.zeros(40), 0.1)
    with pytest.raises(InvalidData, match="one number for each of 40"):
        rejection_rule(np.arange(39.0), np.zeros(40), 0.1)
    with pytest.raises(InvalidArgument, match="alpha"):
        rejection_rule(np.arange(40.0), np.zeros(40), 0.0)
