"""What a comparison says of made-up scores is what one counts by hand, and every way out holds the same numbers."""

from __future__ import annotations

import csv
import io
import json
import math

import pandas as pd
import pytest

from knowable.comparison.journal import Record
from knowable.errors import InvalidArgument
from tests.comparison.cases import THREE, made_up, record


def test_best_and_ranking_are_by_the_lowest_nll():
    found = made_up(THREE)
    assert found.best == "a" and [place.method for place in found.ranking()] == ["a", "b", "c"]
    assert found.mean("c").mean == 5.0 and found.difference("c", "a").mean == 3.0
    assert found.by_fold("b", "nll") == {0: 1.1, 1: 2.2, 2: 3.0}


def test_scores_that_are_better_high_rank_the_other_way():
    found = made_up(THREE, higher=THREE)
    assert [place.method for place in found.ranking("accuracy")] == ["c", "b", "a"]


def test_the_table_is_a_data_frame_in_the_making():
    frame = pd.DataFrame(made_up(THREE, methods=("c", "b", "a", "late"), not_run=(("late", 0),)).table)
    assert frame["method"].tolist() == ["a", "b", "c", "late"]
    assert frame["rank"].tolist()[:3] == [1, 2, 3] and frame["folds"].tolist() == [3, 3, 3, 0]
    assert frame["verdict"].tolist() == ["best", "tied", "worse", "no result"]
    assert frame["nll"].tolist()[:3] == pytest.approx([2.0, 2.1, 5.0]) and math.isnan(frame["nll"][3])
    assert frame["nll_se"][0] == pytest.approx(1 / math.sqrt(3))
    assert frame["nll_difference"].tolist()[:3] == pytest.approx([0.0, 0.1, 3.0])


def test_failures_name_the_fold_and_the_reason():
    records = (record("a", 0, nll=1.0), Record("a", "a", 1, error="ValueError: no"), record("b", 0, nll=2.0))
    found = made_up(THREE, records=records, methods=("a", "b"), not_run=(("b", 1),), folds=2)
    assert found.failures("a") == {1: "ValueError: no"} and found.failures("b") == {1: "not run: the budget was spent"}
    assert found.mean("a").folds == 1 and math.isnan(found.mean("a").standard_error)


def test_warnings_are_counted_over_fits():
    records = [Record("a", "a", fold, scores={"nll": 1.0}, warnings=("slow",) * (fold < 2)) for fold in range(3)]
    assert made_up(THREE, records=tuple(records), methods=("a",)).warnings("a") == {"slow": 2}


def test_warnings_that_differ_in_numbers_alone_are_one():
    texts = [("ended after 21 steps", "R-hat 1.3"), ("ended after 1,335 steps",), ("ended after 4 steps", "no noise")]
    records = [Record("a", "a", fold, scores={"nll": 1.0}, warnings=each) for fold, each in enumerate(texts)]
    found = made_up(THREE, records=tuple(records), methods=("a",)).warnings("a")
    assert found == {"ended after 21 steps": 3, "R-hat 1.3": 1, "no noise": 1}


def test_agreement_is_averaged_over_folds():
    records = [Record("a", "a", fold, scores={"nll": 1.0}, agreement={"ks": 0.1 * (fold + 1)}) for fold in range(3)]
    found = made_up(THREE, records=tuple(records), methods=("a", "b"), reference="b")
    assert found.agreement("a")["ks"].mean == pytest.approx(0.2) and found.agreement("b") == {}


@pytest.mark.parametrize(
    "ask", [lambda c: c.mean("z"), lambda c: c.mean("a", "zzz"), lambda c: c.ranking("rmse"), lambda c: c.failures("z")]
)
def test_unknown_methods_and_scores_are_refused(ask):
    with pytest.raises(InvalidArgument, match="must be one"):
        ask(made_up(THREE))


def test_csv_holds_the_table_and_blanks_for_what_is_not_known(tmp_path):
    found = made_up(THREE, methods=("a", "b", "c", "late"))
    text = found.to_csv(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == text == found.to_csv()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["method"] for row in rows] == ["a", "b", "c", "late"]
    assert float(rows[2]["nll"]) == 5.0 and rows[3]["nll"] == "" and rows[3]["rank"] == ""


def test_csv_of_folds_has_every_record():
    rows = list(csv.DictReader(io.StringIO(made_up(THREE).to_csv(folds=True))))
    assert len(rows) == 9 and (rows[4]["method"], rows[4]["fold"], float(rows[4]["nll"])) == ("b", "1", 2.2)


def test_json_is_strict_and_holds_everything(tmp_path):
    found = made_up({"a": [1.0, 2.0], "b": [math.inf, 2.0]}, methods=("a", "b", "late"), not_run=(("late", 1),))
    text = found.to_json(tmp_path / "all.json")

    def refuse(name):
        raise AssertionError(name)

    content = json.loads(text, parse_constant=refuse)
    assert content["best"] == "a" and content["table"][1]["nll"] == "inf" and content["table"][2]["nll"] is None
    assert content["not_run"] == [{"method": "late", "fold": 1}] and len(content["folds"]) == 4
    assert (tmp_path / "all.json").read_text() == text


def test_html_is_written_where_told(tmp_path):
    text = made_up(THREE).to_html(tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text() == text
    assert "<table" in made_up(THREE)._repr_html_()
