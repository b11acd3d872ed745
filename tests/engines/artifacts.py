"""The SHA-256 of what a fit or a comparison found: all of it but the seconds that it took."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import knowable as kn
from knowable.core.storage.files import Files
from knowable.core.storage.folder import read_document

TIMES = ("seconds", "elapsed", "predict_seconds", "memory_mb")


def artifact_sha(found: kn.Posterior | kn.Comparison) -> str:
    """Of the saved posterior: its tensors, by their own hash, and its manifest. Of a comparison: all its records."""
    if isinstance(found, kn.Comparison):
        content: Any = [record.to_json() for record in found.records]
    else:
        with TemporaryDirectory() as folder:
            found.save(Path(folder) / "saved")
            content = read_document(Files.at(Path(folder) / "saved"), "manifest.json")
    return hashlib.sha256(json.dumps(_without_times(content), sort_keys=True).encode()).hexdigest()


def _without_times(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_times(value) for key, value in content.items() if key not in TIMES}
    return [_without_times(each) for each in content] if isinstance(content, list) else content
