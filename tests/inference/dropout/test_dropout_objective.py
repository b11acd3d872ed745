from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import knowable as kn
from knowable.core.model.data import Data
from knowable.core.support.randomness import fast_keep
from knowable.inference.dropout import mc_dropout
from knowable.inference.dropout.dropout_divergence import entropy
from knowable.inference.dropout.masked_weights import MaskedWeights, SiteMasks, masked_params
from knowable.inference.dropout.mc_dropout import DropoutObjective, log_probability, relaxed_mask, score_term
from knowable.inference.dropout.placement import place_dropout
from tests.inference.dropout.networks import Branches, Residual, images, perceptron
from tests.inference.dropout.oracle import relaxed_moments

RATE = 0.3
N = 40  # rows that the batch stands for


def small(seed: int, way: str = "activations", **settings: object) -> tuple[DropoutObjective, Tensor, Tensor]:
    """A network of two sites with three units each, whose 64 masks can all be tried; and a batch."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for value in net.parameters():
        nn.init.uniform_(value, 0.5, 1.0)  # no unit is idle
    model = kn.Model(net, kn.Gaussian(0.5), kn.Normal(0.8))
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    placement = place_dropout(model, x, rate=RATE, where=None)
    return DropoutObjective(model, N, placement, way=way, **settings), x, y  # type: ignore[arg-type]


def every_mask(objective: DropoutObjective, x: Tensor, y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities of all 64 masks, and the log likelihoods of the rows under each, ``(64, rows)``."""
    params, model = objective.params(), objective.model
    rates = torch.sigmoid(logits)
    probabilities, values = [], []
    for bits in itertools.product((0.0, 1.0), repeat=6):
        masks = torch.tensor(bits, dtype=torch.float64).view(2, 3)
        kept = masks * (1 - rates).log().unsqueeze(1) + (1 - masks) * rates.log().unsqueeze(1)
        weights = {
            name: params[name] * mask / (1 - rate)
            for name, mask, rate in zip(("2.weight", "4.weight"), masks, rates, strict=True)
        }
        output = model.forward({**params, **weights}, x)
        probabilities.append(kept.sum())
        values.append(model.score(output, y, params))
    return torch.stack(probabilities), torch.stack(values)


def exact_log_likelihood(objective: DropoutObjective, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
    """E[mean log likelihood of the batch], differentiable in the logits of the rates."""
    log_q, values = every_mask(objective, x, y, logits)
    return (log_q.exp() @ values).mean()


# --- the two ways ----------------------------------------------------------------------------------------------------

NETS = {
    "perceptron": (perceptron(None), (3,)),
    "its own layers": (perceptron(0.3), (3,)),
    "convolutions": (nn.Sequential(*images(groups=2), nn.Linear(2, 1)), (1, 8, 8)),
    "a shared mask": (Branches(), (3,)),
    "a layer used twice": (nn.Sequential(nn.Linear(3, 3), *(layer := nn.Linear(3, 3), nn.ReLU(), layer)), (3,)),
    "tokens": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), nn.Flatten()), (2, 3)),
}


def outputs_both_ways(name: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Outputs at one input under n masks on activations, one for each row, and under n draws of the weights."""
    net, shape = NETS[name]
    model = kn.Model(net.double(), kn.Gaussian(0.1))
    x = torch.randn((1, *shape), generator=generator, dtype=torch.float64)
    placement = place_dropout(model, x, rate=0.3, where=None)
    params = model.params()
    masks = [
        SiteMasks(site, lambda rows, site=site: fast_keep(rows, site.units, site.rate, like=x), 1 / (1 - site.rate))
        for site in placement.sites
    ]
    assert all(site.by_example for site in placement.sites)
    with torch.no_grad():
        given = masked_params(params, masks, by_example=True)
        by_row = placement.network(model)(given, x.expand(n, *shape), training=True)
        posterior = MaskedWeights(model, params, placement)
        by_draw = model.network.over_draws(posterior.sample(n, generator), x, vectorise=True)[:, 0]
    return by_row[:, 0].round(decimals=9), by_draw[:, 0].round(decimals=9)  # outcomes are equal or not


@pytest.mark.parametrize("name", NETS)
def test_both_ways_give_the_same_predictive_distribution(name, generator):
    by_row, by_draw = outputs_both_ways(name, 4000, generator)
    # the outcomes are discrete, which makes the test conservative: it fails less often than one time in ten thousand
    # (SciPy's exact p value is not always found, and then warns; of 4000 outcomes the limit's is as good)
    assert scipy.stats.ks_2samp(by_row.numpy(), by_draw.numpy(), method="asymp").pvalue > 1e-4


def test_the_comparison_would_notice_another_rate(generator):
    model = kn.Model(perceptron(None), kn.Gaussian(0.1))
    x = torch.randn((1, 3), generator=generator)
    found = []
    for rate in (0.3, 0.4):
        placement = place_dropout(model, x, rate=rate, where=None)
        draws = MaskedWeights(model, model.params(), placement).sample(4000, generator)
        found.append(model.network.over_draws(draws, x, vectorise=True)[:, 0, 0].detach().numpy())
    assert scipy.stats.ks_2samp(*found, method="asymp").pvalue < 1e-4


@pytest.mark.parametrize("way", ["activations", "weights"])
def test_both_ways_estimate_the_bound_of_all_masks(seed, way):
    objective, x, y = small(seed, way)
    with torch.no_grad():
        found = [objective(x, y) for _ in range(400)]
        exact = exact_log_likelihood(objective, x, y, objective.logits).item()
    losses = torch.stack([loss for loss, _ in found])
    expected = -exact + objective.divergence().item() / N
    assert abs(losses.mean() - expected) < 4.5 * losses.std() / math.sqrt(len(losses))
    assert math.isclose(found[0][1]["kl"].item(), objective.divergence().item())
    terms = torch.stack([each["expected_log_likelihood"] for _, each in found])
    assert abs(terms.mean() - N * exact) < 4.5 * terms.std() / math.sqrt(len(terms))


def test_masks_for_each_example_make_less_noise(seed):
    spread = {}
    for way in ("activations", "weights"):
        objective, x, y = small(seed, way)
        x, y = x[:1].expand(10, 3), y[:1].expand(10, 1)  # rows that one mask moves all alike
        with torch.no_grad():
            spread[way] = torch.stack([objective(x, y)[0] for _ in range(200)]).std()
    # the square root of ten less in expectation; 0.5 is far from it in standard errors
    assert spread["activations"] < 0.5 * spread["weights"]


def test_more_draws_make_less_noise(seed):
    spread = []
    for draws in (1, 16):
        objective, x, y = small(seed, "weights", draws=draws)
        with torch.no_grad():
            spread.append(torch.stack([objective(x, y)[0] for _ in range(100)]).std())
    # four times less in expectation; 0.5 leaves seven standard errors of a ratio of two standard deviations
    assert spread[1] < 0.5 * spread[0]


@pytest.mark.parametrize("way", ["activations", "weights"])
def test_gradients_of_the_weights_are_those_of_the_bound(seed, way):
    objective, x, y = small(seed, way)
    names = list(objective.params())
    exact = -exact_log_likelihood(objective, x, y, objective.logits) + objective.divergence() / N
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact, list(objective.values))])
    found = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(objective(x, y)[0], list(objective.values))])
            for _ in range(300)
        ]
    )
    assert len(names) == 6
    error = found.std(0) / math.sqrt(len(found))
    assert ((found.mean(0) - expected).abs() <= 5 * error + 1e-9).all()


# --- learned rates ---------------------------------------------------------------------------------------------------


def rate_gradients(objective: DropoutObjective, x: Tensor, y: Tensor, repeats: int) -> Tensor:
    return torch.stack([torch.autograd.grad(objective(x, y)[0], objective.logits)[0] for _ in range(repeats)])


@pytest.mark.parametrize("way", ["activations", "weights"])
def test_the_score_function_has_the_gradient_of_all_masks(seed, way):
    objective, x, y = small(seed, way, estimator="score", draws=2)
    exact = -exact_log_likelihood(objective, x, y, objective.logits) + objective.divergence() / N
    (expected,) = torch.autograd.grad(exact, objective.logits)
    found = rate_gradients(objective, x, y, 600)
    assert ((found.mean(0) - expected).abs() < 4.5 * found.std(0) / math.sqrt(len(found))).all()


def test_the_score_term_is_nothing_in_value():
    log_q = torch.randn(3, 4, requires_grad=True)
    term = score_term(torch.randn(3, 4), log_q)
    assert term == 0
    assert torch.autograd.grad(term, log_q)[0].abs().sum() > 0


def test_a_baseline_makes_the_score_function_less_noisy(seed):
    # values that differ between rows but not between draws would be pure noise without it
    values = (100 * torch.arange(4.0)).expand(2, 4)
    log_q = torch.randn(2, 4, requires_grad=True)
    assert torch.autograd.grad(score_term(values, log_q), log_q)[0].abs().max() == 0


@pytest.mark.parametrize("way", ["activations", "weights"])
def test_relaxed_masks_have_a_gradient_near_that_of_all_masks(seed, way):
    objective, x, y = small(seed, way, estimator="concrete")
    exact = -exact_log_likelihood(objective, x, y, objective.logits) + objective.divergence() / N
    (expected,) = torch.autograd.grad(exact, objective.logits)
    found = rate_gradients(objective, x, y, 600)
    # relaxed masks have a tenth less variance than hard ones at t = 0.1, and so about as much less effect
    tolerance = 0.25 * expected.abs() + 0.02
    assert ((found.mean(0) - expected).abs() < tolerance + 4.5 * found.std(0) / math.sqrt(len(found))).all()


def test_relaxed_masks_are_less_noisy_than_the_score_function(seed):
    spread = {}
    for estimator, draws in (("concrete", 2), ("score", 2)):
        objective, x, y = small(seed, estimator=estimator, draws=draws)
        spread[estimator] = rate_gradients(objective, x, y, 200).var(0).sum()
    assert spread["concrete"] < spread["score"]


def test_rates_are_kept_to_the_bit_or_learned(seed):
    assert small(seed)[0].rates() == [RATE, RATE]
    learned, _, _ = small(seed, estimator="concrete")
    assert all(math.isclose(rate, RATE) for rate in learned.rates())
    trained = [name for name, value in learned.named_parameters() if value.requires_grad]
    assert "logits" in trained
    assert "logits" not in [name for name, value in small(seed)[0].named_parameters() if value.requires_grad]


# --- held-out rows, points, noise ------------------------------------------------------------------------------------


def test_the_predictive_density_is_that_of_all_masks(seed, monkeypatch):
    monkeypatch.setattr(mc_dropout, "_VALIDATION_DRAWS", 2000)
    objective, x, y = small(seed)
    with torch.no_grad():
        found = objective.predictive_log_likelihood(x, y)
        log_q, values = every_mask(objective, x, y, objective.logits)
        exact = (log_q.unsqueeze(1) + values).logsumexp(0)
        # the relative error of a mean of densities over 2000 draws
        ratio = (values - exact).exp()
        error = ((log_q.exp() @ ratio.square() - 1) / 2000).sqrt()
    assert ((found - exact).abs() < 5 * error + 1e-9).all()


def test_the_final_bound_is_that_of_all_masks(seed):
    objective, x, y = small(seed)
    objective.size = len(x)
    terms = objective.final_elbo(Data((x, y), len(x)), seed)
    exact = len(x) * exact_log_likelihood(objective, x, y, objective.logits).item()
    assert abs(terms["expected_log_likelihood"] - exact) < 4.5 * terms["elbo_standard_error"]
    assert math.isclose(terms["elbo"], terms["expected_log_likelihood"] - terms["kl"])
    assert math.isclose(terms["kl"], objective.divergence().item())


def test_points_are_under_their_prior(seed):
    model = kn.Model(perceptron(None), kn.Gaussian(), kn.Normal(0.5), random="last_layer")
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    objective = DropoutObjective(model, 6, place_dropout(model, x, rate=None, where=None))
    loss, terms = objective(x, y)
    params = model.params()
    expected = sum(model.prior.prior_of(name).log_prob(params[name]).sum() for name in model.point_names)
    assert torch.allclose(terms["log_prior_of_points"], expected)
    whole = terms["expected_log_likelihood"] - terms["kl"] + terms["log_prior_of_points"]
    assert torch.allclose(loss, -whole / 6, rtol=1e-5)


def test_noise_beside_the_sites_is_in_training_and_in_held_out_scores(seed):
    model = kn.Model(Residual(0.5), kn.Gaussian(0.1))
    x, y = torch.randn(6, 3), torch.randn(6, 1)
    objective = DropoutObjective(model, 6, place_dropout(model, x, rate=None, where=None))
    with torch.no_grad():
        assert objective(x, y)[0] != objective(x, y)[0]
        assert not torch.equal(objective.log_likelihood_of_draw(x, y), objective.log_likelihood_of_draw(x, y))


# --- masks ------------------------------------------------------------------------------------------------------------


RATES = [0.02, 0.3, 0.8]


def logit(rate: float) -> torch.Tensor:
    return torch.tensor(rate, dtype=torch.float64).logit()


@pytest.mark.parametrize("rate", RATES)
def test_hard_masks_drop_at_their_rate(seed, rate):
    mask = fast_keep(500, 80, rate, like=torch.zeros((), dtype=torch.float64))
    assert mask.dtype == torch.float64 and mask.shape == (500, 80)
    assert ((mask == 0) | (mask == 1)).all()
    assert abs((mask == 0).double().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("relaxation", [0.1, 0.5])
def test_relaxed_masks_have_the_moments_of_their_integral(seed, rate, relaxation):
    mask = relaxed_mask(500, 80, logit(rate), relaxation) / (1 - rate)
    mean, variance = relaxed_moments(rate, relaxation)
    n = mask.numel()
    assert abs(mask.mean() - mean) < 5 * math.sqrt(variance / n)
    spread = (mask - mean).square()
    assert abs(spread.mean() - variance) < 5 * spread.std() / math.sqrt(n)


@pytest.mark.parametrize("rate", RATES)
def test_relaxed_masks_fall_on_the_side_where_hard_ones_would_be(seed, rate):
    mask = relaxed_mask(500, 80, logit(rate), 0.1)
    dropped = (mask < 0.5).double().mean()
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())


def test_relaxed_masks_become_hard_ones(seed):
    mask = relaxed_mask(500, 80, logit(0.3), 1e-4)
    between = ((mask > 0.01) & (mask < 0.99)).double().mean()
    # the noise must lie within 1e-4 * log(99) of the threshold, where its density is p (1 - p)
    assert between < 2 * 2 * 1e-4 * math.log(99) * 0.3 * 0.7 + 1e-3


def test_relaxed_masks_have_a_gradient_in_the_rate_and_hard_ones_have_none(seed):
    where = logit(0.3).requires_grad_()
    relaxed_mask(10, 10, where, 0.1).sum().backward()
    assert where.grad is not None and where.grad < 0  # a larger rate keeps less
    assert not fast_keep(10, 10, 0.3, like=where).requires_grad


@pytest.mark.parametrize("rate", RATES)
def test_log_probabilities_and_entropy_are_those_of_a_bernoulli(seed, rate):
    mask = fast_keep(20, 7, rate, like=logit(rate))
    law = Bernoulli(probs=torch.tensor(1 - rate, dtype=torch.float64))
    assert torch.allclose(log_probability(mask, logit(rate)), law.log_prob(mask).sum(-1))
    assert torch.allclose(entropy(logit(rate)), law.entropy())
    where = logit(rate).requires_grad_()
    torch.autograd.gradcheck(entropy, where)


def test_extreme_rates_stay_finite():
    for where in (-80.0, 80.0):
        value = torch.tensor(where, requires_grad=True)
        (entropy(value) + log_probability(torch.ones(3), value) * 0).backward()
        assert torch.isfinite(entropy(value)) and torch.isfinite(value.grad)
