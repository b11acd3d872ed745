"""The regressor for scikit-learn users."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils import check_array
from sklearn.utils.metaestimators import available_if

from knowable.core.method import Method
from knowable.core.model.likelihood import Likelihood
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidData, Unsupported
from knowable.inference.ensembles import DeepEnsemble
from knowable.inference.exact import ExactLinear
from knowable.inference.laplace import Laplace
from knowable.inference.sampling import ImportanceSampling
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.variational import MeanFieldVI, MomentVI
from knowable.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from knowable.tabular.estimators import BayesianEstimator, can_update
from knowable.tabular.targets import NumberTargets, Targets, recognise

_NOISE_VARIES_FROM = 100  # rows, for methods that average over the weights
COUNTS = ("count", "poisson", "negative_binomial", "zero_inflated")  # kinds of targets
_NAMED = {
    "heteroscedastic_gaussian": HeteroscedasticGaussian,
    "student_t": StudentT,
    "heteroscedastic_student_t": HeteroscedasticStudentT,
}
_STOPPED_NOISE_VARIES_FROM = 1_000  # rows, for networks that stop early by rows held out
_TRAINED_NOISE_VARIES_FROM = 5_000  # rows, for trained networks: on fewer they would learn where they hit the targets
_POISSON_ONLY = (Laplace, MomentVI)  # methods that do not know NegativeBinomial
_ONE_NOISE = (ExactLinear, Laplace, ImportanceSampling)  # methods that do better with one noise for all rows


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """Regression with a Bayesian network, by the conventions of scikit-learn.

    Numbers, categories, dates and gaps in the inputs are taken care of, and everything that is predicted is in the
    units of the training targets. One target or several.

    Args:
        method: ``"auto"`` (chosen by the size of the data and the budget; ``choice_`` says why), the name of a method
            (``"mfvi"``, ``"laplace"``, ``"ensemble"``, ``"nuts"``, ...) or a method such as ``kn.MAP(epochs=200)``.
        network: Any ``nn.Module``, or a function of the numbers of inputs and outputs that makes one. None: sized to
            the data, see :func:`~knowable.tabular.networks.default_network`.
        likelihood: What the network's output means, for standardised targets, or its name: ``"gaussian"``,
            ``"heteroscedastic_gaussian"``, ``"student_t"``, ``"heteroscedastic_student_t"``, ``"log_normal"`` (above
            0), ``"logit_normal"`` (between 0 and 1), ``"poisson"``, ``"negative_binomial"``, ``"zero_inflated"``.
            None: by the targets, see :func:`~knowable.tabular.targets.recognise`. For plain numbers that is a Student t
            whose spread depends on the input and whose tails are learned, or a normal with one spread for all with
            fewer than 100 rows (5,000 for methods that train networks rather than average over them, 1,000 where
            ``"auto"`` stops them early), for methods that do better so, and where more than half of the targets are
            the same number.
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

    Attributes:
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
        >>> model = kn.BayesianRegressor(kn.MAP(epochs=100), random_state=0).fit(X, 3 * X[:, 0])
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((40,), (40,))
    """

    task = "regression"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @available_if(can_update)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianRegressor:
        """Learn from more rows: the posterior so far is their prior. The first call is a fit.

        What was learned of the columns in the first call stays. It is there for methods whose posterior has a density
        that can be a prior: ``MeanFieldVI``, ``Laplace``, ``ExactLinear``; ``"auto"`` takes the first of them.

        Args:
            X: Rows, as for :meth:`fit`.
            y: Targets.
            sample_weight: How often each row counts.
        """
        if "posterior_" in vars(self):
            self._update(X, y, sample_weight)
        else:
            self._fit(X, y, sample_weight, updates=True)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The expected target of each row, and with ``return_std`` also its standard deviation."""
        prediction = self.predict_dist(X)
        mean = self._shaped(prediction.mean)
        return (mean, self._shaped(prediction.std)) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """The central interval that holds each target with probability ``level``: its lower and upper ends."""
        low, high = self.predict_dist(X).interval(level)
        return self._shaped(low), self._shaped(high)

    def predict_dist(self, X: Any) -> RegressionPrediction:
        """The predictive distribution of each row of ``X``, in the units of the training targets."""
        prediction = super().predict_dist(X)
        if not isinstance(prediction, RegressionPrediction):
            raise Unsupported(f"likelihood={self.likelihood!r} is for labels. Use BayesianClassifier.")
        return prediction

    def _checked_target(self, y: Any) -> np.ndarray:
        number: Any = np.float64
        if getattr(getattr(y, "dtype", None), "kind", "") in ("m", "M"):
            raise InvalidData(f"y holds dates ({y.dtype}), not numbers. Pass it in days: (y - y.min()).dt.days.")
        try:
            found = check_array(y, ensure_2d=False, dtype=number, input_name="y", estimator=self)
        except ValueError as error:
            if "convert string" not in str(error):
                raise
            raise InvalidData(f"y holds text, not numbers. Labels are for BayesianClassifier. ({error})") from None
        return found if found.ndim < 3 else found.reshape(len(found), -1)

    def _learn_targets(self, y: np.ndarray, names: tuple[str, ...], classes: Any = None) -> Targets:
        transform = {"log_normal": "log", "logit_normal": "logit"}.get(self.target_kind_, "none")
        learned = NumberTargets.learn(y, names, transform)
        if self.target_kind_ in COUNTS or isinstance(self.likelihood, Poisson | NegativeBinomial):  # no other units
            return NumberTargets((0.0,) * learned.outputs, (1.0,) * learned.outputs, learned.flat, names)
        return learned

    def _scaled(self, y: np.ndarray) -> np.ndarray:
        assert isinstance(self.schema_.targets, NumberTargets)
        return self.schema_.targets.scale(y)

    def _kind_of_target(self, y: np.ndarray, x: np.ndarray) -> str:
        if isinstance(self.likelihood, str):
            return self.likelihood
        exact = isinstance(self.method, ExactLinear) or self.method in ("exact", "exact_linear")
        return recognise(y, x) if self.likelihood is None and not exact else "number"

    def _default_likelihood(self, method: Method | None, y: np.ndarray) -> Likelihood:
        assert self.schema_.targets is not None
        kind, rows = self.target_kind_, len(y)
        if kind in COUNTS:
            if kind == "poisson" or (kind != "negative_binomial" and isinstance(method, _POISSON_ONLY)):
                return Poisson()
            return NegativeBinomial(base=float(f"{max(y.mean(), 0.1):.4g}"), zeros=kind == "zero_inflated")
        if kind in _NAMED:
            return _NAMED[kind]()
        if rows >= self._noise_varies_from(method) and not isinstance(method, _ONE_NOISE) and kind != "gaussian":
            tails = kind == "number" and (method is None or isinstance(method, Sampler | DeepEnsemble))
            return HeteroscedasticStudentT() if tails else HeteroscedasticGaussian()
        return Gaussian(outputs=self.schema_.targets.outputs)

    def _noise_varies_from(self, method: Method | None) -> int:
        """Rows from which the spread depends on the input."""
        if method is None or isinstance(method, Sampler | MeanFieldVI):
            return _NOISE_VARIES_FROM
        return _STOPPED_NOISE_VARIES_FROM if self.method == "auto" else _TRAINED_NOISE_VARIES_FROM

    def _outputs(self, likelihood: Likelihood) -> int:
        assert self.schema_.targets is not None
        two = isinstance(likelihood, HeteroscedasticGaussian | HeteroscedasticStudentT)
        two = two or (isinstance(likelihood, NegativeBinomial) and likelihood.zeros)
        return self.schema_.targets.outputs * (2 if two else 1)

    def _shaped(self, values: Any) -> np.ndarray:
        assert isinstance(self.schema_.targets, NumberTargets)
        found = values.double().cpu().numpy().reshape(len(values), -1)
        return found[:, 0] if self.schema_.targets.flat else found
