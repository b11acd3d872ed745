"""Tests of the bibliography: every entry is BibTeX that a program can read."""

from __future__ import annotations

import re

import pytest

from knowable.registry import bibliography

BIBTEX = bibliography()


@pytest.mark.parametrize("key", BIBTEX)
def test_every_entry_is_complete(key):
    entry = BIBTEX[key]
    assert re.match(rf"@(article|book|inproceedings|misc|phdthesis){{{key},\n", entry)
    assert entry.count("{") == entry.count("}")
    fields = dict(re.findall(r"^\s+(\w+)\s+= \{(.+)\},?$", entry, re.MULTILINE))
    assert {"author", "title", "year"} <= fields.keys()
    assert re.fullmatch(r"(19|20)\d\d", fields["year"])
    assert key.endswith(fields["year"])
    assert key.removesuffix(fields["year"]) in fields["author"].lower()
    assert "journal" in fields or "booktitle" in fields or "publisher" in fields
