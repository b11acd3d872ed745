"""Tests of mixtures: one component is mean field, two find two modes, and the bounds are what they are said to be."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.prediction.components import normal_log_prob
from knowable.core.training.loop import train
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.mixture import ComponentsInTurn, ComponentsTogether, separation
from knowable.inference.variational.objective import expected_log_likelihood as mean_log_likelihood
from knowable.testing import LinearGaussian
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model, mlp, same_params
from tests.core.training_cases import settings_of
from tests.inference.variational.oracle import expected_log_likelihood, flat_moments, loss_gradient

QUICK = {"epochs": 600, "learning_rate": 0.03}
SLACK = 0.15  # what Adam's last steps leave of a bound, in nats: see test_mean_field.py


class Squared(nn.Module):
    """x w²: w and -w are the same function, so that the posterior has two modes of the same shape."""

    def __init__(self, start: float = 0.8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.square()


NOISE = 0.5
X = torch.linspace(0.5, 1.5, 10, dtype=DTYPE).unsqueeze(1)


def two_modes(seed: int) -> tuple[kn.Model, tuple[Tensor, Tensor], float]:
    """A model of one weight whose posterior has two modes, its data, and the log evidence by integration."""
    generator = torch.Generator().manual_seed(seed)
    y = X + NOISE * torch.randn(X.shape, generator=generator, dtype=DTYPE)  # w is 1 or -1
    w = torch.linspace(-6, 6, 24_001, dtype=DTYPE)
    log_joint = normal_log_prob(w, 0.0, 1.0) + normal_log_prob(y, X * w.square(), NOISE).sum(0)
    evidence = log_joint.logsumexp(0).item() + math.log(12 / 24_000)
    return kn.Model(Squared(), kn.Gaussian(NOISE)), (X, y), evidence


@functools.cache
def fitted(seed: int) -> tuple[kn.Mixture, kn.DiagonalNormal, float]:
    """Two components and one on the same two modes, and the log evidence."""
    model, data, evidence = two_modes(seed)
    start = kn.Particles(model, {"w": torch.tensor([[0.8], [-0.8]], dtype=DTYPE)})
    mixture = kn.MixtureVI(2, **QUICK, draws=4, start=start).fit(model, data, seed=seed)
    single = kn.MeanFieldVI(**QUICK, draws=4).fit(model, data, seed=seed)
    return mixture, single, evidence


def test_two_components_find_both_modes(seed):
    mixture, _, _ = fitted(seed)
    first, second = (member.loc["w"].item() for member in mixture.members)
    assert first > 0.5 and second < -0.5
    # mirror images of each other: a normal that is off by δ of its own standard deviations costs δ² / 2 nats
    spread = mixture.members[0].scale["w"].item()
    assert abs(first + second) < 2 * math.sqrt(2 * SLACK) * spread


def test_two_modes_are_worth_log_two(seed):
    mixture, single, evidence = fitted(seed)
    assert mixture.diagnostics["separation"] == pytest.approx(math.log(2), abs=0.01)  # modes are ten sds apart
    gain, error = mixture.log_evidence - single.log_evidence, mixture.log_evidence.standard_error
    assert abs(gain - math.log(2)) < 4 * math.hypot(error, single.log_evidence.standard_error) + SLACK
    # each mode is nearly normal, so that little is lost
    assert evidence - SLACK - 4 * error < mixture.log_evidence < evidence + 4 * error


def test_bound_and_divergence_make_up_the_evidence(seed):
    # KL(q ‖ posterior) by integration over the one weight
    mixture, _, evidence = fitted(seed)
    _, (x, y), _ = two_modes(seed)
    w = torch.linspace(-4, 4, 16_001, dtype=DTYPE)
    log_q = mixture.log_prob({"w": w.unsqueeze(1)})
    log_p = normal_log_prob(w, 0.0, 1.0) + normal_log_prob(y, x * w.square(), NOISE).sum(0) - evidence
    kl = (log_q.exp() * (log_q - log_p)).sum().item() * 8 / 16_000
    bound = mixture.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - evidence) < 4 * bound.standard_error


def test_report_has_the_bounds_apart(seed):
    mixture, _, _ = fitted(seed)
    terms = mixture.diagnostics.terms
    own = [float(member.log_evidence) for member in mixture.members]  # type: ignore[arg-type]
    assert terms["mean_elbo"] == pytest.approx(sum(own) / 2)
    assert terms["elbo"] == pytest.approx(terms["mean_elbo"] + terms["separation"])
    assert terms["elbo"] == pytest.approx(terms["expected_log_likelihood"] - terms["kl"])
    assert terms["elbo"] == pytest.approx(float(mixture.log_evidence))  # type: ignore[arg-type]
    assert all(member.log_evidence.kind == "bound" for member in mixture.members)  # type: ignore[union-attr]


def test_each_component_reaches_the_closed_form_optimum(seed):
    # a posterior with one mode: all components end there, and mixing them gains nothing
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    posterior = kn.MixtureVI(3, **QUICK).fit(problem.model(), problem.data, seed=seed)
    for member in posterior.members:
        assert problem.elbo() - problem.elbo(*flat_moments(problem, member)) < SLACK / 3  # local: see test_mean_field
    # components that are each δ nats from the optimum differ by about 4 δ of KL at the most
    assert posterior.diagnostics["separation"] < SLACK
    assert abs(posterior.log_evidence - problem.elbo()) < 4 * posterior.log_evidence.standard_error + SLACK


@pytest.mark.parametrize("net", [mlp, batch_norm_net])
@pytest.mark.parametrize(
    "settings", [{}, {"start": "map"}, {"training": kn.Training(clip=0.1)}, {"kl_warmup": 3}], ids=str
)
def test_one_component_is_mean_field(net, settings):
    model, data = kn.Model(net().to(DTYPE), kn.Gaussian()), linear_data()
    settings = {"epochs": 10, "batch_size": 8, **settings}
    mixture = kn.MixtureVI(1, **settings).fit(model, data, seed=3)
    single = kn.MeanFieldVI(**settings).fit(model, data, seed=3)
    (member,) = mixture.members
    assert same_params(member.mean(), single.mean()) and same_params(member.std(), single.std())
    assert same_params(mixture.buffers, single.buffers)
    assert repr(mixture.log_evidence) == repr(single.log_evidence)


@pytest.mark.slow
def test_together_or_in_turn_ends_at_the_same_bound(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    for vectorise in (True, False):
        posterior = kn.MixtureVI(2, **QUICK, vectorise=vectorise).fit(problem.model(), problem.data, seed=seed)
        for member in posterior.members:
            assert problem.elbo() - problem.elbo(*flat_moments(problem, member)) < SLACK / 3


def test_learned_scale_of_the_prior_and_points_are_shared(seed):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), kn.EmpiricalBayes(kn.Normal(1.0)), random="2.*")
    start = model.params()
    for vectorise in (True, False):
        posterior = kn.MixtureVI(2, epochs=20, vectorise=vectorise).fit(model, linear_data(), seed=seed)
        assert set(posterior.points) == set(model.point_names)
        for member in posterior.members:
            assert all(torch.equal(member.points[name], value) for name, value in posterior.points.items())
        assert all(not torch.equal(value, start[name]) for name, value in posterior.points.items())


# --- where components begin ------------------------------------------------------------------------------------------

STILL = {"epochs": 1, "learning_rate": 1e-12}


def test_components_begin_at_the_network_and_at_new_weights(seed):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1))
    posterior = kn.MixtureVI(3, **STILL).fit(model, linear_data(), seed=seed)
    first, second, third = (member.loc["0.weight"] for member in posterior.members)
    torch.testing.assert_close(first, model.params()["0.weight"], rtol=0.0, atol=1e-9)
    for one, other in ((first, second), (first, third), (second, third)):
        assert (one - other).abs().min() > 1e-6
    assert all((member.scale["0.weight"] - 0.02).abs().max() < 1e-9 for member in posterior.members)


def test_components_begin_at_the_modes(seed):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.3)), linear_data()
    posterior = kn.MixtureVI(2, epochs=100, start="map").fit(model, data, seed=seed)
    mode = kn.MAP(epochs=100).fit(model, data, seed=seed).mean()
    still = kn.MixtureVI(2, **STILL, start=posterior).fit(model, data, seed=seed)  # a mixture's members' means
    for before, after in zip(posterior.members, still.members, strict=True):
        torch.testing.assert_close(after.loc, before.loc, rtol=0.0, atol=1e-9)
    assert mode.keys() == posterior.members[0].loc.keys()


def test_components_begin_at_atoms_and_then_at_draws(seed):
    model, data = linear_model(), linear_data()
    stack = {name: torch.stack([value + 1, value + 2]) for name, value in model.params().items()}
    atoms = kn.Particles(model, stack)
    posterior = kn.MixtureVI(3, **STILL, start=atoms).fit(model, data, seed=seed)
    for k in range(2):
        torch.testing.assert_close(posterior.members[k].loc["weight"], stack["weight"][k], rtol=0.0, atol=1e-9)
    drawn = posterior.members[2].loc["weight"]
    assert any((drawn - each).abs().max() < 1e-9 for each in stack["weight"])
    exact = kn.ExactLinear().fit(model, data)
    posterior = kn.MixtureVI(2, **STILL, start=exact).fit(model, data, seed=seed)
    first, second = (member.loc["weight"] for member in posterior.members)
    torch.testing.assert_close(first, exact.mean()["weight"], rtol=0.0, atol=1e-9)
    assert (first - second).abs().max() > 1e-6


# --- what it says and refuses ----------------------------------------------------------------------------------------


def test_improper_prior_has_no_evidence_to_bound(seed):
    model = linear_model(prior=kn.Flat())
    posterior = kn.MixtureVI(2, epochs=3).fit(model, linear_data(), seed=seed)
    assert posterior.log_evidence is None
    assert {"elbo", "mean_elbo", "separation"} <= posterior.diagnostics.terms.keys()


def test_beta_is_told(seed):
    posterior = kn.MixtureVI(2, epochs=2, beta=0.5).fit(linear_model(), linear_data(), seed=seed)
    assert "beta=0.5" in posterior.diagnostics.notes[0] and "beta=0.5" in posterior.diagnostics.method


def test_precision_and_networks_that_vmap_does_not_take_go_in_turn():
    model, data = kn.Model(mlp(), kn.Gaussian(0.1)), tuple(each.float() for each in linear_data())
    method = kn.MixtureVI(2, epochs=2)
    posterior = method.fit(model, data, engine=kn.Engine("bfloat16"))
    assert len(posterior) == 2
    with pytest.raises(kn.Unsupported, match="precision='bfloat16' is for one network at a time"):
        kn.MixtureVI(2, epochs=2, vectorise=True).fit(model, data, engine=kn.Engine("bfloat16"))
    with pytest.raises(kn.Unsupported, match="batch statistics or dropout"):
        kn.MixtureVI(2, epochs=2, vectorise=True).fit(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), data)


def test_members_of_a_normalised_network_have_statistics_of_their_own(seed):
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1))
    posterior = kn.MixtureVI(2, epochs=5).fit(model, linear_data(), seed=seed)
    first, second = (member.buffers["1.running_mean"] for member in posterior.members)
    assert not torch.equal(first, second)


# --- mixture bound ---------------------------------------------------------------------------------------------------


def integrated(loc: Tensor, log_scale: Tensor) -> float:
    """H(q) less the mean of the components' entropies, on a grid of one or two dimensions."""
    count, size = loc.shape
    axis = torch.linspace(-12, 12, 4001 if size == 1 else 801, dtype=DTYPE)
    values = torch.cartesian_prod(*[axis] * size).view(-1, 1, size)
    area = (axis[1] - axis[0]).item() ** size
    each = torch.distributions.Normal(loc, log_scale.exp()).log_prob(values).sum(-1)  # (points, K)
    log_q = each.logsumexp(1) - math.log(count)
    entropy = -(log_q.exp() * log_q).sum().item() * area
    own = (log_scale.sum(1) + size * 0.5 * math.log(2 * math.pi * math.e)).mean().item()
    return entropy - own


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_separation_is_the_entropy_that_mixing_adds(seed, count, size):
    loc = torch.randn(count, size, dtype=DTYPE)
    log_scale = 0.3 * torch.randn(count, size, dtype=DTYPE)
    found, error = separation(loc, log_scale)
    assert 0 < error < 0.02
    assert found == pytest.approx(integrated(loc, log_scale), abs=5 * error + 1e-6)


def test_separation_goes_from_nothing_to_the_logarithm_of_the_number(seed):
    log_scale = torch.zeros(4, 3, dtype=DTYPE)
    alike, error = separation(torch.zeros(4, 3, dtype=DTYPE), log_scale)
    assert alike == pytest.approx(0.0, abs=1e-12) and error == pytest.approx(0.0, abs=1e-12)
    apart, error = separation(100.0 * torch.arange(4.0, dtype=DTYPE).view(-1, 1).expand(4, 3), log_scale)
    assert apart == pytest.approx(math.log(4), abs=1e-12) and error == pytest.approx(0.0, abs=1e-12)
    assert separation(torch.randn(1, 3, dtype=DTYPE), torch.zeros(1, 3, dtype=DTYPE)) == (0.0, 0.0)


def test_draws_in_blocks_are_as_many(seed, monkeypatch):
    loc, log_scale = torch.randn(2, 3, dtype=DTYPE), torch.zeros(2, 3, dtype=DTYPE)
    whole, error = separation(loc, log_scale)
    monkeypatch.setattr("knowable.inference.variational.mixture._BLOCK", 300)
    parts, other = separation(loc, log_scale)
    assert error == pytest.approx(other, rel=0.2)  # as many draws: standard deviations from 2,048 each
    assert whole == pytest.approx(parts, abs=5 * math.hypot(error, other))


# --- mixture objective -----------------------------------------------------------------------------------------------


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
    monkeypatch.setattr("knowable.inference.variational.mixture.fast_randn", lambda *_, like: noise.clone())
    first = gradients_of(together, x, y)
    monkeypatch.setattr("knowable.inference.variational.normals.fast_randn", lambda *_, like: next(rows).clone())
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
