from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from knowable.core.model.prior import PriorByName
from knowable.errors import InvalidArgument, InvalidType
from knowable.priors import EmpiricalBayes, Flat, LaplacePrior, Normal, StudentTPrior

WRAPPED = [Normal(0.5, loc=0.3), LaplacePrior(0.5), StudentTPrior(3.0, 0.5)]


@pytest.mark.parametrize("prior", WRAPPED, ids=repr)
def test_before_binding_it_is_the_wrapped_prior(prior, generator: torch.Generator):
    wrapped, w = EmpiricalBayes(prior), torch.randn(5)
    assert torch.equal(wrapped.log_prob(w), prior.log_prob(w))
    assert wrapped.normal_moments() == prior.normal_moments()
    state = generator.get_state()
    drawn = wrapped.sample((5,), generator=generator, like=w)
    assert torch.equal(drawn, prior.sample((5,), generator=generator.set_state(state), like=w))
    kl, expected = wrapped.kl_from_normal(w, w.abs()), prior.kl_from_normal(w, w.abs())
    assert (kl is None and expected is None) or torch.equal(kl, expected)


@pytest.mark.parametrize("prior", WRAPPED, ids=repr)
def test_binding_puts_the_scale_in_place_and_is_differentiable_in_it(prior):
    wrapped = EmpiricalBayes(prior)
    w = torch.randn(5, dtype=torch.float64)
    start = wrapped.hyperparams(w)
    assert start["log_scale"].item() == pytest.approx(math.log(0.5)) and start["log_scale"].dtype == torch.float64
    torch.testing.assert_close(wrapped.bind(start).log_prob(w), prior.log_prob(w))
    log_scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: wrapped.bind({"log_scale": s}).log_prob(w), log_scale)
    if prior.kl_from_normal(w, w.abs()) is not None:
        assert torch.autograd.gradcheck(lambda s: wrapped.bind({"log_scale": s}).kl_from_normal(w, w.abs()), log_scale)


def test_the_best_scale_of_a_normal_is_the_root_mean_square_of_the_weights():
    w = 3 * torch.randn(200, dtype=torch.float64)
    wrapped = EmpiricalBayes(Normal(1.0))
    best = w.square().mean().sqrt().log().requires_grad_()
    (slope,) = torch.autograd.grad(wrapped.bind({"log_scale": best}).log_prob(w).sum(), best)
    assert abs(slope.item()) < 1e-9
    worse = wrapped.bind({"log_scale": best.detach() + 0.1}).log_prob(w).sum()
    assert worse < wrapped.bind({"log_scale": best.detach()}).log_prob(w).sum()


def test_the_best_scale_under_the_kl_is_the_second_moment_of_q():
    loc, scale = torch.randn(50, dtype=torch.float64), torch.rand(50, dtype=torch.float64) + 0.1
    best = (loc.square() + scale.square()).mean().sqrt().log().requires_grad_()
    kl = EmpiricalBayes(Normal(1.0)).bind({"log_scale": best}).kl_from_normal(loc, scale)
    (slope,) = torch.autograd.grad(kl, best)
    assert abs(slope.item()) < 1e-9


def test_the_hyperprior_scores_the_logarithm_of_the_scale():
    hyperparams = {"log_scale": torch.tensor(0.7)}
    expected = Normal(2.0).log_prob(torch.tensor(0.7))
    assert EmpiricalBayes(Normal(1.0), Normal(2.0)).log_hyperprior(hyperparams) == expected
    assert EmpiricalBayes(Normal(1.0)).log_hyperprior(hyperparams) == 0.0


def test_parameters_share_a_scale_by_glob_or_have_one_each():
    params = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4), "b.bias": torch.randn(4)}
    shared = PriorByName({"*.weight": EmpiricalBayes(Normal(2.0), Normal(1.0)), "*": Normal(1.0)}, params)
    assert list(shared.hyperparams()) == ["prior.*.weight.log_scale"]
    each = PriorByName(EmpiricalBayes(Normal(2.0), per="parameter"), params)
    assert sorted(each.hyperparams()) == [f"prior.{name}.log_scale" for name in sorted(params)]
    everything = {**params, "prior.*.weight.log_scale": torch.tensor(0.4)}
    expected = sum(Normal(math.exp(0.4)).log_prob(params[name]).sum() for name in ("a.weight", "b.weight"))
    expected = expected + Normal(1.0).log_prob(params["b.bias"]).sum() + Normal(1.0).log_prob(torch.tensor(0.4))
    np.testing.assert_allclose(shared.log_prob(everything), expected, rtol=1e-5)


def test_the_parameters_of_a_layer_may_share_a_scale():
    params = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3), "b.c.weight": torch.randn(4), "w": torch.ones(2)}
    prior = PriorByName(EmpiricalBayes(Normal(2.0), Normal(1.0), per="layer"), params)
    groups = {"a": ("a.weight", "a.bias"), "b.c": ("b.c.weight",), "(network)": ("w",)}
    assert set(prior.hyperparams()) == {f"prior.{group}.log_scale" for group in groups}
    logs = {f"prior.{group}.log_scale": torch.tensor(0.1 * i) for i, group in enumerate(groups)}
    expected = torch.zeros(())
    for group, names in groups.items():
        log_scale = logs[f"prior.{group}.log_scale"]
        expected = expected + Normal(1.0).log_prob(log_scale)  # each scale's hyperprior once
        for name in names:
            expected = expected + torch.distributions.Normal(0.0, log_scale.exp()).log_prob(params[name]).sum()
    np.testing.assert_allclose(prior.log_prob({**params, **logs}), expected, rtol=1e-5)


def test_weights_and_biases_of_a_layer_have_scales_of_their_own_where_each_has_a_glob():
    params = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3)}
    globs = {"*.weight": EmpiricalBayes(Normal(2.0), per="layer"), "*": EmpiricalBayes(Normal(0.5), per="layer")}
    found = PriorByName(globs, params).hyperparams()
    assert {name: value.exp().item() for name, value in found.items()} == pytest.approx(
        {"prior.a (*.weight).log_scale": 2.0, "prior.a.log_scale": 0.5}
    )


def test_every_weight_may_have_its_own_scale():
    params = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    prior = PriorByName(EmpiricalBayes(Normal(2.0), per="weight"), params)
    found = prior.hyperparams()
    assert {name: value.shape for name, value in found.items()} == {
        "prior.a.log_scale": (3, 2), "prior.b.log_scale": (4,),
    }  # fmt: skip
    scales = {name: torch.rand(value.shape) + 0.5 for name, value in found.items()}
    logs = {name: value.log() for name, value in scales.items()}
    expected = sum(
        torch.distributions.Normal(0.0, scales[f"prior.{name}.log_scale"]).log_prob(value).sum()
        for name, value in params.items()
    )
    np.testing.assert_allclose(prior.log_prob({**params, **logs}), expected, rtol=1e-5)


def test_what_cannot_be_wrapped_is_refused_with_the_list_of_what_can():
    with pytest.raises(InvalidType, match="prior must be a Normal, LaplacePrior or StudentTPrior, got Flat"):
        EmpiricalBayes(Flat())
    with pytest.raises(InvalidType, match="hyperprior must be None or a prior"):
        EmpiricalBayes(Normal(1.0), 2.0)
    with pytest.raises(InvalidArgument, match="per must be one of 'glob', 'layer', 'parameter', 'weight'; got 'globe'"):
        EmpiricalBayes(Normal(1.0), per="globe")
