from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.structured import KL_GRADIENTS, Group, StructuredObjective
from knowable.testing import BananaRegression, LinearGaussian, network_case
from tests.inference.variational.family_oracle import dense_moments, moved, normal_divergence
from tests.inference.variational.oracle import expected_log_likelihood, integrated_kl

METHODS = [kn.FullRankVI, kn.LowRankVI, kn.MatrixNormalVI]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)  # another case of a check that the quick run has
ONE_QUICK = [kn.FullRankVI, slow(kn.LowRankVI), slow(kn.MatrixNormalVI)]
FULL, MEAN, LOW = kn.families.FullRank(), kn.families.MeanField(), kn.families.LowRank(2)
EVERY = [
    kn.MeanFieldVI(families={"*": MEAN}),
    kn.MeanFieldVI(families={"weight": FULL}),
    kn.FullRankVI(),
    kn.LowRankVI(1),
    kn.LowRankVI(families={"bias": MEAN}),
    kn.MatrixNormalVI(),
]


@functools.cache
def early(place: int, seed: int) -> tuple[LinearGaussian, kn.Posterior]:
    """A problem, and one of the methods on it long before the optimum."""
    problem = LinearGaussian.make(n=30, d=3, noise=0.7, correlation=0.8, seed=seed)
    method = dataclasses.replace(EVERY[place], epochs=60, learning_rate=0.03)
    return problem, method.fit(problem.model(), problem.data, seed=seed)


every = pytest.mark.parametrize("place", range(len(EVERY)), ids=[repr(method) for method in EVERY])


@every
def test_bound_and_divergence_add_up_to_the_evidence(seed, place):
    # ELBO + KL(q ‖ p) = log p(D) for whatever q is, within 4.5 Monte Carlo errors
    problem, posterior = early(place, seed)
    loc, covariance = dense_moments(posterior, Layout.of(problem.model().params()))
    kl = normal_divergence(loc, covariance, problem.mean, problem.precision)
    assert kl > 0.01
    bound = posterior.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - problem.log_evidence) < 4.5 * bound.standard_error


@every
def test_density_of_the_posterior_gives_the_same_divergence(seed, place):
    # KL(q ‖ p) = E_q[log q - log p] from draws and log_prob, 2,000 of them
    problem, posterior = early(place, seed)
    exact = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    draws = posterior.sample(2000, torch.Generator().manual_seed(seed))
    ratio = posterior.log_prob(draws) - exact.log_prob(problem.as_flat(draws))
    kl = problem.log_evidence - posterior.diagnostics["elbo"]
    error = math.hypot(ratio.std().item() / math.sqrt(2000), posterior.log_evidence.standard_error)
    assert abs(ratio.mean().item() - kl) < 4.5 * error


@pytest.mark.slow
def test_families_are_ordered_as_theory_says(seed):
    # on a posterior with strong correlations: mean field, one direction, all of them; 0.15 nats for Adam's last steps
    problem = LinearGaussian.make(n=30, d=4, noise=0.7, correlation=0.9, seed=seed)
    layout = Layout.of(problem.model().params())
    settings = {"epochs": 800, "learning_rate": 0.03, "draws": 2}
    methods = {
        "mean field": kn.MeanFieldVI(**settings, families={"*": MEAN}),
        "weights full rank": kn.MeanFieldVI(**settings, families={"weight": FULL}),
        "full rank": kn.FullRankVI(**settings),
    }
    kl = {}
    for name, method in methods.items():
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        kl[name] = normal_divergence(*dense_moments(posterior, layout), problem.mean, problem.precision)
    # what is known: the best independent normals, the best product of a normal over the weights and one for the bias
    best = problem.divergence(problem.mean, problem.mean_field_std)
    blocks = torch.block_diag(*(torch.linalg.inv(problem.precision[a, a]) for a in (slice(0, 4), slice(4, 5))))
    best_product = normal_divergence(problem.mean, blocks, problem.mean, problem.precision)
    assert best > best_product + 0.3
    assert best - 1e-9 < kl["mean field"] < best + 0.15
    assert best_product - 1e-9 < kl["weights full rank"] < best_product + 0.05
    assert -1e-9 < kl["full rank"] < 0.001


@pytest.mark.slow
def test_families_are_ordered_on_a_bent_posterior(seed):
    # the bound of each fitted normal is exact by quadrature; 0.05 nats for Adam's last steps
    problem = BananaRegression()
    settings = {"epochs": 800, "learning_rate": 0.03, "draws": 4}
    found = {}
    for name, method in {
        "mean field": kn.MeanFieldVI(**settings),
        "one direction": kn.LowRankVI(1, **settings),
        "full rank": kn.FullRankVI(**settings),
    }.items():
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        moments = dense_moments(posterior, Layout.of(problem.model().params()))
        found[name] = problem.divergence(*moments)
        assert abs(posterior.log_evidence + found[name] - problem.log_evidence) < (
            4.5 * posterior.log_evidence.standard_error
        )
    assert found["mean field"] > found["full rank"] + 0.1
    assert abs(found["one direction"] - found["full rank"]) < 0.05  # of two weights, one direction is all there is
    assert found["full rank"] > 0.02  # no normal is bent


# --- groups ----------------------------------------------------------------------------------------------------------


def test_mean_field_family_reaches_the_closed_form_optimum(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kn.MeanFieldVI(families={"*": MEAN}, epochs=800, learning_rate=0.03)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.DiagonalNormal)
    shortfall = problem.elbo() - problem.elbo(problem.as_flat(posterior.loc), problem.as_flat(posterior.scale))
    assert 0 <= shortfall < 0.15  # as for the other estimators of mean field


@pytest.mark.parametrize("way", ["mean field", "full rank"])
def test_a_group_is_correlated_within_and_independent_of_the_others(seed, way):
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.2))
    method = {
        "mean field": kn.MeanFieldVI(epochs=200, families={"2.*": FULL}),
        "full rank": kn.FullRankVI(epochs=200, families={"0.*": MEAN}),
    }[way]
    posterior = method.fit(model, (x, x.sin()), seed=seed)
    assert isinstance(posterior, kn.ProductPosterior)
    assert type(posterior.part_of("2.weight")) is kn.FullNormal
    assert posterior.part_of("2.weight") is posterior.part_of("2.bias")
    assert type(posterior.part_of("0.weight")) is kn.DiagonalNormal
    assert posterior.predict(x).mean.shape == (30, 1)
    off = posterior.part_of("2.weight").covariance
    assert (off - off.diagonal().diag()).abs().max() > 0


def test_last_layer_by_name_and_rest_by_the_method(seed):
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    method = kn.LowRankVI(2, epochs=20, families={"last_layer": FULL, "0.bias": MEAN})
    posterior = method.fit(kn.Model(net, kn.Gaussian()), (x, x.sin()), seed=seed)
    assert posterior.names == [("2.weight", "2.bias", "likelihood.log_noise"), ("0.bias",), ("0.weight",)]
    assert [type(part) for part in posterior.parts] == [kn.FullNormal, kn.DiagonalNormal, kn.LowRankNormal]


def test_glob_without_a_match_is_refused_by_name():
    problem = LinearGaussian.make(n=20)
    with pytest.raises(kn.InvalidArgument, match=r"families='head.\*' matches no parameter"):
        kn.FullRankVI(epochs=1, families={"head.*": MEAN}).fit(problem.model(), problem.data)


@pytest.mark.parametrize("estimator", ["local", "flipout", "score"])
def test_other_families_beside_mean_field_draw_weights(estimator):
    with pytest.raises(kn.InvalidArgument, match="estimator must be 'auto' or 'weight' with families"):
        kn.MeanFieldVI(estimator=estimator, families={"*": FULL})


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", METHODS)
def test_start_and_scale_are_heeded(kind):
    problem = LinearGaussian.make(n=20)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    method = kind(epochs=1, learning_rate=1e-9, start=exact, initial_scale=0.3)
    posterior = method.fit(problem.model(seed=5), problem.data)
    torch.testing.assert_close(problem.as_flat(posterior.mean()), problem.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        problem.as_flat(posterior.std()), torch.full((4,), 0.3, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_beta_is_in_the_report_and_leads_to_the_tempered_optimum(seed, kind):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kind(epochs=1000, learning_rate=0.03, beta=0.3, kl_gradient="path")
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert "beta" in posterior.diagnostics.notes[0] and "beta=0.3" in posterior.diagnostics.method
    cold = problem.tempered(0.3)
    moments = dense_moments(posterior, Layout.of(problem.model().params()))
    kl = normal_divergence(*moments, cold.mean, cold.precision)
    blocks = torch.block_diag(*(torch.linalg.inv(cold.precision[a, a]) for a in (slice(0, 3), slice(3, 4))))
    matrix = normal_divergence(cold.mean, blocks, cold.mean, cold.precision)  # the bias apart from the weights
    assert kl < (matrix if kind is kn.MatrixNormalVI else 0.0) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "batches",
    [slow({"batch_size": 20, "draws": 2}), {"batch_size": 10, "training": kn.Training(accumulate=3)}],
    ids=str,
)
@pytest.mark.parametrize("kind", ONE_QUICK)
def test_mini_batches_with_several_draws_or_accumulated_aim_at_the_same(seed, kind, batches):
    problem = LinearGaussian.make(n=60, noise=0.7, correlation=0.2, seed=seed)
    method = kind(epochs=400, learning_rate=0.03, **batches)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    moments = dense_moments(posterior, Layout.of(problem.model().params()))
    assert normal_divergence(*moments, problem.mean, problem.precision) < 0.3


@pytest.mark.parametrize("prior", [slow(kn.LaplacePrior(0.5)), kn.ScaleMixture(0.5, 1.0, 0.1)], ids=repr)
def test_bound_under_other_priors_is_likelihood_less_divergence(seed, prior):
    # likelihood in closed form; divergence: correlations in closed form, independent normals by quadrature
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    posterior = kn.FullRankVI(epochs=150, learning_rate=0.05).fit(model, problem.data, seed=seed)
    loc, covariance = posterior.loc, posterior.covariance
    std = covariance.diagonal().sqrt()
    design = problem.design
    spread = (design @ (covariance - std.square().diag()) * design).sum() / problem.noise**2
    fit = expected_log_likelihood(problem, loc, std) - 0.5 * spread.item()
    correlation = -0.5 * torch.logdet(covariance / std.outer(std)).item()
    kl = sum(integrated_kl(prior, *pair) for pair in zip(loc.tolist(), std.tolist(), strict=True)) + correlation
    assert abs(posterior.log_evidence - (fit - kl)) < 4.5 * posterior.log_evidence.standard_error


def test_all_methods_have_the_same_knobs():
    common = {field.name for field in dataclasses.fields(kn.FullRankVI)} - {"max_parameters"}
    for kind, own in itertools.zip_longest(METHODS[1:], [{"rank"}, {"full_up_to"}]):
        assert {field.name for field in dataclasses.fields(kind)} - own == common


# --- structured objective --------------------------------------------------------------------------------------------


FAMILIES = [kn.families.MeanField(), kn.families.FullRank(), kn.families.LowRank(2), kn.families.MatrixNormal()]


def objective_of(problem: LinearGaussian, *groups: Group, model: kn.Model | None = None, **knobs: object):
    model = model or problem.model()
    groups = groups or (Group(kn.families.FullRank(), tuple(model.random_names)),)
    return StructuredObjective(model, len(problem.x), groups, initial_scale=0.2, **knobs)  # type: ignore[arg-type]


def shaken(objective: StructuredObjective, seed: int) -> StructuredObjective:
    for part in objective.parts:
        moved(part, seed)
    return objective


def exact_bound(problem: LinearGaussian, objective: StructuredObjective) -> float:
    layout = Layout.of(problem.model().params())
    loc, covariance = dense_moments(objective.posterior(), layout)
    return problem.log_evidence - normal_divergence(loc, covariance, problem.mean, problem.precision)


SPLIT = (Group(kn.families.FullRank(), ("weight",)), Group(kn.families.MeanField(), ("bias",)))
ALL = [(Group(family, ("weight", "bias")),) for family in FAMILIES]


@pytest.mark.parametrize("groups", [*ALL, SPLIT], ids=str)
def test_expected_loss_is_the_closed_form_bound(seed, groups):
    # the mean of 150 losses within 4.5 standard errors of -ELBO / N
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = shaken(objective_of(problem, *groups, draws=2), seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([objective(*problem.data)[0] for _ in range(150)])
    error = losses.std().item() / math.sqrt(150)
    assert abs(losses.mean().item() + exact_bound(problem, objective) / 20) < 4.5 * error


@pytest.mark.parametrize("groups", [*ALL, SPLIT], ids=str)
def test_divergence_has_no_noise_under_a_normal_prior(seed, groups):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = shaken(objective_of(problem, *groups, kl_gradient="closed"), seed)
    layout = Layout.of(problem.model().params())
    loc, covariance = dense_moments(objective.posterior(), layout)
    expected = normal_divergence(loc, covariance, torch.zeros(4), torch.eye(4))
    assert objective.kl_divergence().item() == pytest.approx(expected, rel=1e-8)
    assert objective(*problem.data)[1]["kl"].item() == pytest.approx(expected, rel=1e-8)
    objective.kl_gradient = "path"  # the entropy is still exact
    found = torch.stack([objective(*problem.data)[1]["kl"] for _ in range(100)])
    assert abs(found.mean().item() - expected) < 4.5 * found.std().item() / 10


@pytest.mark.parametrize("groups", [*ALL, SPLIT], ids=str)
def test_both_gradients_of_the_divergence_have_the_same_mean(seed, groups):
    # each of the gradient's numbers, over 800 draws, within 5 standard errors; the value is the same
    problem = LinearGaussian.make(n=20, seed=seed)
    found = {}
    for kind in ("closed", "path"):
        objective = shaken(objective_of(problem, *groups, kl_gradient=kind, draws=40), seed)
        torch.manual_seed(seed)
        each = []
        for _ in range(20):
            objective.zero_grad()
            loss, _ = objective(*problem.data)
            loss.backward()
            each.append(torch.cat([value.grad.flatten() for value in objective.parameters()]))
        stack = torch.stack(each)
        found[kind] = stack.mean(0), stack.std(0) / math.sqrt(20)
    (closed, closed_error), (path, path_error) = found.values()
    # 20 repetitions estimate their own error roughly: Student's t with 19 degrees of freedom, 6.5 for 5
    assert ((closed - path).abs() < 6.5 * (closed_error.square() + path_error.square()).sqrt() + 1e-12).all()


def test_gradient_along_the_draws_vanishes_at_the_posterior_draw_by_draw(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    scale_tril = torch.linalg.cholesky(problem.covariance)
    for kind, still in (("path", True), ("auto", True), ("closed", False)):
        objective = objective_of(problem, kl_gradient=kind)
        (part,) = objective.parts
        with torch.no_grad():
            part.loc.copy_(problem.mean)
            part.base.copy_(scale_tril)
        for _ in range(3):
            objective.zero_grad()
            objective(*problem.data)[0].backward()
            largest = max(value.grad.abs().max().item() for value in objective.parameters())
            assert (largest < 1e-10) is still


def test_batches_are_unbiased_for_the_whole(seed):
    problem = LinearGaussian.make(n=24, seed=seed)
    objective = objective_of(problem)

    def loss(data: tuple[torch.Tensor, ...]) -> float:
        torch.manual_seed(seed)
        return objective(*data)[0].item()

    parts = [loss(pair) for pair in zip(*(v.split(6) for v in problem.data), strict=True)]
    assert sum(parts) / 4 == pytest.approx(loss(problem.data), rel=1e-12)


def test_beta_and_warm_up_weigh_the_divergence_also_along_the_draws(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    results = {}
    for beta in (1.0, 3.0):
        objective = objective_of(problem, beta=beta, kl_warmup=1)  # along the draws
        torch.manual_seed(seed)
        results[beta] = objective(*problem.data)  # at epoch 0 half of it counts
    difference = (results[3.0][0] - results[1.0][0]).item()
    assert difference == pytest.approx(results[1.0][1]["kl"].item() / 20, rel=1e-9)


@pytest.mark.parametrize("kind", KL_GRADIENTS)
@pytest.mark.parametrize(
    "prior", [kn.LaplacePrior(0.5), kn.ScaleMixture(0.5, 1.0, 0.1), kn.EmpiricalBayes(kn.Normal(0.7))], ids=repr
)
def test_loss_under_other_priors_is_finite_and_trains_everything(seed, prior, kind):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(), prior)
    objective = StructuredObjective(
        model, 20, [Group(kn.families.FullRank(), tuple(model.random_names))], kl_gradient=kind
    )
    loss, _ = objective(*problem.data)
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(value.grad is not None and value.grad.abs().max() > 0 for value in objective.parameters())


def test_prior_over_all_weights_is_sampled_as_a_whole(seed):
    # the first half's exact posterior as the prior: the mean of 400 estimates within 4.5 standard errors
    problem = LinearGaussian.make(n=20, seed=seed)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), exact)
    objective = objective_of(problem, *SPLIT, model=model)
    found = torch.stack([objective.kl_divergence().detach() for _ in range(400)])
    loc, covariance = dense_moments(objective.posterior(), Layout.of(problem.model().params()))
    expected = normal_divergence(loc, covariance, problem.mean, problem.precision)
    assert abs(found.mean().item() - expected) < 4.5 * found.std().item() / 20


def test_one_group_has_its_own_posterior_and_several_their_product():
    problem = LinearGaussian.make(n=20)
    kinds = [kn.DiagonalNormal, kn.FullNormal, kn.LowRankNormal, kn.KroneckerNormal]
    for groups, kind in zip(ALL, kinds, strict=True):
        assert type(objective_of(problem, *groups).posterior(seed=5)) is kind
    product = objective_of(problem, *SPLIT).posterior(seed=5)
    assert isinstance(product, kn.ProductPosterior) and product.seed == 5
    assert [type(part) for part in product.parts] == [kn.FullNormal, kn.DiagonalNormal]


def test_form_of_q_changes_between_steps_and_never_within_one(seed):
    # gradients of several batches are added up, so they must be in the same coordinates
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = objective_of(problem)
    (part,) = objective.parts
    optimiser, first = torch.optim.SGD(objective.parameters(), lr=0.01), part.base.clone()
    for _ in range(10):
        assert torch.equal(part.base, first)
        for _ in range(3):
            objective(*problem.data)[0].backward()
        assert torch.equal(part.base, first)
        objective.update(optimiser)
    assert not torch.equal(part.base, first)


def test_default_step_size_does_not_depend_on_the_family():
    problem = LinearGaussian.make(n=20)
    assert {objective_of(problem, *groups).dimension for groups in (*ALL, SPLIT)} == {8}


def test_weights_are_not_drawn_in_low_precision():
    model = kn.Model(nn.Linear(3, 2), kn.Gaussian(0.3))
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    for family in FAMILIES:
        objective = StructuredObjective(model, 6, [Group(family, ("weight", "bias"))], kl_gradient="closed")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, terms = objective(x, y)
        loss.backward()
        assert terms["kl"].dtype == torch.float32
        with torch.no_grad():
            assert terms["kl"].item() == pytest.approx(objective.kl_divergence().item(), rel=1e-5)


def test_everything_that_training_changes_is_listed():
    case = network_case("batchnorm_cnn")
    model = case.model()
    objective = StructuredObjective(model, 16, [Group(kn.families.MatrixNormal(), tuple(model.random_names))])
    before = {name: value.detach().clone() for name, value in objective.tensors().items()}
    for _ in range(2):
        objective(*case.data)[0].backward()
    torch.optim.SGD(objective.parameters(), lr=0.1).step()
    changed = {name for name, value in objective.tensors().items() if not torch.equal(value, before[name])}
    assert {"parameter.parts.0.loc", "buffer.1.running_mean", "buffer.1.num_batches_tracked"} <= changed
    assert any(name.startswith("parameter.parts.0.factors.0.rows") for name in changed)


def test_state_of_the_families_is_part_of_what_training_changes(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    tensors = objective_of(problem).tensors()
    assert {"state.parts.0.base", "state.parts.0.age", "parameter.parts.0.drift"} <= tensors.keys()
