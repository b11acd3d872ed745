"""Reading pages, and holding their words against a golden copy."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "hr", "img", "input"}
GOLDEN = Path(__file__).with_name("golden")


class Reader(HTMLParser):
    """Collects elements with their attributes, and checks that they nest."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.text = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def check_golden(page, name):
    """The words of a page, one run of text a line and numbers as # or left out, are those of ``golden/{name}.txt``.

    ``WRITE_GOLDEN=1 pytest tests/report`` writes the files after a change of words that is meant.
    """
    runs = (" ".join(text.split()) for text in Reader(page).text)
    numbered = (re.sub(r"-?\d[\d.,]*(e-?\d+)?", "#", text) for text in runs)
    words = "\n".join(text for text in numbered if re.search("[a-z]{3}", text)) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(words, encoding="utf-8")
    assert words == path.read_text(encoding="utf-8")
