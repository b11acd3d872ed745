from __future__ import annotations

import pytest
import torch
from benchmarks.study import Rows
from benchmarks.variational_families import _block_divergence
from benchmarks.variational_optimum import METHODS, best_covariance, is_good, run, to_markdown

from benchmarks import variational_optimum
from knowable.testing import LinearGaussian


def precision_of(seed: int) -> torch.Tensor:
    return LinearGaussian.make(20, 7, noise=0.1, seed=seed).precision


@pytest.mark.parametrize("method", METHODS)
def test_optimum_is_a_stationary_member_of_its_family(method, seed):
    # all families stay what they are when every weight is stretched
    precision = precision_of(seed)
    best = best_covariance(method, precision)
    least = _block_divergence(precision, best)
    for factor in (0.99, 1.01):
        for stretch in (*torch.eye(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)):
            scale = factor**stretch
            assert _block_divergence(precision, scale * best * scale.unsqueeze(1)) > least - 1e-9


def test_low_rank_with_enough_directions_is_the_posterior(seed):
    precision = precision_of(seed)
    assert _block_divergence(precision, variational_optimum.best_low_rank(precision, 7)) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    ("missing", "warned", "rise", "good"),
    [(0.4, False, None, True), (0.6, False, 3.0, False), (4.0, True, 2.1, True), (4.0, True, 1.9, False)],
)
def test_good_is_near_or_warned_with_a_number_that_is_no_less_than_half(missing, warned, rise, good):
    assert is_good({"missing": missing, "missing_error": 0.0, "warned": warned, "rise": rise}) is good


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_method_and_skips_what_is_done(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="M[eo]*VI, *", rows=Rows(path))
    names = {row["method"] for found in first["sizes"].values() for row in found}
    assert names == {name for name in METHODS if name in ("MeanFieldVI", "MomentVI")}
    assert all(row["error"] is None for found in first["sizes"].values() for row in found)
    text = to_markdown(first)
    assert all(f"| {name} | 0.001 |" in text for name in names) and "Seeds run: 0; 8 of 320 fits." in text

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(variational_optimum, "evaluate", unwanted)
    assert run(quick=True, only="M[eo]*VI, *", rows=Rows(path))["sizes"] == first["sizes"]
