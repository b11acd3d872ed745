"""Adapters of a small transformer: the study runs, and its rows are what they say."""

from __future__ import annotations

import pytest
from benchmarks.study import Rows

from benchmarks import adapters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft, in transformers
def test_quick_run_has_a_row_for_every_method(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setattr(adapters, "FOLDER", tmp_path)
    run = adapters.run(quick=True, only="*", rows=Rows())
    assert run["methods"].keys() == adapters.contenders().keys()
    for fits in run["methods"].values():
        assert "error" not in fits["0"] and 0 <= fits["0"]["ece"] <= 1
    assert all(f"| {title} |" in adapters.to_markdown(run) for title in run["methods"])


@pytest.mark.slow
def test_docstrings_are_there_once_and_cut():
    found = adapters.docstrings("stdlib")
    texts = [text for text, _ in found]
    assert len(texts) == len(set(texts)) > 1000
    assert all(12 <= len(text.split()) <= 60 for text in texts)
