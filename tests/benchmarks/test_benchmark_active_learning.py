from __future__ import annotations

import pytest
import torch
from benchmarks.active_learning import _QUICK, ACQUISITIONS, REPEATED, Moved, learner, load, run, to_markdown
from benchmarks.study import Rows


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_acquisition():
    found = run(quick=True, only="*", rows=Rows())
    assert list(found["sets"]["MNIST"]) == list(ACQUISITIONS)
    assert list(found["sets"]["RepeatedMNIST"]) == list(REPEATED)
    assert all(row["error"] is None for rows in found["sets"].values() for each in rows.values() for row in each)
    assert found["time"]["query"] > 0
    assert "BatchBALD" in to_markdown(found)


def test_the_first_labels_are_the_same_for_all_acquisitions_two_of_each_digit():
    images = load(_QUICK, quick=True, repeated=False)
    first, second = (learner(images, name, 0, _QUICK).indices for name in ("bald", "random"))
    assert first == second
    assert torch.equal(images.y[first].bincount(), torch.full((10,), 2))


def test_images_are_moved_in_training_only():
    x = torch.rand(4, 1, 28, 28)
    assert torch.equal(Moved().eval()(x), x)
    assert not torch.equal(Moved().train()(x), x)
