from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.gradient_variance import EstimatorNoise, GradientVariance
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import loss_gradient

EXACT = ("score", "local_score", "weight", "flipout", "auto")  # "local" is "auto" on a linear layer


def somewhere(model: kn.Model, generator: torch.Generator, *, scale: float = 0.3) -> kn.DiagonalNormal:
    """A mean-field posterior at random means, away from any optimum."""
    params = model.params()
    loc = {name: 0.5 * torch.randn(v.shape, generator=generator, dtype=v.dtype) for name, v in params.items()}
    std = {name: scale * (0.5 + torch.rand(v.shape, generator=generator, dtype=v.dtype)) for name, v in params.items()}
    return kn.DiagonalNormal(model, loc, std)


def largest_z(one: EstimatorNoise, other: EstimatorNoise) -> float:
    """Largest difference of two mean gradients, in standard errors of the difference."""
    error = (one.standard_error**2 + other.standard_error**2).sqrt()
    return ((one.mean - other.mean).abs() / error.clamp_min(1e-12)).max().item()


def test_every_estimator_has_the_closed_form_gradient_of_a_linear_model(seed, generator):
    # 8 coordinates and 5 estimators within 5 standard errors: gradients are skewed, so that the mean of 600 draws still
    # strays further than a normal variable would
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    at = somewhere(model, generator)
    expected = loss_gradient(problem, problem.as_flat(at.loc), problem.as_flat(at.scale))
    measured = kn.gradient_variance(model, problem.data, EXACT, at=at, draws=4, repeats=150, seed=seed)
    for row in measured.rows:
        assert ((row.mean - expected).abs() < 5 * row.standard_error).all(), row.estimator


def test_every_estimator_has_no_gradient_at_the_optimum(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    best = kn.DiagonalNormal(model, problem.as_params(problem.mean), problem.as_params(problem.mean_field_std))
    for row in kn.gradient_variance(model, problem.data, EXACT, at=best, draws=4, repeats=150, seed=seed).rows:
        assert (row.mean.abs() < 5 * row.standard_error).all(), row.estimator  # as above


def test_point_estimates_are_those_of_the_posterior(seed):
    # at the optimum, with the bias a point at its best value, the weights have no gradient; at the network's bias of 5
    # they would have one
    problem = LinearGaussian.make(n=20, seed=seed)
    net = problem.model().net
    with torch.no_grad():
        net.bias.fill_(5.0)
    model = kn.Model(net, kn.Gaussian(problem.noise), random="weight")
    loc, std = problem.as_params(problem.mean), problem.as_params(problem.mean_field_std)
    at = kn.DiagonalNormal(model, {"weight": loc["weight"]}, {"weight": std["weight"]}, points={"bias": loc["bias"]})
    row = kn.gradient_variance(model, problem.data, ["local"], at=at, repeats=150, seed=seed)["local"]
    assert (row.mean.abs() < 5 * row.standard_error).all()


NETWORKS = {
    # every layer's weights act once per example: local, flipout and score are all exact
    "linear layers": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), (6, 2),
        ("local", "flipout", "score", "local_score"),
    ),
    # a convolution straight under a likelihood that is a sum over positions: only the marginals matter
    "conv2d": (lambda: nn.Conv2d(1, 2, 2), (4, 1, 3, 3), ("local", "flipout", "score")),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(1, 2, 2), (4, 1, 2, 2), ("local", "flipout", "score")),
    # positions are mixed later: flipout is still exact
    "conv2d under a head": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)),
        (4, 1, 3, 3), ("auto", "flipout", "local_score"),
    ),
    # one weight acts on several rows of what it is given for each example
    "tokens as rows": (lambda: Tokens(False), (4, 2), ("auto", "flipout")),
    "time before batch": (lambda: Tokens(True), (4, 2), ("auto", "flipout")),
    # examples meet in the statistics of the batch
    "batch normalisation": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)), (6, 2), ("auto",),
    ),
}  # fmt: skip


class Tokens(nn.Module):
    """One small layer at every column of the input, and the sum of its outputs."""

    def __init__(self, time_first: bool):
        super().__init__()
        self.layer, self.time_first = nn.Linear(1, 2), time_first

    def forward(self, x: Tensor) -> Tensor:
        if self.time_first:
            return torch.tanh(self.layer(x.T.unsqueeze(-1))).sum((0, 2)).unsqueeze(1)
        return torch.tanh(self.layer(x.reshape(-1, 1))).reshape(len(x), -1).sum(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_estimators_agree_with_weight_draws(seed, generator, name):
    # up to 44 coordinates and 4 comparisons within 5.5 standard errors, with some room for skewed gradients
    make, shape, estimators = NETWORKS[name]
    net = make().double()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        y = torch.randn(net(x).shape, generator=generator, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5))
    measured = kn.gradient_variance(
        model, (x, y), ("weight", *estimators), at=somewhere(model, generator), draws=2, repeats=150, seed=seed
    )
    for estimator in estimators:
        assert largest_z(measured[estimator], measured["weight"]) < 5.5, estimator


def test_local_noise_at_each_position_is_an_approximation_where_positions_meet(seed):
    # one weight at two positions whose sum is scored: Var (2 w) = 4 s², but independent noise gives 2 s². The gradient
    # of the expected log likelihood in log s is -4 s² / σ² or -2 s² / σ²: this is what "auto" is there to avoid
    net = nn.Sequential(nn.Conv1d(1, 1, 1, bias=False), nn.Flatten(), SumUp()).double()
    model = kn.Model(net, kn.Gaussian(1.0), kn.Normal(1.0))
    x = torch.ones(1, 1, 2, dtype=torch.float64)
    at = kn.DiagonalNormal(model, {"0.weight": torch.zeros_like(net[0].weight)}, {"0.weight": 0.5 + 0 * net[0].weight})
    measured = kn.gradient_variance(
        model, (x, x[:, :, 0] * 0), ("weight", "auto", "local"), at=at, repeats=300, seed=seed
    )
    for estimator, factor in (("weight", 4), ("auto", 4), ("local", 2)):
        row = measured[estimator]
        expected = factor * 0.5**2 + (0.5**2 - 1)  # of -ELBO / N in log s
        assert abs(row.mean[1] - expected) < 4.5 * row.standard_error[1], estimator


class SumUp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True)


def test_noise_falls_from_score_to_weight_to_flipout_to_local(seed, generator):
    # A batch of 64. Weight draws are shared by all rows, flipout decorrelates them, local reparameterisation averages
    # over the inputs within each output as well: that last gain is in the log scales (about the number of inputs), the
    # means have the same noise. A sum of 305 variances over 150 repeats is known to about 10 %; each step is over 2
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(0.5))
    at = somewhere(model, generator, scale=0.1)
    measured = kn.gradient_variance(model, (x, torch.sin(x.sum(1))), at=at, repeats=150, seed=seed)
    order = [measured[name] for name in ("score", "weight", "flipout", "local")]
    half = len(order[0].mean) // 2
    of_log_scales = [row.standard_error[half:].square().sum().item() for row in order]
    assert all(before > 1.5 * after for before, after in itertools.pairwise(of_log_scales)), of_log_scales
    assert all(before.variance > after.variance for before, after in itertools.pairwise(order))


def test_variance_of_weight_draws_is_the_closed_form(seed):
    # y = w x + noise, one weight: the gradient of -log p in m is -(y - w x) x / σ², of variance s² x⁴ / σ⁴; over S
    # repeats a variance is estimated to sqrt(2 / S)
    net = nn.Linear(1, 1, bias=False).double()
    model = kn.Model(net, kn.Gaussian(0.5), kn.Flat())
    x = torch.full((1, 1), 1.5, dtype=torch.float64)
    at = kn.DiagonalNormal(
        model, {"weight": torch.zeros_like(net.weight)}, {"weight": torch.full_like(net.weight, 0.3)}
    )
    repeats = 500
    row = kn.gradient_variance(model, (x, x), ["weight"], at=at, repeats=repeats, seed=seed)["weight"]
    found = (row.standard_error[0] ** 2 * repeats).item()
    assert found == pytest.approx(0.3**2 * 1.5**4 / 0.5**4, rel=4.5 * math.sqrt(2 / repeats))


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_more_draws_are_less_noise(seed, estimator):
    # K independent draws: the variance falls as 1 / K, here estimated to about 20 %
    problem = LinearGaussian.make(n=20, seed=seed)
    one, many = (
        kn.gradient_variance(problem.model(), problem.data, [estimator], draws=draws, repeats=200, seed=seed)[estimator]
        for draws in (1, 8)
    )
    assert 8 / 1.6 < one.variance / many.variance < 8 * 1.6


def test_table_lists_the_noisiest_first_and_repeats_itself(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    first, second = (
        kn.gradient_variance(problem.model(), problem.data, ("local", "score"), repeats=20, seed=seed) for _ in range(2)
    )
    assert torch.equal(first["score"].mean, second["score"].mean)
    lines = repr(first).splitlines()
    assert lines[1].startswith("score") and lines[2].startswith("local")
    assert lines[2].split()[3] == "1.0"
    assert [line.split()[1] for line in lines[1:]] == ["2", "1"]  # draws


def test_plot_shows_the_figures_of_the_table(seed, tmp_path):
    problem = LinearGaussian.make(n=20, seed=seed)
    found = kn.gradient_variance(problem.model(), problem.data, ("local", "score", "weight"), repeats=20, seed=seed)
    figure = found.plot()
    left, right = figure.axes
    rows = found.by_noise[::-1]  # the noisiest above
    assert [label.get_text() for label in left.get_yticklabels()] == [f"{row.estimator} ({row.draws})" for row in rows]
    assert [text.get_text() for text in left.texts] == [f"{row.variance:.3g}" for row in rows]
    assert [text.get_text() for text in right.texts] == [f"{row.variance * row.milliseconds:.3g}" for row in rows]
    ends = [bar.get_x() + bar.get_width() for bar in left.patches]
    assert ends == pytest.approx([row.variance for row in rows], rel=1e-9)
    assert left.get_xscale() == right.get_xscale() == "log"
    assert not any("$" in label.get_text() for axes in (left, right) for label in axes.get_xticklabels(which="both"))
    figure.savefig(tmp_path / "noise.png")
    assert (tmp_path / "noise.png").stat().st_size > 5_000


def test_plot_of_an_estimator_without_noise_is_drawn(seed):
    # with a flat prior and no data to speak of, a gradient may be the same every time
    row = EstimatorNoise("weight", torch.zeros(2), torch.zeros(2), 0.0, 1.0)
    found = GradientVariance((row,))
    assert "nan" in repr(found)
    assert found.plot().axes


def test_unknown_estimators_are_refused():
    problem = LinearGaussian.make(n=20)
    with pytest.raises(kn.InvalidArgument, match="estimators must be one of"):
        kn.gradient_variance(problem.model(), problem.data, ["pathwise"])
    for knobs in ({"repeats": 1}, {"draws": 0}):
        with pytest.raises(kn.InvalidArgument, match=next(iter(knobs))):
            kn.gradient_variance(problem.model(), problem.data, **knobs)
