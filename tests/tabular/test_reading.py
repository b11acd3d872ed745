"""Tests of reading tables from wherever they are."""

from __future__ import annotations

import builtins
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import knowable as kn
from knowable.tabular import Table, read_table

FRAME = pd.DataFrame({"x": [1.0, 2.0], "colour": ["red", "blue"]})


def test_files_streams_and_standard_input_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "data.csv"
    FRAME.to_csv(file, index=False)
    content = file.read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    sources = [file, str(file), io.BytesIO(content), io.StringIO(content.decode()), "-"]
    for table in map(read_table, sources):
        assert table.names == ("x", "colour")
        assert table.column("x").tolist() == [1.0, 2.0]
        assert table.where(1).endswith("line 3")


def test_errors_name_the_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.csv").write_text("")
    with pytest.raises(kn.InvalidData, match=r"mine.csv is empty"):
        read_table(tmp_path / "mine.csv")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(kn.InvalidData, match="standard input is empty"):
        read_table("-")


def test_a_table_is_itself():
    table = read_table(FRAME)
    assert read_table(table) is table


def test_data_frames_keep_their_values_and_are_not_changed():
    frame = FRAME.set_index(pd.Index([7, 3]))
    table = read_table(frame)
    assert table.column("colour").tolist() == ["red", "blue"]
    assert frame.index.tolist() == [7, 3]


def test_a_series_is_a_table_of_one_column():
    assert read_table(pd.Series([1, 2], name="y")).names == ("y",)


@pytest.mark.parametrize("make", [np.array, torch.tensor, list], ids=["numpy", "torch", "list"])
def test_arrays_have_numbered_columns(make: Any):
    table = read_table(make([[1.0, 2.0], [3.0, 4.0]]))
    assert table.names == ("x0", "x1")
    assert table.column("x1").tolist() == [2.0, 4.0]


def test_arrays_with_names_keep_them():
    table = read_table(np.array([(1.0, 2), (3.0, 4)], dtype=[("a", float), ("b", int)]))
    assert table.names == ("a", "b")


def test_mappings_are_columns():
    table = read_table({"a": [1, 2], "b": np.array([0.5, 1.5]), 3: torch.tensor([7, 8])})
    assert table.names == ("a", "b", "3")
    assert table.column("3").tolist() == [7, 8]


def test_polars_frames_are_read(tmp_path: Path):
    pl = pytest.importorskip("polars")
    import datetime

    frame = pl.DataFrame(
        {"x": [1.0, None], "n": [1, 2], "s": ["a", None], "b": [True, False], "d": [datetime.date(2024, 2, 29)] * 2}
    )
    for source in (frame, frame.lazy()):
        table = read_table(source)
        assert table.names == ("x", "n", "s", "b", "d")
        assert table.column("x").isna().tolist() == [False, True]
        assert table.column("s").isna().tolist() == [False, True]
        assert str(table.column("d")[0].date()) == "2024-02-29"


def test_parquet_files_and_arrow_tables_are_read(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    arrow = pa.table({"x": [1.0, 2.0], "colour": ["red", "blue"]})
    parquet.write_table(arrow, tmp_path / "data.parquet")
    for source in (arrow, tmp_path / "data.parquet"):
        assert read_table(source).column("colour").tolist() == ["red", "blue"]


def test_a_parquet_file_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "data.parquet"
    file.write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(kn.MissingExtra, match=r"knowable\[data\]"):
        read_table(file)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (np.zeros(3), kn.InvalidType, "two-dimensional array, got ndarray of shape"),
        (7, kn.InvalidType, "A table must be"),
        ([[1, 2], [3]], kn.InvalidData, "different lengths"),
        ({}, kn.InvalidData, "no columns"),
        ({"a": [1, 2], "b": [1]}, kn.InvalidData, "Column 'b' has 1 values and column 'a' 2"),
        ({"a": 5}, kn.InvalidData, "must be a list of values"),
    ],
)
def test_what_is_no_table_is_refused(source: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        read_table(source)


def test_a_table_in_memory_has_no_lines():
    table = read_table(FRAME)
    assert isinstance(table, Table) and table.lines is None
