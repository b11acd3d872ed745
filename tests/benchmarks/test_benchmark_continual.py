from __future__ import annotations

import pytest
from benchmarks.continual import _QUICK, run, tasks_of, to_markdown
from benchmarks.study import Rows


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_method():
    found = run(quick=True, only="*", rows=Rows())
    for methods in found["kinds"].values():
        assert len(methods) == 9
        assert [row["error"] for row in methods.values()] == [None] * 9
    assert "Split MNIST" in to_markdown(found)


def test_split_tasks_have_two_digits_and_a_head_each():
    tasks = tasks_of("split", _QUICK, quick=True)
    assert [task.output for task in tasks] == list(range(5))
    assert all(set(task.y.tolist()) == {0, 1} for task in tasks)
    assert sum(len(task.x) for task in tasks) == _QUICK.rows


def test_permuted_tasks_have_the_same_pixels_in_another_order():
    first, second = tasks_of("permuted", _QUICK, quick=True)
    assert not (first.x == second.x).all()
    assert (first.x.sort(1).values == second.x.sort(1).values).all()
