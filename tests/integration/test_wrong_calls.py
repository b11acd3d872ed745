"""Wrong calls through the public names: each is refused at the door, with the argument, what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import knowable as kn

X = torch.randn((20, 2), generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
LABELS = torch.arange(20) % 3


def _at(tensor: Tensor, row: int, value: float, column: int = 0) -> Tensor:
    changed = tensor.clone()
    changed[row, column] = value
    return changed


def _model(**settings: Any) -> kn.Model:
    return kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), **settings)


def _fit(data: Any = (X, Y), model: Any = None, **settings: Any) -> kn.Posterior:
    return kn.MAP(epochs=1).fit(_model() if model is None else model, data, **settings)


def _classes(x: Any = X, y: Any = LABELS) -> kn.Posterior:
    return _fit((x, y), kn.Model(nn.Linear(2, 3), kn.Categorical()))


@cache
def _posterior() -> kn.DiagonalNormal:
    return kn.MeanFieldVI(epochs=1).fit(_model(), (X, Y))


@cache
def _prediction() -> kn.RegressionPrediction:
    return _posterior().predict(X, 4)


@cache
def _class_prediction() -> kn.ClassPrediction:
    return _classes().predict(X)


def _frame(**columns: Any) -> Any:
    import pandas as pd

    return pd.DataFrame(columns)


class Recurrent(nn.Module):
    """Returns a tuple, or puts the batch second."""

    def __init__(self, how: Callable[[Tensor], Any]):
        super().__init__()
        self.linear, self.how = nn.Linear(2, 1), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.linear(x))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


Case = tuple[Callable[[], Any], type[Exception], str]

MODEL: dict[str, Case] = {
    "net is a list": (lambda: kn.Model([nn.Linear(2, 1)], kn.Gaussian()), kn.InvalidType, r"net must be a torch\.nn\.Module, got list"),
    "net is a class": (lambda: kn.Model(nn.Linear, kn.Gaussian()), kn.InvalidType, r"net must be a torch\.nn\.Module, got type"),
    "net is lazy": (lambda: kn.Model(nn.LazyLinear(1), kn.Gaussian()), kn.InvalidArgument, "net has lazy parameters.*Run it once"),
    "net mixes dtypes": (lambda: kn.Model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double()), kn.Gaussian()), kn.InvalidArgument, r"net mixes parameter dtypes.*net\.float\(\)"),
    "net has no parameters": (lambda: kn.Model(nn.ReLU(), kn.Gaussian(0.1)), kn.InvalidArgument, "leaves no parameter random"),
    "likelihood is a class": (lambda: kn.Model(nn.Linear(2, 1), kn.Gaussian), kn.InvalidType, r"likelihood must be an instance: write Gaussian\(\)"),
    "likelihood is a loss": (lambda: kn.Model(nn.Linear(2, 1), nn.MSELoss()), kn.InvalidType, r"likelihood must be a knowable likelihood .* got MSELoss\(\)"),
    "likelihood is missing": (lambda: kn.Model(nn.Linear(2, 1), None), kn.InvalidType, "likelihood must be a knowable likelihood .* got None"),
    "prior is a number": (lambda: _model(prior=1.0), kn.InvalidType, "prior must be a knowable prior, a mapping .* or a posterior; got 1.0"),
    "prior is a class": (lambda: _model(prior=kn.Normal), kn.InvalidType, r"prior must be an instance: write Normal\(\.\.\.\)"),
    "prior maps to a number": (lambda: _model(prior={"*": 1.0}), kn.InvalidType, r"prior\['\*'\] must be a knowable prior .* got 1\.0"),
    "prior key is a number": (lambda: _model(prior={1: kn.Normal()}), kn.InvalidType, "prior.* 1"),
    "prior misses a parameter": (lambda: _model(prior={"weight": kn.Normal()}), kn.InvalidArgument, "prior gives nothing for parameter 'bias'"),
    "prior names no parameter": (lambda: _model(prior={"w": kn.Normal(), "*": kn.Flat()}), kn.InvalidArgument, "prior has no parameter to match 'w'. The parameters are: weight"),
    "prior is a point estimate": (lambda: _model(prior=_fit()), kn.Unsupported, "Particles has no density, so it cannot be a prior"),
    "prior of another network": (lambda: kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1), _posterior()), kn.InvalidArgument, r"prior has shape \(1, 2\) for 'weight', the network \(1, 3\)"),
    "random is a typo": (lambda: _model(random="wieght"), kn.InvalidArgument, "random='wieght' matches no parameter. The parameters are: weight, bias"),
    "random is a number": (lambda: _model(random=5), kn.InvalidType, "random must be a name, a glob, 'last_layer' or a list of these; got 5"),
    "frozen is None": (lambda: _model(frozen=None), kn.InvalidType, "frozen must be a name, a glob, 'last_layer' or a list of these; got None"),
    "everything is frozen": (lambda: _model(frozen="*"), kn.InvalidArgument, "leaves no parameter random once the frozen"),
    "a model scores other parameters": (lambda: _model().log_joint({"weight": torch.zeros(1, 2)}, X, Y, 20), kn.InvalidArgument, "params lacks bias"),
    "a model scores a misspelt parameter": (lambda: _model().log_likelihood({**_model().params(), "b": torch.zeros(1)}, X, Y), kn.InvalidArgument, "params has no place for b"),
    "a model scores rows that do not match": (lambda: _model().log_likelihood(_model().params(), X, Y[:3]), kn.InvalidData, r"y must have 20 rows.*\(3, 1\)"),
    "size of the data is zero": (lambda: _model().log_joint(_model().params(), X, Y, 0), kn.InvalidArgument, "size must be a whole number >= 1, got 0"),
    "an improper prior is sampled": (lambda: _model(prior=kn.Flat()).prior_predict(X), kn.Unsupported, r"Cannot draw parameter 'weight' .* Flat\(\) is improper.*Normal\(1\.0\)"),
    "no draws of the prior": (lambda: _model().prior_predict(X, samples=0), kn.InvalidArgument, "samples must be a whole number >= 1, got 0"),
}  # fmt: skip

PARTS: dict[str, Case] = {
    "noise is negative": (lambda: kn.Gaussian(-0.1), kn.InvalidArgument, "noise must be a finite number > 0, got -0.1"),
    "noise is text": (lambda: kn.Gaussian("0.1"), kn.InvalidType, "noise must be a number, got str '0.1'"),
    "noise has a wrong length": (lambda: kn.Gaussian((0.1, 0.2), outputs=3), kn.InvalidArgument, "noise must have one value for each of 3 outputs, got 2"),
    "no outputs": (lambda: kn.Gaussian(outputs=0), kn.InvalidArgument, "outputs must be a whole number >= 1, got 0"),
    "degrees of freedom are zero": (lambda: kn.StudentT(0.0), kn.InvalidArgument, "df must be a finite number > 0, got 0.0"),
    "scale is zero": (lambda: kn.Normal(0), kn.InvalidArgument, "scale must be a finite number > 0, got 0"),
    "scale is not a number": (lambda: kn.Normal(float("nan")), kn.InvalidArgument, "scale must be a finite number > 0, got nan"),
    "scale is a truth value": (lambda: kn.Normal(True), kn.InvalidType, "scale must be a number, got bool True"),
    "scale of a Laplace prior": (lambda: kn.LaplacePrior("wide"), kn.InvalidType, "scale must be a number, got str 'wide'"),
    "share above one": (lambda: kn.ScaleMixture(pi=1.5), kn.InvalidArgument, "pi must be a finite number > 0 and < 1, got 1.5"),
    "learned scale of a number": (lambda: kn.EmpiricalBayes(1.0), kn.InvalidType, "prior must be a Normal, LaplacePrior or StudentTPrior, got float 1.0"),
    "learned scale per layer": (lambda: kn.EmpiricalBayes(kn.Normal(), per="layer"), kn.InvalidArgument, "per must be one of 'glob', 'parameter'; got 'layer'"),
    "epochs are zero": (lambda: kn.MAP(epochs=0), kn.InvalidArgument, "epochs must be a whole number >= 1, got 0"),
    "epochs are a fraction": (lambda: kn.MeanFieldVI(epochs=1.5), kn.InvalidType, "epochs must be a whole number, got float 1.5"),
    "learning rate is negative": (lambda: kn.MAP(learning_rate=-1), kn.InvalidArgument, "learning_rate must be a finite number > 0, got -1"),
    "batch size is zero": (lambda: kn.MAP(batch_size=0), kn.InvalidArgument, "batch_size must be a whole number >= 1, got 0"),
    "optimiser is a typo": (lambda: kn.MAP(optimiser="adma"), kn.InvalidArgument, r"optimiser must be one of 'adam', 'sgd'; got 'adma'\. Did you mean 'adam'\?"),
    "estimator is a typo": (lambda: kn.MeanFieldVI(estimator="locla"), kn.InvalidArgument, r"estimator must be one of 'auto', .* got 'locla'\. Did you mean 'local'\?"),
    "beta is zero": (lambda: kn.MeanFieldVI(beta=0), kn.InvalidArgument, "beta must be a finite number > 0, got 0"),
    "one draw for the score estimator": (lambda: kn.MeanFieldVI(estimator="score", draws=1), kn.InvalidArgument, "draws must be >= 2 with estimator='score'"),
    "warm-up is negative": (lambda: kn.MeanFieldVI(kl_warmup=-1), kn.InvalidArgument, "kl_warmup must be a whole number >= 0, got -1"),
    "start is unknown": (lambda: kn.MeanFieldVI(start="zero"), kn.InvalidArgument, "start must be one of 'network', 'map'; got 'zero'"),
    "start is a tensor": (lambda: kn.MeanFieldVI(start=X), kn.InvalidType, "start must be 'network', 'map' or a posterior, got Tensor"),
    "too many parameters allowed to be none": (lambda: kn.ExactLinear(max_parameters=0), kn.InvalidArgument, "max_parameters must be a whole number >= 1, got 0"),
    "precision is unknown": (lambda: kn.Engine("fp8"), kn.InvalidArgument, "precision must be one of 'full', 'bfloat16'; got 'fp8'"),
    "time between saves is negative": (lambda: kn.Checkpoint("run", seconds=-1), kn.InvalidArgument, "seconds must be a finite number >= 0, got -1"),
    "size of a data set is unknown": (lambda: kn.Data((X, Y), size=None), kn.InvalidType, "size must be a whole number, got NoneType"),
}  # fmt: skip

DATA: dict[str, Case] = {
    "no data": (lambda: kn.MAP(epochs=1).fit(_model(), None), kn.InvalidType, r"data must be a pair \(x, y\), a Dataset or a DataLoader; got NoneType"),
    "a file name": (lambda: _fit("train.csv"), kn.InvalidType, "data must be a pair .*; got str"),
    "x alone": (lambda: _fit(X), kn.InvalidType, "data must be a pair .*; got Tensor"),
    "three parts": (lambda: _fit((X, Y, Y)), kn.InvalidType, "data must be a pair .*; got 3 items"),
    "a missing value in x": (lambda: _fit((_at(X, 7, torch.nan, 1), Y)), kn.InvalidData, r"x has 1 missing or infinite value, the first in row 7, column 1 \(counting from 0\)"),
    "an infinite value in x": (lambda: _fit((_at(X, 7, torch.inf), Y)), kn.InvalidData, "x has 1 missing or infinite value.*row 7, column 0"),
    "an infinite value in y": (lambda: _fit((X, _at(Y, 11, -torch.inf))), kn.InvalidData, r"y has missing or infinite values in row 11 \(counting from 0\)"),
    "more rows in x": (lambda: _fit((X, Y[:7])), kn.InvalidData, r"x and y must have the same number of rows, got x \(20, 2\) and y \(7, 1\)"),
    "no rows": (lambda: _fit((X[:0], Y[:0])), kn.InvalidData, r"x is empty: shape \(0, 2\) has no rows"),
    "one number as x": (lambda: _fit((3.0, 1.0)), kn.InvalidData, "x must have rows"),
    "one number as y": (lambda: _fit((X, 1.0)), kn.InvalidData, r"same number of rows, got x \(20, 2\) and y \(\)"),
    "text in x": (lambda: _fit((np.array([["a", "b"]] * 20), Y)), kn.InvalidType, "x must be a tensor, an array or a data frame of numbers, got ndarray"),
    "objects in x": (lambda: _fit((np.array([[1.0, None]] * 20), Y)), kn.InvalidType, "x must be .* of numbers, got ndarray: it holds Python objects"),
    "text in y": (lambda: _fit((X, ["low", "high"] * 10)), kn.InvalidType, "y must be .* of numbers, got list"),
    "ragged rows": (lambda: _fit(([[1.0], [1.0, 2.0]], [1.0, 2.0])), kn.InvalidType, "x must be .* of numbers, got list"),
    "a text column": (lambda: _fit((_frame(height=[1.0] * 20, city=["Ulm"] * 20), Y)), kn.InvalidType, "x column 'city' holds .*, not numbers. Encode it first or drop it"),
    "a column of categories": (lambda: _fit((_frame(height=[1.0] * 20, city=np.array(["2020-01-01"] * 20, "M8[s]")), Y)), kn.InvalidType, "x column 'city' holds datetime64"),
    "too few columns": (lambda: _fit((X[:, :1], Y)), kn.InvalidData, r"cannot take x of shape \(20, 1\)"),
    "one row without a batch": (lambda: _fit((X[0], Y[:2, 0])), kn.InvalidData, r"\(2,\)|one row per row"),
    "too many targets": (lambda: _fit((X, torch.zeros(20, 3))), kn.InvalidData, r"y has shape \(20, 3\), but the network's output .* has shape \(20, 1\)"),
    "a label out of range": (lambda: _classes(y=torch.arange(20) % 4), kn.InvalidData, r"y must be a whole number from 0 to 2 \(the network has 3 classes\), got 3 in row 3"),
    "a negative label": (lambda: _classes(y=LABELS - 1), kn.InvalidData, r"y must be .* from 0 to 2 .*, got -1 in row 0"),
    "a label between two": (lambda: _classes(y=LABELS + 0.5), kn.InvalidData, r"y must be a whole number .*, got 0.5 in row 0.*Gaussian\(\)"),
    "one-hot labels": (lambda: _classes(y=torch.eye(3)[LABELS]), kn.InvalidData, r"y has shape \(20, 3\).*pass y\.argmax\(1\)"),
    "one output for classes": (lambda: _fit((X, LABELS), kn.Model(nn.Linear(2, 1), kn.Categorical())), kn.InvalidData, r"Categorical needs .* shape \(\d, 1\)\. .*Bernoulli\(\)"),
    "two in a yes or no": (lambda: _fit((X, LABELS), kn.Model(nn.Linear(2, 1), kn.Bernoulli())), kn.InvalidData, r"y must be 0 or 1, got 2 in row 2.*Categorical\(\)"),
    "a negative count": (lambda: _fit((X, -torch.ones(20)), kn.Model(nn.Linear(2, 1), kn.Poisson())), kn.InvalidData, "y must be a whole number, 0 or more, got -1 in row 0"),
    "one output for mean and scale": (lambda: _fit((X, Y), kn.Model(nn.Linear(2, 1), kn.HeteroscedasticGaussian())), kn.InvalidData, r"\(\d, 1\)|output"),
    "noise for more outputs than there are": (lambda: _fit((X, Y), kn.Model(nn.Linear(2, 1), kn.Gaussian(outputs=2))), kn.InvalidData, r"noise for each of 2 outputs, but the network's output has shape \(\d, 1\)"),
    "a network that returns a tuple": (lambda: _fit(model=kn.Model(Recurrent(lambda out: (out, None)), kn.Gaussian(0.1))), kn.InvalidType, "The network must return one tensor, got tuple. Wrap it in a module"),
    "a network with the batch second": (lambda: _fit(model=kn.Model(Recurrent(lambda out: out.T), kn.Gaussian(0.1))), kn.InvalidData, "one row per row of x: .*batch_first=True"),
    "a network with the batch second, of two outputs": (lambda: _fit((X, X), model=kn.Model(Recurrent(lambda out: out.expand(-1, 2).T), kn.Gaussian(0.1))), kn.InvalidData, "one row per row of x"),
    "an iterable dataset": (lambda: _fit(Stream()), kn.InvalidArgument, r"number of rows is unknown\. Pass Data\(DataLoader\(\.\.\.\), size=N\)"),
    "a loader of one": (lambda: _fit(DataLoader(Stream())), kn.InvalidArgument, r"number of rows is unknown\. Pass Data\(loader, size=N\)"),
    "a loader without a batch": (lambda: _fit(DataLoader(TensorDataset(X, Y), batch_size=32, drop_last=True)), kn.InvalidData, "batch"),
    "a loader of inputs alone": (lambda: _fit(DataLoader(TensorDataset(X))), kn.InvalidData, r"Each batch of the data must be a pair \(x, y\)"),
    "a wrong size": (lambda: _fit(kn.Data((X, Y), 19)), kn.InvalidArgument, "data.size is 19, but its tensors have 20 rows"),
    "a missing value in the validation data": (lambda: _fit(validation=(_at(X, 2, torch.nan), Y)), kn.InvalidData, "validation.*row 2, column 0|row 2, column 0.*validation"),
    "a share as validation": (lambda: _fit(validation=0.1), kn.InvalidType, "validation must be a pair .*; got float"),
}  # fmt: skip

FIT: dict[str, Case] = {
    "a network instead of a model": (lambda: _fit(model=nn.Linear(2, 1)), kn.InvalidType, r"model must be a knowable Model \(network, likelihood, prior\), got Linear"),
    "a negative seed": (lambda: _fit(seed=-1), kn.InvalidArgument, "seed must be a whole number >= 0, got -1"),
    "no seed": (lambda: _fit(seed=None), kn.InvalidType, "seed must be a whole number, got NoneType"),
    "an engine's name": (lambda: _fit(engine="bfloat16"), kn.InvalidType, "engine must be an Engine or None, got str"),
    "an engine's name in closed form": (lambda: kn.ExactLinear().fit(_model(), (X, Y), engine="bfloat16"), kn.InvalidType, "engine must be an Engine or None, got str"),
    "a number as checkpoint": (lambda: _fit(checkpoint=5), kn.InvalidType, "checkpoint must be the path of a folder or a Checkpoint, got int"),
    "a number as checkpoint in closed form": (lambda: kn.ExactLinear().fit(_model(), (X, Y), checkpoint=5), kn.InvalidType, "checkpoint must be the path"),
    "text as progress": (lambda: _fit(progress="yes"), kn.InvalidType, "progress must be True, False or None"),
    "a scale to learn at the mode": (lambda: _fit(model=_model(prior=kn.EmpiricalBayes(kn.Normal()))), kn.Unsupported, "MAP cannot learn the prior's own scale.*MeanFieldVI"),
    "classes in closed form": (lambda: kn.ExactLinear().fit(kn.Model(nn.Linear(2, 3), kn.Categorical()), (X, LABELS)), kn.Unsupported, r"ExactLinear needs a Gaussian likelihood, got Categorical\(\)"),
    "a network that is not linear in closed form": (lambda: kn.ExactLinear().fit(kn.Model(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), kn.Gaussian(0.1)), (X, Y)), kn.Unsupported, "linear in its random parameters.*random='last_layer'"),
    "a Laplace prior in closed form": (lambda: kn.ExactLinear().fit(_model(prior=kn.LaplacePrior(1.0)), (X, Y)), kn.Unsupported, "ExactLinear needs a normal prior on 'weight', got LaplacePrior"),
    "too large in closed form": (lambda: kn.ExactLinear(max_parameters=2).fit(_model(), (X, Y)), kn.InvalidArgument, "3 x 3 matrix; max_parameters is 2"),
    "a start of another shape": (lambda: kn.MeanFieldVI(epochs=1, start=_posterior()).fit(kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1)), (torch.zeros(20, 3), Y)), kn.InvalidArgument, "start.*weight"),
    "a start with other names": (lambda: kn.MeanFieldVI(epochs=1, start=_posterior()).fit(kn.Model(nn.Sequential(nn.Linear(2, 1)), kn.Gaussian(0.1)), (X, Y)), kn.InvalidArgument, r"start.*0\.weight"),
}  # fmt: skip

PREDICT: dict[str, Case] = {
    "a missing value": (lambda: _posterior().predict(_at(X, 4, torch.nan, 1)), kn.InvalidData, "x has 1 missing or infinite value.*row 4, column 1"),
    "too few columns": (lambda: _posterior().predict(X[:, :1]), kn.InvalidData, r"cannot take x of shape \(20, 1\)"),
    "no rows": (lambda: _posterior().predict(X[:0]), kn.InvalidData, "x is empty"),
    "a single number": (lambda: _posterior().predict(1.0), kn.InvalidData, "x must have rows"),
    "text": (lambda: _posterior().predict("x"), kn.InvalidType, "x must be a tensor, an array or a data frame of numbers, got str"),
    "no draws": (lambda: _posterior().predict(X, 0), kn.InvalidArgument, "samples must be a whole number >= 1, got 0"),
    "half a draw": (lambda: _posterior().predict(X, 0.5), kn.InvalidType, "samples must be a whole number, got float 0.5"),
    "a seed as generator": (lambda: _posterior().predict(X, generator=3), kn.InvalidType, "generator must be a torch.Generator.*got int"),
    "memory in words": (lambda: _posterior().predict(X, max_memory="plenty"), kn.InvalidArgument, "max_memory must be bytes or text such as '500MB', got 'plenty'"),
    "memory in two points": (lambda: _posterior().predict(X, max_memory="1.2.3GB"), kn.InvalidArgument, "max_memory must be .*got '1.2.3GB'"),
    "no memory": (lambda: _posterior().predict(X, max_memory=0), kn.InvalidArgument, "max_memory must be > 0, got 0"),
    "too little memory": (lambda: _posterior().predict(X, max_memory=100), kn.InvalidArgument, "max_memory=100 is too small: .*predict_stream"),
    "no samples": (lambda: _posterior().sample(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "samples with a seed": (lambda: _posterior().sample(3, generator=1), kn.InvalidType, "generator must be a torch.Generator.*got int"),
    "the density of nothing": (lambda: _posterior().log_prob({}), kn.InvalidArgument, "weight"),
    "the density of a point estimate": (lambda: _fit().log_prob(_fit().mean()), kn.Unsupported, "Particles has no density. Families with one: DiagonalNormal"),
    "a quantile in percent": (lambda: _prediction().quantile(95), kn.InvalidArgument, "q must be a finite number > 0 and < 1, got 95"),
    "two quantiles at once": (lambda: _prediction().quantile([0.1, 0.9]), kn.InvalidType, r"q must be a number, got list \[0\.1, 0\.9\]"),
    "a level in percent": (lambda: _prediction().interval(90), kn.InvalidArgument, "level must be a finite number > 0 and < 1, got 90"),
    "no outcomes": (lambda: _prediction().draw(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "no labels": (lambda: _class_prediction().draw(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
    "outcomes for other rows": (lambda: _prediction().log_prob(Y[:5]), kn.InvalidData, r"y must have 20 rows, one for each prediction; got shape \(5, 1\)"),
    "outcomes that are words": (lambda: _prediction().log_prob(["a"] * 20), kn.InvalidType, "y must be"),
    "labels out of range": (lambda: _class_prediction().log_prob(LABELS + 1), kn.InvalidData, r"y must be a whole number from 0 to 2 .* got 3 in row 2"),
}  # fmt: skip

SCORES: dict[str, Case] = {
    "evaluate with y first": (lambda: kn.evaluate(Y, _prediction()), kn.InvalidType, "prediction must be a Prediction, what posterior.predict.* returns; got a Tensor"),
    "evaluate a posterior": (lambda: kn.evaluate(_posterior(), Y), kn.InvalidType, "prediction must be a Prediction.*got a DiagonalNormal"),
    "evaluate other rows": (lambda: kn.evaluate(_prediction(), Y[:5]), kn.InvalidData, r"y must have 20 rows, one for each prediction; got shape \(5, 1\)"),
    "evaluate missing outcomes": (lambda: kn.evaluate(_prediction(), _at(Y, 6, torch.nan)), kn.InvalidData, "y has missing or infinite values in row 6"),
    "evaluate words": (lambda: kn.evaluate(_prediction(), ["a"] * 20), kn.InvalidType, "y must be a tensor or an array of numbers, got a list"),
    "evaluate labels out of range": (lambda: kn.evaluate(_class_prediction(), LABELS + 1), kn.InvalidData, "got 3 in row 2"),
    "accuracy of numbers": (lambda: kn.metrics.accuracy(_prediction(), LABELS), kn.InvalidType, "over classes .*got a RegressionPrediction"),
    "rmse of classes": (lambda: kn.metrics.rmse(_class_prediction(), LABELS), kn.InvalidType, "over numbers"),
    "crps of classes": (lambda: kn.metrics.crps(_class_prediction(), LABELS), kn.InvalidType, "over numbers"),
    "logits as probabilities": (lambda: kn.metrics.nll(torch.randn(20, 3) * 3, LABELS), kn.InvalidData, "sum to one .*softmax"),
    "probabilities of one class too many": (lambda: kn.metrics.agreement(torch.full((4, 2), 0.5), torch.full((4, 3), 1 / 3)), kn.InvalidData, "2|3|shape"),
    "coverage in percent": (lambda: kn.metrics.coverage(_prediction(), Y, level=90), kn.InvalidArgument, "level must be a finite number > 0 and < 1, got 90"),
    "a rate above one": (lambda: kn.metrics.tpr_at_fpr(torch.rand(5), torch.rand(5), fpr=5), kn.InvalidArgument, "fpr must be a finite number"),
    "nothing outside": (lambda: kn.metrics.auroc(torch.rand(5), torch.rand(0)), kn.InvalidData, "outside is empty"),
    "a missing score": (lambda: kn.metrics.auroc(torch.tensor([0.1, torch.nan]), torch.rand(3)), kn.InvalidData, "inside"),
}  # fmt: skip

REST: dict[str, Case] = {
    "an unknown estimator": (lambda: kn.gradient_variance(_model(), (X, Y), ["locla"]), kn.InvalidArgument, "estimators must be one of .* got 'locla'. Did you mean 'local'"),
    "no estimator": (lambda: kn.gradient_variance(_model(), (X, Y), ()), kn.InvalidArgument, "estimators must name at least one"),
    "one repeat": (lambda: kn.gradient_variance(_model(), (X, Y), repeats=1), kn.InvalidArgument, "repeats must be a whole number >= 2, got 1"),
    "no draws": (lambda: kn.gradient_variance(_model(), (X, Y), ["local"], draws=0), kn.InvalidArgument, "draws must be a whole number >= 1, got 0"),
    "at a point estimate": (lambda: kn.gradient_variance(_model(), (X, Y), ["local"], at=_fit()), kn.InvalidType, "at must be a posterior fitted by MeanFieldVI, or None, got Particles|at must be .* got a Particles"),
    "at another network": (lambda: kn.gradient_variance(kn.Model(nn.Linear(3, 1), kn.Gaussian(0.1)), (torch.zeros(20, 3), Y), ["local"], at=_posterior(), repeats=2), kn.InvalidArgument, "at.*weight"),
    "the gradient of a network": (lambda: kn.gradient_variance(nn.Linear(2, 1), (X, Y)), kn.InvalidType, "model must be a knowable Model"),
    "an unknown method": (lambda: kn.cite("mean_field"), kn.InvalidArgument, r"method 'mean_field' is not known\. Did you mean 'mean_field_vi'\? The methods are: "),
    "a method far from all": (lambda: kn.cite("qqq"), kn.InvalidArgument, r"method 'qqq' is not known\. The methods are: .*mean_field_vi"),
    "weights that are too few": (lambda: kn.Particles(_model(), {"weight": torch.zeros(3, 1, 2), "bias": torch.zeros(3, 1)}, torch.zeros(2)), kn.InvalidArgument, r"log_weights must be 3 numbers, not all -inf; got shape \(2,\)"),
    "loading from nowhere": (lambda: kn.load("no such folder"), kn.DamagedArtifact, "no such folder is not a saved folder: it has no manifest.json"),
    "loading a number": (lambda: kn.load(5), kn.InvalidType, "path must be the name of a folder, got int 5"),
    "saving to a number": (lambda: _posterior().save(5), kn.InvalidType, "path must be the name of a folder, got int 5"),
    "saving to a file": (lambda: _posterior().save(__file__), kn.InvalidArgument, "is a file"),
    "saving among other files": (lambda: _posterior().save(Path(__file__).parent), kn.InvalidArgument, "something else in it"),
}  # fmt: skip

GROUPS = {"Model": MODEL, "parts": PARTS, "data": DATA, "fit": FIT, "predict": PREDICT, "scores": SCORES, "the rest": REST}
CASES = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}


@pytest.mark.parametrize(("call", "error", "wanted"), CASES.values(), ids=CASES)
def test_a_wrong_call_is_refused_with_what_is_wrong(call, error, wanted):
    with pytest.raises(error, match=wanted) as caught:
        call()
    assert isinstance(caught.value, kn.KnowableError)
    assert len(str(caught.value)) < 700


def test_there_are_enough_wrong_calls():
    assert len(CASES) >= 50


# --- wrong calls that need a folder --------------------------------------------------------------------------------------------


def test_the_checkpoint_of_another_fit_is_refused_saying_what_differs(tmp_path):
    _fit(checkpoint=tmp_path)
    for settings, wanted in (
        ({"seed": 1, "model": _model()}, "seed"),
        ({"data": (X + 1, Y), "model": _model()}, "data"),
    ):
        with pytest.raises(kn.InvalidArgument, match=rf"belongs to another fit: .*{wanted}.*Give another folder or delete"):
            _fit(checkpoint=tmp_path, **settings)


@pytest.mark.parametrize(
    ("net", "error", "wanted"),
    [
        (nn.Linear(3, 1), kn.InvalidArgument, r"'weight' has shape \(1, 3\) in net and \(1, 2\) in the saved posterior"),
        (nn.Sequential(nn.Linear(2, 1)), kn.InvalidArgument, "not the network this posterior was fitted with: parameter 'weight'"),
        (nn.Linear(2, 1).double(), kn.InvalidArgument, "net is float64, the saved posterior float32"),
        ("linear", kn.InvalidType, r"net must be a torch\.nn\.Module, got str"),
    ],
)
def test_a_posterior_is_not_loaded_into_another_network(net, error, wanted, tmp_path):
    _posterior().save(tmp_path)
    with pytest.raises(error, match=wanted):
        kn.load(tmp_path, net)


def test_a_network_of_ones_own_must_be_passed_to_load(tmp_path):
    _fit(model=kn.Model(Recurrent(lambda out: out), kn.Gaussian(0.1))).save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match=r"network \(Recurrent\) is not made of plain torch\.nn layers.*net=\.\.\."):
        kn.load(tmp_path)


# --- calls that are right ------------------------------------------------------------------------------------------------------


def test_a_vector_and_a_column_of_targets_are_the_same_and_never_broadcast():
    # broadcast (20,) against (20, 1) would give 400 terms, and the loss another value
    net = nn.Linear(2, 1)
    losses = [
        kn.MAP(epochs=3).fit(kn.Model(net, kn.Gaussian(0.1)), (X, y)).diagnostics.history[-1]["loss"]
        for y in (Y, Y.squeeze(1), Y.squeeze(1).numpy(), Y.squeeze(1).tolist())
    ]
    assert len(set(losses)) == 1
    prediction = kn.MAP(epochs=1).fit(kn.Model(net, kn.Gaussian(0.1)), (X, Y)).predict(X)
    assert prediction.log_prob(Y.squeeze(1)).shape == (20,)
    assert dict(kn.evaluate(prediction, Y)) == dict(kn.evaluate(prediction, Y.squeeze(1)))


def test_a_network_without_an_output_dimension_takes_a_column_of_targets():
    model = kn.Model(Recurrent(lambda out: out.squeeze(1)), kn.Gaussian(0.1))
    prediction = _fit(model=model).predict(X)
    assert prediction.mean.shape == (20,)
    assert prediction.log_prob(Y).shape == (20,)
