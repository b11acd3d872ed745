"""Tests of components trained side by side: each has the loss and the gradient it would have alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.training.loop import train
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.mixture_objective import ComponentsInTurn, ComponentsTogether
from knowable.inference.variational.objective import expected_log_likelihood as mean_log_likelihood
from knowable.testing import LinearGaussian
from tests.core.cases import DTYPE, batch_norm_net, linear_data, mlp
from tests.core.training_cases import settings_of
from tests.inference.variational.oracle import expected_log_likelihood, loss_gradient

COUNT = 3
PRIORS = {
    "normal": kn.Normal(0.7, loc=0.2),
    "two normals": {"0.*": kn.Normal(2.0), "*": kn.Normal(0.5)},
    "closed form of its own": kn.LaplacePrior(1.0),
    "learned": kn.EmpiricalBayes(kn.Normal(1.0)),
}


def components_of(model: kn.Model, size: int = 20, **settings) -> list[MeanFieldObjective]:
    x, _ = linear_data()
    made = [MeanFieldObjective(model, x, size, **{"initial_scale": 0.3, **settings}) for _ in range(COUNT)]
    with torch.no_grad():
        for each in made:
            each.q.add_(0.3 * torch.randn_like(each.q))
    return made


def gradients_of(objective: ComponentsTogether | ComponentsInTurn, *batch: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients that the loop sees: of every component, and of the points."""
    objective.zero_grad()
    loss, _ = objective(*batch)
    loss.backward()
    if isinstance(objective, ComponentsTogether):
        points = [] if objective.points is None else [objective.points.grad]
        return loss.detach(), [*objective.q.grad, *points]  # type: ignore[list-item, misc]
    points = [value.grad.flatten() for value in objective.components[0].points]  # type: ignore[union-attr]
    return loss.detach(), [each.q.grad for each in objective.components] + ([torch.cat(points)] if points else [])  # type: ignore[misc]


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("random", ["*", "2.*"])
@pytest.mark.parametrize("prior", PRIORS)
def test_losses_and_gradients_are_those_of_each_component_alone(seed, prior, random, draws):
    # with the same noise: weights are drawn, so all of it is passed in
    chosen = PRIORS[prior] if random == "*" or prior != "two normals" else kn.Normal(0.7)
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(), chosen, random=random), linear_data()
    x, y = x[:10], y[:10]
    components = components_of(model, estimator="weight", draws=draws, beta=0.8)
    together = ComponentsTogether(components)
    inputs = together._inputs(x, y)
    by_q, by_points, losses, fits, kls, log_prior = together.losses_and_gradients(*inputs)
    expected_by_points = []
    for k, component in enumerate(components):
        points = component.point_params()
        kl, _, _, thetas = component.normals.draw(component.q, inputs[2][k].clone())
        fit = mean_log_likelihood(component, x, y, points, thetas)
        kl = kl + component.normals.remaining_kl(component.q, model, points, 64)
        loss = 0.8 / 20 * kl - fit
        torch.testing.assert_close(torch.stack([fits[k], kls[k], losses[k]]), torch.stack([fit, kl, loss]).detach())
        total = loss - component.log_prior_of_points(points) / 20
        slopes = torch.autograd.grad(total, [component.q, *points.values()], allow_unused=True)
        torch.testing.assert_close(by_q[k], slopes[0])
        expected_by_points.append([torch.zeros(()) if slope is None else slope for slope in slopes[1:]])
    for place, name in enumerate(together.point_layout.names):
        found = together.point_layout.views(by_points)[name]
        torch.testing.assert_close(found, sum(each[place] for each in expected_by_points).to(DTYPE).expand_as(found))
    if model.point_names:
        torch.testing.assert_close(log_prior, components[0].log_prior_of_points(components[0].point_params()).detach())


@pytest.mark.parametrize("kind", [ComponentsTogether, ComponentsInTurn])
def test_temperature_counts_the_entropy_of_every_component(seed, kind):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.5)), linear_data()
    found = []
    for temperature in (1.0, 3.0):
        torch.manual_seed(seed)
        components = components_of(model, estimator="weight", temperature=temperature)
        entropy = sum(each.entropy().item() for each in components) / COUNT
        found.append(gradients_of(kind(components), *data))
    (plain, slopes), (changed, other_slopes) = found
    assert (changed - plain).item() == pytest.approx(-2 * entropy / 20, rel=1e-9)
    for k in range(COUNT):  # of a component's own loss: dH / d log s = 1
        torch.testing.assert_close(other_slopes[k][1], slopes[k][1] - 2 / 20)
        torch.testing.assert_close(other_slopes[k][0], slopes[k][0])


@pytest.mark.parametrize("kind", [ComponentsTogether, ComponentsInTurn])
def test_loss_and_gradient_are_right_in_the_mean_where_layers_are_sampled_locally(seed, kind):
    # a linear model, whose expected log likelihood and gradient are closed forms; 5 standard errors of the mean
    problem = LinearGaussian.make(n=12, d=2, noise=0.7, seed=seed)
    model = problem.model()
    components = [MeanFieldObjective(model, problem.x, 12, initial_scale=0.3) for _ in range(COUNT)]
    with torch.no_grad():
        for each in components:
            each.q.add_(0.3 * torch.randn_like(each.q))
    assert components[0].normals.local.size == 3  # all of it
    objective, repeats = kind(components), 300
    found = [gradients_of(objective, *problem.data) for _ in range(repeats)]
    losses = torch.stack([loss for loss, _ in found])
    bounds = []
    for k, component in enumerate(components):
        loc, std = (problem.as_flat(each) for each in component.loc_and_scale())
        bounds.append(expected_log_likelihood(problem, loc, std) - component.kl_divergence().item())
        gradients = torch.stack([each[k] for _, each in found])
        views = [component.layout.views(part) for part in gradients.unbind(1)]
        flat = torch.cat([problem.as_flat(each) for each in views], dim=1)
        error = flat.std(0) / math.sqrt(repeats) + 1e-12
        assert ((flat.mean(0) - loss_gradient(problem, loc, std)).abs() < 5 * error).all()
    error = losses.std().item() / math.sqrt(repeats)
    assert losses.mean().item() == pytest.approx(-sum(bounds) / COUNT / 12, abs=5 * error)


@pytest.mark.parametrize("estimator", ["auto", "weight"])
def test_a_recording_does_what_it_was_made_from(seed, estimator):
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), kn.StudentTPrior(3.0)), linear_data()
    components = components_of(model, estimator=estimator)
    found = []
    for mode in ("eager", "traced"):
        objective = ComponentsTogether(components, mode=mode)
        torch.manual_seed(seed)
        found += [[gradients_of(objective, x, y) for _ in range(3)]]  # recording draws nothing
    for (loss, slopes), (other, others) in zip(*found, strict=True):
        torch.testing.assert_close(loss, other)
        torch.testing.assert_close(slopes, others)


@pytest.mark.parametrize("random", ["*", "2.*"])
def test_in_turn_and_together_are_the_same_on_the_same_noise(seed, random, monkeypatch):
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), random=random), linear_data()
    components = components_of(model, estimator="weight")
    noise = torch.randn(COUNT, components[0].normals.drawn.size, dtype=DTYPE)
    rows = iter(noise.unsqueeze(1))
    together = ComponentsTogether(components)
    monkeypatch.setattr("knowable.inference.variational.mixture_objective.fast_randn", lambda *_, like: noise.clone())
    first = gradients_of(together, x, y)
    monkeypatch.setattr("knowable.inference.variational.objective.fast_randn", lambda *_, like: next(rows).clone())
    second = gradients_of(ComponentsInTurn(components), x, y)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_whole_steps_are_those_of_autograd(seed, optimiser):
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="2.*"), linear_data()
    found = []
    for clip in (None, 1e9):  # with a limit the loop takes the gradient from autograd
        torch.manual_seed(seed)
        objective = ComponentsTogether(components_of(model))
        training = settings_of(epochs=10, batch_size=8, optimiser=optimiser, learning_rate=0.01, clip=clip)
        train(objective, as_data((x, y), model), training, seed=seed)
        found.append([objective.q.detach(), objective.points.detach()])  # type: ignore[union-attr]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", [ComponentsTogether, ComponentsInTurn])
def test_each_components_gradient_is_clipped_by_itself(seed, kind):
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), random="2.*"), linear_data()
    objective = kind(components_of(model))
    _, slopes = gradients_of(objective, x, y)
    before = [each.clone() for each in slopes]
    norms = torch.stack([each.norm() for each in before])
    most = norms.median().item()
    objective.clip_gradient(most)
    for slope, norm, old in zip(slopes, norms, before, strict=True):
        if norm >= most:
            assert slope.norm().item() == pytest.approx(most, rel=1e-5)
        else:
            assert torch.equal(slope, old)


def test_warm_up_and_dimension_are_those_of_a_component(seed):
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1)), linear_data()
    for kind in (ComponentsTogether, ComponentsInTurn):
        torch.manual_seed(seed)
        objective = kind(components_of(model, kl_warmup=9))
        assert objective.settles_from == 9.0
        assert objective.dimension == 2 * sum(value.numel() for value in model.params().values())
        terms = objective(x, y)[1]
        objective.epoch = 9.0
        torch.manual_seed(seed)
        components_of(model)  # the same draws as before
        loss, later = objective(x, y)
        torch.testing.assert_close(terms["kl"], later["kl"])
        torch.testing.assert_close(loss, (later["kl"] - later["expected_log_likelihood"]) / 20)


def test_held_out_rows_are_scored_under_the_mixture(seed):
    # components so narrow that they are points
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.5)), linear_data()
    components = components_of(model, initial_scale=1e-9)
    with torch.no_grad():
        for each in components:
            each.q[1] = -20.0
    scores = [model.log_likelihood(each.layout.views(each.q[0].detach()), x, y) for each in components]
    expected = torch.stack(scores).exp().mean(0).log()
    for objective in (ComponentsTogether(components), ComponentsInTurn(components)):
        found = objective.predictive_log_likelihood(x, y).detach()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_components_are_given_back_as_they_are_now(seed):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="2.*")
    objective = ComponentsTogether(components_of(model))
    with torch.no_grad():
        objective.q.fill_(0.25)
        objective.points.fill_(0.5)  # type: ignore[union-attr]
    for each in objective.components:
        assert (each.q == 0.25).all()
        assert all((value == 0.5).all() for value in each.points)
        assert all((value == 0.25).all() for value in each.loc_and_scale()[0].values())


def test_components_in_turn_have_running_statistics_of_their_own(seed):
    model, (x, y) = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1)), linear_data()
    objective = ComponentsInTurn(components_of(model))
    objective(x, y)
    first, second = (each.net_buffers["1.running_mean"] for each in list(objective.components)[:2])
    assert not torch.equal(first, second)
    names = objective.tensors().keys()
    assert {f"buffer.{k}.1.running_mean" for k in range(COUNT)} <= names
    assert sum(name.startswith("parameter.") for name in names) == COUNT


class Last(nn.Module):
    """A recurrent network read out at its last step, which vmap does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize(("net", "takes"), [(mlp, True), (Last, False)])
def test_it_says_whether_the_network_goes_through_vmap(net, takes):
    model, (x, y) = kn.Model(net().to(DTYPE), kn.Gaussian(0.1)), linear_data()
    assert ComponentsTogether(components_of(model)).vectorises(x, y) is takes
