"""Tests of the evidence estimate: dense matrices, closed forms and stationarity are the oracles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace.curvature import Curvature
from knowable.inference.laplace.evidence import Evidence
from knowable.inference.laplace.laplace import STRUCTURES
from knowable.testing import network_case
from tests.inference.laplace.oracle import dense_ggn, expansion_of

DTYPE = torch.float64
NOISE, SCALE = "likelihood.log_noise", "prior.*.log_scale"


def evidence_of(structure: str, prior=None, *, rows: int = 8, likelihood=None) -> Evidence:
    case = network_case("mlp", rows=rows, dtype=DTYPE)
    model = kn.Model(case.net, likelihood or kn.Gaussian(), prior or kn.EmpiricalBayes(kn.Normal(1.0)))
    expansion = expansion_of(model, case.data)
    curvature: type[Curvature] = STRUCTURES[structure]
    return Evidence(expansion, curvature.of(expansion, rank=60))


def settings(noise: float, scale: float) -> dict[str, torch.Tensor]:
    return {NOISE: torch.tensor(noise, dtype=DTYPE), SCALE: torch.tensor(scale, dtype=DTYPE)}


@pytest.mark.parametrize("structure", ["full", "lowrank"])
@pytest.mark.parametrize(("noise", "scale"), [(-1.0, 0.0), (0.3, -0.7), (-2.0, 1.0)])
def test_the_estimate_is_that_of_dense_matrices_at_any_scales(structure, noise, scale):
    evidence = evidence_of(structure)
    expansion = evidence.expansion
    there = expansion.at(settings(noise, scale))
    x, y = expansion.data.tensors
    output = expansion.model.forward(expansion.params, x, buffers={})
    weights = expansion.layout.flatten(expansion.params)
    likelihood = torch.distributions.Normal(output, math.exp(noise)).log_prob(y).sum()
    prior = torch.distributions.Normal(0.0, math.exp(scale)).log_prob(weights).sum()
    precision = dense_ggn(there) + math.exp(-2 * scale) * torch.eye(len(weights), dtype=DTYPE)
    expected = likelihood + prior + 0.5 * len(weights) * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)
    torch.testing.assert_close(evidence(settings(noise, scale)), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_at_the_scales_found_no_direction_leads_up(structure):
    evidence = evidence_of(structure)
    found, gain = evidence.maximised([NOISE, SCALE])
    assert gain == evidence.gain(found) > 0
    for name in found:
        for step in (-0.01, 0.01):
            assert evidence.gain({**found, name: found[name] + step}) < evidence.gain(found)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("per", ["parameter", "weight"])
def test_many_scales_are_better_than_one(structure, per):
    one = evidence_of(structure, kn.EmpiricalBayes(kn.Normal(1.0), kn.Normal(1.0)))
    many = evidence_of(structure, kn.EmpiricalBayes(kn.Normal(1.0), per=per))
    names = many.expansion.model.hyper_names
    assert len(names) == 4
    best_of_one = one.maximised(one.expansion.model.hyper_names)[0][SCALE]
    same = {name: torch.full_like(many.expansion.params[name], best_of_one.item()) for name in names}
    found, _ = many.maximised(names)
    assert many.gain(found) >= many.gain(same)


def test_a_fixed_scale_is_no_scale_to_find():
    evidence = evidence_of("kron", kn.Normal(1.0), likelihood=kn.Gaussian(0.3))
    assert evidence.maximised([]) == ({}, 0.0)


def test_scales_stay_within_bounds_where_the_best_is_none():
    # weights of exactly zero under their own scales: the smaller, the better, without end
    net = nn.Linear(2, 1).double()
    with torch.no_grad():
        net.weight.zero_(), net.bias.zero_()
    x = torch.randn(5, 2, dtype=DTYPE)
    model = kn.Model(net, kn.Gaussian(1.0), kn.EmpiricalBayes(kn.Normal(1.0)))
    expansion = expansion_of(model, (x, 0.01 * x[:, :1]))
    evidence = Evidence(expansion, STRUCTURES["full"].of(expansion, rank=1))
    found = evidence.maximised([SCALE])[0][SCALE]
    assert torch.isfinite(found) and -12.0 <= found < -2.0


def test_an_improper_prior_has_no_evidence():
    assert not evidence_of("kron", kn.Flat()).proper
    assert evidence_of("kron", kn.Normal(1.0)).proper


def test_other_priors_have_an_estimate_too():
    for prior in (kn.LaplacePrior(0.5), kn.StudentTPrior(3.0), kn.EmpiricalBayes(kn.LaplacePrior(1.0))):
        evidence = evidence_of("full", prior)
        names = evidence.expansion.model.hyper_names
        found, _ = evidence.maximised(names)
        assert torch.isfinite(evidence(found))
        assert evidence.gain(found) >= 0
