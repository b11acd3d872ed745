"""The JSON Schema of artifacts describes those that are written, and refuses what the reader refuses."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.core.artifacts import make_originals

SCHEMA = json.loads(resources.files("knowable.core.storage").joinpath("artifact.schema.json").read_text())


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> dict[str, Any]:
    originals = make_originals(tmp_path_factory.mktemp("originals"))
    files = [file for path in originals.values() for file in sorted(path.rglob("*.json"))]
    return {str(file): json.loads(file.read_text()) for file in files}


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_document_that_is_written_fits_the_schema(documents):
    assert {each["body"]["kind"] for each in documents.values()} == {"posterior", "certificate", "estimator"}
    for name, each in documents.items():
        jsonschema.validate(each, SCHEMA)
        if Path(name).parent.name == "mapped":
            assert each["body"]["tensors"]["blocks"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 3), ("kind", 3), ("tensors.bytes", -1), ("tensors.bytes", 1.5), ("tensors.name", "../x"),
        ("tensors.sha256", "0"), ("content.diagnostics.terms", []), ("content.dtype", "object"), ("content.seed", -1),
        ("content.network.parameters", {"w": ["a"]}), ("content.log_evidence", [1, "guess", 0]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(path, value, documents):
    document = copy.deepcopy(next(each for each in documents.values() if each["body"]["kind"] == "posterior"))
    *way, last = path.split(".")
    at = document["body"]
    for key in way:
        at = at[key]
    at[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)
