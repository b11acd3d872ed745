from __future__ import annotations

import pytest
import torch
from benchmarks.distillation import moved, run, to_markdown
from benchmarks.study import Rows


@pytest.mark.slow
def test_quick_run_compares_teacher_student_and_the_network_alone():
    found = run(quick=True, only="*", rows=Rows())
    (row,) = found["rows"].values()
    assert row["error"] is None
    assert set(row["scores"]) == {"teacher", "student", "alone"}
    assert "Points of accuracy lost" in to_markdown(found)


def test_every_second_image_is_moved():
    x = torch.rand(6, 1, 28, 28)
    same = (moved(x) == x).flatten(1).all(1)
    assert same.tolist() == [False, True] * 3
