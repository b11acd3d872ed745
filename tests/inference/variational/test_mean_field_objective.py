from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.variational.mean_field import ESTIMATORS, MeanFieldObjective
from knowable.testing import LinearGaussian, network_case
from tests.inference.variational.oracle import expected_log_likelihood


def objective_of(problem: LinearGaussian, *, scale: float = 0.2, **knobs: object) -> MeanFieldObjective:
    return MeanFieldObjective(problem.model(), problem.x, len(problem.x), initial_scale=scale, **knobs)  # type: ignore[arg-type]


def moments(problem: LinearGaussian, objective: MeanFieldObjective) -> tuple[torch.Tensor, torch.Tensor]:
    loc, scale = objective.loc_and_scale()
    return problem.as_flat(loc), problem.as_flat(scale)


def repeated(objective: MeanFieldObjective, data: tuple[torch.Tensor, torch.Tensor], seed: int) -> tuple:
    """Loss and terms with the noise of a given seed."""
    torch.manual_seed(seed)
    return objective(*data)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expected_loss_is_the_closed_form_bound(seed, estimator):
    # the mean of S losses within 4.5 standard errors of -ELBO / N
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = objective_of(problem, estimator=estimator, draws=2)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([objective(*problem.data)[0] for _ in range(150)])
    expected = -problem.elbo(*moments(problem, objective)) / 20
    assert abs(losses.mean().item() - expected) < 4.5 * losses.std().item() / math.sqrt(150)


def test_terms_are_on_the_full_data_scale(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = objective_of(problem)
    _, terms = repeated(objective, problem.data, seed)
    loc, std = moments(problem, objective)
    kl = kn.Normal(1.0).kl_from_normal(loc, std).item()
    assert terms["kl"].item() == pytest.approx(kl, rel=1e-9)
    with torch.no_grad():
        values = torch.stack([objective(*problem.data)[1]["expected_log_likelihood"] for _ in range(150)])
    error = values.std().item() / math.sqrt(150)
    assert abs(values.mean().item() - expected_log_likelihood(problem, loc, std)) < 4.5 * error


def test_batches_are_unbiased_for_the_whole(seed):
    # with the same draw of the weights, the mean loss over batches of equal size is the loss of all rows
    problem = LinearGaussian.make(n=24, seed=seed)
    objective = objective_of(problem, estimator="weight")
    whole = repeated(objective, problem.data, seed)[0].item()
    parts = [
        repeated(objective, (x, y), seed)[0].item() for x, y in zip(*(v.split(6) for v in problem.data), strict=True)
    ]
    assert sum(parts) / len(parts) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("beta", [0.25, 3.0])
def test_beta_multiplies_the_divergence_and_nothing_else(seed, beta):
    problem = LinearGaussian.make(n=20, seed=seed)
    plain, terms = repeated(objective_of(problem), problem.data, seed)
    changed, changed_terms = repeated(objective_of(problem, beta=beta), problem.data, seed)
    assert (changed - plain).item() == pytest.approx((beta - 1) * terms["kl"].item() / 20, rel=1e-9)
    assert changed_terms["kl"].item() == terms["kl"].item()


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_temperature_multiplies_the_entropy_and_nothing_else(seed, temperature):
    problem = LinearGaussian.make(n=20, seed=seed)
    plain, terms = repeated(objective_of(problem), problem.data, seed)
    objective = objective_of(problem, temperature=temperature)
    changed, changed_terms = repeated(objective, problem.data, seed)
    _, std = moments(problem, objective)
    entropy = torch.distributions.Normal(0.0, std).entropy().sum().item()
    assert objective.entropy().item() == pytest.approx(entropy, rel=1e-9)
    assert (changed - plain).item() == pytest.approx((1 - temperature) * entropy / 20, rel=1e-9)
    assert changed_terms["kl"].item() == terms["kl"].item()


def test_warm_up_raises_the_divergence_to_its_full_weight(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = objective_of(problem, kl_warmup=4)
    full, terms = repeated(objective_of(problem), problem.data, seed)
    weights = []
    for epoch in (0.0, 1.5, 4.0, 100.0):
        objective.epoch = epoch
        loss = repeated(objective, problem.data, seed)[0]
        weights.append(1 + 20 * (loss - full).item() / terms["kl"].item())
    assert weights == pytest.approx([0.2, 0.5, 1.0, 1.0], rel=1e-6)


def test_prior_of_point_estimates_is_counted_once(seed):
    # log p(D | w, b) + log p(b) - KL(q(w) ‖ p(w)), with b a point
    problem = LinearGaussian.make(n=20, seed=seed)
    net = problem.model().net
    model = kn.Model(
        net, kn.Gaussian(problem.noise), {"bias": kn.Normal(0.3, loc=1.0), "*": kn.Normal(1.0)}, random="weight"
    )
    objective = MeanFieldObjective(model, problem.x, 20, initial_scale=1e-9)  # all but a point: no noise in the loss
    loss, terms = objective(*problem.data)
    log_prior = kn.Normal(0.3, loc=1.0).log_prob(net.bias).sum()
    kl = kn.Normal(1.0).kl_from_normal(net.weight, torch.full_like(net.weight, 1e-9))
    log_likelihood = model.log_likelihood(model.params(), *problem.data).sum()
    assert terms["log_prior_of_points"].item() == pytest.approx(log_prior.item(), rel=1e-9)
    assert loss.item() == pytest.approx((-(log_likelihood + log_prior) + kl).item() / 20, rel=1e-6)


def test_hyperprior_of_a_learned_scale_is_counted_once(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    prior = kn.EmpiricalBayes(kn.Normal(2.0), kn.Normal(0.5, loc=0.1))
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    _, terms = MeanFieldObjective(model, problem.x, 20)(*problem.data)
    expected = kn.Normal(0.5, loc=0.1).log_prob(torch.tensor(math.log(2.0), dtype=torch.float64))
    assert terms["log_prior_of_points"].item() == pytest.approx(expected.item(), rel=1e-9)


# --- which weights are drawn and which are left to their layer -------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "drawn"),
    [
        ("auto", {"0.weight", "0.bias"}),
        ("local", set()),
        ("flipout", set()),
        ("weight", {"0.weight", "0.bias", "2.weight", "2.bias"}),
        ("score", {"0.weight", "0.bias", "2.weight", "2.bias"}),
        ("local_score", {"0.weight", "0.bias"}),
    ],
)
def test_plan_follows_the_estimator(estimator, drawn):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 1))
    model = kn.Model(net, kn.Gaussian(0.1))
    objective = MeanFieldObjective(model, torch.randn(5, 1, 3, 3), 5, estimator=estimator)
    assert set(objective.normals.drawn.names) == drawn
    assert sorted(objective.normals.drawn.names + objective.normals.local.names) == sorted(model.random_names)


def test_weights_before_batch_normalisation_are_drawn_by_auto():
    # examples meet in the batch's statistics, which move with a draw that all of them share
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    objective = MeanFieldObjective(kn.Model(net, kn.Gaussian(0.1)), torch.randn(6, 2), 6)
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} <= set(objective.normals.drawn.names)
    frozen = kn.Model(net, kn.Gaussian(0.1), frozen="1.*")  # held in evaluation mode: nothing meets
    assert {"0.weight", "0.bias"} <= set(MeanFieldObjective(frozen, torch.randn(6, 2), 6).normals.local.names)


@pytest.mark.parametrize("shape", [(-1, 1), (2, -1, 1)], ids=["tokens as rows", "time before batch"])
def test_weights_whose_rows_are_not_the_examples_are_drawn_by_flipout(shape):
    class Rearranged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(1, 3), nn.Linear(6, 1)

        def forward(self, x):
            tokens = x.T.reshape(shape)  # two tokens of each example
            return self.head(self.layer(tokens).reshape(2, len(x), 3).transpose(0, 1).flatten(1))

    model = kn.Model(Rearranged(), kn.Gaussian(0.1))
    objective = MeanFieldObjective(model, torch.randn(5, 2), 5, estimator="flipout")
    assert set(objective.normals.drawn.names) == {"layer.weight", "layer.bias"}
    assert set(objective.normals.local.names) == {"head.weight", "head.bias"}


def test_equal_priors_are_side_by_side():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = kn.Model(net, kn.Gaussian(0.1), {"*.bias": kn.Normal(3.0), "*": kn.Normal(1.0)})
    objective = MeanFieldObjective(model, torch.randn(4, 2), 4)
    assert objective.layout.names == ("0.weight", "2.weight", "0.bias", "2.bias")
    assert [(each.start, each.stop) for each in objective.normals.segments] == [(0, 9), (9, 13)]


def test_noise_of_the_likelihood_is_a_random_parameter_like_any_other(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian())
    objective = MeanFieldObjective(model, problem.x, 20)
    assert "likelihood.log_noise" in objective.normals.drawn.names
    loss, _ = objective(*problem.data)
    (gradient,) = torch.autograd.grad(loss, objective.q)
    assert (objective.layout.views(gradient[0])["likelihood.log_noise"] != 0).all()


# --- the rest --------------------------------------------------------------------------------------------------------


def test_start_values_replace_those_of_the_network():
    problem = LinearGaussian.make()
    start = problem.as_params(torch.arange(4.0, dtype=torch.float64))
    objective = objective_of(problem, start=start)
    loc, std = moments(problem, objective)
    assert loc.tolist() == [0.0, 1.0, 2.0, 3.0]
    torch.testing.assert_close(std, torch.full_like(std, 0.2))


def test_held_out_density_averages_over_weights_not_over_logarithms(seed):
    # one weight, y = w x: p(y) = N(y | m x, s² x² + σ²); the mean of S estimates from 8 draws is biased by about
    # Var / 16: with s x = 0.3 σ that is below 0.01, beside 4.5 standard errors
    net = nn.Linear(1, 1, bias=False).double()
    model = kn.Model(net, kn.Gaussian(1.0))
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), 1.2, dtype=torch.float64)
    objective = MeanFieldObjective(model, x, 1, initial_scale=0.3)
    torch.manual_seed(seed)
    with torch.no_grad():
        found = torch.stack([objective.predictive_log_likelihood(x, y)[0] for _ in range(150)])
        exact = torch.distributions.Normal(net.weight.item(), math.sqrt(0.09 + 1.0)).log_prob(y).item()
    assert abs(found.mean().item() - exact) < 4.5 * found.std().item() / math.sqrt(150) + 0.01


def test_everything_that_training_changes_is_listed():
    case = network_case("batchnorm_cnn")
    objective = MeanFieldObjective(case.model(), case.x, 16)
    tensors = objective.tensors()
    before = {name: value.detach().clone() for name, value in tensors.items()}
    loss, _ = objective(*case.data)
    loss.backward()
    torch.optim.SGD(objective.parameters(), lr=0.1).step()
    changed = {name for name, value in objective.tensors().items() if not torch.equal(value, before[name])}
    assert {"parameter.q", "buffer.1.running_mean", "buffer.1.num_batches_tracked"} <= changed
    assert tensors["parameter.q"] is objective.q
