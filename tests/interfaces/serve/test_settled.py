"""Draws that stop: decisions are those of all draws but with the probability that was asked for."""

import math

import torch
from torch import nn

import knowable as kn
from knowable.core.posterior.monte_carlo import predict_outputs
from knowable.core.support.randomness import own_randomness
from knowable.interfaces.serve.settled import LOOKS, MOVE, Draws, draws_needed, in_random_order

K, EPSILON, ROWS = 64, 0.05, 4000


def first_look_at_which_settled(predict, outputs, level=0.9):
    """For each row, at which of the looks it is settled, and K where at none."""
    found = torch.full((outputs.shape[1],), K)
    for look in reversed(LOOKS):
        needed = draws_needed(predict(outputs[:look]), K, EPSILON, level, looks=len(LOOKS))
        found[needed <= look] = look
    return found


def predicting(likelihood, noise):
    return lambda outputs: likelihood.predict(outputs, noise, torch.zeros(len(outputs)).log_softmax(0))


def test_labels_that_are_settled_are_those_of_all_draws(seed):
    """Rows near a tie: of those settled, another label than with all draws with probability epsilon at most."""
    with own_randomness(seed):
        centre = torch.randn(ROWS, 3) * 0.7
        outputs = centre + torch.randn(K, ROWS, 3)
    predict = predicting(kn.Categorical(), {})
    stopped = first_look_at_which_settled(predict, outputs)
    final, wrong = predict(outputs).labels, 0
    for look in LOOKS:
        these = stopped == look
        wrong += int((predict(outputs[:look]).labels[these] != final[these]).sum())
    assert wrong <= ROWS * EPSILON + 4 * math.sqrt(ROWS * EPSILON)
    assert (stopped < K).double().mean() > 0.2  # it does stop


def test_ends_of_intervals_that_are_settled_move_little(seed):
    """Over all draws, both ends are within MOVE of the width but with probability epsilon at most."""
    with own_randomness(seed):
        spread = 0.02 + 0.3 * torch.rand(ROWS)
        outputs = (spread * torch.randn(K, ROWS)).unsqueeze(-1)
    likelihood, noise = kn.Gaussian(1.0), {}
    predict = predicting(likelihood, noise)
    stopped = first_look_at_which_settled(predict, outputs)
    low, high = (each.flatten() for each in predict(outputs).interval(0.9))
    wrong = 0
    for look in LOOKS:
        these = stopped == look
        first, last = (each.flatten() for each in predict(outputs[:look]).interval(0.9))
        most = 1.1 * MOVE * (last - first)
        wrong += int((((low - first).abs() > most) | ((high - last).abs() > most))[these].sum())
    assert wrong <= ROWS * EPSILON + 4 * math.sqrt(ROWS * EPSILON)
    assert (stopped < K).double().mean() > 0.5


def fitted(method, likelihood, outputs):
    x = torch.linspace(-2, 2, 60).unsqueeze(1)
    y = (x[:, 0] > 0).long() if isinstance(likelihood, kn.Categorical) else x[:, 0].sin()
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, outputs))
    return method.fit(kn.Model(net, likelihood), (x, y))


def test_all_draws_are_the_prediction_of_the_posterior():
    x = torch.linspace(-3, 3, 70).unsqueeze(1)
    for posterior in (
        fitted(kn.MeanFieldVI(epochs=30), kn.Categorical(), 2),
        fitted(kn.MeanFieldVI(epochs=30), kn.Gaussian(), 1),
        fitted(kn.DeepEnsemble(3, epochs=20), kn.Gaussian(), 1),
        fitted(kn.Laplace(epochs=50), kn.Gaussian(), 1),
    ):
        expected = posterior.predict(x, samples=64)
        mean = torch.full_like(expected.mean, torch.nan) if hasattr(expected, "mean") else None
        for piece in Draws(posterior, 64, block=32).predict(x, most=64, epsilon=0.0, level=0.9):
            if mean is None:
                assert torch.allclose(piece.prediction.probs, expected.probs[piece.rows], atol=1e-6)
            else:
                mean[piece.rows] = piece.prediction.mean
        assert mean is None or torch.allclose(mean, expected.mean, atol=1e-5)


def test_settled_rows_take_few_draws_and_every_row_is_answered():
    posterior = fitted(kn.MeanFieldVI(epochs=300), kn.Categorical(), 2)
    x = torch.linspace(-2, 2, 101).unsqueeze(1)
    taken = torch.zeros(101, dtype=torch.long)
    for piece in Draws(posterior, 64, block=32).predict(x, most=64, epsilon=0.001, level=0.9):
        assert len(piece.prediction) == len(piece.rows)
        taken[piece.rows] = piece.draws
    assert taken.min() == LOOKS[0] and (taken > 0).all()
    assert taken[0] <= taken[50]  # the edge is decided before the middle


def test_a_settled_row_has_the_answer_of_its_first_draws():
    posterior = fitted(kn.MeanFieldVI(epochs=300), kn.Categorical(), 2)
    x = torch.linspace(-0.6, 0.6, 101).unsqueeze(1)
    with torch.no_grad():
        outputs, _, _ = predict_outputs(posterior, x, 64, posterior.seed, None)
    for block in (1, 32):
        for piece in Draws(posterior, 64, block=block).predict(x, most=64, epsilon=0.001, level=0.9):
            expected = outputs[: piece.draws, piece.rows].softmax(-1).mean(0)
            assert torch.allclose(piece.prediction.probs, expected, atol=1e-5)


def test_atoms_are_shuffled_and_none_is_lost():
    posterior = fitted(kn.SGLD(chains=2, warmup=50, draws=40), kn.Gaussian(), 1)
    made = in_random_order(posterior, 64)
    name = next(iter(made.stack))
    rows = {tuple(each.flatten().tolist()) for each in made.stack[name]}
    assert len(made.stack[name]) == 64 and rows <= {tuple(e.flatten().tolist()) for e in posterior.stack[name]}
