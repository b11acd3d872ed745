"""``knowable cite``."""

import json

import pytest

from tests.interfaces.cli.calling import call


@pytest.mark.parametrize("name", ["mean_field_vi", "mfvi", "MeanFieldVI"])
def test_bibtex_is_printed_by_name_alias_or_class(name):
    result = call("cite", name)
    assert result.exit_code == 0
    assert "blundell2015" in result.stdout and result.stdout.count("{") == result.stdout.count("}")


def test_a_paper_of_two_methods_is_printed_once():
    assert call("cite", "map", "exact_linear").stdout.count("{mackay1992") == 1


def test_for_machines_each_method_has_its_papers():
    found = json.loads(call("cite", "map", "mfvi", "--json").stdout)
    assert list(found) == ["map", "mean_field_vi"]
    assert any("blundell2015" in paper for paper in found["mean_field_vi"])


def test_an_unknown_method_names_the_nearest_on_one_line():
    result = call("cite", "mean_feild_vi")
    assert result.exit_code == 2 and result.stdout == ""
    assert "Did you mean 'mean_field_vi'?" in result.stderr
    assert result.stderr.count("\n") == 1
