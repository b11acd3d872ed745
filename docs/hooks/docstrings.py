"""Docstrings are written with ``.. math::`` and roles, which read well in a terminal; the site wants Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

MATH_BLOCK = re.compile(r"^(?P<indent> *)\.\. math:: *(?P<first>.*)(?P<rest>(?:\n(?P=indent) +\S.*)*)", re.MULTILINE)
MATH_INLINE = re.compile(r":math:`([^`]+)`")
QUALIFIED_ROLE = re.compile(r":[a-z]+:`(~?)(knowable\.[\w.]+)`")
EXAMPLE_SECTION = re.compile(r"^Example:$", re.MULTILINE)
LITERAL_BLOCK = re.compile(r"::$(?=\n\n +)", re.MULTILINE)
OTHER_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")


class MarkdownDocstrings(griffe.Extension):
    """Translate the docstring of every object."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each object when its package has been read."""
        if obj.is_module and obj.is_init_module:
            obj.exports = None  # what a package re-exports is shown where it is defined, once
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Formulas between dollars, names of this package as links, other names as code."""
    text = MATH_BLOCK.sub(_block, text)
    text = EXAMPLE_SECTION.sub("Examples:", text)
    text = LITERAL_BLOCK.sub(":", text)
    text = MATH_INLINE.sub(r"$\1$", text)
    text = QUALIFIED_ROLE.sub(_link, text)
    return OTHER_ROLE.sub(r"`\1`", text)


def _block(match: re.Match[str]) -> str:
    indent = match["indent"]
    lines = [match["first"], *match["rest"].split("\n")]
    formula = f"\n{indent}".join(line.strip() for line in lines if line.strip())
    return f"{indent}$$\n{indent}{formula}\n{indent}$$"


def _link(match: re.Match[str]) -> str:
    short, path = match.groups()
    return f"[`{path.rsplit('.', 1)[-1] if short else path}`][{path}]"
