"""``knowable methods``."""

import json

from knowable.registry import METHODS
from tests.interfaces.cli.calling import call


def test_every_method_is_listed_with_aliases_and_family():
    printed = call("methods").stdout
    for entry in METHODS.values():
        assert entry.name in printed and entry.family in printed
        assert all(alias in printed for alias in entry.aliases)
        assert entry.summary.split()[0] in printed


def test_the_list_for_machines_is_the_registry():
    found = json.loads(call("methods", "--json").stdout)
    assert [each["name"] for each in found] == list(METHODS)
    assert all(each["summary"] == METHODS[each["name"]].summary for each in found)


def test_one_family_can_be_asked_for_and_an_unknown_one_is_refused():
    found = json.loads(call("methods", "--family", "point", "--json").stdout)
    assert {each["family"] for each in found} == {"point"}
    result = call("methods", "--family", "points")
    assert result.exit_code == 2 and "point" in result.stderr
