"""The motorcycle series is the published one."""

import hashlib

import pytest
import torch

from knowable.datasets import motorcycle


def test_motorcycle_has_133_times_and_accelerations():
    data = motorcycle()
    assert data.x.shape == (133, 1) and data.y.shape == (133,)
    assert data.x.dtype == data.y.dtype == torch.get_default_dtype()
    assert (data.x_units, data.y_units) == (("ms",), "g")
    assert "Silverman" in data.citation


def test_motorcycle_values_have_the_published_checksum():
    # All values have one decimal, so tenths are exact whole numbers; the digest is of "time,acceleration" lines.
    data = motorcycle()
    tenths = torch.cat([data.x, data.y.unsqueeze(1)], dim=1).mul(10).round().long().tolist()
    digest = hashlib.sha256("\n".join(f"{a},{b}" for a, b in tenths).encode()).hexdigest()
    assert digest == "be9c9936a572795ca3e3cd5374c5aad6ca33c5b8430db570d5d574d988f5e9a8"


def test_motorcycle_sums_are_those_of_the_series():
    data = motorcycle()
    assert data.x.double().sum().item() == pytest.approx(3348.8, abs=1e-3)
    assert data.y.double().sum().item() == pytest.approx(-3397.6, abs=1e-3)
    assert (data.x[0].item(), data.y[-1].item()) == pytest.approx((2.4, 10.7))
    assert bool((data.x[1:] >= data.x[:-1]).all())
