"""Models, likelihoods, priors and methods put together wrongly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from tests.integration.wrong_calls import Case, X, Y, fit, linear_model, posterior, refuses

MODEL: dict[str, Case] = {
    "net is a list": (
        lambda: kn.Model([nn.Linear(2, 1)], kn.Gaussian()),
        kn.InvalidType,
        r"net must be a torch\.nn\.Module, got list",
    ),
    "net is a class": (
        lambda: kn.Model(nn.Linear, kn.Gaussian()),
        kn.InvalidType,
        r"net must be a torch\.nn\.Module, got type",
    ),
    "net is lazy": (
        lambda: kn.Model(nn.LazyLinear(1), kn.Gaussian()),
        kn.InvalidArgument,
        "net has lazy parameters.*Run it once",
    ),
    "net mixes dtypes that do not go together": (
        lambda: fit(model=kn.Model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double()), kn.Gaussian())),
        kn.InvalidData,
        r"The network cannot take x.*same dtype",
    ),
    "net has no parameters": (
        lambda: kn.Model(nn.ReLU(), kn.Gaussian(0.1)),
        kn.InvalidArgument,
        "leaves no parameter random",
    ),
    "likelihood is a class": (
        lambda: kn.Model(nn.Linear(2, 1), kn.Gaussian),
        kn.InvalidType,
        r"likelihood must be an instance: write Gaussian\(\)",
    ),
    "likelihood is a loss": (
        lambda: kn.Model(nn.Linear(2, 1), nn.MSELoss()),
        kn.InvalidType,
        r"got torch\'s MSELoss, a loss. Did you mean kn.Gaussian\(\)",
    ),
    "likelihood is missing": (
        lambda: kn.Model(nn.Linear(2, 1), None),
        kn.InvalidType,
        "likelihood is missing",
    ),
    "prior is a number": (
        lambda: linear_model(prior=1.0),
        kn.InvalidType,
        "prior must be a knowable prior, a mapping .* or a posterior; got 1.0",
    ),
    "prior is a class": (
        lambda: linear_model(prior=kn.Normal),
        kn.InvalidType,
        r"prior must be an instance: write Normal\(\.\.\.\)",
    ),
    "prior maps to a number": (
        lambda: linear_model(prior={"*": 1.0}),
        kn.InvalidType,
        r"prior\['\*'\] must be a knowable prior .* got 1\.0",
    ),
    "prior key is a number": (lambda: linear_model(prior={1: kn.Normal()}), kn.InvalidType, "prior.* 1"),
    "prior misses a parameter": (
        lambda: linear_model(prior={"weight": kn.Normal()}),
        kn.InvalidArgument,
        "prior has no entry for parameter 'bias'",
    ),
    "prior names no parameter": (
        lambda: linear_model(prior={"w": kn.Normal(), "*": kn.Flat()}),
        kn.InvalidArgument,
        "prior has no parameter to match 'w'. The parameters are: weight",
    ),
    "prior is a point estimate": (
        lambda: linear_model(prior=fit()),
        kn.Unsupported,
        "Particles has no density, so it cannot be a prior",
    ),
    "prior of another network": (
        lambda: kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), posterior()),
        kn.InvalidArgument,
        r"prior has shape \(1, 2\) for 'weight', the network \(1, 3\)",
    ),
    "random is a typo": (
        lambda: linear_model(random="wieght"),
        kn.InvalidArgument,
        "random='wieght' matches no parameter. The parameters are: weight, bias",
    ),
    "random is a number": (
        lambda: linear_model(random=5),
        kn.InvalidType,
        "random must be a name, a glob, 'last_layer' or a list of these; got 5",
    ),
    "frozen is None": (
        lambda: linear_model(frozen=None),
        kn.InvalidType,
        "frozen must be a name, a glob, 'last_layer' or a list of these; got None",
    ),
    "everything is frozen": (
        lambda: linear_model(frozen="*"),
        kn.InvalidArgument,
        "leaves no parameter random once the frozen",
    ),
    "a model scores other parameters": (
        lambda: linear_model().log_joint({"weight": torch.zeros(1, 2)}, X, Y, 20),
        kn.InvalidArgument,
        "params lacks bias",
    ),
    "a model scores a misspelt parameter": (
        lambda: linear_model().log_likelihood({**linear_model().params(), "b": torch.zeros(1)}, X, Y),
        kn.InvalidArgument,
        "params has no place for b",
    ),
    "a model scores rows that do not match": (
        lambda: linear_model().log_likelihood(linear_model().params(), X, Y[:3]),
        kn.InvalidData,
        r"y must have 20 rows.*\(3, 1\)",
    ),
    "size of the data is zero": (
        lambda: linear_model().log_joint(linear_model().params(), X, Y, 0),
        kn.InvalidArgument,
        "size must be a whole number >= 1, got 0",
    ),
    "an improper prior is sampled": (
        lambda: linear_model(prior=kn.Flat()).prior_predict(X),
        kn.Unsupported,
        r"Cannot draw parameter 'weight' .* Flat\(\) is improper.*Normal\(1\.0\)",
    ),
    "no draws of the prior": (
        lambda: linear_model().prior_predict(X, samples=0),
        kn.InvalidArgument,
        "samples must be a whole number >= 1, got 0",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), MODEL.values(), ids=MODEL)
def test_a_model_put_together_wrongly_is_refused(call, error, wanted):
    refuses(call, error, wanted)


PARTS: dict[str, Case] = {
    "noise is negative": (lambda: kn.Gaussian(-0.1), kn.InvalidArgument, "noise must be a finite number > 0, got -0.1"),
    "noise is text": (lambda: kn.Gaussian("0.1"), kn.InvalidType, "noise must be a number, got str '0.1'"),
    "noise has a wrong length": (
        lambda: kn.Gaussian((0.1, 0.2), outputs=3),
        kn.InvalidArgument,
        "noise must have one value for each of 3 outputs, got 2",
    ),
    "no outputs": (lambda: kn.Gaussian(outputs=0), kn.InvalidArgument, "outputs must be a whole number >= 1, got 0"),
    "degrees of freedom are zero": (
        lambda: kn.StudentT(0.0),
        kn.InvalidArgument,
        "df must be a finite number > 0, got 0.0",
    ),
    "scale is zero": (lambda: kn.Normal(0), kn.InvalidArgument, "scale must be a finite number > 0, got 0"),
    "scale is not a number": (
        lambda: kn.Normal(float("nan")),
        kn.InvalidArgument,
        "scale must be a finite number > 0, got nan",
    ),
    "scale is a truth value": (lambda: kn.Normal(True), kn.InvalidType, "scale must be a number, got bool True"),
    "scale of a Laplace prior": (
        lambda: kn.LaplacePrior("wide"),
        kn.InvalidType,
        "scale must be a number, got str 'wide'",
    ),
    "share above one": (
        lambda: kn.ScaleMixture(pi=1.5),
        kn.InvalidArgument,
        "pi must be a finite number > 0 and < 1, got 1.5",
    ),
    "learned scale of a number": (
        lambda: kn.EmpiricalBayes(1.0),
        kn.InvalidType,
        "prior must be a Normal, LaplacePrior or StudentTPrior, got float 1.0",
    ),
    "learned scale per network": (
        lambda: kn.EmpiricalBayes(kn.Normal(), per="network"),
        kn.InvalidArgument,
        "per must be one of 'glob', 'layer', 'parameter', 'weight'; got 'network'",
    ),
    "epochs are zero": (lambda: kn.MAP(epochs=0), kn.InvalidArgument, "epochs must be a whole number >= 1, got 0"),
    "epochs are a fraction": (
        lambda: kn.MeanFieldVI(epochs=1.5),
        kn.InvalidType,
        "epochs must be a whole number, got float 1.5",
    ),
    "learning rate is negative": (
        lambda: kn.MAP(learning_rate=-1),
        kn.InvalidArgument,
        "learning_rate must be a finite number > 0, got -1",
    ),
    "batch size is zero": (
        lambda: kn.MAP(batch_size=0),
        kn.InvalidArgument,
        "batch_size must be a whole number >= 1, got 0",
    ),
    "optimiser is a typo": (
        lambda: kn.MAP(training=kn.Training(optimiser="adma")),
        kn.InvalidArgument,
        r"optimiser must be one of 'adam', 'sgd'; got 'adma'\. Did you mean 'adam'\?",
    ),
    "estimator is a typo": (
        lambda: kn.MeanFieldVI(estimator="locla"),
        kn.InvalidArgument,
        r"estimator must be one of 'auto', .* got 'locla'\. Did you mean 'local'\?",
    ),
    "beta is zero": (lambda: kn.MeanFieldVI(beta=0), kn.InvalidArgument, "beta must be a finite number > 0, got 0"),
    "one draw for the score estimator": (
        lambda: kn.MeanFieldVI(estimator="score", draws=1),
        kn.InvalidArgument,
        "draws must be >= 2 with estimator='score'",
    ),
    "warm-up is negative": (
        lambda: kn.MeanFieldVI(kl_warmup=-1),
        kn.InvalidArgument,
        "kl_warmup must be a whole number >= 0, got -1",
    ),
    "start is unknown": (
        lambda: kn.MeanFieldVI(start="zero"),
        kn.InvalidArgument,
        "start must be one of 'network', 'map'; got 'zero'",
    ),
    "start is a tensor": (
        lambda: kn.MeanFieldVI(start=X),
        kn.InvalidType,
        "start must be 'network', 'map' or a posterior, got Tensor",
    ),
    "too many parameters allowed to be none": (
        lambda: kn.ExactLinear(max_parameters=0),
        kn.InvalidArgument,
        "max_parameters must be a whole number >= 1, got 0",
    ),
    "precision is unknown": (
        lambda: kn.Engine("fp8"),
        kn.InvalidArgument,
        "precision must be one of 'full', 'bfloat16'; got 'fp8'",
    ),
    "time between saves is negative": (
        lambda: kn.Checkpoint("run", seconds=-1),
        kn.InvalidArgument,
        "seconds must be a finite number >= 0, got -1",
    ),
    "size of a data set is unknown": (
        lambda: kn.Data(iter(())),
        kn.InvalidArgument,
        "size must be given: the number of rows of a tuple_iterator is not known",
    ),
}


@pytest.mark.parametrize(("call", "error", "wanted"), PARTS.values(), ids=PARTS)
def test_a_part_with_a_wrong_setting_is_refused(call, error, wanted):
    refuses(call, error, wanted)
