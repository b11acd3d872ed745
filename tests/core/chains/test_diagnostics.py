"""Tests of what chains say about themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from knowable.core.chains.convergence import ess_bulk, ess_tail, rhat
from knowable.core.chains.diagnostics import ChainDiagnostics, element_name, moments_of
from knowable.core.posterior.diagnostics import Diagnostics


def draws_of(*shape: int) -> torch.Tensor:
    return torch.randn((4, 50, *shape), dtype=torch.float64) * 3 + 100


# --- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("correction", [0, 1])
def test_moments_are_those_of_numpy(shape, correction):
    draws = draws_of(*shape)
    mean, std = moments_of(draws, correction=correction)
    assert mean.shape == std.shape == shape
    np.testing.assert_allclose(mean, draws.numpy().mean((0, 1)), rtol=1e-13)
    np.testing.assert_allclose(std, draws.numpy().std((0, 1), ddof=correction), rtol=1e-12)


def test_weighted_moments_are_those_of_numpy_and_do_not_see_a_constant():
    draws, log_weights = draws_of(2), torch.randn(4, 50, dtype=torch.float64)
    mean, std = moments_of(draws, log_weights - 700.0)
    weights = log_weights.exp().flatten().numpy()
    expected = np.average(draws.flatten(0, 1).numpy(), axis=0, weights=weights)
    np.testing.assert_allclose(mean, expected, rtol=1e-12)
    variance = np.average((draws.flatten(0, 1).numpy() - expected) ** 2, axis=0, weights=weights)
    np.testing.assert_allclose(std, np.sqrt(variance), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_moments_are_the_same_to_the_bit_however_the_draws_lie_in_memory(dtype):
    whole = torch.randn(4, 50, 7, dtype=torch.float64).to(dtype)
    part = whole[..., 2:5]
    turned = part.transpose(0, 1).contiguous().transpose(0, 1)
    expected = moments_of(part.contiguous())
    for found in (moments_of(part), moments_of(turned)):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_moments_of_shortened_numbers_are_taken_in_double_precision():
    draws = torch.full((2, 500, 1), 100.5).bfloat16()  # its own sum would not even reach 1000
    mean, std = moments_of(draws)
    assert mean.dtype == torch.float64 and mean.item() == pytest.approx(draws[0, 0, 0].item(), rel=1e-12)
    assert std.item() == pytest.approx(0.0, abs=1e-9)


def test_moments_taken_in_blocks_are_the_moments(monkeypatch):
    draws = draws_of(3)
    expected = moments_of(draws)
    monkeypatch.setattr("knowable.core.chains.diagnostics._NUMBERS_AT_ONCE", 20)
    for a, b in zip(expected, moments_of(draws), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_one_draw_has_a_mean_and_no_spread_to_speak_of():
    mean, std = moments_of(torch.full((1, 1, 2), 3.0))
    assert mean.tolist() == [3.0, 3.0]
    assert all(map(math.isnan, std.tolist()))
    assert moments_of(torch.full((1, 1, 2), 3.0), correction=0)[1].tolist() == [0.0, 0.0]


# --- the report ------------------------------------------------------------------------------------------------------


def test_every_element_has_its_figures():
    draws = {"w": draws_of(2, 3), "s": draws_of()}
    found = ChainDiagnostics.of(draws)
    for name, value in draws.items():
        assert torch.equal(found.rhat[name], rhat(value))
        assert torch.equal(found.ess[name], ess_bulk(value))
        assert torch.equal(found.ess_tail[name], ess_tail(value))
        assert found.mean[name].shape == found.std[name].shape == value.shape[2:]


def test_what_is_known_of_the_run_is_kept():
    run = Diagnostics(method="HMC()", terms={"acceptance": 0.8}, converged=True, message="mixed", notes=("a note",))
    found = ChainDiagnostics.of({"x": draws_of(1)}, run)
    assert found["acceptance"] == 0.8
    assert (found.method, found.converged, found.message, found.notes) == ("HMC()", True, "mixed", ("a note",))


def test_reports_can_be_compared():
    draws = {"x": draws_of(3)}
    assert ChainDiagnostics.of(draws, Diagnostics(message="a")) == ChainDiagnostics.of(draws, Diagnostics(message="a"))
    assert ChainDiagnostics.of(draws, Diagnostics(message="a")) != ChainDiagnostics.of(draws, Diagnostics(message="b"))


def test_a_short_table_has_every_element_by_name():
    text = repr(ChainDiagnostics.of({"w": draws_of(2, 2), "scale": draws_of()}, Diagnostics(message="mixed")))
    for name in ("w[0, 0]", "w[0, 1]", "w[1, 0]", "w[1, 1]", "scale"):
        assert sum(line.strip().startswith(f"{name}  ") for line in text.splitlines()) == 1, name
    assert "mixed" in text and "r-hat" in text


def test_a_long_table_has_the_worst_ones():
    draws = draws_of(40)
    draws[0, :, 33] += 50.0  # one chain of this one is far away
    lines = repr(ChainDiagnostics.of({"x": draws})).splitlines()
    table = [line for line in lines if line.startswith("  x[")]
    assert len(table) == 24
    assert table[0].startswith("  x[33]")
    assert "(24 of 40, the largest R-hat)" in lines[-1]


def test_numbers_in_the_table_stand_in_their_line():
    draws = torch.stack([torch.full((4, 50), 1.0), torch.full((4, 50), 2.0)], -1).double()
    draws += 1e-3 * torch.randn(draws.shape, dtype=torch.float64)
    lines = {line.split()[0]: line.split()[1] for line in repr(ChainDiagnostics.of({"x": draws})).splitlines()[3:]}
    assert float(lines["x[0]"]) == pytest.approx(1.0, abs=0.01)
    assert float(lines["x[1]"]) == pytest.approx(2.0, abs=0.01)


def test_one_draw_of_one_chain_can_be_shown():
    assert "nan" in repr(ChainDiagnostics.of({"x": torch.zeros(1, 1, 2)}))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 4)])
def test_elements_are_named_by_their_index(shape):
    value = torch.arange(math.prod(shape)).reshape(shape)
    for place in range(value.numel()):
        name = element_name("w", value.shape, place)
        index = tuple(int(each) for each in name[2:-1].split(", ")) if shape else ()
        assert value[index] == place
