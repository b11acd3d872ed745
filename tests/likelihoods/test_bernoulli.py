from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from knowable.errors import InvalidData
from knowable.likelihoods import Bernoulli

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2, 3)])
def test_log_prob_matches_scipy_and_stays_exact_for_extreme_logits(shape: tuple[int, ...]):
    output = 10 * torch.randn(shape, dtype=torch.float64)
    y = (torch.rand(shape) < 0.5).double()
    sign = 2 * y.numpy() - 1
    expected = special.log_expit(sign * output.numpy()).reshape(6, -1).sum(1)
    np.testing.assert_allclose(Bernoulli().log_prob(output, y, {}), expected, rtol=1e-11)
    assert Bernoulli().log_prob(torch.tensor([-500.0]), torch.tensor([1.0]), {}).item() == -500.0


def test_gradients_match_finite_differences_and_vmap_equals_the_loop():
    outputs = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 2, (4, 2)).double()
    assert torch.autograd.gradcheck(lambda f: Bernoulli().log_prob(f, y, {}), outputs[0])
    batched = torch.func.vmap(lambda f: Bernoulli().log_prob(f, y, {}))(outputs)
    torch.testing.assert_close(batched, torch.stack([Bernoulli().log_prob(f, y, {}) for f in outputs]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_booleans_integers_and_floats_are_all_targets(dtype: torch.dtype):
    y = Bernoulli().check_target(torch.tensor([0, 1, 1]).to(dtype), torch.zeros(2, 1))
    assert y.tolist() == [[0.0], [1.0], [1.0]] and y.dtype == torch.float32


def test_what_is_neither_zero_nor_one_is_refused_with_row_and_value():
    with pytest.raises(InvalidData, match=r"labels must be 0 or 1, got 2 in row 1 \(counting from 0\).*Categorical"):
        Bernoulli().check_target(torch.tensor([0, 2]), torch.zeros(2), name="labels")
    with pytest.raises(InvalidData, match=r"got 0\.5 in row 0"):
        Bernoulli().check_target(torch.tensor([0.5]), torch.zeros(2))


def _prediction(shape: tuple[int, ...] = (3, 5, 2)):
    logits = 2 * torch.randn(shape, dtype=torch.float64)
    return special.expit(logits.numpy()), Bernoulli().predict(logits, {}, WEIGHTS.log())


def test_probabilities_labels_and_entropies_match_scipy():
    probs, prediction = _prediction()
    mean = np.tensordot(WEIGHTS.numpy(), probs, 1)
    np.testing.assert_allclose(prediction.probs, mean, rtol=1e-12)
    np.testing.assert_array_equal(prediction.labels, mean > 0.5)
    assert not prediction.labels.is_floating_point()
    np.testing.assert_allclose(prediction.total, stats.bernoulli.entropy(mean), rtol=1e-10)
    expected = np.tensordot(WEIGHTS.numpy(), stats.bernoulli.entropy(probs), 1)
    np.testing.assert_allclose(prediction.aleatoric, expected, rtol=1e-10)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=0, atol=1e-15)


def test_log_prob_of_a_row_is_joint_and_matches_brute_force():
    probs, prediction = _prediction()
    y = torch.randint(0, 2, (5, 2))
    joint = stats.bernoulli.pmf(y.numpy(), probs).prod(-1)
    np.testing.assert_allclose(prediction.log_prob(y).exp(), WEIGHTS.numpy() @ joint, rtol=1e-12)
    with pytest.raises(InvalidData, match="0 or 1, got 3 in row 0"):
        prediction.log_prob(torch.full((5, 2), 3))


def test_entropy_is_exactly_zero_for_certain_and_log_two_for_even_predictions():
    prediction = Bernoulli().predict(torch.tensor([[1e4, -1e4, 0.0]]), {}, torch.zeros(1))
    assert prediction.total[:2].tolist() == prediction.aleatoric[:2].tolist() == [0.0, 0.0]
    assert prediction.total[2].item() == pytest.approx(np.log(2), rel=1e-6)
    opposed = Bernoulli().predict(torch.tensor([[1e4], [-1e4]]), {}, torch.tensor([0.5, 0.5]).log())
    assert opposed.aleatoric.item() == 0.0 and opposed.epistemic.item() == pytest.approx(np.log(2), rel=1e-6)


def test_draws_have_the_predictive_probabilities_and_share_a_posterior_draw_within_a_row(generator: torch.Generator):
    _, prediction = _prediction()
    n = 20_000
    drawn = prediction.draw(n, generator=generator)
    assert drawn.shape == (n, 5, 2) and not drawn.is_floating_point()
    error = 4 * (prediction.probs * (1 - prediction.probs) / n).sqrt()
    assert ((drawn.double().mean(0) - prediction.probs).abs() < error + 1e-12).all()
    certain = Bernoulli().predict(torch.tensor([[[50.0, 50.0]], [[-50.0, -50.0]]]), {}, torch.tensor([0.5, 0.5]).log())
    pairs = certain.draw(500, generator=generator)[:, 0]
    assert torch.equal(pairs[:, 0], pairs[:, 1])
