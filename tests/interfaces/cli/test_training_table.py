"""A table to learn from: read, checked, divided."""

import hashlib

import numpy as np
import pytest

from knowable.errors import InvalidArgument, InvalidData
from knowable.interfaces.cli.training_table import divide, file_hash, lines_of, read_training
from knowable.tabular.reading import read_table


def test_every_row_is_in_one_part_and_the_share_is_held_out(seed):
    training, held = divide(np.arange(200.0), 0.2, classes=False, seed=seed)
    assert sorted([*training, *held]) == list(range(200)) and len(held) == 40
    again = divide(np.arange(200.0), 0.2, classes=False, seed=seed)
    assert np.array_equal(held, again[1])
    assert not np.array_equal(held, divide(np.arange(200.0), 0.2, classes=False, seed=seed + 1)[1])


def test_every_class_gives_its_share_and_keeps_a_row_for_training(seed):
    labels = np.array(["common"] * 100 + ["rare"] * 20 + ["single"])
    training, held = divide(labels, 0.25, classes=True, seed=seed)
    counts = {label: int((labels[held] == label).sum()) for label in ("common", "rare", "single")}
    assert counts == {"common": 25, "rare": 5, "single": 0}
    assert set(labels[training]) == {"common", "rare", "single"}


def test_nothing_is_held_out_where_the_share_is_none():
    training, held = divide(np.arange(5.0), 0.0, classes=False, seed=0)
    assert len(training) == 5 and len(held) == 0


@pytest.mark.parametrize("rows", [3, 5])
def test_too_few_rows_are_refused_with_a_way_out(rows):
    with pytest.raises(InvalidData, match="--holdout 0"):
        divide(np.arange(float(rows)), 0.2, classes=False, seed=0)


@pytest.mark.parametrize("share", [-0.1, 0.95, float("nan")])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(InvalidArgument, match="holdout"):
        divide(np.arange(50.0), share, classes=False, seed=0)


def test_lines_are_those_of_the_file_with_the_header_first(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n\n3,4\n")
    assert lines_of(read_table(tmp_path / "a.csv")) == [2, 4]
    assert lines_of(read_table({"x": [1.0, 2.0]})) == [0, 1]


def test_a_table_is_read_with_columns_dropped_and_what_was_left_out_is_said(tmp_path):
    lines = ["id,x,same,y", *(f"n{i},{i % 7},1,{i % 5 + i / 100}" for i in range(40))]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    table = read_training(str(tmp_path / "a.csv"), "y", drop=["id"])
    assert table.task == "regression" and list(table.inputs.columns) == ["x", "same"]
    assert [column.name for column in table.schema.columns] == ["x"]
    assert any("'same'" in notice.text for notice in table.notices)
    assert table.outcomes[3] == pytest.approx(3.03)


def test_a_target_that_is_not_there_names_the_nearest(tmp_path):
    (tmp_path / "a.csv").write_text("x,price\n1,2\n3,4\n")
    with pytest.raises(InvalidData, match="'price'"):
        read_training(str(tmp_path / "a.csv"), "prise")


def test_a_file_is_known_by_its_hash(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"x,y\n")
    assert file_hash(str(tmp_path / "a.csv")) == hashlib.sha256(b"x,y\n").hexdigest()
    assert file_hash("-") is None
