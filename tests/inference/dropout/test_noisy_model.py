from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.dropout.sparse_variational_dropout import noisy_names, prior_notes, with_log_uniform


def model(**settings: object) -> kn.Model:
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1))
    return kn.Model(net, kn.Gaussian(), **settings)  # type: ignore[arg-type]


def test_matrices_and_kernels_are_noisy_unless_others_are_named():
    assert noisy_names(model(), None) == ["0.weight", "3.weight"]
    assert noisy_names(model(), ("3.*", "0.bias")) == ["0.bias", "3.weight", "3.bias"]
    assert noisy_names(model(frozen="0.*"), None) == ["3.weight"]
    assert noisy_names(model(random="last_layer"), "*") == ["3.weight", "3.bias"]
    with pytest.raises(kn.InvalidArgument, match="no random weight matrix or kernel"):
        noisy_names(model(random="*bias"), None)
    with pytest.raises(kn.InvalidArgument, match="where='likelihood"):
        noisy_names(model(), "likelihood.*")


def test_the_rest_are_points_and_the_users_model_is_left_alone():
    own = model(prior={"*.bias": kn.Normal(0.2), "*": kn.LaplacePrior()})
    target = with_log_uniform(own, ["3.weight"])
    assert target.random_names == ["3.weight"] and target.prior.prior_of("3.weight") == kn.LogUniform()
    assert target.prior.prior_of("0.weight") == kn.LaplacePrior() and "0.weight" in target.point_names
    assert "3.bias" in own.random_names and own.prior.prior_of("3.weight") == kn.LaplacePrior()
    assert target.net is own.net and target.likelihood is own.likelihood


def test_posteriors_as_priors_and_learned_scales_are_refused():
    x = torch.randn(8, 1, 4)
    posterior = kn.MeanFieldVI(epochs=1).fit(model(), (x, x[:, 0, :1]))
    with pytest.raises(kn.Unsupported, match="the posterior to the method as start="):
        with_log_uniform(model(prior=posterior), ["3.weight"])
    with pytest.raises(kn.Unsupported, match="scale is learned"):
        with_log_uniform(model(prior=kn.EmpiricalBayes(kn.Normal(1.0))), ["3.weight"])


def test_replaced_priors_are_named():
    own = model(prior={"0.*": kn.LogUniform(), "*": kn.Normal(1.0)})
    (note,) = prior_notes(own, ["0.weight", "3.weight"])
    assert "prior of 3.weight is log-uniform" in note
    assert prior_notes(own, ["0.weight"]) == ()
