"""A report as one self-contained HTML page: no network, readable on a phone, on paper and without a pointer.

The page carries a content security policy that forbids every request and every script but its own, which is named by
its hash. So nothing leaves the page even if a word from outside should ever slip through the escaping.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import types
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from knowable.core.support.files import write_atomically
from knowable.errors import DamagedArtifact, MissingExtra
from knowable.report import drawing as drawn
from knowable.report import figures, panels
from knowable.report.report import Listing, Report
from knowable.report.scores import ScoreColumn

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
        (i, j): drawn.draw(panel, key=f"s{i}f{j}")
        for i, section in enumerate(report.sections)
        for j, panel in enumerate(section.panels)
        if panel.kind != "pictures"
    }
    script = script_text() if any(drawing.marks for drawing in drawings.values()) else ""
    template = environment.get_template("report.html.jinja")
    return template.render(
        report=report,
        drawings=drawings,
        marks={place: _as_json(drawing) for place, drawing in drawings.items()},
        colours=figures,
        generator=GENERATOR,
        script=script,
        policy=policy(script),
    )


def render_listing(listing: Listing) -> str:
    """One table alone, as an HTML fragment for notebooks.

    Raises:
        MissingExtra: If jinja2 is not installed.
    """
    return str(_environment().get_template("macros.html.jinja").module.listing(listing))  # type: ignore[attr-defined]


def script_text() -> str:
    """The one script of a page: it reads values off figures for the pointer and the arrow keys."""
    return resources.files("knowable.report").joinpath("templates/report.js").read_text(encoding="utf-8")


def policy(script: str) -> str:
    """The content security policy of a page with this script: styles of its own, the script, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page to ``path`` atomically, and return where it is."""
    return write_atomically(path, render(report))


def _as_json(drawing: drawn.Drawing) -> str:
    """The marks of a drawing for the script: ``[x, y, text]`` or ``[x, y, text, row]`` each."""
    marks = [[m.x, m.y, m.text] if m.row is None else [m.x, m.y, m.text, m.row] for m in drawing.marks]
    return json.dumps(marks, ensure_ascii=False, separators=(",", ":")) if marks else ""


def _environment() -> Environment:
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("Reports need jinja2, which is not there. Run: pip install 'knowable[report]'.") from None
    return jinja2.Environment(
        loader=jinja2.PackageLoader("knowable.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


# --- A report as JSON and back, so that its page can be made again without the data ----------------------------------

_PANELS: dict[str, type[panels.Panel]] = {
    cls.kind: cls
    for cls in vars(panels).values()
    if isinstance(cls, type) and issubclass(cls, panels.Panel) and cls is not panels.Panel
}


def to_json(report: Report) -> str:
    """The report as JSON text; numbers that are not finite become null."""
    return json.dumps(finite(report.to_dict()), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Report:
    """The inverse of :func:`to_json`: only the classes of a report are ever made.

    Raises:
        DamagedArtifact: If the text is not a report.
    """
    try:
        return _build(Report, json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedArtifact(
            f"The saved report cannot be read ({type(error).__name__}: {error}): it was written by another version of "
            f"knowable, or by hand. Fit again, or give the data with --data."
        ) from None


def finite(value: Any) -> Any:
    """The same with None in place of numbers that are NaN or infinite, as JSON wants it."""
    if isinstance(value, Mapping):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _build(kind: Any, value: Any) -> Any:
    """A value of the annotated type ``kind`` from plain JSON."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is tuple:
        if inside[-1] is Ellipsis:
            return tuple(_build(inside[0], each) for each in value)
        return tuple(_build(each, own) for each, own in zip(inside, value, strict=True))
    if origin in (Union, types.UnionType):
        return None if value is None else _build(next(each for each in inside if each is not type(None)), value)
    if dataclasses.is_dataclass(kind):
        return _build_object(kind, value)
    if kind is float:
        return math.nan if value is None else float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _build_object(kind: Any, value: Mapping[str, Any]) -> Any:
    made = _PANELS[value["kind"]] if issubclass(kind, panels.Panel) else kind
    if made is ScoreColumn and "key" in value:  # as reports were saved by earlier versions
        value = {**value, "name": value["key"]}
    hints = get_type_hints(made)
    given = {f.name: _build(hints[f.name], value[f.name]) for f in dataclasses.fields(made) if f.name in value}
    return made(**given)
