"""Options that commands share."""

import pytest

from knowable.errors import InvalidArgument
from knowable.interfaces.cli.options import complete_method, complete_methods, parse_kinds, parse_task
from knowable.registry import METHODS


def test_kinds_are_pairs_and_an_order_is_a_list_of_levels():
    given = ["zip=categorical", "size = small < medium<large", "a=b=date"]
    assert parse_kinds(given) == {"zip": "categorical", "size": ["small", "medium", "large"], "a=b": "date"}
    assert parse_kinds(None) == {}


@pytest.mark.parametrize("text", ["zip", "=categorical", ""])
def test_a_kind_without_a_column_is_refused(text):
    with pytest.raises(InvalidArgument, match="COLUMN=KIND"):
        parse_kinds([text])


def test_tasks_are_three():
    assert parse_task(" Regression ") == "regression" and parse_task("auto") is None
    with pytest.raises(InvalidArgument, match="auto, regression or classification"):
        parse_task("clustering")


def test_every_method_and_auto_are_offered_for_completion():
    assert [name for name, _ in complete_method("")] == ["auto", *METHODS]
    assert [name for name, _ in complete_method("lap")] == ["laplace"]


def test_lists_of_methods_are_completed_behind_the_last_comma():
    assert complete_methods("map,lap") == ["map,laplace"]
    assert "auto" not in complete_methods("")
