"""A report goes to JSON and comes back the same."""

import json
import math

import pytest
import torch

from knowable.errors import DamagedArtifact
from knowable.report import Report, render
from knowable.report.html import from_json, to_json
from knowable.report.report import Listing, Section
from knowable.report.scores import Cell, ScoreTable
from knowable.tabular.fit_report import fit_report
from tests.interfaces.cases import HOSTILE, whole_report
from tests.report.fitted import class_fit, linear_fit


@pytest.mark.parametrize("label", ["label", HOSTILE])
def test_a_report_with_every_part_comes_back_equal_and_renders_the_same(label):
    report = whole_report(torch.Generator().manual_seed(0), label)
    again = from_json(to_json(report))
    assert again == report and type(again.sections[0].panels[0]) is type(report.sections[0].panels[0])
    assert render(again) == render(report)


@pytest.mark.parametrize("make", [linear_fit, class_fit])
def test_the_report_of_a_run_comes_back_equal(make):
    report = fit_report(make())
    assert from_json(to_json(report)) == report


def test_numbers_that_are_not_finite_are_null_and_come_back_as_nan():
    table = ScoreTable("t", "", (), (("m", (Cell(math.nan, None, "–", "", ""),)),))
    report = Report("t", "l", sections=(Section("s", "l", tables=(table,)),))
    text = to_json(report)
    assert "NaN" not in text and json.loads(text)
    cell = from_json(text).sections[0].tables[0].rows[0][1][0]
    assert math.isnan(cell.value) and cell.standard_error is None


def test_a_report_of_an_older_version_without_a_new_field_is_read():
    report = Report("t", "l", sections=(Section("s", "l", listings=(Listing("x", ("a",), (("b",),)),)),))
    plain = json.loads(to_json(report))
    del plain["sections"][0]["listings"][0]["lines"]
    assert from_json(json.dumps(plain)) == report


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"title": 3, "lead": "l"}', '{"title": "t", "lead": "l", "facts": 1}']
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(DamagedArtifact, match="cannot be read"):
        from_json(text)


def test_only_panels_are_made_where_panels_are():
    plain = json.loads(to_json(whole_report(torch.Generator().manual_seed(0))))
    plain["sections"][0]["panels"][0]["kind"] = "Popen"
    with pytest.raises(DamagedArtifact):
        from_json(json.dumps(plain))
