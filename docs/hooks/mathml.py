"""Formulas become MathML while the site is built, so that its pages need no script and no network to show them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

SPACE_AFTER_NAME = re.compile(r"\\(log|exp|det|sin|cos|max|min)\s+(?=[a-zA-Z\\])")  # the thin space that TeX would put
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
UNKNOWN_COMMANDS = {r"\arg": r"\operatorname{arg}"}  # what the converter would print as it stands


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a rendered page."""
    return FORMULA.sub(_to_mathml, content)


def _to_mathml(match: re.Match[str]) -> str:
    tag, tex = match[1], html.unescape(match[2])
    for command, known in UNKNOWN_COMMANDS.items():
        tex = re.sub(re.escape(command) + r"(?![a-zA-Z])", lambda _, known=known: known, tex)
    tex = SPACE_AFTER_NAME.sub(r"\\\1\\,", tex)
    formula = convert(tex, display="block" if tag == "div" else "inline")
    return f'<div class="formula">{formula}</div>' if tag == "div" else formula
