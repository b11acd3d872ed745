"""Tests of the draws that a sampler leaves of a bare density."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import Samples
from knowable.core.posterior.diagnostics import Diagnostics


def samples_of(chains: int = 3, count: int = 20, *, dtype=torch.float64, **more) -> Samples:
    draws = {
        "w": torch.randn(chains, count, 2, 3, dtype=torch.float64).to(dtype),
        "s": torch.randn(chains, count, dtype=torch.float64).to(dtype) + 5,
    }
    run = Diagnostics(message="mixed after 20 transitions")
    return Samples(draws, torch.randn(chains, count), ChainDiagnostics.of(draws, run), **more)


def test_moments_are_taken_over_chains_and_draws():
    found = samples_of()
    for name, value in found.draws.items():
        np.testing.assert_allclose(found.mean()[name], value.numpy().mean((0, 1)), rtol=1e-12)
        np.testing.assert_allclose(found.std()[name], value.numpy().std((0, 1), ddof=1), rtol=1e-12)


def test_moments_of_weighted_draws_are_weighted():
    log_weights = torch.full((3, 20), -torch.inf)
    log_weights[1, 4] = log_weights[2, 7] = -3.0
    found = samples_of(log_weights=log_weights)
    expected = 0.5 * (found.draws["s"][1, 4] + found.draws["s"][2, 7])
    torch.testing.assert_close(found.mean()["s"], expected)
    torch.testing.assert_close(found.std()["s"], (found.draws["s"][1, 4] - expected).abs())


@pytest.mark.parametrize(
    ("stored", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_moments_are_at_least_single_precision(stored, expected):
    found = samples_of(count=400, dtype=stored)
    assert found.mean()["s"].dtype == found.std()["s"].dtype == expected
    exact = found.draws["s"].double().mean().item()
    assert found.mean()["s"].item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("what", ["log_density", "info", "log_weights", "draws"])
def test_what_does_not_belong_to_the_draws_is_refused(what):
    found = samples_of()
    parts = {"draws": found.draws, "log_density": found.log_density}
    more = {"info": {"energy": torch.zeros(3, 20)}, "log_weights": torch.zeros(3, 20)}
    short = torch.zeros(3, 19)
    if what == "info":
        more["info"] = {"energy": short}
    elif what == "draws":
        parts["draws"] = {**found.draws, "s": short}
    else:
        (more if what == "log_weights" else parts)[what] = short
    with pytest.raises(kn.InvalidArgument, match=r"\(3, 19\) for 3 chains of 20 draws"):
        Samples(parts["draws"], parts["log_density"], found.diagnostics, **more)


def test_its_text_says_how_many_draws_of_what_there_are():
    assert repr(samples_of()) == "Samples(3 chains x 20 draws of w[2, 3], s; mixed after 20 transitions)"


# --- ArviZ -----------------------------------------------------------------------------------------------------------


def test_arviz_gets_the_draws_and_the_statistics_of_their_transitions():
    pytest.importorskip("arviz_base")
    diverging = torch.zeros(3, 20)
    diverging[1, 5] = 1
    info = {"acceptance": torch.rand(3, 20), "diverging": diverging, "energy": torch.randn(3, 20)}
    found = samples_of(info={**info, "steps": torch.ones(3, 20)}, log_weights=torch.randn(3, 20))
    tree = found.to_arviz()
    np.testing.assert_array_equal(tree["posterior"]["w"].values, found.draws["w"].numpy())
    assert tree["posterior"]["w"].dims[:2] == ("chain", "draw")
    statistics = tree["sample_stats"]
    assert set(statistics) == {"acceptance_rate", "diverging", "energy", "n_steps", "lp", "log_weight"}
    np.testing.assert_array_equal(statistics["lp"].values, found.log_density.numpy())
    assert statistics["diverging"].dtype == bool
    assert np.argwhere(statistics["diverging"].values).tolist() == [[1, 5]]


def test_arviz_gets_short_numbers_as_single_precision():
    pytest.importorskip("arviz_base")
    found = samples_of(dtype=torch.bfloat16)
    values = found.to_arviz()["posterior"]["s"].values
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, found.draws["s"].float().numpy())


def test_without_arviz_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(kn.MissingExtra, match=r"pip install 'knowable\[diag\]'"):
        samples_of().to_arviz()
