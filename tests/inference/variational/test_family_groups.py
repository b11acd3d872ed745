from __future__ import annotations

import pytest
from torch import nn

import knowable as kn
from knowable.inference.variational.structured import check_families, group_weights

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
