"""A report as one self-contained HTML page: no network, no scripts, readable on a phone and on paper."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from knowable.errors import MissingExtra
from knowable.interfaces.report import figures, style
from knowable.interfaces.report.content import Report

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = '<meta name="generator" content="knowable">'
"""The mark by which a page says who made it."""


def render(report: Report) -> str:
    """The page as text. Every string of the report is escaped.

    Raises:
        MissingExtra: If jinja2 or matplotlib is not installed.
    """
    environment = _environment()
    drawings = {
        (i, j): figures.svg(panel, key=f"s{i}f{j}")
        for i, section in enumerate(report.sections)
        for j, panel in enumerate(section.panels)
        if panel.kind != "pictures"
    }
    template = environment.get_template("report.html.jinja")
    return template.render(report=report, drawings=drawings, colours=style, generator=GENERATOR)


def write(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path``, all of it or nothing, and return where it is."""
    path = Path(path)
    page = render(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(page)
    try:
        os.chmod(file.name, 0o666 & ~_umask())  # a temporary file is private; a report is an ordinary file
        os.replace(file.name, path)
    except OSError:
        os.unlink(file.name)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _environment() -> Environment:
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("Reports need jinja2, which is not installed. Run: pip install knowable[report]") from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("knowable.interfaces.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
