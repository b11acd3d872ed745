"""Tests of the weights of members."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.inference.ensembles.ensemble_of import (
    evidence_log_weights,
    held_out_log_densities,
    mixture_evidence,
    stacking_log_weights,
)  # fmt: skip
from tests.core.cases import DTYPE, atoms, diagonal_posterior, linear_data, linear_model


def _members(*evidence: kn.LogEvidence | None) -> list[kn.Posterior]:
    model = linear_model()
    return [diagonal_posterior(model, log_evidence=each) for each in evidence]


def test_weights_by_evidence_are_its_shares():
    members = _members(*(kn.LogEvidence(value, "bound") for value in (-1000.0, -1001.0, -1003.0)))
    shares = torch.tensor([1.0, 0.36787944, 0.04978707], dtype=torch.float64)  # e^0, e^-1, e^-3
    torch.testing.assert_close(evidence_log_weights(members).exp(), shares / shares.sum(), rtol=1e-6, atol=0.0)


def test_members_without_evidence_cannot_be_weighed_by_it():
    with pytest.raises(kn.Unsupported, match="weights='evidence' needs members that know their evidence; DiagonalN"):
        evidence_log_weights(_members(kn.LogEvidence(0.0, "bound"), None))


def test_weights_by_stacking_are_the_best_ones(generator):
    # at the optimum the ratio of a member's density to the mixture's is 1 on average, or less where its weight is 0
    each = torch.randn((4, 50), generator=generator, dtype=DTYPE)
    weights = stacking_log_weights(each).exp()
    assert weights.sum().item() == pytest.approx(1.0)
    ratios = (each.exp() / (weights @ each.exp())).mean(1)
    assert (ratios < 1 + 1e-3).all()
    assert (weights * (ratios - 1)).abs().max() < 1e-3


def test_a_member_that_is_better_on_every_row_takes_all():
    densities = torch.tensor([[-1.0, -2.0, -1.5], [-4.0, -5.0, -4.5]], dtype=DTYPE)
    assert stacking_log_weights(densities).exp().tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_held_out_densities_are_those_of_each_member(generator):
    model, (x, y) = linear_model(), linear_data(9, generator=generator)
    members = [atoms(model, 2, generator), atoms(model, 1, generator)]
    found = held_out_log_densities(members, kn.Data((x, y), 9))
    torch.testing.assert_close(found, torch.stack([member.predict(x).log_prob(y) for member in members]))


def test_the_evidence_of_a_mixture_is_the_mean_of_its_members_and_says_what_it_is():
    weights = torch.tensor([0.25, 0.75]).log()
    bounds = mixture_evidence(_members(kn.LogEvidence(-4.0, "bound", 0.4), kn.LogEvidence(-8.0, "exact", 0.0)), weights)
    assert (float(bounds), bounds.kind, bounds.standard_error) == (pytest.approx(-7.0), "bound", pytest.approx(0.1))
    guess = mixture_evidence(_members(kn.LogEvidence(-4.0, "estimate"), kn.LogEvidence(-8.0, "bound")), weights)
    assert guess.kind == "estimate"
    alone = mixture_evidence(_members(kn.LogEvidence(-4.0, "exact")), torch.zeros(1))
    assert (float(alone), alone.kind) == (-4.0, "exact")
    assert mixture_evidence(_members(kn.LogEvidence(-4.0, "exact"), None), weights) is None


def test_the_mean_of_bounds_bounds_what_the_mixture_bounds(generator):
    # the bound of a mixture of normals, by Monte Carlo with known target N(0, 1): E_q[log p - log q]
    locs, target = torch.tensor([-1.0, 2.0]), torch.distributions.Normal(0.0, 1.0)
    each = [torch.distributions.Normal(loc, 1.0) for loc in locs]
    bounds = [-torch.distributions.kl_divergence(q, target).item() for q in each]
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.tensor([0.5, 0.5])), torch.distributions.Normal(locs, torch.ones(2))
    )
    torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
    draws = mixture.sample((20_000,))
    values = target.log_prob(draws) - mixture.log_prob(draws)
    assert sum(bounds) / 2 < values.mean() - 5 * values.std() / 20_000**0.5
