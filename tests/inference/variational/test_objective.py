from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)
from knowable.testing import LinearGaussian


class Pinned(VariationalObjective):
    """All but a point: the smallest distribution there can be."""

    def __init__(self, model, size, **knobs):
        super().__init__(model, size, **knobs)
        start = first_values(model, knobs.get("start"))
        self.layout = Layout.of({name: start[name] for name in model.random_names})
        self.loc = nn.Parameter(self.layout.flatten(start))

    def kl_divergence(self):
        return self.loc.square().sum()

    def entropy(self):
        return self.loc.sum() + 5.0

    def draw_weights(self, count):
        return [self.layout.views(self.loc) for _ in range(count)]

    def posterior(self, **common):
        raise NotImplementedError

    def forward(self, x, y):
        points = self.point_params()
        log_likelihood = expected_log_likelihood(self, x, y, points, self.draw_weights(1))
        return negative_elbo(self, log_likelihood, self.kl_divergence(), points)


def build(**knobs: object) -> tuple[LinearGaussian, Pinned]:
    problem = LinearGaussian.make(n=20)
    return problem, Pinned(problem.model(), 20, **knobs)


def test_a_distribution_without_entropy_has_no_other_temperature(monkeypatch):
    monkeypatch.delattr(Pinned, "entropy")
    problem, objective = build()
    objective(*problem.data)
    _, objective = build(temperature=0.5)
    with pytest.raises(kn.Unsupported, match="Pinned has no entropy"):
        objective(*problem.data)


def test_loss_is_likelihood_and_divergence_over_the_number_of_rows():
    problem, objective = build(beta=2.0)
    loss, terms = objective(*problem.data)
    log_likelihood = objective.model.log_likelihood(objective.model.params(), *problem.data).sum()
    kl = objective.kl_divergence()
    assert loss.item() == pytest.approx((2 * kl - log_likelihood).item() / 20, rel=1e-12)
    assert terms["expected_log_likelihood"].item() == pytest.approx(log_likelihood.item(), rel=1e-12)
    assert terms["kl"].item() == kl.item() and not terms["kl"].requires_grad


def test_temperature_counts_the_entropy_again():
    problem, objective = build(temperature=3.0)
    loss, terms = objective(*problem.data)
    plain = build()[1](*problem.data)[0]
    assert (loss - plain).item() == pytest.approx(-2 * objective.entropy().item() / 20, rel=1e-9)
    assert terms["kl"].item() == objective.kl_divergence().item()
    known, _ = negative_elbo(objective, torch.zeros(()), torch.ones(()), {}, entropy=torch.full((), 4.0))
    assert known.item() == pytest.approx((1 - 2 * 4) / 20)


def test_divergence_rises_to_its_full_weight():
    problem, objective = build(kl_warmup=4)
    assert objective.settles_from == 4.0
    full = build()[1](*problem.data)[0]
    weights = []
    for epoch in (0.0, 1.5, 4.0, 9.0):
        objective.epoch = epoch
        weights.append(1 + 20 * (objective(*problem.data)[0] - full).item() / objective.kl_divergence().item())
    assert weights == pytest.approx([0.2, 0.5, 1.0, 1.0], rel=1e-9)


def test_points_are_trained_and_their_prior_counts():
    problem = LinearGaussian.make(n=20)
    net = problem.model().net
    model = kn.Model(net, kn.Gaussian(0.5), {"bias": kn.Normal(0.3), "*": kn.Normal(1.0)}, random="weight")
    objective = Pinned(model, 20)
    assert list(objective.point_params()) == ["bias"]
    loss, terms = objective(*problem.data)
    expected = kn.Normal(0.3).log_prob(net.bias).sum().item()
    assert terms["log_prior_of_points"].item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert objective.points[0].grad.abs().item() > 0


def test_held_out_density_is_that_of_the_draws():
    problem, objective = build()
    with torch.no_grad():
        found = objective.predictive_log_likelihood(*problem.data)
    expected = objective.model.log_likelihood(objective.model.params(), *problem.data)
    torch.testing.assert_close(found, expected)


def test_values_to_begin_at_are_copies():
    problem = LinearGaussian.make()
    model = problem.model()
    start = {"bias": torch.ones(1, dtype=torch.float64)}
    first = first_values(model, start)
    first["bias"].add_(1.0)
    first["weight"].add_(1.0)
    assert start["bias"].item() == 1.0
    assert torch.equal(model.params()["weight"], model.net.weight)
