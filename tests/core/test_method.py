"""Tests of what every method shares: its printed form, its door, its identity."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.method import FitJob, Method
from knowable.registry import METHODS
from tests.core.cases import batch_norm_net, diagonal_posterior, linear_data, linear_model, mlp


def test_a_method_prints_only_what_differs_from_its_defaults():
    assert repr(kn.MAP()) == "MAP()"
    assert repr(kn.MAP(epochs=3, training=kn.Training(clip=1.0))) == "MAP(epochs=3, training=Training(clip=1.0))"
    assert repr(kn.MeanFieldVI(beta=0.5)) == "MeanFieldVI(beta=0.5)"


def test_a_method_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        kn.MAP().epochs = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"lr": 0.1}, r"MAP has no setting 'lr'\. Did you mean 'learning_rate'\?"),
        ({"epoch": 3}, r"MAP has no setting 'epoch'\. Did you mean 'epochs'\?"),
        ({"patience": 3}, r"MAP has no setting 'patience'\. Write training=kn\.Training\(patience=\.\.\.\)\."),
        ({"optimizer": "sgd"}, r"'optimizer'\. Write training=kn\.Training\(optimiser=\.\.\.\)\."),
        ({"zzz": 1}, r"'zzz'\. Its settings are epochs, learning_rate, batch_size, training\."),
    ],
)
def test_an_unknown_setting_is_refused_with_the_spelling_that_works(settings, wanted):
    with pytest.raises(kn.InvalidType, match=wanted):
        kn.MAP(**settings)


def test_fit_is_the_same_method_for_all():
    methods = [entry.cls for entry in METHODS.values()]
    assert all(cls.fit is Method.fit for cls in methods)
    assert Method.fit.__final__


def test_a_start_is_refused_by_a_method_without_one():
    with pytest.raises(kn.Unsupported, match=r"MAP has no setting start\. Leave start= out\."):
        kn.MAP(epochs=1).fit(linear_model(), linear_data(), start="network")


def test_a_start_given_to_fit_is_the_setting_of_that_name():
    model, data = linear_model(), linear_data()
    first = kn.Laplace(start="network").fit(model, data)
    second = kn.Laplace().fit(model, data, start="network")
    assert first.diagnostics.method == second.diagnostics.method
    assert all(torch.equal(value, second.mean()[name]) for name, value in first.mean().items())


def test_a_job_has_checked_data_and_a_plain_seed():
    x, y = linear_data()
    job = FitJob.of(kn.MAP(), linear_model(), (x.numpy(), y), (x[:3], y[:3]), np.int64(7))
    assert (job.rows.size, job.validation.size) == (20, 3)
    assert type(job.seed) is int
    assert job.seed == 7
    assert job.engine == kn.Engine()
    assert job.options["label"] == "MAP"


def test_a_part_of_a_job_saves_inside_its_folder(tmp_path):
    job = FitJob.of(kn.MAP(), linear_model(), linear_data(), checkpoint=tmp_path)
    part = job.part("start", label="begin")
    assert part.checkpoint.path.parent == job.checkpoint.path
    assert part.options["label"] == "begin"
    assert part.rows is job.rows


@pytest.mark.parametrize(
    ("change", "error", "wanted"),
    [
        ({"model": nn.Linear(2, 1)}, kn.InvalidType, r"model must be a knowable Model .*, got Linear"),
        ({"seed": -1}, kn.InvalidArgument, "seed must be a whole number >= 0, got -1"),
        ({"seed": 1.5}, kn.InvalidType, "seed must be a whole number, got float 1.5"),
        ({"data": None}, kn.InvalidType, "data must be a pair"),
        ({"validation": 0.1}, kn.InvalidType, "validation must be a pair"),
        ({"validation": (torch.zeros(3, 2), torch.full((3,), torch.nan))}, kn.InvalidData, "validation.*row 0, 1, 2"),
    ],
)
def test_a_fit_refuses_arguments_it_cannot_use(change, error, wanted):
    given = {"model": linear_model(), "data": linear_data(), "validation": None, "seed": 0, **change}
    with pytest.raises(error, match=wanted):
        FitJob.of(kn.MAP(), **given)


def test_a_method_that_takes_over_a_job_must_support_what_is_in_it():
    model = linear_model(prior={"bias": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    job = FitJob.of(kn.DiscreteVI(), model, linear_data())
    with pytest.raises(
        kn.Unsupported, match=r"MAP does not support parameters that are 0 or 1 \(bias\)\. Use DiscreteVI"
    ):
        job.for_method(kn.MAP())


@pytest.mark.parametrize(
    "method",
    [kn.MAP(), kn.MaximumLikelihood(), kn.MeanFieldVI(), kn.Laplace(), kn.HMC(), kn.ExactLinear(), kn.DeepEnsemble(2),
     kn.MCDropout(), kn.SWAG(), kn.ImportanceSampling()],
    ids=repr,
)  # fmt: skip
def test_methods_that_follow_gradients_refuse_parameters_that_are_0_or_1(method):
    model = linear_model(prior={"bias": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})
    with pytest.raises(kn.Unsupported, match="DiscreteVI"):
        method.fit(model, linear_data())


def _identity(method=None, net=None, likelihood=None, data=None, validation=None, **settings) -> dict:
    torch.manual_seed(5)
    net = mlp() if net is None else net()
    model = kn.Model(net, likelihood or kn.Gaussian(0.1), **settings)
    source = torch.arange(20.0).view(10, 2), torch.arange(10.0)
    return FitJob.of(method or kn.MAP(), model, data or source, validation, checkpoint="never written").identity


def _moved_net() -> nn.Module:
    net = mlp()
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-6
    return net


def _moved_buffers() -> nn.Module:
    net = batch_norm_net()
    net[1].running_mean += 1e-3
    return net


X, Y = torch.arange(20.0).view(10, 2), torch.arange(10.0)
HELD = X[:4] + 1, Y[:4]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"method": kn.MAP(epochs=3)}),
        ({}, {"method": kn.MaximumLikelihood()}),
        ({}, {"net": _moved_net}),
        ({}, {"likelihood": kn.Gaussian(0.2)}),
        ({}, {"prior": kn.Normal(2.0)}),
        ({}, {"random": "0.weight"}),
        ({}, {"data": (X, Y + 1e-3)}),
        ({}, {"data": (X[:9], Y[:9])}),
        ({}, {"validation": HELD}),
        ({"validation": HELD}, {"validation": (HELD[0], HELD[1] + 1)}),
        ({"frozen": "0.*"}, {"frozen": "0.*", "net": _moved_net}),
        ({"net": batch_norm_net}, {"net": _moved_buffers}),
    ],
)
def test_two_fits_that_differ_have_different_identities(first, second):
    assert _identity(**first) == _identity(**first)
    assert _identity(**first) != _identity(**second)


def test_without_a_checkpoint_nothing_is_hashed():
    assert FitJob.of(kn.MAP(), linear_model(), linear_data()).identity == {}


def test_two_priors_made_of_different_posteriors_have_different_identities(generator):
    # the same means, other scales: everything that prints is the same
    net = mlp()
    first = diagonal_posterior(kn.Model(net, kn.Gaussian(0.1)), generator)
    wider = {name: 2 * value for name, value in first.scale.items()}
    second = kn.DiagonalNormal(first.model, first.loc, wider)
    identities = [_identity(net=lambda: net, prior=posterior) for posterior in (first, second)]
    assert identities[0] != identities[1]


# --- weights on rows -------------------------------------------------------------------------------------------------


def test_row_weights_reach_the_job():
    x, y = linear_data()
    weighted = kn.Data((x, y), 20, torch.ones(20))
    assert FitJob.of(kn.MAP(), linear_model(), weighted).rows.weights.shape == (20,)


def test_weights_for_several_networks_and_of_held_out_rows_are_refused():
    x, y = linear_data()
    with pytest.raises(kn.InvalidArgument, match=r"weights must be one number for each row, got shape \(20, 2\)"):
        FitJob.of(kn.MAP(), linear_model(), kn.Data((x, y), 20, torch.ones(20, 2)))
    with pytest.raises(kn.Unsupported, match="validation has row weights"):
        FitJob.of(kn.MAP(), linear_model(), (x, y), kn.Data((x, y), 20, torch.ones(20)))


def test_fits_with_other_weights_have_other_identities():
    model, (x, y) = linear_model(), linear_data()
    found = [
        FitJob.of(kn.MAP(), model, kn.Data((x, y), 20, weights), checkpoint="never written").identity
        for weights in (None, torch.ones(20), torch.arange(20.0))
    ]
    assert len({each["data"] for each in found}) == 3
