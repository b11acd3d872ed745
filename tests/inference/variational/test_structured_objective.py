from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.structured import KL_GRADIENTS, Group, StructuredObjective
from knowable.testing import LinearGaussian, network_case
from tests.inference.variational.family_oracle import dense_moments, moved, normal_divergence

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
