"""Wrong calls of fits, predictions, scores, saves and loads: each is refused at the door, saying what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import knowable as kn
from tests.integration.wrong_calls import (
    LABELS,
    Case,
    Recurrent,
    X,
    Y,
    at,
    class_prediction,
    fit,
    linear_model,
    posterior,
    prediction,
    refuses,
)

FIT: dict[str, Case] = {
    "a network instead of a model": (
        lambda: fit(model=nn.Linear(2, 1)),
        kn.InvalidType,
        r"model must be a knowable Model \(network, likelihood, prior\), got Linear",
    ),
    "a negative seed": (lambda: fit(seed=-1), kn.InvalidArgument, "seed must be a whole number >= 0, got -1"),
    "no seed": (lambda: fit(seed=None), kn.InvalidType, "seed must be a whole number, got NoneType"),
    "an engine's name": (
        lambda: fit(engine="bfloat16"),
        kn.InvalidArgument,
        "engine must be an Engine, workers or one of",
    ),
    "an engine's name in closed form": (
        lambda: kn.ExactLinear().fit(linear_model(), (X, Y), engine="bfloat16"),
        kn.InvalidArgument,
        "engine must be an Engine, workers or one of",
    ),
    "a number as checkpoint": (
        lambda: fit(checkpoint=5),
        kn.InvalidType,
        "checkpoint must be the path of a folder or a Checkpoint, got int",
    ),
    "a number as checkpoint in closed form": (
        lambda: kn.ExactLinear().fit(linear_model(), (X, Y), checkpoint=5),
        kn.InvalidType,
        "checkpoint must be the path",
    ),
    "text as progress": (lambda: fit(progress="yes"), kn.InvalidType, "progress must be True, False or None"),
    "a scale to learn at the mode": (
        lambda: fit(model=linear_model(prior=kn.EmpiricalBayes(kn.Normal()))),
        kn.Unsupported,
        "MAP cannot learn the prior's own scale.*MeanFieldVI",
    ),
    "classes in closed form": (
        lambda: kn.ExactLinear().fit(kn.Model(nn.Linear(2, 3), kn.Categorical()), (X, LABELS)),
        kn.Unsupported,
        r"ExactLinear needs a Gaussian likelihood, got Categorical\(\)",
    ),
    "a network that is not linear in closed form": (
        lambda: kn.ExactLinear().fit(
            kn.Model(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), kn.Gaussian(0.1)), (X, Y)
        ),
        kn.Unsupported,
        "linear in its random parameters.*random='last_layer'",
    ),
    "a Laplace prior in closed form": (
        lambda: kn.ExactLinear().fit(linear_model(prior=kn.LaplacePrior(1.0)), (X, Y)),
        kn.Unsupported,
        "ExactLinear needs a normal prior on 'weight', got LaplacePrior",
    ),
    "too large in closed form": (
        lambda: kn.ExactLinear(max_parameters=2).fit(linear_model(), (X, Y)),
        kn.InvalidArgument,
        "3 x 3 matrix; max_parameters is 2",
    ),
    "a start of another shape": (
        lambda: kn.MeanFieldVI(epochs=1, start=posterior()).fit(
            kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1)), (torch.zeros(20, 3), Y)
        ),
        kn.InvalidArgument,
        "start.*weight",
    ),
    "a start with other names": (
        lambda: kn.MeanFieldVI(epochs=1, start=posterior()).fit(
            kn.Model(nn.Sequential(nn.Linear(2, 1)), kn.Gaussian(0.1)), (X, Y)
        ),
        kn.InvalidArgument,
        r"start.*0\.weight",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), FIT.values(), ids=FIT)
def test_a_fit_called_wrongly_is_refused(call, error, wanted):
    refuses(call, error, wanted)


PREDICT: dict[str, Case] = {
    "a missing value": (
        lambda: posterior().predict(at(X, 4, torch.nan, 1)),
        kn.InvalidData,
        "x has 1 missing or infinite value.*row 4, column 1",
    ),
    "too few columns": (lambda: posterior().predict(X[:, :1]), kn.InvalidData, r"cannot take x of shape \(20, 1\)"),
    "no rows": (lambda: posterior().predict(X[:0]), kn.InvalidData, "x is empty"),
    "a single number": (lambda: posterior().predict(1.0), kn.InvalidData, "x must have rows"),
    "text": (
        lambda: posterior().predict("x"),
        kn.InvalidType,
        "x must be a tensor, an array or a data frame of numbers, got str",
    ),
    "no draws": (lambda: posterior().predict(X, 0), kn.InvalidArgument, "samples must be a whole number >= 1, got 0"),
    "half a draw": (
        lambda: posterior().predict(X, 0.5),
        kn.InvalidType,
        "samples must be a whole number, got float 0.5",
    ),
    "a seed as generator": (
        lambda: posterior().predict(X, generator=3),
        kn.InvalidType,
        "generator must be a torch.Generator.*got int",
    ),
    "memory in words": (
        lambda: posterior().predict(X, max_memory="plenty"),
        kn.InvalidArgument,
        "max_memory must be bytes or text such as '500MB', got 'plenty'",
    ),
    "memory in two points": (
        lambda: posterior().predict(X, max_memory="1.2.3GB"),
        kn.InvalidArgument,
        "max_memory must be .*got '1.2.3GB'",
    ),
    "no memory": (lambda: posterior().predict(X, max_memory=0), kn.InvalidArgument, "max_memory must be > 0, got 0"),
    "too little memory": (
        lambda: posterior().predict(X, max_memory=100),
        kn.InvalidArgument,
        "max_memory=100 is too small: .*predict_stream",
    ),
    "no samples": (lambda: posterior().sample(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "samples with a seed": (
        lambda: posterior().sample(3, generator=1),
        kn.InvalidType,
        "generator must be a torch.Generator.*got int",
    ),
    "the density of nothing": (lambda: posterior().log_prob({}), kn.InvalidArgument, "weight"),
    "the density of a point estimate": (
        lambda: fit().log_prob(fit().mean()),
        kn.Unsupported,
        "Particles has no density. Families with one: .*DiagonalNormal",
    ),
    "a quantile in percent": (
        lambda: prediction().quantile(95),
        kn.InvalidArgument,
        "q must be a finite number > 0 and < 1, got 95",
    ),
    "two quantiles at once": (
        lambda: prediction().quantile([0.1, 0.9]),
        kn.InvalidType,
        r"q must be a number, got list \[0\.1, 0\.9\]",
    ),
    "a level in percent": (
        lambda: prediction().interval(90),
        kn.InvalidArgument,
        "level must be a finite number > 0 and < 1, got 90",
    ),
    "no outcomes": (lambda: prediction().draw(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "no labels": (lambda: class_prediction().draw(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "outcomes for other rows": (
        lambda: prediction().log_prob(Y[:5]),
        kn.InvalidData,
        r"y must have 20 rows, one for each prediction; got shape \(5, 1\)",
    ),
    "outcomes that are words": (lambda: prediction().log_prob(["a"] * 20), kn.InvalidType, "y must be"),
    "labels out of range": (
        lambda: class_prediction().log_prob(LABELS + 1),
        kn.InvalidData,
        r"y must be a whole number from 0 to 2 .* got 3 in row 2",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), PREDICT.values(), ids=PREDICT)
def test_a_prediction_called_wrongly_is_refused(call, error, wanted):
    refuses(call, error, wanted)


SCORES: dict[str, Case] = {
    "evaluate with y first": (
        lambda: kn.evaluate(Y, prediction()),
        kn.InvalidType,
        "prediction must be a Prediction, what posterior.predict.* returns; got a Tensor",
    ),
    "evaluate a posterior": (
        lambda: kn.evaluate(posterior(), Y),
        kn.InvalidType,
        "prediction must be a Prediction.*got a DiagonalNormal",
    ),
    "evaluate other rows": (
        lambda: kn.evaluate(prediction(), Y[:5]),
        kn.InvalidData,
        r"y must have 20 rows, one for each prediction; got shape \(5, 1\)",
    ),
    "evaluate missing outcomes": (
        lambda: kn.evaluate(prediction(), at(Y, 6, torch.nan)),
        kn.InvalidData,
        "y has missing or infinite values in row 6",
    ),
    "evaluate words": (
        lambda: kn.evaluate(prediction(), ["a"] * 20),
        kn.InvalidType,
        "y must be a tensor, an array or a data frame of numbers, got list",
    ),
    "evaluate labels out of range": (
        lambda: kn.evaluate(class_prediction(), LABELS + 1),
        kn.InvalidData,
        "got 3 in row 2",
    ),
    "accuracy of numbers": (
        lambda: kn.metrics.accuracy(prediction(), LABELS),
        kn.InvalidType,
        "over classes .*got a RegressionPrediction",
    ),
    "rmse of classes": (lambda: kn.metrics.rmse(class_prediction(), LABELS), kn.InvalidType, "over numbers"),
    "crps of classes": (lambda: kn.metrics.crps(class_prediction(), LABELS), kn.InvalidType, "over numbers"),
    "logits as probabilities": (
        lambda: kn.metrics.nll(torch.randn(20, 3) * 3, LABELS),
        kn.InvalidData,
        "sum to one .*softmax",
    ),
    "probabilities of one class too many": (
        lambda: kn.metrics.agreement(torch.full((4, 2), 0.5), torch.full((4, 3), 1 / 3)),
        kn.InvalidData,
        "2|3|shape",
    ),
    "coverage in percent": (
        lambda: kn.metrics.coverage(prediction(), Y, level=90),
        kn.InvalidArgument,
        "level must be a finite number > 0 and < 1, got 90",
    ),
    "a rate above one": (
        lambda: kn.metrics.tpr_at_fpr(torch.rand(5), torch.rand(5), fpr=5),
        kn.InvalidArgument,
        "fpr must be a finite number",
    ),
    "nothing outside": (lambda: kn.metrics.auroc(torch.rand(5), torch.rand(0)), kn.InvalidData, "outside is empty"),
    "a missing score": (
        lambda: kn.metrics.auroc(torch.tensor([0.1, torch.nan]), torch.rand(3)),
        kn.InvalidData,
        "inside",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), SCORES.values(), ids=SCORES)
def test_a_score_called_wrongly_is_refused(call, error, wanted):
    refuses(call, error, wanted)


REST: dict[str, Case] = {
    "an unknown estimator": (
        lambda: kn.gradient_variance(linear_model(), (X, Y), ["locla"]),
        kn.InvalidArgument,
        "estimators must be one of .* got 'locla'. Did you mean 'local'",
    ),
    "no estimator": (
        lambda: kn.gradient_variance(linear_model(), (X, Y), ()),
        kn.InvalidArgument,
        "estimators must name at least one",
    ),
    "one repeat": (
        lambda: kn.gradient_variance(linear_model(), (X, Y), repeats=1),
        kn.InvalidArgument,
        "repeats must be a whole number >= 2, got 1",
    ),
    "no draws": (
        lambda: kn.gradient_variance(linear_model(), (X, Y), ["local"], draws=0),
        kn.InvalidArgument,
        "draws must be a whole number >= 1, got 0",
    ),
    "at a point estimate": (
        lambda: kn.gradient_variance(linear_model(), (X, Y), ["local"], at=fit()),
        kn.InvalidType,
        "at must be a posterior fitted by MeanFieldVI, or None, got Particles|at must be .* got a Particles",
    ),
    "at another network": (
        lambda: kn.gradient_variance(
            kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1)), (torch.zeros(20, 3), Y), ["local"], at=posterior(), repeats=2
        ),
        kn.InvalidArgument,
        "at.*weight",
    ),
    "the gradient of a network": (
        lambda: kn.gradient_variance(nn.Linear(2, 1), (X, Y)),
        kn.InvalidType,
        "model must be a knowable Model",
    ),
    "an unknown method": (
        lambda: kn.cite("mean_field"),
        kn.InvalidArgument,
        r"method 'mean_field' is not known\. Did you mean 'mean_field_vi'\? The methods are: ",
    ),
    "a method far from all": (
        lambda: kn.cite("qqq"),
        kn.InvalidArgument,
        r"method 'qqq' is not known\. The methods are: .*mean_field_vi",
    ),
    "weights that are too few": (
        lambda: kn.Particles(
            linear_model(), {"weight": torch.zeros(3, 1, 2), "bias": torch.zeros(3, 1)}, torch.zeros(2)
        ),
        kn.InvalidArgument,
        r"log_weights must be 3 numbers, not all -inf; got shape \(2,\)",
    ),
    "loading from nowhere": (
        lambda: kn.load("no such folder"),
        kn.DamagedArtifact,
        "There is no folder '.*no such folder'",
    ),
    "loading a number": (lambda: kn.load(5), kn.InvalidType, "path must be the name of a folder, got int 5"),
    "saving to a number": (lambda: posterior().save(5), kn.InvalidType, "path must be the name of a folder, got int 5"),
    "saving to a file": (lambda: posterior().save(__file__), kn.InvalidArgument, "is a file"),
    "saving among other files": (
        lambda: posterior().save(Path(__file__).parent),
        kn.InvalidArgument,
        "something else in it",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), REST.values(), ids=REST)
def test_other_calls_that_are_wrong_are_refused(call, error, wanted):
    refuses(call, error, wanted)


# --- wrong calls that need a folder ---------------------------------------------------------------------------------


def test_the_checkpoint_of_another_fit_is_refused_saying_what_differs(tmp_path):
    fit(checkpoint=tmp_path)
    for settings, wanted in (
        ({"seed": 1, "model": linear_model()}, "seed"),
        ({"data": (X + 1, Y), "model": linear_model()}, "data"),
    ):
        with pytest.raises(
            kn.InvalidArgument, match=rf"belongs to another fit: .*{wanted}.*Give another folder or delete"
        ):
            fit(checkpoint=tmp_path, **settings)


@pytest.mark.parametrize(
    ("net", "error", "wanted"),
    [
        (
            nn.Linear(3, 1),
            kn.InvalidArgument,
            r"'weight' has shape \(1, 3\) in net and \(1, 2\) in the saved posterior",
        ),
        (
            nn.Sequential(nn.Linear(2, 1)),
            kn.InvalidArgument,
            "not the network this posterior was fitted with: parameter 'weight'",
        ),
        (nn.Linear(2, 1).double(), kn.InvalidArgument, "net is float64, the saved posterior float32"),
        ("linear", kn.InvalidType, r"net must be a torch\.nn\.Module, got str"),
    ],
)
def test_a_posterior_is_not_loaded_into_another_network(net, error, wanted, tmp_path):
    posterior().save(tmp_path)
    with pytest.raises(error, match=wanted):
        kn.load(tmp_path, net)


def test_a_network_of_ones_own_must_be_passed_to_load(tmp_path):
    fit(model=kn.Model(Recurrent(lambda out: out), kn.Gaussian(0.1))).save(tmp_path)
    with pytest.raises(
        kn.InvalidArgument, match=r"network \(Recurrent\) is not made of plain torch\.nn layers.*net=\.\.\."
    ):
        kn.load(tmp_path)
