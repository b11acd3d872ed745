from __future__ import annotations

import numpy as np
import pytest
import torch

from knowable.errors import InvalidData, InvalidType
from knowable.evaluation.agreement import agreement, total_variation

from .cases import DTYPE, binary, classes, normals


def _probs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE).softmax(1)


def test_agreement_is_the_share_of_equal_labels():
    p, q = _probs(50, 4), _probs(50, 4)
    expected = np.mean([p[row].argmax() == q[row].argmax() for row in range(50)])
    assert agreement(p, q) == pytest.approx(expected)
    assert agreement(classes(p.unsqueeze(0)), q.numpy()) == pytest.approx(expected)
    assert agreement(p, p) == 1.0


def test_total_variation_is_the_largest_difference_over_all_events():
    # half the L1 distance is the maximum of |P(A) - Q(A)| over all 2^C events A
    p, q = _probs(20, 4), _probs(20, 4)
    events = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DTYPE)] * 4)
    expected = ((p - q) @ events.T).abs().max(1).values.mean().item()
    assert total_variation(p, q) == pytest.approx(expected, rel=1e-12)
    assert total_variation(classes(p.unsqueeze(0)), classes(q.unsqueeze(0))) == pytest.approx(expected, rel=1e-10)


def test_total_variation_is_a_distance():
    p, q, r = _probs(30, 3), _probs(30, 3), _probs(30, 3)
    assert total_variation(p, p) == 0.0
    assert total_variation(p, q) == total_variation(q, p)
    assert total_variation(p, r) <= total_variation(p, q) + total_variation(q, r)
    assert total_variation([[1.0, 0.0]], [[0.0, 1.0]]) == 1.0


def test_encodings_of_a_binary_problem_are_interchangeable():
    p, q = torch.rand(40, dtype=DTYPE), torch.rand(40, dtype=DTYPE)
    two = torch.stack((1 - q, q), 1)
    expected = (p - q).abs().mean().item()
    for other in (q, q.unsqueeze(1), two, binary(q.unsqueeze(0)), classes(two.unsqueeze(0))):
        assert total_variation(p, other) == pytest.approx(expected, rel=1e-10)
        assert agreement(p, other) == ((p > 0.5) == (q > 0.5)).double().mean().item()


def test_every_pixel_counts():
    p, q = _probs(3, 4, 2, 5), _probs(3, 4, 2, 5)
    flat_p, flat_q = (each.permute(0, 2, 3, 1).reshape(-1, 4) for each in (p, q))
    assert agreement(p, q) == pytest.approx(agreement(flat_p, flat_q))
    assert total_variation(p, q) == pytest.approx(total_variation(flat_p, flat_q))


@pytest.mark.parametrize("score", [agreement, total_variation])
def test_what_cannot_be_compared_is_refused(score):
    with pytest.raises(InvalidData, match=r"got 5 rows x 3 classes and 6 rows x 3 classes"):
        score(_probs(5, 3), _probs(6, 3))
    with pytest.raises(InvalidData, match=r"5 rows x 3 classes and 5 rows x 4 classes"):
        score(_probs(5, 3), _probs(5, 4))
    with pytest.raises(InvalidData, match=r"q must hold class probabilities that sum to one.*softmax"):
        score(_probs(5, 3), torch.ones(5, 3))
    with pytest.raises(InvalidType, match="p must be a Prediction over classes"):
        score(normals(torch.zeros(1, 5), torch.ones(1, 5)), _probs(5, 3))
