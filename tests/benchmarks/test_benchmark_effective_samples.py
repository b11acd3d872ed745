from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.effective_samples import (
    CONTENDERS,
    Contender,
    disagreement,
    judge,
    run,
    summarise,
    to_markdown,
)
from benchmarks.effective_samples_peers import Settings
from benchmarks.study import Rows

from benchmarks import effective_samples


def independent(seed: int, *, shift: float = 0.0, chains: int = 4, draws: int = 500) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((chains, draws, 3)) + shift


def test_independent_draws_are_worth_about_their_number():
    row = judge(independent(0), seconds=10.0, gradients=4000)
    # the estimate of 2,000 independent draws' effective size scatters by some percent around 2,000
    assert 1400 < row["ess"] < 2600 and row["rhat"] < 1.02
    assert row["ess_per_second"] == pytest.approx(row["ess"] / 10)
    assert row["ess_per_thousand_gradients"] == pytest.approx(row["ess"] / 4)
    assert row["gradients_per_second"] == 400.0
    np.testing.assert_allclose(row["error_of_mean"], 1 / np.sqrt(2000), rtol=0.25)


def described(seed: int, label: str = "a", *, shift: float = 0.0, seconds: float = 1.0, exact: bool = True) -> dict:
    settings = {"settings": {}, "label": label, "seed": seed, "exact": exact}
    return settings | judge(independent(seed, shift=shift), seconds, 1000)


def test_disagreement_is_in_standard_errors():
    same = disagreement([described(0)], [described(1), described(2)])
    # three differences of unit variance: above 4.5 with probability 2e-5
    assert same is not None and same < 4.5
    error = 1 / np.sqrt(2000)
    far = disagreement([described(0, shift=0.5)], [described(1), described(2)])
    assert far == pytest.approx(0.5 / (error * np.sqrt(1.5)), rel=0.4)
    assert disagreement([described(0)], []) is None


def test_summary_is_the_median_over_the_seeds():
    runs = [described(0), described(1), described(2, seconds=9.0)]
    summary = summarise({"ours": runs, "theirs": [described(5)]})["ours"]
    assert summary["label"] == "a" and summary["seeds"] == 3 and summary["error"] is None
    rates = [row["ess_per_second"] for row in runs]
    assert summary["ess_per_second"] == np.median(rates) and summary["range"] == [min(rates), max(rates)]
    assert summary["disagreement"] is not None


def test_chain_count_is_chosen_on_a_seed_that_is_not_in_the_table(monkeypatch, tmp_path):
    asked = []

    def measured(contender, target, settings, seed, *, quick):
        asked.append((settings.chains, seed))
        best_in_trial = seed == effective_samples.TRIAL and settings.chains == 4
        return judge(independent(seed), 1.0 if best_in_trial else 5.0, 1)

    monkeypatch.setattr(effective_samples, "measure", measured)
    contender = Contender("ours", "knowable", {"toy": [Settings(2, 1, 1), Settings(4, 1, 1), Settings(8, 1, 1)]})
    found = effective_samples._runs_of(contender, "toy", False, Rows(tmp_path / "rows.jsonl"))
    assert [row["seed"] for row in found] == [0, 1, 2] and {row["label"] for row in found} == {"4 x (1 + 1)"}
    assert sorted(asked) == [(2, 100), (4, 0), (4, 1), (4, 2), (4, 100), (8, 100)]


@pytest.fixture
def one_contender(monkeypatch):
    """Ours alone: a process, but no compiling."""
    hmc = replace(CONTENDERS[0], settings={"toy": [Settings(2, 10, 10)], "diabetes": [Settings(2, 10, 10)]})
    absent = Contender(
        "knowable Nobody", "knowable", hmc.settings, {"method": "Nobody", "mode": "traced", "start": "prior"}
    )
    monkeypatch.setattr(effective_samples, "CONTENDERS", (hmc, absent))


@pytest.mark.slow
@pytest.mark.usefixtures("one_contender")
def test_quick_run_samples_in_another_process_and_is_not_repeated(tmp_path):
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="toy", rows=Rows(path))
    (row,) = first["runs"]["toy"]["knowable HMC"]
    assert row["error"] is None and row["gradients"] > 2 * 40 and row["seconds"] > 0 and len(row["mean"]) == 4
    (absent,) = first["runs"]["toy"]["knowable Nobody"]
    assert "has no attribute 'Nobody'" in absent["error"]
    assert "| knowable HMC | 2 x (20 + 20) |" in to_markdown(first) and "failed: AttributeError" in to_markdown(first)
    again = run(quick=True, only="toy", rows=Rows(path))
    assert again["runs"]["toy"]["knowable HMC"] == [row]
