"""Tests of search spaces: points become rows and come back, and what is no point is refused."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.decisions.space import Space

MIXED = {"rate": kn.Real(1e-4, 1e-1, log=True), "units": kn.Integer(3, 7), "kind": kn.Choice(["a", "b", "c"])}


def test_numbers_are_scaled_options_are_one_hot_and_points_come_back():
    space = Space({**MIXED, "x": (-2.0, 6.0)})
    point = {"rate": 1e-3, "units": 4, "kind": "b", "x": 0.0}
    row = torch.tensor(space.encode(point), dtype=torch.float64)
    expected = [1 / 3, 0.25, 0.0, 1.0, 0.0, 0.25]
    torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64))
    found = space.decode(row)
    assert found == {**point, "rate": pytest.approx(1e-3)} and isinstance(found["units"], int)
    assert space.width == 6 and math.isinf(space.size)


def test_random_points_are_points_and_whole_numbers_are_equally_likely():
    space = Space(MIXED)
    u = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(1_000, dtype=torch.float64)
    points = [space.decode(row) for row in space.from_uniform(u)]
    for point, row in zip(points, space.from_uniform(u), strict=True):
        torch.testing.assert_close(torch.tensor(space.encode(point), dtype=torch.float64), row)
    for value in range(3, 8):
        assert abs(sum(point["units"] == value for point in points) - 200) < 10  # a Sobol sequence is even


def test_all_points_of_a_space_without_intervals_are_listed():
    space = Space([kn.Integer(0, 2), kn.Choice(["x", "y"]), kn.Integer(-1, 0)])
    points = [tuple(space.decode(row)) for row in space.every_row()]
    assert space.size == 12 and len(set(points)) == 12
    rows = space.alternatives(torch.tensor(space.encode([1, "x", 0]), dtype=torch.float64), 0)
    assert [space.decode(row) for row in rows] == [[0, "x", 0], [1, "x", 0], [2, "x", 0]]


def test_a_wide_whole_number_has_its_neighbours_among_the_alternatives():
    space = Space([kn.Integer(0, 1_000_000)])
    row = torch.tensor(space.encode([123_456]), dtype=torch.float64)
    found = {space.decode(each)[0] for each in space.alternatives(row, 0)}
    assert {123_455, 123_456, 123_457, 0, 1_000_000} <= found


def test_points_are_saved_as_numbers_and_come_back_to_the_last_digit():
    space = Space(MIXED)
    points = [{"rate": 0.1 / 3, "units": 5, "kind": "c"}]
    assert space.plain(points) == [[0.1 / 3, 5, 2]]
    assert space.from_plain(space.plain(points)) == points


@pytest.mark.parametrize(
    ("space", "error", "match"),
    [
        ([], kn.InvalidArgument, "space is empty"),
        ({}, kn.InvalidArgument, "space is empty"),
        (3, kn.InvalidType, "a dict or a list of dimensions"),
        ([(1.0, 0.0)], kn.InvalidArgument, r"space\[0\]: low must be below high"),
        ({"x": (1.0, 1.0)}, kn.InvalidArgument, r"space\['x'\]: low must be below high"),
        ({"x": (0.0, math.nan)}, kn.InvalidArgument, "finite"),
        ({"x": (0.0, "1")}, kn.InvalidType, "must be a number"),
        ({"x": ["a", "b", "c"]}, kn.InvalidType, "kn.Choice"),
        ({"x": 3.0}, kn.InvalidType, r"must be \(low, high\)"),
    ],
)
def test_spaces_that_are_none_are_refused(space, error, match):
    with pytest.raises(error, match=match):
        Space(space)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: kn.Real(0.0, 1.0, log=True), "low must be > 0"),
        (lambda: kn.Integer(3, 3), "low must be below high"),
        (lambda: kn.Choice(["a"]), "at least two different"),
        (lambda: kn.Choice(["a", "a"]), "at least two different"),
    ],
)
def test_dimensions_that_are_none_are_refused(make, match):
    with pytest.raises(kn.InvalidArgument, match=match):
        make()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rate": 1.0}, kn.InvalidArgument, r"point\['rate'\] must be from 0.0001 to 0.1, got 1.0"),
        ({"rate": math.nan}, kn.InvalidArgument, "must be from"),
        ({"units": 3.5}, kn.InvalidArgument, "whole number"),
        ({"kind": "d"}, kn.InvalidArgument, "must be one of 'a', 'b', 'c'"),
        ({"rate": "fast"}, kn.InvalidType, "must be a number"),
        ({"other": 1}, kn.InvalidData, "must be a dict with 'rate', 'units', 'kind'"),
    ],
)
def test_points_outside_are_refused_with_their_names(change, error, match):
    with pytest.raises(error, match=match):
        Space(MIXED).encode({"rate": 0.01, "units": 4, "kind": "a", **change})
    with pytest.raises(kn.InvalidData, match="must have 2 values, got 3"):
        Space([(0, 1), (0, 1)]).encode([0.5, 0.5, 0.5])
