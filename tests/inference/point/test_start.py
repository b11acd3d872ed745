"""Tests of weights to begin at."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.point.point import means_for, start_values
from tests.core.cases import DTYPE, Tied, batch_norm_net, diagonal_posterior


def model_of(net: nn.Module | None = None, **settings) -> kn.Model:
    return kn.Model((net or batch_norm_net()).to(DTYPE), kn.Gaussian(), **settings)


def test_a_state_is_read_with_its_buffers():
    model, other = model_of(), batch_norm_net().to(DTYPE)
    other(torch.randn(9, 2, dtype=DTYPE))
    found = start_values("start", model, other.state_dict())
    assert torch.equal(found.params["0.weight"], other[0].weight)
    assert torch.equal(found.buffers["1.running_mean"], other[1].running_mean)
    assert found.unset == ("likelihood.log_noise",)


def test_a_network_and_its_state_are_the_same():
    model, other = model_of(), batch_norm_net().to(DTYPE)
    first, second = start_values("start", model, other), start_values("start", model, other.state_dict())
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)


def test_the_networks_own_weights():
    model = model_of()
    found = start_values("start", model, "network")
    assert all(torch.equal(value, model.params()[name]) for name, value in found.params.items())
    assert found.unset == ("likelihood.log_noise",)


def test_a_posterior_gives_its_means_and_buffers():
    model = model_of()
    posterior = diagonal_posterior(model, buffers={"1.running_mean": torch.ones(4, dtype=DTYPE)})
    found = start_values("start", model, posterior)
    assert all(torch.equal(value, posterior.mean()[name]) for name, value in found.params.items())
    assert torch.equal(found.buffers["1.running_mean"], torch.ones(4, dtype=DTYPE))
    assert found.unset == ()


def test_a_posterior_under_another_prior_or_likelihood_will_do():
    net = batch_norm_net().to(DTYPE)
    posterior = diagonal_posterior(kn.Model(net, kn.Gaussian()))
    model = kn.Model(net, kn.Gaussian(0.1), kn.EmpiricalBayes(kn.Normal(1.0)))
    assert start_values("start", model, posterior).unset == ("prior.*.log_scale",)


def test_the_likelihoods_parameters_may_be_given():
    model = model_of()
    state = {**model.net.state_dict(), "likelihood.log_noise": torch.tensor(-2.0)}
    found = start_values("start", model, state)
    assert found.params["likelihood.log_noise"] == -2.0 and found.params["likelihood.log_noise"].dtype == DTYPE
    assert found.unset == ()


def test_tied_weights_have_several_names():
    net = Tied()
    assert "decoder.weight" in net.state_dict()
    found = start_values("start", kn.Model(net, kn.Gaussian(0.1)), net.state_dict())
    assert "decoder.weight" not in found.params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.weight"), r"start has no value for 0\.weight"),
        (lambda s: s.update(other=torch.zeros(1)), r"start has a value for 'other', which the model does not have"),
        (lambda s: s.update({"0.bias": torch.zeros(3)}), r"start\['0\.bias'\] has shape \(3,\), the model's \(4,\)"),
        (lambda s: s["0.bias"].fill_(float("nan")), r"start\['0\.bias'\] has missing or infinite values"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    model = model_of()
    state = {name: value.clone() for name, value in model.net.state_dict().items()}
    change(state)
    with pytest.raises(kn.InvalidArgument, match=message):
        start_values("start", model, state)


def test_frozen_weights_must_be_the_networks():
    net = batch_norm_net().to(DTYPE)
    model = kn.Model(net, kn.Gaussian(0.1), frozen="0.*")
    start_values("start", model, net.state_dict())
    with pytest.raises(kn.InvalidArgument, match=r"start\['0\.weight'\] differs from the network's own value"):
        start_values("start", model, batch_norm_net().to(DTYPE).state_dict())


@pytest.mark.parametrize("wrong", [3, "best", [1.0], {"0.weight": 1.0}])
def test_what_is_no_start_is_refused(wrong):
    with pytest.raises(kn.InvalidType, match="start must be 'network', a posterior, a network or a mapping"):
        start_values("start", model_of(), wrong)


def test_means_for_another_model_need_all_its_parameters():
    posterior = diagonal_posterior(kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1)))
    with pytest.raises(kn.InvalidArgument, match=r"at is a posterior with nothing for 'likelihood\.log_noise'"):
        means_for("at", kn.Model(nn.Linear(2, 1), kn.Gaussian()), posterior)


def test_what_is_done_to_a_posteriors_means_is_not_done_to_the_posterior():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), random="weight")  # the bias is a point estimate
    posterior = kn.MeanFieldVI(epochs=1).fit(model, (torch.randn(8, 2), torch.randn(8, 1)))
    before = {name: value.clone() for name, value in posterior.mean().items()}
    for value in means_for("start", model, posterior).values():
        value.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in posterior.mean().items())
