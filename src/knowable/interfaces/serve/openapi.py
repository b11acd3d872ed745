"""The service described for other programs: the OpenAPI of its addresses, with the columns of the very model."""

from __future__ import annotations

from typing import Any

from knowable.interfaces.serve.rows import ARROW, CSV, JSON, Description, Limits, as_csv
from knowable.tabular.columns import Column
from knowable.tabular.label_columns import CategoricalColumn, OrdinalColumn
from knowable.tabular.number_columns import NumericColumn

_NUMBER, _TEXT, _TRUTH = {"type": "number"}, {"type": "string"}, {"type": "boolean"}
_NUMBERS = {"description": "One number, or nested lists of them where a row has several outcomes."}
_MANY = 20  # categories that a description lists
_ERROR = {
    "type": "object",
    "required": ["error", "field", "row", "request_id"],
    "properties": {
        "error": {"type": "string", "description": "What is wrong, in a sentence."},
        "field": {"type": ["string", "null"], "description": "The field or column that it is about."},
        "row": {"type": ["integer", "null"], "description": "The row that it is about, counted from 0."},
        "request_id": _TEXT,
    },
}
_REFUSALS = {
    400: "The body cannot be read.",
    401: "A token is needed.",
    408: "The body did not come in time.",
    413: "The body, or the number of rows, is too large.",
    415: "The body is of another type.",
    422: "The rows, or an option, cannot be used.",
    429: "Too much waits already; come again after Retry-After seconds.",
    503: "There is no worker yet, it took too long, or the service is shutting down.",
}


def operation(kind: str, about: Description, limits: Limits) -> dict[str, Any]:
    """``/predict`` or ``/explain``."""
    rows = example_rows(about)
    json_body = {
        "type": "object",
        "required": ["rows"],
        "additionalProperties": False,
        "properties": {
            "rows": {
                "type": "array",
                "minItems": 1,
                "maxItems": limits.rows_of(kind),
                "items": _row_schema(about),
            },
            **_options(about),
        },
    }
    content: dict[str, Any] = {JSON: {"schema": json_body, "example": {"rows": rows, "level": 0.9}}}
    if about.columns is not None or (about.shape is not None and len(about.shape) == 1):
        content[CSV] = {"schema": _TEXT, "example": as_csv(rows if about.columns is not None else _named(rows))}
        content[ARROW] = {"schema": {"type": "string", "format": "binary"}}
    answers = _answers(kind, about)
    return {
        "requestBody": {"required": True, "content": content},
        "security": [{}, {"token": []}],
        "responses": {"200": _response("Predictions, in the order of the rows.", answers), **_refusals(_REFUSALS)},
    }


def plain_operation(
    description: str, *, token: bool = True, also: int | None = None, media: str = JSON
) -> dict[str, Any]:
    """An address that is only read."""
    responses: dict[str, Any] = {"200": {"description": description, "content": {media: {"schema": {}}}}}
    if also is not None:
        responses[str(also)] = {"description": "Not so.", "content": {JSON: {"schema": {}}}}
    return {"responses": {**responses, **(_refusals({401: _REFUSALS[401]}) if token else {})}}


def _refusals(kinds: dict[int, str]) -> dict[str, Any]:
    return {str(status): _response(text, _ERROR) for status, text in kinds.items()}


def _response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _options(about: Description) -> dict[str, Any]:
    found: dict[str, Any] = {
        "level": {
            "type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": 0.9,
            "description": "Probability that an interval holds the outcome.",
        },
        "epsilon": {
            "type": "number", "minimum": 0, "exclusiveMaximum": 1, "default": 0.001,
            "description": "Draws stop when the label, or the interval, would be another with all of them with this "
            "probability at most. 0 takes all draws.",
        },
        "draws": {
            "type": "integer", "minimum": 1, "maximum": about.draws, "default": about.draws,
            "description": "The most posterior draws of a row.",
        },
    }  # fmt: skip
    if about.fast:
        found["fast"] = {**_TRUTH, "default": False, "description": "Let the student network answer, in one pass."}
    return found


# --- rows ------------------------------------------------------------------------------------------------------------


def _row_schema(about: Description) -> dict[str, Any]:
    if about.columns is None:
        return _array_schema(about.shape)
    return {
        "type": "object",
        "required": [column.name for column in about.columns],
        "additionalProperties": False,
        "properties": {
            **{name: {"type": ["string", "number", "boolean", "null"]} for name in about.ignored},
            **{column.name: _column_schema(column) for column in about.columns},
        },
    }


def _array_schema(shape: tuple[int, ...] | None) -> dict[str, Any]:
    if shape is None:
        return {"type": "array", "minItems": 1, "description": "Numbers, nested as the network takes them."}
    inner: dict[str, Any] = {"type": "number", "minimum": -1e30, "maximum": 1e30}
    for size in reversed(shape):
        inner = {"type": "array", "minItems": size, "maxItems": size, "items": inner}
    return inner


def _column_schema(column: Column) -> dict[str, Any]:
    """What a value of the column may be; null where it is not known."""
    if isinstance(column, NumericColumn):
        span = f"The training rows go from {column.low:.6g} to {column.high:.6g}."
        return {"type": ["number", "null"], "description": span}
    if column.kind == "date":
        return {"type": ["string", "null"], "format": "date", "description": "A date such as 2024-02-29."}
    if column.kind == "boolean":
        return {"type": ["boolean", "null"], "description": "true or false; also texts such as yes and no."}
    known = _known(column)
    more = "" if len(known) <= _MANY else f" and {len(known) - _MANY} more"
    return {
        "type": ["string", "number", "boolean", "null"],
        "description": f"Known: {', '.join(known[:_MANY])}{more}. A new one is averaged over these.",
    }


def _known(column: Column) -> tuple[str, ...]:
    if isinstance(column, CategoricalColumn):
        return column.categories
    return column.levels if isinstance(column, OrdinalColumn) else ()


def example_rows(about: Description) -> list[Any]:
    """Two rows as the model takes them."""
    if about.columns is None:
        return [_filled(about.shape or (1,), value) for value in (0.0, 0.5)]
    return [{column.name: _example(column, number) for column in about.columns} for number in (0, 1)]


def _filled(shape: tuple[int, ...], value: float) -> Any:
    return [value if len(shape) == 1 else _filled(shape[1:], value) for _ in range(shape[0])]


def _named(rows: list[Any]) -> list[dict[str, float]]:
    return [{f"x{place}": value for place, value in enumerate(row)} for row in rows]


def _example(column: Column, number: int) -> Any:
    if isinstance(column, NumericColumn):
        return float(f"{column.median if number == 0 else 0.5 * (column.median + column.high):.4g}")
    if column.kind == "date":
        from datetime import UTC, datetime

        return datetime.fromtimestamp(getattr(column, "centre", 0.0), UTC).date().isoformat()
    if column.kind == "boolean":
        return number == 0
    known = _known(column)
    return known[min(number, len(known) - 1)] if known else None


# --- answers ---------------------------------------------------------------------------------------------------------


def _answers(kind: str, about: Description) -> dict[str, Any]:
    if about.task == "regression":
        names = ("mean", "std", "low", "high", "aleatoric_std", "epistemic_std")
        properties: dict[str, Any] = dict.fromkeys(names, _NUMBERS)
        if about.promises:
            properties["certified_interval"] = {"type": "array", "description": "Holds with the certificate's promise."}
    else:
        properties = {"label": {"description": "The most probable class."}, "probabilities": {}}
        properties |= dict.fromkeys(("probability", "entropy", "aleatoric", "epistemic"), _NUMBERS)
        if about.promises:
            properties["set"] = {"type": "array", "description": "Holds the class with the certificate's promise."}
    if about.promises:
        properties["abstain"] = {**_TRUTH, "description": "Whether the certificate's rule refuses the row."}
        properties["p_value"] = {**_NUMBER, "description": "Share of held-out rows at least as uncertain."}
    properties["draws"] = {"type": "integer", "description": "Posterior draws that were taken."}
    told = "reasons" if kind == "explain" else "notes"
    properties[told] = {"type": "array", "items": _TEXT, "description": "What is odd about the row, in sentences."}
    return {
        "type": "object",
        "required": ["predictions", "level", "epsilon", "request_id"],
        "properties": {
            "predictions": {"type": "array", "items": {"type": "object", "properties": properties}},
            "level": _NUMBER,
            "epsilon": _NUMBER,
            "request_id": _TEXT,
        },
    }


def about_model(about: Description, limits: Limits) -> dict[str, Any]:
    """What ``/model`` tells."""
    columns = None
    if about.columns is not None:
        columns = [
            {"name": each.name, "kind": each.kind, "known": list(_known(each)), **_range_of(each)}
            for each in about.columns
        ]
    return {
        "name": about.name,
        "method": about.method,
        "task": about.task,
        "targets": list(about.targets),
        "classes": list(about.classes),
        "columns": columns,
        "ignored": list(about.ignored),
        "shape": None if about.shape is None else list(about.shape),
        "draws": about.draws,
        "fast": about.fast,
        "promises": list(about.promises),
        "abstain_bound": about.abstain_bound,
        "max_rows": limits.rows,
        "max_body": limits.body,
    }


def _range_of(column: Column) -> dict[str, float]:
    return {"low": column.low, "high": column.high} if isinstance(column, NumericColumn) else {}
