"""The page is self-contained, escaped and accessible, and shows the ranking with its standard errors."""

from __future__ import annotations

import itertools
import re

import pytest

from knowable.comparison.journal import Record
from knowable.comparison.page import GENERATOR, fragment, page
from tests.comparison.cases import HOSTILE, THREE, made_up, record
from tests.comparison.page_reader import Reader


def whole(label: str = "label"):
    """A comparison with every part, and ``label`` wherever words from outside can be."""
    records = [
        record(f"{label} {name}", fold, nll=value)
        for name, values in THREE.items()
        for fold, value in enumerate(values)
    ]
    records.append(Record(f"{label} d", "d", 0, scores={"nll": 9.0}, agreement={label: 0.5}, warnings=(label,)))
    records.append(Record(f"{label} d", "d", 1, error=label))
    methods = (*(f"{label} {name}" for name in "abcd"), label)
    return made_up(
        THREE, records=tuple(records), methods=methods, not_run=((label, 0),), reference=f"{label} a",
        facts={label: label, "Rows": "9"}, notices=(label,), citations={f"{label} a": (label,), f"{label} b": (label,)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def text() -> str:
    return page(whole())


def cells(reader_text: str) -> str:
    return " ".join(reader_text.split())


def test_the_ranking_is_shown_with_standard_errors_and_paired_differences():
    reader = Reader(page(made_up(THREE)))
    said = cells(" ".join(reader.text))
    assert "2.00 ± 0.58" in said and "+0.100 ± 0.058" in said and "tied with the best" in said
    assert said.index("a has the lowest NLL") < said.index("Paired difference from the best")
    names = [attributes.get("aria-label", "") for attributes in reader.all("svg")]
    assert any("a 2.00 ± 0.58; b 2.10 ± 0.55; c 5.00 ± 0.58" in name for name in names)


def test_nothing_is_loaded_from_the_network(text):
    for tag, attributes in Reader(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "video", "audio")
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster", "data"):
            assert attributes.get(name, "#").startswith("#"), (tag, name)
    assert "@import" not in text and "@font-face" not in text and "url(" not in text
    assert "http:" not in text and "https:" not in text and GENERATOR in text


def test_words_from_outside_are_escaped_wherever_they_appear():
    text = page(whole(HOSTILE))
    assert "<script" not in text.lower() and "<script" not in fragment(whole(HOSTILE)).lower()
    assert HOSTILE in "".join(Reader(text).text)


def test_identifiers_are_unique_and_references_resolve(text):
    reader = Reader(text)
    identifiers = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers)) >= 7
    for _, attributes in reader.elements:
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in identifiers


def test_figures_tables_and_headings_can_be_read_aloud(text):
    reader = Reader(text)
    assert reader.all("html")[0]["lang"] == "en"
    assert all(each.get("aria-label") for each in reader.all("svg")) and len(reader.all("svg")) == 2
    assert all(each.get("scope") in ("row", "col") for each in reader.all("th"))
    assert len(reader.all("caption")) == len(reader.all("table")) == 4
    levels = [int(tag[1]) for tag, _ in reader.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    regions = [each for each in reader.all("div") if each.get("class") == "scroll"]
    assert all(each.get("tabindex") == "0" and each.get("aria-label") for each in regions)


def test_every_row_of_a_table_is_as_wide_as_its_heading(text):
    for table in re.findall(r"<table>.*?</table>", text, flags=re.DOTALL):
        widths = {len(re.findall(r"<t[hd][ >]", row)) for row in re.findall(r"<tr.*?</tr>", table, flags=re.DOTALL)}
        assert len(widths) == 1


def test_the_page_adapts_to_phones_and_paper(text):
    assert 'name="viewport"' in text and "@media print" in text and "@media (max-width" in text


def test_warnings_come_before_results_and_a_clean_run_says_so(text):
    said = " ".join(Reader(text).text)
    assert said.index("Warnings") < said.index("Ranking") and "not run: the budget was spent" in said
    assert "No warnings" in page(made_up(THREE))


def test_a_reference_that_was_never_fitted_is_said():
    assert "was not fitted on any fold" in page(made_up(THREE, reference="a"))


def test_papers_are_listed_once_under_all_their_methods(text):
    assert text.count("<pre>label</pre>") == 1 and "<h3>label a, label b</h3>" in text
