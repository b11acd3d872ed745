"""Methods have names of their own, and the same settings in every process."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.comparison.methods import Candidate, as_candidates, as_method, plain_repr
from knowable.errors import InvalidArgument, InvalidType


def test_names_aliases_and_objects_are_taken_in_order():
    found = as_candidates(["mfvi", kn.MAP(), kn.MAP(epochs=5)], as_method)
    assert [each.name for each in found] == ["mean_field_vi", "map", "MAP(epochs=5)"]
    assert [type(each.method) for each in found] == [kn.MeanFieldVI, kn.MAP, kn.MAP]
    assert [each.settings for each in found] == ["MeanFieldVI()", "MAP()", "MAP(epochs=5)"]


def test_a_dict_gives_them_names_and_one_alone_is_enough():
    assert as_candidates({"mine": "map"}, as_method) == (Candidate("mine", kn.MAP()),)
    assert as_candidates("map", as_method) == as_candidates(kn.MAP(), as_method) == (Candidate("map", kn.MAP()),)


def test_a_candidate_knows_its_papers_by_name_or_class():
    for method in (kn.NUTS(draws=7), "nuts"):
        entry = Candidate("x", method).entry
        assert entry is not None and entry.name == "nuts"
    assert Candidate("x", "auto").entry is None


@pytest.mark.parametrize(
    ("methods", "error", "words"),
    [
        ([], InvalidArgument, "methods is empty"),
        (3, InvalidType, "must be a list of methods"),
        ([3], InvalidType, "such as MeanFieldVI"),
        ([kn.MAP], InvalidType, r"write MAP\(\) with parentheses"),
        (["map", "map"], InvalidArgument, "has 'map' twice"),
        (["map", kn.MAP()], InvalidArgument, "has 'map' twice"),
        (["mapp"], InvalidArgument, "Did you mean 'map'"),
    ],
)
def test_what_is_no_list_of_methods_is_refused(methods, error, words):
    with pytest.raises(error, match=words):
        as_candidates(methods, as_method)


def test_settings_have_no_addresses_in_them():
    class Thing:
        pass

    assert plain_repr([Thing()]) == plain_repr([Thing()]) and "0x" not in plain_repr(Thing())
