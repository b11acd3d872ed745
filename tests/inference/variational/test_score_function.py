from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.mean_field_objective import MeanFieldObjective
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


def test_one_draw_has_nothing_to_be_compared_with():
    with pytest.raises(kn.InvalidArgument, match="draws must be >= 2"):
        kn.MeanFieldVI(estimator="score", draws=1)
