from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from knowable.evaluation.rejection import accuracy_rejection
from knowable.evaluation.scores import accuracy

from .cases import DTYPE, classes


def test_accuracy_is_that_of_the_rows_kept(generator):
    probs, y = torch.rand(60, 3, dtype=DTYPE, generator=generator).softmax(1), torch.randint(3, (60,))
    curve = accuracy_rejection(probs, y)
    order = probs.amax(1).sort(descending=True).indices
    for kept in (60, 31, 2, 1):
        chosen = order[:kept]
        assert curve.accuracy[60 - kept].item() == pytest.approx(accuracy(probs[chosen], y[chosen]))
        assert curve.rejected[60 - kept].item() == pytest.approx(1 - kept / 60)
    assert curve.area == pytest.approx(curve.accuracy.mean().item())


@given(rows=st.lists(st.tuples(st.sampled_from([0.6, 0.7, 0.9]), st.integers(0, 1)), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_ties_do_not_depend_on_the_order_of_rows(rows):
    p, y = (torch.tensor(each) for each in zip(*rows, strict=True))
    curve, turned = accuracy_rejection(p.double(), y), accuracy_rejection(p.double().flip(0), y.flip(0))
    torch.testing.assert_close(curve.accuracy, turned.accuracy)
    assert curve.accuracy[0].item() == pytest.approx(accuracy(p.double(), y))


def test_rejection_by_another_uncertainty_and_the_share_it_takes(generator):
    probs = torch.rand(3, 40, 2, dtype=DTYPE, generator=generator).log().softmax(2)
    prediction, y = classes(probs), torch.randint(2, (40,), generator=generator)
    by = accuracy_rejection(prediction, y, uncertainty=prediction.epistemic)
    assert by.accuracy[0] == accuracy_rejection(prediction, y).accuracy[0]
    right = (prediction.labels == y).double()
    perfect = accuracy_rejection(prediction, y, uncertainty=1 - right)
    assert perfect.rejected_for(1.0) == pytest.approx(1 - right.mean().item())
    assert accuracy_rejection([0.9, 0.8], [0, 0]).rejected_for(0.5) is None
