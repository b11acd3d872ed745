"""The report of a run: everything the reader needs, warnings first."""

import dataclasses

import pytest

from knowable.core.posterior.diagnostics import Diagnostics
from knowable.registry import find_method
from knowable.report import Notice, render
from knowable.report.rejection import rejection_listing
from knowable.tabular.fit_report import all_notices, citations, fit_report
from tests.report.fitted import class_fit, linear_fit
from tests.report.pages import check_golden

SECTIONS = [
    "What was fitted",
    "The data",
    "Scores and calibration",
    "Feature importance and partial dependence",
    "The most and least certain rows",
    "Convergence",
]


@pytest.fixture(scope="module", params=["numbers", "classes"])
def made(request):
    fitted = linear_fit() if request.param == "numbers" else class_fit()
    return request.param, fitted, fit_report(fitted)


def panels(report, kind):
    return [panel for section in report.sections for panel in section.panels if panel.kind == kind]


def test_every_part_is_there_in_its_order(made):
    kind, fitted, report = made
    assert [section.title for section in report.sections] == SECTIONS
    assert fitted.target in report.title and fitted.data in report.title
    facts = dict(report.facts)
    assert facts["Method"] == fitted.method.cls_name and facts["Training rows"] == str(fitted.trained_on)
    assert len(panels(report, "calibration")) == (2 if kind == "numbers" else 1)
    assert len(panels(report, "bars")) == 1
    assert len(panels(report, "truth")) == (1 if kind == "numbers" else 0)
    assert len(panels(report, "dependence")) == len(fitted.kinds)
    assert len(panels(report, "lines")) == 1
    assert [listing.title for listing in report.sections[4].listings] == [
        "The most certain rows",
        "The least certain rows",
    ]


def test_the_rows_of_the_tables_can_be_found_in_the_figure(made):
    kind, _, report = made
    listed = {line for listing in report.sections[4].listings for line in listing.lines}
    assert len(listed) == 10
    if kind == "numbers":
        assert listed <= set(panels(report, "truth")[0].rows)


def test_classes_have_their_confusions_and_all_say_what_to_reject(made):
    kind, fitted, report = made
    *others, rejection = report.sections[2].listings
    titles = [listing.title for listing in others]
    assert titles == ([] if kind == "numbers" else ["Confusion matrix (rows: truth, columns: prediction)"])
    assert rejection == rejection_listing(fitted.prediction, fitted.y, scale=fitted.outcomes.std)


def test_every_figure_has_a_text_alternative_with_numbers(made):
    _, _, report = made
    for section in report.sections:
        for panel in section.panels:
            assert len(panel.alt) > 40 and any(letter.isdigit() for letter in panel.alt)


def test_the_page_says_what_it_said_before(made):
    kind, _, report = made
    check_golden(render(report), f"fit_{kind}")


def test_warnings_of_the_fit_the_data_and_the_quality_come_once_each():
    fitted = linear_fit(notices=(Notice("Data", "Odd."), Notice("Data", "Odd.")), held_out=False)
    posterior = fitted.posterior
    posterior.diagnostics = Diagnostics(converged=False, message="cut short", notes=("beta is 0.5",))
    texts = [notice.text for notice in all_notices(fitted)]
    assert "converged (cut short)" in texts[0]
    assert texts.count("Odd.") == 1 and "beta is 0.5" in texts
    assert any("too good to be true" in text for text in texts)


def test_a_fit_that_was_warned_of_already_is_not_warned_of_twice():
    fitted = linear_fit(notices=(Notice("Fit", "The chains have not mixed."),))
    fitted.posterior.diagnostics = Diagnostics(converged=False)
    found = [notice for notice in all_notices(fitted) if notice.source == "Fit"]
    assert [notice.text for notice in found] == ["The chains have not mixed."]


def test_why_a_method_was_chosen_is_said_where_it_was():
    fitted = class_fit()
    assert fit_report(fitted).sections[0].lead.startswith("MeanFieldVI: ")
    fitted.estimator.method = "auto"
    assert fitted.why == "MeanFieldVI was chosen automatically: it was asked for."


def test_the_papers_and_the_library_are_cited():
    names = [citation.name for citation in citations(find_method("laplace"))]
    assert names[-1] == "The library" and any("mackay1992" in name for name in names)


def test_the_report_is_the_same_twice():
    fitted = linear_fit()
    assert fit_report(fitted) == fit_report(dataclasses.replace(fitted))
