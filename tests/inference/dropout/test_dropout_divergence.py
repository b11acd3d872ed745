from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.dropout.dropout_divergence import (
    DropoutDivergence,
    HalfSquares,
    check_priors,
    cross_entropy,
    entropy,
)
from knowable.inference.dropout.layer_trace import DropoutSite, WeightAxis
from tests.core.cases import diagonal_posterior, full_posterior

WIDTH = 1e-3  # of the narrow normals, in the integral
PRIORS = [
    kn.Normal(1.0),
    kn.Normal(0.5, loc=0.3),
    kn.LaplacePrior(0.7),
    kn.StudentTPrior(),
    kn.ScaleMixture(0.5, 1.0, 0.1),
]


def logits(*rates: float) -> Tensor:
    return torch.tensor(rates, dtype=torch.float64).logit()


def mixture_divergence(prior: kn.Normal, loc: float, rate: float) -> float:
    """KL of the mixture of two narrow normals to the prior, by a fine trapezium rule around the two."""
    centres = (0.0, loc / (1 - rate))
    total = 0.0
    for centre in centres:
        w = centre + WIDTH * torch.linspace(-10, 10, 4001, dtype=torch.float64)
        parts = torch.stack([-0.5 * ((w - c) / WIDTH) ** 2 for c in centres])
        parts = parts - math.log(WIDTH) - 0.5 * math.log(2 * math.pi)
        log_q = (parts + torch.tensor([[rate], [1 - rate]], dtype=torch.float64).log()).logsumexp(0)
        total += torch.trapezoid(log_q.exp() * (log_q - prior.log_prob(w)), w).item()
    return total


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_divergence_is_that_of_two_narrow_normals_up_to_their_entropy(prior, rate):
    loc = torch.tensor(0.8, dtype=torch.float64)
    found = cross_entropy(prior, loc, torch.tensor(rate)) - entropy(logits(rate)).item()
    normals = 0.5 * math.log(2 * math.pi * math.e * WIDTH**2)
    # what is left out: half the curvature of the log prior times WIDTH², and at a kink WIDTH times its slope
    tolerance = 5e-4 + 2 * WIDTH
    assert abs(found.item() - normals - mixture_divergence(prior, 0.8, rate)) < tolerance


def one_layer(prior: object = None, **settings: object) -> kn.Model:
    return kn.Model(nn.Linear(3, 2).double(), kn.Gaussian(0.1), prior, **settings)  # type: ignore[arg-type]


SITE = DropoutSite((WeightAxis("weight"),), 3, 0.2)


def enumerated(model: kn.Model, params: dict[str, Tensor], rate: float) -> float:
    """-E[log p(w)] over all eight masks, less their entropy."""
    total = 0.0
    for bits in itertools.product((0.0, 1.0), repeat=3):
        mask = torch.tensor(bits, dtype=torch.float64)
        probability = math.prod(1 - rate if bit else rate for bit in bits)
        drawn = {**params, "weight": params["weight"] * mask / (1 - rate)}
        total -= probability * model.log_prior(drawn).item()
    return total - 3 * entropy(logits(rate)).item()


@pytest.mark.parametrize("prior", [None, kn.Normal(0.5, loc=0.2), kn.LaplacePrior(0.7), "diagonal", "full"], ids=repr)
def test_divergence_is_the_expectation_over_all_masks(prior, generator):
    if prior == "diagonal":
        prior = diagonal_posterior(one_layer(), generator)
    elif prior == "full":
        prior = full_posterior(one_layer(), generator)
    model = one_layer(prior)
    params = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in model.params().items()}
    found = DropoutDivergence(model, [SITE])(params, logits(0.2))
    assert math.isclose(found.item(), enumerated(model, params, 0.2), rel_tol=1e-10)


def test_a_mask_that_two_weights_share_has_its_entropy_once(generator):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.1))
    apart = [DropoutSite((WeightAxis("0.weight"),), 3, 0.2), DropoutSite((WeightAxis("1.weight"),), 3, 0.2)]
    shared = [DropoutSite((WeightAxis("0.weight"), WeightAxis("1.weight")), 3, 0.2)]
    params = model.params()
    one, two = (
        DropoutDivergence(model, shared)(params, logits(0.2)),
        DropoutDivergence(model, apart)(params, logits(0.2, 0.2)),
    )
    assert torch.allclose(one - two, 3 * entropy(logits(0.2)))


def test_divergence_has_the_gradient_of_its_definition(generator):
    model = one_layer({"bias": kn.LaplacePrior(0.4), "*": kn.Normal(0.3)})
    layout = Layout.of(model.params())
    divergence = DropoutDivergence(model, [SITE])

    def value(flat: Tensor, where: Tensor) -> Tensor:
        return divergence(layout.views(flat), where)

    flat = torch.randn(layout.size, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(value, (flat, logits(0.3).requires_grad_()))


def test_half_squares_have_their_gradient(generator):
    values = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((2, 3), (4,), ())]
    factors = torch.rand(3, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = 0.5 * sum(f * v.square().sum() for f, v in zip(factors, values, strict=True))
    assert torch.allclose(HalfSquares.apply(factors, *values), expected)
    assert torch.autograd.gradcheck(HalfSquares.apply, (factors, *values))


def test_half_squares_take_weights_in_any_memory_format(generator):
    kernel = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=generator)
    last = kernel.to(memory_format=torch.channels_last).requires_grad_()
    found = HalfSquares.apply(torch.tensor([3.0], dtype=torch.float64), last)
    found.backward()
    assert found.item() == pytest.approx(1.5 * kernel.square().sum().item())
    assert torch.allclose(last.grad, 3.0 * kernel)


def test_the_l2_term_is_the_one_of_gal_and_ghahramani():
    # (1 - p) / (2 s²) ‖kept weights‖², with kept weights m / (1 - p)
    model = one_layer(kn.Normal(0.5))
    params, zero = model.params(), {k: torch.zeros_like(v) for k, v in model.params().items()}
    divergence = DropoutDivergence(model, [SITE])
    change = divergence(params, logits(0.2)) - divergence(zero, logits(0.2))
    kept = params["weight"] / 0.8
    expected = 0.8 / (2 * 0.25) * kept.square().sum() + params["bias"].square().sum() / (2 * 0.25)
    assert torch.allclose(change, expected)


def test_a_prior_that_is_infinite_at_zero_is_refused_where_weights_are_dropped():
    prior = kn.LogUniform()
    with pytest.raises(kn.Unsupported, match="infinite density"):
        check_priors(one_layer(prior), [SITE])
    check_priors(one_layer({"bias": prior, "*": kn.Normal(1.0)}), [SITE])


def test_scales_that_would_be_learned_are_refused():
    with pytest.raises(kn.Unsupported, match="scale"):
        check_priors(one_layer(kn.EmpiricalBayes(kn.Normal(1.0))), [SITE])
