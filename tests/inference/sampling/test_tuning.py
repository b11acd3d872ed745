"""What samplers with a tuned step share."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.core.support.time_limit import time_limit
from knowable.inference.sampling.tuning import begin, sensible_step


@pytest.mark.parametrize("sampler", [kn.HMC, kn.NUTS, kn.MCLMC])
@pytest.mark.parametrize("bad", [{"step_size": 0.0}, {"mass": "heavy"}, {"target_acceptance": 1.0}])
def test_settings_that_make_no_sense_are_refused(sampler, bad):
    with pytest.raises(kn.errors.InvalidArgument, match=next(iter(bad))):
        sampler(**bad)


def test_a_mass_is_dense_where_correlations_can_be_learned():
    assert [kn.HMC().mass_for(d) for d in (1, 100, 101)] == ["dense", "dense", "diagonal"]
    assert kn.HMC(mass="identity").mass_for(5) == "identity"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_first_step_is_of_the_size_of_the_density(scale, generator):
    start = scale * torch.randn((50, 3), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * (p["x"] / scale).square().sum(), Layout.of({"x": start[0]}))
    state = begin(target, start, kn.HMC(mass="diagonal"), generator=generator)
    assert torch.equal(state["inverse_mass"], torch.ones(3, dtype=torch.float64))
    # the leapfrog of a normal is unstable beyond twice its standard deviation
    assert 0.2 * scale < sensible_step(target, state, generator) < 2.5 * scale


def test_a_dense_mass_begins_at_the_curvature_unless_time_is_short(generator):
    start = torch.randn((5, 3), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * (p["x"] / 100).square().sum(), Layout.of({"x": start[0]}))
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(begin(target, start, kn.HMC(), generator=generator)["inverse_mass"], 1e4 * eye)
    with time_limit(10):
        assert torch.equal(begin(target, start, kn.HMC(), generator=generator)["inverse_mass"], eye)
