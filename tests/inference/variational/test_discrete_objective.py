from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.discrete import ESTIMATORS, DiscreteObjective, all_settings
from tests.inference.variational.gated_regression import GatedRegression


def objective_of(problem: GatedRegression, estimator: str, *, draws: int = 4, logits: Tensor | None = None, **knobs):
    objective = DiscreteObjective(problem.model(), len(problem.x), estimator=estimator, draws=draws, **knobs)
    if logits is not None:
        with torch.no_grad():
            objective.logits.copy_(logits)
    return objective


def gradients(objective: DiscreteObjective, data: tuple[Tensor, Tensor], repeats: int) -> Tensor:
    found = [torch.autograd.grad(objective(*data)[0], objective.logits)[0] for _ in range(repeats)]
    return torch.stack(found)


LOGITS = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.float64)


def test_settings_are_all_there_are():
    found = all_settings(3, like=torch.zeros(1))
    assert sorted(map(tuple, found.tolist())) == sorted(itertools.product([0.0, 1.0], repeat=3))


def test_enumerated_loss_is_the_bound_written_out(seed):
    problem = GatedRegression.make(seed=seed)
    objective = objective_of(problem, "enumerate", logits=LOGITS)
    loss, terms = objective(*problem.data)
    assert loss.item() == pytest.approx(-problem.elbo(LOGITS.sigmoid()) / len(problem.x), rel=1e-10)
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Bernoulli(logits=LOGITS),
        torch.distributions.Bernoulli(torch.full_like(LOGITS, problem.probability)),
    )
    assert terms["kl"].item() == terms["kl_of_gates"].item() == pytest.approx(divergence.sum().item(), rel=1e-10)


def test_beta_and_temperature_weigh_divergence_and_entropy():
    # of gates and one weight, whose entropies are those of torch's distributions
    net = kn.gated(nn.Sequential(nn.Linear(1, 1, bias=False)), "0").double()
    model = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    x = torch.randn(6, 1, dtype=torch.float64)
    losses, entropy, kl = {}, 0.0, 0.0
    for knobs in ((1.0, 1.0), (3.0, 1.0), (1.0, 0.5)):
        beta, temperature = knobs
        objective = DiscreteObjective(
            model, 6, beta=beta, temperature=temperature, initial_scale=0.4, initial_probability=0.3
        )
        torch.manual_seed(0)
        losses[knobs] = objective(x, x)[0].item()
        kl = objective.kl_divergence().item()
        parts = torch.distributions.Bernoulli(torch.tensor(0.3)), torch.distributions.Normal(0.0, 0.4)
        entropy = sum(float(part.entropy()) for part in parts)
        assert objective.entropy().item() == pytest.approx(entropy, rel=1e-6)
    assert losses[3.0, 1.0] - losses[1.0, 1.0] == pytest.approx(2 * kl / 6, rel=1e-9)
    assert losses[1.0, 0.5] - losses[1.0, 1.0] == pytest.approx(0.5 * entropy / 6, rel=1e-6)


def test_log_probability_is_that_of_independent_bernoullis(seed):
    objective = objective_of(GatedRegression.make(seed=seed), "score", logits=LOGITS)
    settings = all_settings(4, like=LOGITS)
    expected = torch.distributions.Bernoulli(logits=LOGITS).log_prob(settings).sum(1)
    torch.testing.assert_close(objective.log_probability(settings).detach(), expected)
    assert objective.log_probability(settings).exp().sum().item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("estimator", ["score", "local_expectation"])
def test_estimated_gradient_is_that_of_the_enumerated_bound(seed, estimator):
    # four coordinates, the mean of 300 gradients within 4.5 standard errors
    problem = GatedRegression.make(seed=seed)
    (expected,) = gradients(objective_of(problem, "enumerate", logits=LOGITS), problem.data, 1)
    torch.manual_seed(seed)
    found = gradients(objective_of(problem, estimator, logits=LOGITS), problem.data, 300)
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error + 1e-12).all()


def test_differences_are_exact_where_gates_do_not_interact(seed):
    # orthogonal inputs: the log likelihood is a sum over gates, so that what a gate adds does not depend on the others
    problem = GatedRegression.make(seed=seed, correlation=0.0)
    (expected,) = gradients(objective_of(problem, "enumerate", logits=LOGITS), problem.data, 1)
    found = gradients(objective_of(problem, "local_expectation", draws=1, logits=LOGITS), problem.data, 5)
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-8, atol=1e-10)


def test_noise_falls_from_score_to_differences_to_enumeration(seed):
    # at four draws each. The score has the noise of all gates, a difference only that of what interacts with its own
    problem = GatedRegression.make(seed=seed)
    torch.manual_seed(seed)
    noise = [
        gradients(objective_of(problem, each, logits=LOGITS), problem.data, 100).var(0).sum().item()
        for each in ESTIMATORS
    ]
    assert noise[0] > 2 * noise[1] > noise[2] and noise[2] < 1e-20  # some 4 times; a variance is known to 15%


def test_baseline_takes_out_what_all_draws_share(seed):
    # a constant added to the log likelihood (other units of the target) leaves the gradient as it is
    problem = GatedRegression.make(seed=seed)
    objective = objective_of(problem, "score", logits=LOGITS)
    found, original = [], type(objective.model).score
    for shift in (0.0, 1000.0):
        objective.model.score = lambda *args, shift=shift: original(objective.model, *args) + shift  # type: ignore[method-assign]
        torch.manual_seed(seed)
        found.append(gradients(objective, problem.data, 1)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_have_the_gradient_of_the_expected_likelihood(seed, estimator):
    # of one weight w and its gate z: E[log p] = π E_w[log p(y | w x)] + (1 - π) log p(y | 0), and the derivative of the
    # bound in the mean of w in closed form. The mean of 300 gradients within 4.5 standard errors
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    net = kn.gated(nn.Sequential(nn.Linear(1, 1, bias=False)), "0").double()
    model = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    objective = DiscreteObjective(model, 6, estimator=estimator, draws=4, initial_scale=0.4)
    with torch.no_grad():
        objective.logits.fill_(0.4)
    torch.manual_seed(seed)
    found = torch.stack([torch.autograd.grad(objective(x, y)[0], objective.q)[0][:, 0] for _ in range(300)])
    loc, log_scale = (each.detach().clone().requires_grad_() for each in objective.q[:, 0])
    spread = log_scale.exp() ** 2
    squares = (y - loc * x).square() + spread * x.square()
    value = -torch.tensor(0.4).sigmoid() * squares.mean() / (2 * 0.7**2)
    kl = kn.Normal(1.0).kl_from_normal(loc, log_scale.exp())
    expected = torch.stack(torch.autograd.grad(-value + kl / 6, (loc, log_scale)))
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()


def test_probabilities_begin_at_the_prior_or_where_they_are_told():
    problem = GatedRegression.make()
    assert objective_of(problem, "score").logits.sigmoid().tolist() == pytest.approx([problem.probability] * 4)
    told = objective_of(problem, "score", initial_probability=0.9)
    assert told.logits.sigmoid().tolist() == pytest.approx([0.9] * 4)
    net = kn.gated(nn.Sequential(nn.Linear(1, 1)), "0")
    rare = kn.Model(net, kn.Gaussian(0.7), {"*.gate": kn.BernoulliPrior(1e-4), "*": kn.Normal(1.0)})
    assert DiscreteObjective(rare, 6).logits.sigmoid().item() == pytest.approx(0.05)


def test_without_binary_parameters_it_is_the_bound_of_normals(seed):
    # within 4.5 standard errors of the closed form
    problem = kn.testing.LinearGaussian.make(n=20, seed=seed)
    objective = DiscreteObjective(problem.model(), 20, initial_scale=0.2)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([objective(*problem.data)[0] for _ in range(200)])
    loc, scale = (problem.as_flat(each) for each in objective.loc_and_scale())
    assert abs(losses.mean().item() + problem.elbo(loc, scale) / 20) < 4.5 * losses.std().item() / math.sqrt(200)


def test_warm_up_raises_the_divergence_to_its_full_weight(seed):
    problem = GatedRegression.make(seed=seed)
    plain, warming = (objective_of(problem, "enumerate", logits=LOGITS, kl_warmup=each) for each in (0, 4))
    loss, terms = plain(*problem.data)
    shares = []
    for epoch in (0.0, 1.5, 4.0, 100.0):
        warming.epoch = epoch
        shares.append(1 + len(problem.x) * (warming(*problem.data)[0] - loss).item() / terms["kl"].item())
    assert shares == pytest.approx([0.2, 0.5, 1.0, 1.0], rel=1e-6)
    assert warming.settles_from == 4.0
