"""What the two estimators share: from a table to a posterior, and from rows to a prediction."""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from knowable.core.chains.posterior import ChainPosterior
from knowable.core.compiling.engine import as_engine
from knowable.core.method import Method
from knowable.core.model.data import Data
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.tensors import few_threads
from knowable.core.support.time_limit import time_limit
from knowable.errors import InvalidArgument, InvalidData, InvalidType, TooFewSteps, Unsupported
from knowable.inference.ensembles import DeepEnsemble
from knowable.inference.exact import ExactLinear
from knowable.inference.sampling.sampler import Sampler
from knowable.registry import find_method
from knowable.tabular import saving
from knowable.tabular.auto import BUDGETS, Choice, choose, with_budget
from knowable.tabular.label_columns import CategoricalColumn
from knowable.tabular.networks import default_network, default_prior
from knowable.tabular.reading import read_table
from knowable.tabular.rows import canonical_order, checked_weights, weighed
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table
from knowable.tabular.targets import Targets, refuse_hopeless, target_values

PRECISIONS = {"double": torch.float64, "single": torch.float32}
LIKELIHOODS = {
    "regression": (
        "gaussian", "heteroscedastic_gaussian", "student_t", "heteroscedastic_student_t", "log_normal", "logit_normal",
        "poisson", "negative_binomial", "zero_inflated",
    ),
    "classification": ("categorical", "bernoulli"),
}  # fmt: skip
_WIDENED = {"regression": 10.0, "classification": 5.0}  # the prior of networks that rows held out stop early
FEWEST_STEPS = 100  # of training, or gradients of chains, that a time limit must leave
_LOG = logging.getLogger(__name__)  # beginning and end of a fit, which the command line tells where there is no bar
UPDATING = ("MeanFieldVI", "Laplace", "ExactLinear")  # whose posterior can be the prior of the next rows


class BayesianEstimator(BaseEstimator):
    """A Bayesian network for tables, by the conventions of scikit-learn.

    The two kinds are :class:`~knowable.tabular.regressor.BayesianRegressor` and
    :class:`~knowable.tabular.classifier.BayesianClassifier`, which document their parameters.
    """

    def __init__(
        self,
        method: str | Method = "auto",
        *,
        network: nn.Module | Callable[[int, int], nn.Module] | None = None,
        likelihood: Likelihood | str | None = None,
        prior: Any = None,
        budget: str = "normal",
        time_limit: float | None = None,
        samples: int = 64,
        random_state: Any = None,
        kinds: Any = None,
        precision: str = "double",
        engine: Any = None,
        verbose: bool = False,
    ):
        self.method = method
        self.network = network
        self.likelihood = likelihood
        self.prior = prior
        self.budget = budget
        self.time_limit = time_limit
        self.samples = samples
        self.random_state = random_state
        self.kinds = kinds
        self.precision = precision
        self.engine = engine
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # gaps are filled in
        tags.input_tags.string = True
        return tags

    task: str

    @abstractmethod
    def _checked_target(self, y: Any) -> np.ndarray:
        """Targets as an array, or an error."""

    @abstractmethod
    def _learn_targets(self, y: np.ndarray, names: tuple[str, ...], classes: Any = None) -> Targets:
        """What is to be predicted; ``classes`` are all labels there will ever be, where they are known."""

    @abstractmethod
    def _scaled(self, y: np.ndarray) -> np.ndarray:
        """Targets as the likelihood wants them."""

    @abstractmethod
    def _kind_of_target(self, y: np.ndarray, x: np.ndarray) -> str:
        """What the target is, which decides the likelihood where none is given; a name given by the user decides."""

    @abstractmethod
    def _default_likelihood(self, method: Method | None, y: np.ndarray) -> Likelihood:
        """The likelihood where none is given, or only its name."""

    @abstractmethod
    def _outputs(self, likelihood: Likelihood) -> int:
        """How many numbers the likelihood wants of the network."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the posterior.

        Args:
            X: Rows: an array, a data frame of pandas or polars, or anything else that
                :func:`~knowable.tabular.reading.read_table` takes.
            y: Targets ``(rows,)`` (of numbers also ``(rows, outputs)``), or the name of a column of ``X``.
            sample_weight: How much each row counts: a row of weight 2 as two rows.
        """
        self._fit(X, y, sample_weight)
        return self

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, updates: bool = False, classes: Any = None) -> None:
        started = time.monotonic()
        self._check_settings()
        for name in ("posterior_", "method_"):  # a fit that fails leaves nothing that looks fitted
            vars(self).pop(name, None)
        table, y, names = self._admit(X, y, reset=True)
        table, y, weights = weighed(table, y, self._row_weights(y, sample_weight))
        if len(table) < 2:
            raise InvalidData(f"{type(self).__name__} needs at least 2 rows with a weight, got 1 sample.")
        order = canonical_order(table, y if y.dtype.kind in "biuf" else np.unique(y, return_inverse=True)[1], weights)
        table, y, weights = table.rows(order), y[order], None if weights is None else weights[order]
        kinds = self.kinds
        if isinstance(kinds, Mapping):  # which may also speak of the target
            kinds = {name: kind for name, kind in kinds.items() if name in table.names or name not in names}
        columns = Schema.learn(table, None, kinds=kinds)
        self.target_kind_ = self._kind_of_target(y, columns.encode(table))
        self.schema_ = columns.predicting(self._learn_targets(y, names, classes))
        self.input_names_ = table.names
        self.seed_ = int(check_random_state(self.random_state).randint(2**31 - 1))
        self.choice_ = self._choose(y, updates=updates)
        self.method_ = self.choice_.method
        likelihood = self._make_likelihood(self.method_, y)
        linear = isinstance(self.method_, ExactLinear)
        net = self._make_network(likelihood, len(table), linear=linear)
        ours = self.network is None and not linear
        widened = _WIDENED[self.task] if self._trains_networks and weights is None else 1.0
        self.model_ = Model(net, likelihood, default_prior(net, widened) if self.prior is None and ours else self.prior)
        self.posterior_ = self._run(table, y, weights, started)

    def _row_weights(self, y: np.ndarray, sample_weight: Any) -> np.ndarray | None:
        """How much each row counts; None: all the same."""
        return checked_weights(sample_weight, len(y))

    def _update(self, X: Any, y: Any, sample_weight: Any) -> None:
        started = time.monotonic()
        self._check_settings()
        table, y, _ = self._admit(X, y, reset=False)
        table, y, weights = weighed(table, y, self._row_weights(y, sample_weight))
        self.model_ = Model(self.model_.net, self.model_.likelihood, self.posterior_)
        self.posterior_ = self._run(table, y, weights, started)

    def _run(self, table: Table, y: np.ndarray, weights: np.ndarray | None, started: float) -> Posterior:
        x, target = torch.from_numpy(self.schema_.encode(table)), torch.from_numpy(self._scaled(y))
        data = Data((x, target), len(x), None if weights is None else torch.from_numpy(weights).to(self.model_.dtype))
        with time_limit(self._seconds_left(started)), few_threads(self._weights):
            training, held_out = self._divided(data)
            progress = None if self.verbose else False
            _LOG.info("fitting %s rows by %r", f"{data.size:,}", self.method_)
            found = self.method_.fit(
                self.model_, training, validation=held_out, seed=self.seed_, progress=progress, engine=self.engine
            )
            _LOG.info("fitted in %.0f s: %s", time.monotonic() - started, found.diagnostics.message)
        self._refuse_few_steps(found)
        if isinstance(found, ChainPosterior) and found.diagnostics.interrupted and "rhat" not in found.diagnostics:
            raise KeyboardInterrupt(f"the fit was {found.diagnostics.message}: there is nothing to score")
        return found

    def _divided(self, data: Data) -> tuple[Data, Data | None]:
        """Rows to train on, and a tenth to stop early by, where that is needed."""
        if not (self._trains_networks or self._has_no_useful_mode) or data.weights is not None:
            return data, None
        order = torch.randperm(data.size, generator=generator_for(self.seed_, "held out"))
        held, kept = order[: data.size // 10].sort().values, order[data.size // 10 :].sort().values
        if not len(held):
            return data, None
        first, second = (Data(tuple(each[rows] for each in data.tensors), len(rows)) for rows in (kept, held))
        return first, second

    @property
    def _trains_networks(self) -> bool:
        """Whether networks are trained that were not asked for."""
        return self.method == "auto" and isinstance(vars(self).get("method_"), DeepEnsemble)

    @property
    def _has_no_useful_mode(self) -> bool:
        """Whether the mode is searched of weights and noise together: a network through all rows, without noise."""
        method = self.method_
        learned = self.model_.likelihood.noise_name is not None and bool(self.model_.likelihood.params())
        return method.family == "point" and getattr(method, "epochs", 1) is None and learned

    @property
    def _weights(self) -> int:
        return sum(value.numel() for value in self.model_.params().values())

    def _seconds_left(self, started: float) -> float | None:
        """What is left of the time that the fit may take."""
        return None if self.time_limit is None else max(1e-3, self.time_limit - (time.monotonic() - started))

    def _refuse_few_steps(self, posterior: Posterior) -> None:
        """A fit that a time limit ended when it had hardly begun is not an answer."""
        found = posterior.diagnostics
        steps = found.history[-1]["step"] if found.history else found.get("gradients")
        if found.out_of_time and steps is not None and steps < FEWEST_STEPS:
            limit = "kn.time_limit" if self.time_limit is None else f"time_limit={self.time_limit:g}"
            raise TooFewSteps(
                f"{limit} ended the fit after {steps:.0f} steps, and fewer than {FEWEST_STEPS} are no answer. Give it "
                f"more seconds (time_limit=, --time-limit), or leave the limit out: budget='quick' makes fewer steps "
                f"and gives the same numbers on any machine."
            )

    def _admit(self, X: Any, y: Any, *, reset: bool) -> tuple[Table, np.ndarray, tuple[str, ...]]:
        """Inputs, targets and the targets' names; ``y`` may be the name of columns of ``X``."""
        if y is None:
            raise InvalidArgument(
                f"This {type(self).__name__} estimator requires y to be passed, but the target y is None."
            )
        named = (y,) if isinstance(y, str) else tuple(y) if _all_texts_in(y, X) else ()
        if named:
            whole = read_table(X)
            named = tuple(whole.find(name) for name in named)
            found = target_values(whole, named, self.task)
            if reset:
                refuse_hopeless(whole, named, found, self.task, self.kinds)
            return self._table(whole.without(named), reset=reset), found, named
        table = self._table(X, reset=reset)
        found = self._checked_target(y)
        check_consistent_length(table.frame, found)
        return table, found, _names_of(y)

    def _table(self, X: Any, *, reset: bool) -> Table:
        """Rows as a table whose columns have the names that they had in training."""
        if isinstance(X, Table | Mapping | str | os.PathLike) and not issparse(X):  # one kind of which is a mapping
            X = read_table(X)
            if reset:
                self.n_features_in_, self.feature_names_in_ = len(X.names), np.array(X.names, dtype=object)
            return X
        if _library(X) in ("pandas", "polars") and type(X).__name__ == "DataFrame":
            frame: Any = X
            validate_data(self, frame, skip_check_array=True, reset=reset)
            table = read_table(X)
            if not len(table):
                raise InvalidData(f"X has 0 samples (rows), {type(self).__name__} needs at least one.")
            return table
        any_type: Any = {"dtype": None, "ensure_all_finite": "allow-nan"}
        try:
            array = check_array(X, **any_type, estimator=self, input_name="X")
        except ValueError as error:
            if "inhomogeneous" not in str(error):
                raise
            raise InvalidData("X must be a table, but its rows have different lengths.") from None
        validate_data(self, array, skip_check_array=True, reset=reset)
        names = [f"x{k}" for k in range(array.shape[1])] if reset else self.input_names_
        return read_table({name: array[:, k] for k, name in enumerate(names)})

    def _make_likelihood(self, method: Method | None, y: np.ndarray) -> Likelihood:
        return self.likelihood if isinstance(self.likelihood, Likelihood) else self._default_likelihood(method, y)

    def _choose(self, y: np.ndarray, *, updates: bool) -> Choice:
        rows = len(y)
        if isinstance(self.method, Method):
            return Choice(self.method, "it was asked for")
        if self.method != "auto":
            inputs = len(self.schema_.feature_names)
            return Choice(with_budget(find_method(self.method).cls(), rows, inputs, self.budget), "it was asked for")
        likelihood = self._make_likelihood(None, y)
        size = sum(value.numel() for value in self._make_network(likelihood, rows).parameters())
        inputs = len(self.schema_.feature_names)
        return choose(rows, inputs, size, self.task, self.budget, updates=updates)

    def _make_network(self, likelihood: Likelihood, rows: int, *, linear: bool = False) -> nn.Module:
        if isinstance(self.network, nn.Module):
            return self.network
        inputs, outputs = len(self.schema_.feature_names), self._outputs(likelihood)
        with own_randomness(derive_seed(self.seed_, "network")):
            if self.network is not None:
                return self.network(inputs, outputs)
            if linear:
                return nn.Linear(inputs, outputs).to(PRECISIONS[self.precision])
            groups, method = self.schema_.groups, vars(self).get("method_")
            categories = [groups[each.name] for each in self.schema_.columns if isinstance(each, CategoricalColumn)]
            return default_network(
                inputs, outputs, rows, categorical=categories, dtype=PRECISIONS[self.precision],
                gain=self.task == "classification" and (self._trains_networks or isinstance(method, Sampler)),
                activation="relu" if self._trains_networks and self.task == "classification" else "tanh",
            )  # fmt: skip

    def _check_settings(self) -> None:
        if not isinstance(self.method, str | Method):
            raise InvalidType(
                f"method must be 'auto', the name of a method or a method such as MAP(), got {self.method!r}."
            )
        if self.network is not None and not isinstance(self.network, nn.Module) and not callable(self.network):
            raise InvalidType(
                f"network must be a torch.nn.Module, a function of the numbers of inputs and outputs that makes one, "
                f"or None; got {type(self.network).__name__}."
            )
        if isinstance(self.likelihood, str):
            check_choice("likelihood", self.likelihood, LIKELIHOODS[self.task])
        elif self.likelihood is not None and not isinstance(self.likelihood, Likelihood):
            raise InvalidType(f"likelihood must be one such as Gaussian(), its name, or None; got {self.likelihood!r}.")
        if not isinstance(self.budget, str):
            raise InvalidType(
                f"budget must be one of {', '.join(map(repr, BUDGETS))}, got {self.budget!r}. For a limit in seconds "
                f"use time_limit={self.budget!r} (--time-limit)."
            )
        check_choice("budget", self.budget, BUDGETS)
        if self.time_limit is not None:
            check_number("time_limit", self.time_limit, above=0)
        check_count("samples", self.samples)
        check_choice("precision", self.precision, PRECISIONS)
        as_engine(self.engine)

    def predict_dist(self, X: Any) -> Prediction:
        """The predictive distribution of each row of ``X``, in the units of the training targets."""
        check_is_fitted(self, "posterior_")
        encodings = self.schema_.encodings(self._table(X, reset=False))
        with few_threads(self._weights):
            parts = [self.posterior_.predict(torch.from_numpy(x), samples=self.samples) for x in encodings]
        assert self.schema_.targets is not None
        equal = torch.zeros(len(parts), dtype=parts[0].log_weights.dtype).log_softmax(0)
        found = parts[0] if len(parts) == 1 else type(parts[0]).joined(parts, equal)  # over known categories
        return self.schema_.targets.restore(found)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Any:
        """Write a folder that :meth:`load` reads: the schema as JSON and the posterior, without code in it.

        Args:
            path: The folder; a name that ends in ``.knowable`` is that of a single file with the same content.
            overwrite: Replace an estimator that was saved there before.
        """
        check_is_fitted(self, "posterior_")
        return saving.save_estimator(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], network: nn.Module | None = None) -> Any:
        """Read what :meth:`save` wrote; ``knowable.load`` does so too.

        Args:
            path: The folder or file.
            network: The network it was fitted with, if that was one of your own that is not made of plain layers.
        """
        return saving.load_estimator([cls], path, network)


def can_update(estimator: BayesianEstimator) -> bool:
    """Whether ``partial_fit`` is there: the method's posterior can be the prior of the next rows."""
    method = vars(estimator).get("method_", estimator.method)
    if method == "auto":
        return True
    name = type(method).__name__ if isinstance(method, Method) else find_method(method).cls_name
    if name in UPDATING:
        return True
    raise Unsupported(
        f"The posterior of {name} has no density, so that it cannot be the prior of the next rows. Methods with "
        f"partial_fit: {', '.join(UPDATING)}."
    )


def _all_texts_in(y: Any, X: Any) -> bool:
    """Whether ``y`` is a list of names of columns, for a table with names."""
    return isinstance(X, Table) and isinstance(y, list | tuple) and len(y) > 0 and set(map(str, y)) <= set(X.names)


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _names_of(y: Any) -> tuple[str, ...]:
    if _library(y) not in ("pandas", "polars"):
        return ()
    names = list(y.columns) if type(y).__name__ == "DataFrame" else [y.name]
    return tuple(str(name) for name in names) if all(isinstance(name, str) and name for name in names) else ()
