from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from knowable.errors import InvalidData
from knowable.likelihoods import Categorical

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
SHAPES = [(6, 4), (6, 4, 2, 3)]  # (batch, classes, ...)


def _labels(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, shape[1], (shape[0], *shape[2:]))


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_matches_the_softmax_of_scipy_summed_over_pixels(shape: tuple[int, ...]):
    output, y = 3 * torch.randn(shape, dtype=torch.float64), _labels(shape)
    log_probs = special.log_softmax(output.numpy(), axis=1)
    expected = np.take_along_axis(log_probs, y.numpy()[:, None], 1).reshape(6, -1).sum(1)
    np.testing.assert_allclose(Categorical().log_prob(output, y, {}), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_finite_differences_and_vmap_equals_the_loop(shape: tuple[int, ...]):
    outputs = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    y = _labels(shape)
    assert torch.autograd.gradcheck(lambda f: Categorical().log_prob(f, y, {}), outputs[0])
    batched = torch.func.vmap(lambda f: Categorical().log_prob(f, y, {}))(outputs)
    torch.testing.assert_close(batched, torch.stack([Categorical().log_prob(f, y, {}) for f in outputs]))
    gradients = torch.func.vmap(torch.func.grad(lambda f: Categorical().log_prob(f, y, {}).sum()))(outputs.detach())
    torch.testing.assert_close(gradients[1], torch.autograd.grad(batched[1].sum(), outputs)[0][1])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.float64])
def test_whole_numbers_of_any_type_are_labels(dtype: torch.dtype):
    y = Categorical().check_target(torch.tensor([[0], [2], [1]]).to(dtype), torch.zeros(2, 3))
    assert y.tolist() == [0, 2, 1] and y.dtype == torch.int64


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], r"whole number from 0 to 2 \(the network has 3 classes\), got 3 in row 2 \(counting from 0\)"),
        ([0, -1, 2], "got -1 in row 1"),
        ([0.0, 0.5, 2.0], "got 0.5 in row 1.*Gaussian"),
        ([0.0, 2.0**62, 2.0], "got 4.611686018e.18 in row 1"),
        ([0.0, float("nan"), 2.0], "missing or infinite values in row 1"),
        ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], r"shape \(3, 3\).*3 logits has shape \(3,\).*argmax"),
        (2, "one row for each example"),
    ],
)
def test_bad_labels_are_refused_with_row_label_and_number_of_classes(labels: list, message: str):
    with pytest.raises(InvalidData, match=message):
        Categorical().check_target(torch.tensor(labels), torch.zeros(2, 3))


def test_a_bad_label_among_pixels_is_named_with_its_position():
    y = torch.zeros(2, 4, 4, dtype=torch.int64)
    y[1, 2, 3] = 9
    with pytest.raises(InvalidData, match=r"got 9 in row 1, position \(2, 3\)"):
        Categorical().check_target(y, torch.zeros(2, 3, 4, 4))


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_a_network_with_one_output_is_sent_to_bernoulli(shape: tuple[int, ...]):
    with pytest.raises(InvalidData, match=r"two or more classes.*Bernoulli\(\)"):
        Categorical().check_target(torch.zeros(5), torch.zeros(shape))


def _prediction(shape: tuple[int, ...]):
    logits = 2 * torch.randn(3, *shape, dtype=torch.float64)
    return special.softmax(logits.numpy(), axis=2), Categorical().predict(logits, {}, WEIGHTS.log())


@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_labels_and_entropies_match_scipy_at_every_pixel(shape: tuple[int, ...]):
    probs, prediction = _prediction(shape)
    mean = np.tensordot(WEIGHTS.numpy(), probs, 1)
    np.testing.assert_allclose(prediction.probs, mean, rtol=1e-12)
    np.testing.assert_array_equal(prediction.labels, mean.argmax(1))
    np.testing.assert_allclose(prediction.total, stats.entropy(mean, axis=1), rtol=1e-12)
    expected = np.tensordot(WEIGHTS.numpy(), stats.entropy(probs, axis=2), 1)
    np.testing.assert_allclose(prediction.aleatoric, expected, rtol=1e-12)
    assert prediction.total.shape == (6, *shape[2:])
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_of_a_row_is_joint_over_pixels_and_matches_brute_force(shape: tuple[int, ...]):
    probs, prediction = _prediction(shape)
    y = _labels(shape)
    expected = np.zeros(6)
    for k, weight in enumerate(WEIGHTS.tolist()):
        for row in range(6):
            each = (
                [probs[k, row, y[row][i], *i] for i in np.ndindex(*shape[2:])] if shape[2:] else [probs[k, row, y[row]]]
            )
            expected[row] += weight * np.prod(each)
    np.testing.assert_allclose(prediction.log_prob(y), np.log(expected), rtol=1e-11)


def test_an_impossible_class_adds_nothing_to_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]], [[0.0, 0.0, -1e4]]])
    prediction = Categorical().predict(logits, {}, torch.tensor([0.5, 0.5]).log())
    assert prediction.total.item() == pytest.approx(np.log(2), rel=1e-6)
    assert prediction.aleatoric.item() == pytest.approx(np.log(2), rel=1e-6)


def test_one_draw_has_no_epistemic_uncertainty_and_opposed_certain_draws_have_nothing_else():
    single = Categorical().predict(torch.randn(1, 50, 4), {}, torch.zeros(1))
    assert torch.equal(single.epistemic, torch.zeros(50))
    logits = 1e4 * torch.eye(3)[:, None]  # each draw is certain of another class
    opposed = Categorical().predict(logits, {}, torch.full((3,), 1 / 3).log())
    assert opposed.aleatoric.item() == 0.0 and opposed.epistemic.item() == pytest.approx(np.log(3), rel=1e-6)


def test_a_draw_of_weight_zero_changes_nothing():
    logits = torch.randn(2, 5, 3, dtype=torch.float64)
    weighted = Categorical().predict(logits, {}, torch.tensor([0.0, -torch.inf], dtype=torch.float64))
    alone = Categorical().predict(logits[:1], {}, torch.zeros(1, dtype=torch.float64))
    y = torch.tensor([0, 1, 2, 0, 1])
    for name in ("probs", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(weighted, name), getattr(alone, name))
    torch.testing.assert_close(weighted.log_prob(y), alone.log_prob(y))


def test_draws_have_the_predictive_probabilities(generator: torch.Generator):
    _, prediction = _prediction((2, 3, 2))
    n = 20_000
    drawn = prediction.draw(n, generator=generator)
    assert drawn.shape == (n, 2, 2)
    share = torch.stack([(drawn == c).double().mean(0) for c in range(3)], 1)
    error = 4 * (prediction.probs * (1 - prediction.probs) / n).sqrt()
    assert ((share - prediction.probs).abs() < error).all()


def test_all_pixels_of_a_drawn_row_come_from_one_posterior_draw(generator: torch.Generator):
    logits = torch.stack([torch.tensor([50.0, -50.0]), torch.tensor([-50.0, 50.0])])[:, None, :, None].expand(
        2, 1, 2, 7
    )
    prediction = Categorical().predict(logits, {}, torch.tensor([0.5, 0.5]).log())
    drawn = prediction.draw(300, generator=generator)[:, 0]  # (300, 7)
    assert torch.equal(drawn, drawn[:, :1].expand_as(drawn))
    assert 0 < drawn[:, 0].sum() < 300


@pytest.mark.parametrize("shape", SHAPES)
def test_aligned_labels_are_integers_without_the_class_dimension(shape: tuple[int, ...]):
    y = _labels(shape)
    column = y.double()[:, None] if len(shape) == 2 else y.double()
    aligned = Categorical().align(column, torch.zeros(shape))
    assert torch.equal(aligned, y) and aligned.dtype == torch.int64
    with pytest.raises(InvalidData, match="shape"):
        Categorical().align(torch.zeros(6, 5), torch.zeros(shape))
