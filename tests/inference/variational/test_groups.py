from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.structured import Drawn, FamilyModule, GroupPrior, check_families, group_weights
from tests.inference.variational.oracle import integrated_kl

FULL, LOW, MEAN = kn.families.FullRank(), kn.families.LowRank(2), kn.families.MeanField()


def model(**knobs: object) -> kn.Model:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    return kn.Model(net, kn.Gaussian(), **knobs)  # type: ignore[arg-type]


def names_of(families: dict[str, kn.families.Family], **knobs: object) -> list[tuple[kn.families.Family, list[str]]]:
    return [(group.family, list(group.names)) for group in group_weights(families, MEAN, model(**knobs))]


def test_first_glob_that_matches_wins_and_the_rest_is_one_group():
    found = names_of({"4.*": FULL, "*.weight": LOW})
    assert found == [
        (FULL, ["4.weight", "4.bias"]),
        (LOW, ["0.weight", "2.weight"]),
        (MEAN, ["0.bias", "2.bias", "likelihood.log_noise"]),
    ]


def test_without_globs_all_weights_are_one_group():
    assert [len(names) for _, names in names_of({})] == [7]


def test_globs_that_cover_everything_leave_no_group():
    assert names_of({"*": FULL}) == [(FULL, model().random_names)]
    assert names_of({"*": FULL, "4.*": LOW}) == [(FULL, model().random_names)]


def test_last_layer_has_a_name():
    assert names_of({"last_layer": FULL})[0] == (FULL, ["4.weight", "4.bias", "likelihood.log_noise"])


def test_only_random_weights_are_counted():
    assert names_of({"4.*": FULL}, random="4.*") == [(FULL, ["4.weight", "4.bias"])]
    with pytest.raises(kn.InvalidArgument, match=r"families='0.\*' matches no parameter"):
        names_of({"0.*": FULL}, random="4.*")


@pytest.mark.parametrize(
    ("families", "message"),
    [
        (FULL, "families must map"),
        ("full", "families must map"),
        ({}, "families must name at least one"),
        ({3: FULL}, "3 is not a name"),
        ({"*": kn.families.FullRank}, r"write FullRank\(\) with parentheses"),
        ({"*": "full"}, r"families\['\*'\] must be a family"),
        ({"*": kn.FullRankVI()}, r"families\['\*'\] must be a family"),
    ],
    ids=str,
)
def test_what_is_not_a_mapping_to_families_is_refused(families, message):
    with pytest.raises((kn.InvalidType, kn.InvalidArgument), match=message):
        check_families("families", families)


# --- group prior -----------------------------------------------------------------------------------------------------


MEANS = torch.tensor([0.3, -0.5, 0.0, 1.2, 0.4], dtype=torch.float64)
SCALES = torch.tensor([0.2, 0.6, 0.1, 0.3, 0.5], dtype=torch.float64)


def group(prior: object) -> GroupPrior:
    net = nn.Linear(4, 1).double()
    model = kn.Model(net, kn.Gaussian(0.3), prior)  # type: ignore[arg-type]
    return GroupPrior.of(model, Layout.of({name: model.params()[name] for name in model.random_names}))


def points_of(found: GroupPrior) -> dict[str, torch.Tensor]:
    return {name: found.model.params()[name] for name in found.model.point_names}


def normal_draws(count: int, seed: int) -> Drawn:
    noise = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Drawn(MEANS + SCALES * noise, None, torch.zeros(()), (MEANS, SCALES.square()))


def entropy() -> float:
    return SCALES.log().sum().item() + 2.5 * math.log(2 * math.pi * math.e)


def integrated(found: GroupPrior) -> float:
    """Cross-entropy by quadrature, weight by weight."""
    names = ["weight"] * 4 + ["bias"]
    kl = sum(
        integrated_kl(found.model.prior.prior_of(name), m, s)
        for name, m, s in zip(names, MEANS.tolist(), SCALES.tolist(), strict=True)
    )
    return kl + entropy()


CLOSED = [
    kn.Normal(1.3),
    kn.Normal(0.4, loc=0.7),
    {"bias": kn.Normal(0.2), "*": kn.Normal(2.0)},
    {"bias": kn.LaplacePrior(0.8), "*": kn.Normal(2.0)},
    kn.EmpiricalBayes(kn.Normal(0.6)),
]


@pytest.mark.parametrize("prior", CLOSED, ids=repr)
def test_priors_with_a_closed_form_need_no_draws(prior):
    found = group(prior)
    drawn = Drawn(torch.full((1, 5), torch.nan, dtype=torch.float64), None, None, (MEANS, SCALES.square()))
    value = found.cross_entropy(drawn, points_of(found), normal=True)
    assert value.item() == pytest.approx(integrated(found), rel=1e-6)


@pytest.mark.parametrize("prior", [CLOSED[0], CLOSED[1], CLOSED[4]], ids=repr)
def test_normal_priors_need_only_moments_also_of_what_is_not_normal(prior):
    found = group(prior)
    drawn = Drawn(torch.full((1, 5), torch.nan, dtype=torch.float64), None, None, (MEANS, SCALES.square()))
    value = found.cross_entropy(drawn, points_of(found), normal=False)
    assert value.item() == pytest.approx(integrated(found), rel=1e-6)


@pytest.mark.parametrize("prior", [*CLOSED, kn.ScaleMixture(0.5, 1.0, 0.1), kn.Horseshoe(0.5)], ids=repr)
def test_draws_give_the_same_on_average(seed, prior):
    # within 4.5 standard errors, those of the terms of single draws
    found = group(prior)
    drawn = normal_draws(4000, seed)
    each = torch.stack([found.sampled(draw.unsqueeze(0), points_of(found)) for draw in drawn.values[:150]])
    assert each.mean().item() == pytest.approx(found.sampled(drawn.values[:150], points_of(found)).item(), rel=1e-9)
    error = each.std().item() / math.sqrt(4000)
    assert abs(found.sampled(drawn.values, points_of(found)).item() - integrated(found)) < 4.5 * error


def test_what_has_no_moments_is_sampled(seed):
    found = group(kn.Normal(1.3))
    values = normal_draws(3, seed).values
    blind = found.cross_entropy(Drawn(values, torch.zeros(3), None, None), {}, normal=False)
    expected = -kn.Normal(1.3).log_prob(values).sum() / 3
    assert blind.item() == pytest.approx(expected.item(), rel=1e-12)


def test_only_weights_without_a_closed_form_are_sampled(seed):
    found = group({"bias": kn.ScaleMixture(0.5, 1.0, 0.1), "*": kn.Normal(2.0)})
    assert found.others == ("bias",)
    drawn = normal_draws(2, seed)
    value = found.cross_entropy(drawn, {}, normal=True)
    fixed = kn.Normal(2.0).kl_from_normal(MEANS[:4], SCALES[:4]) + SCALES[:4].log().sum()
    fixed = fixed + 2 * math.log(2 * math.pi * math.e)
    sampled = -kn.ScaleMixture(0.5, 1.0, 0.1).log_prob(drawn.values[:, 4]).sum() / 2
    assert value.item() == pytest.approx((fixed + sampled).item(), rel=1e-12)


def test_flat_prior_costs_nothing(seed):
    found = group(kn.Flat())
    drawn = normal_draws(2, seed)
    assert found.cross_entropy(drawn, {}, normal=True).item() == pytest.approx(0.0, abs=1e-12)
    assert found.sampled(drawn.values, {}).item() == pytest.approx(0.0, abs=1e-12)


def test_learned_scale_has_a_gradient():
    found = group(kn.EmpiricalBayes(kn.Normal(0.6)))
    points = {name: value.requires_grad_() for name, value in points_of(found).items()}
    drawn = Drawn(MEANS.unsqueeze(0), None, None, (MEANS, SCALES.square()))
    (name,) = points
    for value in (found.cross_entropy(drawn, points, normal=True), found.cross_entropy(drawn, points, normal=False)):
        (slope,) = torch.autograd.grad(value, points[name])
        # d/d log s of Σ (m² + v) / 2s² + log s
        expected = 5 - (MEANS.square() + SCALES.square()).sum() / 0.36
        assert slope.item() == pytest.approx(expected.item(), rel=1e-9)


# --- family ----------------------------------------------------------------------------------------------------------


LAYOUT = Layout(("w",), (torch.Size([3]),))


class Shifted(FamilyModule):
    """A family that knows nothing in closed form: a logistic distribution."""

    def __init__(self):
        super().__init__(LAYOUT)
        self.loc = nn.Parameter(torch.zeros(3))

    def draw(self, count):
        noise = torch.rand(count, 3)
        standard = torch.logit(noise)
        return self.loc + standard, (-standard - 2 * nn.functional.softplus(-standard)).sum(1)

    def posterior(self, model, **common):
        raise NotImplementedError


def test_family_without_closed_forms_needs_only_draws_and_their_densities():
    family = Shifted()
    drawn = family.draw_with_terms(4)
    assert drawn.values.shape == (4, 3) and drawn.log_density.shape == (4,)
    assert drawn.entropy is None and drawn.moments is None
    assert family.held_log_density(drawn.values) is None
    assert not family.prefers_path and not family.normal_marginals
    assert family.layout is LAYOUT


# --- families --------------------------------------------------------------------------------------------------------


KINDS = [name for name in kn.families.__all__ if name != "Family"]


@pytest.mark.parametrize("name", KINDS)
def test_every_family_is_a_frozen_dataclass_that_works_without_settings(name):
    family = getattr(kn.families, name)()
    assert isinstance(family, kn.families.Family) and dataclasses.is_dataclass(family)
    assert family == getattr(kn.families, name)()
    assert repr(family).startswith(name)
    for each in dataclasses.fields(family):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(family, each.name, 1)
