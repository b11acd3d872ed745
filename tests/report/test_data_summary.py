"""Columns in words."""

import pandas
import pytest

from knowable.report.row_panels import data_listing


@pytest.fixture
def frame():
    return pandas.DataFrame(
        {
            "n": [1.0, 2.0, None, 5.0],
            "t": ["a", "a", "b", None],
            "yes": [True, True, False, True],
            "day": pandas.to_datetime(["2020-01-05", "2021-03-04", "2020-02-01", "2020-02-02"]),
            "y": [3, 4, 5, 6],
            "id": ["q", "r", "s", "t"],
            "nothing": [None, None, None, None],
        }
    )


def test_every_column_says_its_kind_its_gaps_and_what_it_holds(frame):
    kinds = {"n": "numeric", "t": "categorical", "yes": "boolean", "day": "date"}
    rows = {row[0]: row[1:] for row in data_listing(frame, kinds, "y").rows}
    assert next(iter(rows)) == "y"
    assert rows["y"] == ("outcome", "none", "4", "3 to 6, median 4.5")
    assert rows["n"] == ("numeric", "1 (25%)", "3", "1 to 5, median 2")
    assert rows["t"] == ("categorical", "1 (25%)", "2", "a (2), b (1)")
    assert rows["yes"][-1] == "true in 75%"
    assert rows["day"][-1] == "2020-01-05 to 2021-03-04"
    assert rows["id"][0] == "not used" and rows["id"][-1].endswith("…")
    assert rows["nothing"][-1] == "nothing"


def test_of_very_many_columns_some_are_listed():
    wide = pandas.DataFrame({f"c{i}": [1.0, 2.0] for i in range(100)})
    listing = data_listing(wide, {}, "c99")
    assert listing.rows[0][0] == "c99" and len(listing.rows) == 61 and "39 more" in listing.note
