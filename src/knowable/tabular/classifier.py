"""The classifier for scikit-learn users."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from sklearn.base import ClassifierMixin
from sklearn.utils import column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from torch import nn

from knowable.core.method import Method
from knowable.core.model.likelihood import Likelihood
from knowable.core.prediction.prediction import ClassPrediction
from knowable.errors import InvalidArgument, InvalidData, Unsupported
from knowable.likelihoods import Bernoulli, Categorical
from knowable.tabular.columns import find_missing
from knowable.tabular.estimators import BayesianEstimator, can_update
from knowable.tabular.targets import ClassTargets, Targets, label_array


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """Classification with a Bayesian network, by the conventions of scikit-learn.

    Numbers, categories, dates and gaps in the inputs are taken care of; labels may be texts, numbers or truth values,
    two of them or more. How sure a prediction is, and why, is in :meth:`predict_dist`.

    Args:
        method: ``"auto"`` (chosen by the size of the data and the budget; ``choice_`` says why), the name of a method
            (``"mfvi"``, ``"laplace"``, ``"ensemble"``, ``"nuts"``, ...) or a method such as ``kn.MAP(epochs=200)``.
        network: Any ``nn.Module``, or a function of the numbers of inputs and outputs that makes one. None: sized to
            the data, see :func:`~knowable.tabular.networks.default_network`.
        likelihood: ``Categorical()``, which is the default, or for two classes ``Bernoulli()``; or their names.
        prior: Over the weights, see :class:`~knowable.core.model.model.Model`. None: for a network that is made here by
            the widths of its layers, see :func:`~knowable.tabular.networks.default_prior`; else ``Normal(1.0)``.
        budget: How much work ``"auto"`` puts into a fit: ``"quick"``, ``"normal"`` or ``"thorough"``. Counted in
            gradients, not by the clock: the same seed gives the same numbers on any machine, busy or not.
        time_limit: Seconds that a fit may take, kept within 20%, or None. A fit that it cuts short says so; one that it
            ends within 100 steps is an error.
        samples: Maximum number of posterior draws that a prediction uses.
        random_state: Fixes everything random.
        kinds: What some columns are, by name, see :class:`~knowable.tabular.schema.Schema`.
        precision: ``"double"`` or ``"single"``, of the weights of a network that is made here.
        engine: Where independent work is done, see :meth:`~knowable.core.method.Method.fit`: here, or with ``"ray"``
            there.
        verbose: Show a progress bar on a terminal.
        class_weight: How much the rows of each class count, on top of ``sample_weight``: a number by label,
            ``"balanced"`` for classes that count the same, or None. Probabilities are then those of a population in
            which the classes are as frequent as they count.

    Attributes:
        classes_: The labels, in order.
        posterior_: The posterior of the weights.
        schema_: What the columns are.
        model_: Network, likelihood and prior.
        method_: The method that was used.
        choice_: That, and why.
        n_features_in_: How many columns the inputs have.
        feature_names_in_: Their names, where they have any.

    Example:
        >>> import numpy as np
        >>> import knowable as kn
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> y = np.where(X[:, 0] > 0, "up", "down")
        >>> model = kn.BayesianClassifier(kn.MAP(epochs=100), random_state=0).fit(X, y)
        >>> model.predict_proba(X).shape
        (40, 2)
        >>> model.predict([[0.9]]).tolist()
        ['up']
    """

    task = "classification"

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
        class_weight: Mapping[Any, float] | str | None = None,
    ):
        super().__init__(
            method, network=network, likelihood=likelihood, prior=prior, budget=budget, time_limit=time_limit,
            samples=samples, random_state=random_state, kinds=kinds, precision=precision, engine=engine,
            verbose=verbose,
        )  # fmt: skip
        self.class_weight = class_weight

    def _row_weights(self, y: np.ndarray, sample_weight: Any) -> np.ndarray | None:
        own = super()._row_weights(y, sample_weight)
        if self.class_weight is None:
            return own
        if self.class_weight != "balanced" and not isinstance(self.class_weight, Mapping):
            raise InvalidArgument(
                f"class_weight must be 'balanced', a mapping from labels to numbers or None, got {self.class_weight!r}."
            )
        found = compute_sample_weight(self.class_weight, y)
        return found if own is None else found * own

    @available_if(can_update)
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> BayesianClassifier:
        """Learn from more rows: the posterior so far is their prior. The first call is a fit.

        What was learned of the columns in the first call stays. It is there for methods whose posterior has a density
        that can be a prior: ``MeanFieldVI``, ``Laplace``; ``"auto"`` takes the first of them.

        Args:
            X: Rows, as for :meth:`fit`.
            y: Labels.
            classes: All labels that there will ever be, in the first call; None where its rows have all of them.
            sample_weight: How often each row counts.
        """
        if "posterior_" in vars(self):
            self._update(X, y, sample_weight)
        else:
            self._fit(X, y, sample_weight, updates=True, classes=classes)
        return self

    @property
    def classes_(self) -> np.ndarray:
        """The labels, in order."""
        if "schema_" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no classes_ before it is fitted.")
        assert isinstance(self.schema_.targets, ClassTargets)
        return np.array(self.schema_.targets.classes)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row."""
        probs = self.predict_proba(X)
        assert isinstance(self.schema_.targets, ClassTargets)
        return self.schema_.targets.labels(probs.argmax(1))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, in the order of ``classes_``, averaged over the posterior."""
        probs = self.predict_dist(X).probs.double().cpu().numpy()
        probs = probs.reshape(len(probs), -1)
        return probs if probs.shape[1] > 1 else np.column_stack([1.0 - probs, probs])

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of :meth:`predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict_dist(self, X: Any) -> ClassPrediction:
        """The predictive distribution of each row of ``X``; classes are numbered in the order of ``classes_``."""
        prediction = super().predict_dist(X)
        if not isinstance(prediction, ClassPrediction):
            raise Unsupported(f"likelihood={self.likelihood!r} is for numbers. Use BayesianRegressor.")
        return prediction

    def _checked_target(self, y: Any) -> np.ndarray:
        found = column_or_1d(y, warn=True)
        if found.dtype.kind == "c":
            raise InvalidArgument("Complex data not supported: y must hold labels.")
        gaps = np.flatnonzero(find_missing(pd.Series(found))) if found.dtype.kind == "O" else np.arange(0)
        if len(gaps):
            raise InvalidData(f"y has no label in row {gaps[0]} (counting from 0). Drop such rows, or fill them in.")
        labels = label_array(found)
        check_classification_targets(labels)
        return labels

    def _learn_targets(self, y: np.ndarray, names: tuple[str, ...], classes: Any = None) -> Targets:
        if classes is None:
            return ClassTargets.learn(y, names)
        learned = ClassTargets.learn(label_array(np.asarray(classes)), names)
        learned.codes(y)  # refuses others
        return learned

    def _scaled(self, y: np.ndarray) -> np.ndarray:
        assert isinstance(self.schema_.targets, ClassTargets)
        return self.schema_.targets.codes(y)

    def _kind_of_target(self, y: np.ndarray, x: np.ndarray) -> str:
        return "class"

    def _default_likelihood(self, method: Method | None, y: np.ndarray) -> Likelihood:
        return Bernoulli() if self.likelihood == "bernoulli" else Categorical()

    def _outputs(self, likelihood: Likelihood) -> int:
        assert self.schema_.targets is not None
        if not isinstance(likelihood, Bernoulli):
            return self.schema_.targets.outputs
        if self.schema_.targets.outputs > 2:
            raise InvalidArgument(
                f"likelihood=Bernoulli() is for two classes, there are {self.schema_.targets.outputs}. Leave it out."
            )
        return 1
