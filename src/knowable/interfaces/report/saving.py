"""A report as JSON and back, so that its page can be made again without the data."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from knowable.errors import DamagedArtifact
from knowable.interfaces.report import panels
from knowable.interfaces.report.content import Report

_PANELS: dict[str, type[panels.Panel]] = {
    cls.kind: cls
    for cls in vars(panels).values()
    if isinstance(cls, type) and issubclass(cls, panels.Panel) and cls is not panels.Panel
}


def to_json(report: Report) -> str:
    """The report as JSON text; numbers that are not finite become null."""
    return json.dumps(_plain(report.to_dict()), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
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
    hints = get_type_hints(made)
    given = {f.name: _build(hints[f.name], value[f.name]) for f in dataclasses.fields(made) if f.name in value}
    return made(**given)
