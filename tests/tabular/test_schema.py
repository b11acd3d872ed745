"""Tests of the schema: what it learns, what it holds a table to, and that it survives the disk."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest

import knowable as kn
from knowable.tabular import Schema, read_table


def frame(rows: int = 60, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "height": rng.normal(170, 10, rows),
            "colour": rng.choice(["red", "blue"], rows),
            "member": rng.choice([True, False], rows),
            "joined": pd.date_range("2020-01-01", periods=rows, freq="30D"),
            "same": 1.0,
            "id": [f"row {k}" for k in range(rows)],
            "y": rng.normal(size=rows),
        }
    )


def learned(**more) -> Schema:
    return Schema.learn(read_table(frame()), "y", **more)


def test_columns_are_learned_and_useless_ones_left_out_with_a_reason():
    schema = learned()
    assert [(column.name, column.kind) for column in schema.columns] == [
        ("height", "numeric"), ("colour", "categorical"), ("member", "boolean"), ("joined", "date"),
    ]  # fmt: skip
    assert set(schema.dropped) == {"same", "id"}
    assert schema.notes[0] == "column 'same' is left out: it is the same in every row"
    assert (schema.task, schema.target, schema.rows) == ("regression", ("y",), 60)


def test_features_and_their_groups_match_what_is_encoded():
    schema = learned()
    encoded = schema.encode(read_table(frame()))
    assert encoded.shape == (60, len(schema.feature_names))
    assert encoded.dtype == np.float32
    assert schema.groups["height"] == slice(0, 1)
    assert schema.feature_names[schema.groups["colour"]] == ("colour = blue", "colour = red", "colour = other")
    width = sum(each.stop - each.start for each in schema.groups.values())
    assert width == len(schema.feature_names)
    np.testing.assert_allclose(encoded[:, schema.groups["height"]].mean(), 0, atol=1e-6)


def test_kinds_can_be_given():
    schema = learned(kinds={"height": "ignore", "colour": ["red", "blue"]})
    assert {column.name: column.kind for column in schema.columns}["colour"] == "ordinal"
    assert schema.dropped["height"] == "it is to be ignored"


@pytest.mark.parametrize(
    ("kinds", "error", "words"),
    [
        ({"heigth": "numeric"}, kn.InvalidData, "no column 'heigth'. Did you mean 'height'"),
        (["height"], kn.InvalidType, "kinds must be a mapping"),
    ],
)
def test_kinds_of_what_is_not_there_are_refused(kinds, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        learned(kinds=kinds)


def test_the_task_can_be_given():
    table = read_table({"x": [1.0, 2.0, 3.0], "y": [1, 2, 3]})
    assert Schema.learn(table, "y", "classification").task == "classification"
    with pytest.raises(kn.InvalidArgument, match="task must be one of"):
        Schema.learn(table, "y", "clustering")


def test_without_a_target_all_columns_are_inputs():
    schema = Schema.learn(read_table({"x": [1.0, 2.0], "y": [1.0, 3.0]}), None)
    assert (schema.task, schema.target) == (None, ())
    assert schema.feature_names == ("x", "y")
    with pytest.raises(kn.InvalidArgument, match="without the name of a target"):
        schema.target_of(read_table({"x": [1.0], "y": [2.0]}))


def test_several_targets_are_learned_together():
    schema = Schema.learn(read_table({"x": [1.0, 2.0], "a": [1.0, 3.0], "b": [0.0, 5.0]}), ["a", "b"])
    assert schema.target == ("a", "b")
    assert schema.target_of(read_table({"a": [1.0], "b": [2.0]})).tolist() == [[1.0, 2.0]]


def test_order_and_further_columns_of_a_new_table_do_not_matter():
    schema, new = learned(), frame(seed=1)
    expected = schema.encode(read_table(new))
    shuffled = new[sorted(new.columns)].assign(more=1)
    np.testing.assert_array_equal(schema.encode(read_table(shuffled)), expected)


def test_a_column_that_is_missing_is_named():
    with pytest.raises(kn.InvalidData, match="lacks the column height that the model was fitted with"):
        learned().encode(read_table(frame().drop(columns="height")))
    with pytest.raises(kn.InvalidData, match="lacks the columns height, colour"):
        learned().encode(read_table(frame().drop(columns=["height", "colour"])))


def test_a_column_of_another_type_is_named():
    wrong = frame().astype({"height": object})
    wrong.loc[3, "height"] = "tall"
    with pytest.raises(kn.InvalidData, match=r"row 3 .*column 'height': 'tall' is not a number"):
        learned().encode(read_table(wrong))


def test_a_jump_as_of_other_units_is_warned_of_by_name():
    metres = frame().assign(height=lambda each: each["height"] / 100)
    with pytest.warns(kn.KnowableWarning, match="In the table column 'height' has a median of 1.7.* other units"):
        learned().encode(read_table(metres))


def test_the_training_table_itself_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learned().encode(read_table(frame()))


def test_a_schema_goes_to_json_and_back_with_the_same_numbers():
    schema, new = learned(), read_table(frame(seed=2))
    back = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert back == schema
    assert Schema.from_json(json.dumps(schema.to_json())) == schema
    np.testing.assert_array_equal(back.encode(new), schema.encode(new))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "has format 99; this version"),
        ({"columns": None}, "cannot be read"),
        ({"columns": [{"kind": "colour"}]}, "cannot be read"),
    ],
)
def test_a_schema_that_is_damaged_or_newer_is_told(change: dict, words: str):
    with pytest.raises(kn.DamagedArtifact, match=words):
        Schema.from_json({**learned().to_json(), **change})
    with pytest.raises(kn.DamagedArtifact, match="cannot be read"):
        Schema.from_json("{")


def test_columns_that_become_too_many_numbers_are_refused(monkeypatch: pytest.MonkeyPatch):
    from knowable.tabular import schema as module

    monkeypatch.setattr(module, "MOST_FEATURES", 7)
    with pytest.raises(kn.InvalidData, match=r"become \d+ numbers a row; at most 7 .* kinds={'joined': 'ignore'}"):
        learned()


def test_it_shows_what_it_is():
    assert repr(learned()) == (
        "Schema(height: numeric, colour: categorical, member: boolean, joined: date -> y)"
    )  # fmt: skip
