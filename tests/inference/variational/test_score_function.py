from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.score_function import centred
from knowable.testing import LinearGaussian


class Step(nn.Module):
    """1 where its weight is positive, else 0: no gradient anywhere."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight > 0).to(x.dtype).expand_as(x)


def test_baseline_is_the_mean_of_the_others():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    others = torch.stack([torch.cat([values[:i], values[i + 1 :]]).mean() for i in range(4)])
    torch.testing.assert_close(centred(values), values - others)
    rows = torch.stack([values, 3 * values - 1], 1)  # each column by itself
    torch.testing.assert_close(centred(rows), torch.stack([values - others, 3 * (values - others)], 1))


@pytest.mark.parametrize("draws", [2, 5])
def test_gradient_is_right_where_the_likelihood_has_none(seed, draws):
    # E_q[log p] = p(w > 0) l1 + p(w <= 0) l0 with p(w > 0) = Φ(m / s): d/dm = (l1 - l0) φ(m / s) / s, and
    # d / d log s = -(m / s) times φ(m / s) (l1 - l0); the mean over repeats within 4.5 standard errors
    x = torch.zeros(1, 1, dtype=torch.float64)
    y = torch.full((1, 1), 0.9, dtype=torch.float64)
    model = kn.Model(Step(), kn.Gaussian(0.5), kn.Normal(1.0))
    objective = MeanFieldObjective(model, x, 1, estimator="score", draws=draws)
    loc, scale = 0.3, 0.8
    with torch.no_grad():
        objective.q.copy_(torch.tensor([[loc], [math.log(scale)]]))
    torch.manual_seed(seed)
    found = torch.stack([torch.autograd.grad(objective(x, y)[0], objective.q)[0][:, 0] for _ in range(300)])
    jump = scipy.stats.norm(1.0, 0.5).logpdf(0.9) - scipy.stats.norm(0.0, 0.5).logpdf(0.9)
    density = scipy.stats.norm.pdf(loc / scale)
    kl = torch.tensor([loc, scale**2 - 1])  # of N(m, s²) to N(0, 1), by m and log s
    expected = -torch.tensor([jump * density / scale, -loc / scale * jump * density]) + kl
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()


def test_point_estimates_get_the_ordinary_gradient(seed):
    # at one and the same draw of the weights, d log p / d bias is what autograd says for those weights
    problem = LinearGaussian.make(seed=seed)
    net = problem.model().net
    model = kn.Model(net, kn.Gaussian(problem.noise), random="weight")
    objective = MeanFieldObjective(model, problem.x, len(problem.x), estimator="score", draws=4)
    torch.manual_seed(seed)
    loss, _ = objective(*problem.data)
    (found,) = torch.autograd.grad(loss, list(objective.points))
    torch.manual_seed(seed)
    noise = torch.randn(4, 3, dtype=torch.float64)
    weights = objective.q[0].detach() + objective.q[1].detach().exp() * noise
    bias = objective.points[0].detach()
    residual = problem.y - problem.x @ weights.T - bias  # (rows, draws)
    expected = -residual.mean() / problem.noise**2 + bias / len(problem.x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_loss_is_the_mean_over_the_draws(seed):
    problem = LinearGaussian.make(seed=seed)
    score, weight = (
        MeanFieldObjective(problem.model(), problem.x, len(problem.x), estimator=each, draws=4)
        for each in ("score", "weight")
    )
    losses = []
    for objective in (score, weight):
        torch.manual_seed(seed)
        losses.append(objective(*problem.data)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("estimator", ["score", "local_score"])
def test_one_draw_has_nothing_to_be_compared_with(estimator):
    with pytest.raises(kn.InvalidArgument, match="draws must be >= 2"):
        kn.MeanFieldVI(estimator=estimator, draws=1)


# --- Rao-Blackwellised by layer --------------------------------------------------------------------------------------


class Threshold(nn.Module):
    """1 where its input is positive, else 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)


def test_local_gradient_is_right_through_an_activation_that_has_none(seed):
    # h = 1 with probability Φ(m₁ sign(x) / s₁), and then y ~ N(w₂, σ²), else N(0, σ²): the expected log likelihood and
    # with it the gradient in both layers is closed form. The mean of 400 gradients within 4.5 standard errors
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor([[0.7], [-1.2], [2.0], [-0.1]], dtype=torch.float64)
    y = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(1, 1, bias=False), Threshold(), nn.Linear(1, 1, bias=False)).double()
    model = kn.Model(net, kn.Gaussian(0.8), kn.Normal(1.0))
    objective = MeanFieldObjective(model, x, 4, estimator="local_score", draws=3)
    assert objective.normals.drawn.size == 0  # both layers' outputs are drawn
    with torch.no_grad():
        objective.q.copy_(torch.tensor([[0.4, 1.1], [math.log(0.9), math.log(0.5)]]))
    torch.manual_seed(seed)
    found = torch.stack([torch.autograd.grad(objective(x, y)[0], objective.q)[0] for _ in range(400)])
    q = objective.q.detach().clone().requires_grad_()
    (first, second), (first_scale, second_scale) = q[0], q[1].exp()
    active = torch.special.ndtr(first * x.sign() / first_scale)
    at_zero, at_mean = (torch.distributions.Normal(mean, 0.8).log_prob(y) for mean in (0.0 * second, second))
    expected_value = ((1 - active) * at_zero + active * (at_mean - second_scale**2 / (2 * 0.8**2))).mean()
    kl = kn.Normal(1.0).kl_from_normal(q[0], q[1].exp())
    (expected,) = torch.autograd.grad(-expected_value + kl / 4, q)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()


def test_drawing_outputs_takes_the_other_rows_and_weights_out_of_the_noise(seed, generator):
    # 64 rows and 8 inputs. Plain: every score is multiplied by the likelihood of all rows, which share their weights.
    # By layer: by the likelihood of its own row, and the rows' errors average out. Some ten times less noise, but
    # the plain one's tails are heavy, and 60 repeats say little of them
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5))
    found = kn.gradient_variance(
        model, (x, torch.sin(x.sum(1))), ("score", "local_score"), draws=4, repeats=60, seed=seed
    )
    assert found["score"].variance > 2 * found["local_score"].variance


@pytest.mark.parametrize("random", ["2.*", ["0.bias", "2.bias"]], ids=str)
def test_point_estimates_before_and_in_a_drawn_layer_get_the_ordinary_gradient(seed, generator, random):
    # the mean gradient in the points is that of weight draws, whose gradient is autograd's: 200 of each, within 5
    # standard errors of the difference
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(10, 1, generator=generator, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5), random=random)
    moments = []
    for estimator in ("weight", "local_score"):
        objective = MeanFieldObjective(model, x, 10, estimator=estimator, draws=4, initial_scale=0.3)
        torch.manual_seed(seed)
        gradients = [torch.autograd.grad(objective(x, y)[0], list(objective.points)) for _ in range(200)]
        flat = torch.stack([torch.cat([each.flatten() for each in one]) for one in gradients])
        moments.append((flat.mean(0), flat.var(0) / len(flat)))
    (one, one_error), (other, other_error) = moments
    assert ((one - other).abs() < 5 * (one_error + other_error).sqrt() + 1e-12).all()


def test_weights_that_act_more_than_once_are_drawn_as_weights():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 1))
    objective = MeanFieldObjective(
        kn.Model(net, kn.Gaussian(0.1)), torch.randn(5, 1, 3, 3), 5, estimator="local_score", draws=2
    )
    assert set(objective.normals.drawn.names) == {"0.weight", "0.bias"}
    assert set(objective.normals.local.names) == {"2.weight", "2.bias"}
