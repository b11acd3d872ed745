"""Tests of how priors over parameters compose."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.model.prior import Prior, PriorByName
from knowable.core.prediction.components import normal_log_prob
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from tests.core.cases import DTYPE, same_params

PARAMS = {
    "0.weight": torch.linspace(-1, 1, 6, dtype=DTYPE).view(2, 3),
    "0.bias": torch.tensor([0.5, -0.2], dtype=DTYPE),
    "likelihood.log_noise": torch.tensor(-1.0, dtype=DTYPE),
}


def _normal(name: str, scale: float, loc: float = 0.0) -> torch.Tensor:
    return torch.distributions.Normal(loc, scale).log_prob(PARAMS[name]).sum()


def test_one_prior_covers_all_parameters():
    prior = PriorByName(kn.Normal(2.0), PARAMS)
    torch.testing.assert_close(prior.log_prob(PARAMS), sum(_normal(name, 2.0) for name in PARAMS))


def test_the_first_glob_that_matches_wins():
    prior = PriorByName({"*.bias": kn.Normal(3.0), "0.*": kn.Normal(0.5), "*": kn.Normal(7.0)}, PARAMS)
    expected = _normal("0.bias", 3.0) + _normal("0.weight", 0.5) + _normal("likelihood.log_noise", 7.0)
    torch.testing.assert_close(prior.log_prob(PARAMS), expected)
    assert prior.prior_of("0.bias") == kn.Normal(3.0)


@pytest.mark.parametrize("general", [kn.Normal(2.0), {"*": kn.Normal(2.0)}, {"0.*": kn.Normal(2.0)}])
def test_the_likelihoods_own_prior_is_kept_unless_named(general):
    prior = PriorByName(general, PARAMS, own={"likelihood.log_noise": kn.Normal(0.3, loc=-1.0)})
    assert prior.prior_of("likelihood.log_noise") == kn.Normal(0.3, loc=-1.0)


def test_a_glob_that_names_the_likelihood_replaces_its_own_prior():
    own = {"likelihood.log_noise": kn.Normal(0.3, loc=-1.0)}
    prior = PriorByName({"likelihood.*": kn.Normal(5.0), "*": kn.Normal(2.0)}, PARAMS, own=own)
    assert prior.prior_of("likelihood.log_noise") == kn.Normal(5.0)
    expected = _normal("likelihood.log_noise", 5.0) + _normal("0.weight", 2.0) + _normal("0.bias", 2.0)
    torch.testing.assert_close(prior.log_prob(PARAMS), expected)


def test_a_parameter_without_a_prior_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"prior has no entry for parameter '0\.bias'.*'\*' for all other"):
        PriorByName({"*.weight": kn.Normal(1.0)}, PARAMS)


def test_globs_that_match_nothing_are_refused_with_the_names_there_are():
    with pytest.raises(InvalidArgument, match=r"no parameter to match '1\.\*', 'q'\. The parameters are: 0\.weight"):
        PriorByName({"1.*": kn.Normal(), "q": kn.Normal(), "*": kn.Normal()}, PARAMS)


def test_a_value_that_is_not_a_prior_is_refused_with_its_glob():
    with pytest.raises(InvalidType, match=r"prior\['\*'\] must be a knowable prior such as Normal\(1\.0\), got 1\.0"):
        PriorByName({"*": 1.0}, PARAMS)  # type: ignore[dict-item]


def test_draws_come_from_each_parameters_prior(generator):
    # 20,000 draws of the 2 biases (scale 3) and 6 weights (scale 0.5): sd of a sample sd is s / sqrt(2 n)
    prior = PriorByName({"*.bias": kn.Normal(3.0), "*": kn.Normal(0.5)}, PARAMS)
    draws = [prior.sample(PARAMS, generator=generator) for _ in range(3_000)]
    for name, scale in (("0.bias", 3.0), ("0.weight", 0.5)):
        values = torch.stack([draw[name] for draw in draws])
        assert abs(values.std() - scale) < 5 * scale / (2 * values.numel()) ** 0.5
    assert {name: value.shape for name, value in draws[0].items()} == {n: v.shape for n, v in PARAMS.items()}


def test_a_prior_that_cannot_be_sampled_is_named_with_its_parameter():
    prior = PriorByName({"*.bias": kn.Flat(), "*": kn.Normal()}, PARAMS)
    with pytest.raises(Unsupported, match=r"Cannot draw parameter '0\.bias' from its prior: Flat\(\) is improper"):
        prior.sample(PARAMS)


# --- hyperparameters ------------------------------------------------------------------------------------------------


def test_parameters_of_one_glob_share_their_hyperparameters():
    prior = PriorByName({"0.*": kn.EmpiricalBayes(kn.Normal(2.0)), "*": kn.Normal()}, PARAMS)
    assert list(prior.hyperparams()) == ["prior.0.*.log_scale"]
    params = {**PARAMS, "prior.0.*.log_scale": torch.tensor(0.7, dtype=DTYPE).log()}
    expected = _normal("0.weight", 0.7) + _normal("0.bias", 0.7) + _normal("likelihood.log_noise", 1.0)
    torch.testing.assert_close(prior.log_prob(params), expected)


def test_hyperparameters_per_parameter_have_a_value_each():
    prior = PriorByName(kn.EmpiricalBayes(kn.Normal(2.0), per="parameter"), PARAMS)
    hyper = prior.hyperparams()
    assert list(hyper) == [f"prior.{name}.log_scale" for name in PARAMS]
    params = {**PARAMS, **{name: torch.tensor(float(i), dtype=DTYPE) for i, name in enumerate(hyper)}}
    expected = sum(_normal(name, torch.tensor(float(i)).exp().item()) for i, name in enumerate(PARAMS))
    torch.testing.assert_close(prior.log_prob(params), expected, rtol=1e-6, atol=1e-6)


def test_the_hyperprior_is_counted_once_for_each_shared_set():
    prior = PriorByName(kn.EmpiricalBayes(kn.Normal(1.0), hyperprior=kn.Normal(0.5)), PARAMS)
    (name,) = prior.hyperparams()
    params = {**PARAMS, name: torch.tensor(0.3, dtype=DTYPE)}
    expected = torch.distributions.Normal(0.0, 0.5).log_prob(params[name])
    torch.testing.assert_close(torch.as_tensor(prior.log_hyperprior(params)), expected)
    weights = sum(_normal(each, torch.tensor(0.3).exp().item()) for each in PARAMS)
    torch.testing.assert_close(prior.log_prob(params), weights + expected, rtol=1e-6, atol=1e-6)


def test_the_likelihoods_own_prior_takes_no_part_in_a_shared_scale():
    own = {"likelihood.log_noise": kn.Normal(2.0)}
    prior = PriorByName(kn.EmpiricalBayes(kn.Normal(1.0)), PARAMS, own=own)
    params = {**PARAMS, "prior.*.log_scale": torch.tensor(5.0, dtype=DTYPE)}
    assert prior.bound("likelihood.log_noise", params) == kn.Normal(2.0)
    assert prior.bound("0.bias", params).scale == pytest.approx(torch.tensor(5.0).exp().item())


def test_sampling_leaves_hyperparameters_where_they_are(generator):
    prior = PriorByName(kn.EmpiricalBayes(kn.Normal(1.0)), PARAMS)
    like = {**PARAMS, **prior.hyperparams()}
    drawn = prior.sample(like, generator=generator)
    assert torch.equal(drawn["prior.*.log_scale"], like["prior.*.log_scale"])
    assert not torch.equal(drawn["0.weight"], like["0.weight"])


# --- the rest -------------------------------------------------------------------------------------------------------


def test_the_printed_prior_is_what_the_user_wrote():
    assert repr(PriorByName(kn.Normal(2.0), PARAMS)) == "Normal(scale=2.0, loc=0.0)"
    shown = repr(PriorByName({"*.bias": kn.Flat(), "*": kn.Normal(2.0)}, PARAMS))
    assert shown == "{'*.bias': Flat(), '*': Normal(scale=2.0, loc=0.0)}"


class _Density(Prior):
    def log_prob(self, value):
        return -value.abs()


def test_a_prior_needs_only_a_density():
    prior = _Density()
    value = torch.ones(2)
    assert prior.kl_from_normal(value, value) is None
    assert prior.normal_moments() is None
    assert prior.hyperparams(value) == {}
    assert prior.bind({}) is prior
    assert prior.log_hyperprior({}) == 0.0
    with pytest.raises(Unsupported, match="does not define sample"):
        prior.sample((2,), like=value)
    assert PriorByName(prior, {"w": value}).log_prob({"w": value}) == -2.0


def test_a_factorising_prior_has_no_joint_form():
    prior = PriorByName(kn.Normal(), PARAMS)
    assert prior.joint_kl(PARAMS, PARAMS) is None
    assert same_params(prior.hyperparams(), {})


def test_the_normal_log_density_takes_numbers_and_tensors():
    value, loc, scale = torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 2.0])
    expected = torch.distributions.Normal(loc, scale).log_prob(value)
    torch.testing.assert_close(normal_log_prob(value, loc, scale), expected)
    expected = torch.distributions.Normal(1.0, 0.5).log_prob(value)
    torch.testing.assert_close(normal_log_prob(value, 1.0, 0.5), expected)
