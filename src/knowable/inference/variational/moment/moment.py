"""Deterministic variational inference by moment propagation (Hernández-Lobato and Adams, 2015; Wu et al., 2019)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.data import Data, as_input
from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.monte_carlo import bytes_per_row, check_result_fits
from knowable.core.posterior.normal import NormalPosterior, in_order
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import Unsupported
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.moment.algebra import NODES, Moments
from knowable.inference.variational.moment.expected_likelihood import check_likelihood, expected_log_likelihood
from knowable.inference.variational.moment.network import check_layers, propagate
from knowable.inference.variational.normals import FlatNormalDistribution, FlatNormals
from knowable.inference.variational.objective import VariationalObjective, first_values, negative_elbo


@dataclass(frozen=True, repr=False, kw_only=True)
class MomentVI(VariationalMethod):
    r"""An independent normal for every weight, fitted and used without sampling.

    Means and variances of the weights become means and variances of each layer's outputs, up to the network's own. The
    outputs f of a row are treated as normal, and the ELBO

    .. math:: \sum_n E_{f_n \sim \mathcal{N}(m_n, S_n)}[\log p(y_n \mid f_n)] - \mathrm{KL}(q \,\|\, p)

    has no noise: not in its gradient, and with ``prediction="moments"`` not in predictions, which take one pass through
    the network.

    What is approximate: results of non-linear layers are treated as normal; so are those of max pooling, two by two
    (Clark, 1961); positions of a convolution, tokens of a linear layer, and outputs of linear layers wider than
    ``covariance_limit``, as independent. It is exact for a linear model. Layers without a rule are refused by name,
    and so are weights used twice and sums of two random results (residual connections).

    ``log_evidence`` is estimated from weight draws: it is the ELBO of the fitted normals, without the approximations.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        covariance_limit: Number of outputs up to which the covariances of a linear layer's outputs are followed in
            training; they cost its square for every row. In prediction it is at least 256.
        prediction: ``"moments"``, or ``"sampling"``: the network at drawn weights, as for any other posterior.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MomentVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.output_moments(x).variance.shape
        torch.Size([40, 1])
    """

    family = "variational"
    says_rise = True
    summary = "the same independent normals without sampling: moments go through the layers"
    aliases = ("dvi",)
    references = ("wu2019", "lobato2015", "clark1961", "knowles2011")

    initial_scale: float = 0.02
    temperature: float = 1.0
    covariance_limit: int = 64
    prediction: str = "moments"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_count("covariance_limit", self.covariance_limit, at_least=0)
        check_choice("prediction", self.prediction, PREDICTIONS)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MomentObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        return MomentObjective(model, x, size, limit=self.covariance_limit, **self.elbo_settings(start))

    def _posterior(self, objective: MomentObjective, **common: Any) -> MomentNormal:
        return objective.posterior(prediction=self.prediction, **common)


class MomentObjective(FlatNormalDistribution, VariationalObjective):
    """-ELBO / N of independent normals, with the expected log likelihood from the moments of the outputs."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        initial_scale: float = 0.02,
        start: Params | None = None,
        limit: int = 64,
        **common: Any,
    ):
        check_likelihood(model.likelihood)
        check_layers(model, x, limit=limit)
        super().__init__(model, size, start=start, **common)
        self.limit = limit
        first = first_values(model, start)
        by_weights = FlatNormals.of(model, x, first, "weight")
        normals = replace(by_weights, drawn=Layout.of({}), local=by_weights.layout)  # no weight is drawn
        self.hold(normals, first, initial_scale)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms: no weight is drawn."""
        points = self.point_params()
        kl, loc, variance, _ = self.normals.draw(self.q, self.q.new_empty((1, 0)))
        params = {name: Moments(value, variance.get(name)) for name, value in {**points, **loc}.items()}
        output = propagate(self.model, params, x, buffers=self.net_buffers, training=True, limit=self.limit)
        own, y = likelihood_moments(self.model, params), self.model.align(y, output.mean)
        each = expected_log_likelihood(self.model.likelihood, output, y, own)
        log_likelihood = (each if weights is None else weights * each).mean()
        if self.normals.others:
            kl = kl + self.normals.remaining_kl(self.q, self.model, points, self.draws)
        return negative_elbo(self, log_likelihood, kl, points)

    def exact_elbo(self, data: Data) -> Tensor:
        """The ELBO as moments give it: what is maximised, and not that of draws."""
        if self.normals.others:
            raise Unsupported("priors without a closed form of their KL are drawn")
        return torch.stack([-len(batch[1]) * self(*batch)[0] for batch in data]).sum()

    def posterior(self, **common: Any) -> MomentNormal:
        """Independent normals that predict by moments."""
        limit = max(LIMIT, self.limit)
        return MomentNormal(self.model, *self.loc_and_scale(), limit=limit, **self.shared(common))


def likelihood_moments(model: Model, params: dict[str, Moments]) -> dict[str, Moments]:
    """Moments of the likelihood's own parameters, by short name."""
    means = model.likelihood_params({name: value.mean for name, value in params.items()})
    found = {name: params.get(LIKELIHOOD_PREFIX + name) for name in means}
    return {name: found[name] or Moments(value) for name, value in means.items()}


PREDICTIONS = ("moments", "sampling")
LIMIT = 256  # outputs of a linear layer whose covariances are followed in prediction
_MOST_OUTPUTS = 100  # of a row, whose covariances are given to the likelihood
_BATCH_BYTES = 64 * 2**20  # working memory of one batch of rows


class MomentNormal(NormalPosterior):
    r"""Independent normals over weights, whose predictions come from the moments of the network's outputs.

    Each row's outputs are treated as normal with these moments, which the likelihood turns into a prediction in closed
    form where it can (numbers: one normal; yes or no: the probit approximation). ``samples`` draws of the outputs are
    made for what needs them, such as the split of a label's uncertainty. They show each row by itself, not how rows go
    together: ``with_prediction("sampling")`` does, with weights that are drawn.

    Args:
        model: The model.
        loc: Means of the random parameters.
        scale: Their standard deviations.
        prediction: ``"moments"`` or ``"sampling"``.
        limit: The widest linear layer whose outputs' covariances are followed.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "moment_normal"
    loc: Params
    scale: Params

    def __init__(
        self,
        model: Model,
        loc: Params,
        scale: Params,
        *,
        prediction: str = "moments",
        limit: int = LIMIT,
        **common: Any,
    ):
        super().__init__(model, IndependentNormal(in_order(model, loc), in_order(model, scale)), **common)
        self.prediction = check_choice("prediction", prediction, PREDICTIONS)
        self.limit = check_count("limit", limit, at_least=0)

    def with_prediction(self, prediction: str) -> MomentNormal:
        """The same posterior, predicting in another way."""
        made = copy.copy(self)
        made.prediction = check_choice("prediction", prediction, PREDICTIONS)
        made._kept = None
        return made

    def output_moments(self, x: Any) -> Moments:
        """Means, variances and covariances of the network's outputs at ``x``."""
        with torch.no_grad():
            return self._output_moments(as_input(x, self.model), None)

    def _output_moments(self, x: Tensor, memory: int | None) -> Moments:
        self.model.network.probe(x, self.model.network_params(self.mean()), self.buffers)
        params = {name: Moments(value, None) for name, value in self.points.items()}
        params |= {name: Moments(value, self.scale[name].square()) for name, value in self.loc.items()}
        rows = max(1, min(_BATCH_BYTES, memory or _BATCH_BYTES) // self._row_bytes(x))
        parts = [propagate(self.model, params, part, buffers=self.buffers, limit=self.limit) for part in x.split(rows)]
        mean, variance = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "spread"))
        known = [part.covariance for part in parts if part.covariance is not None]
        if mean[0].numel() > _MOST_OUTPUTS:
            return Moments(mean, variance)
        return Moments(mean, variance, torch.cat(known) if known else variance.flatten(1).diag_embed())

    def _row_bytes(self, x: Tensor) -> int:
        """Working memory of one row: a quadrature over all activations, and the covariances of linear layers."""
        widths = [value.shape[0] for value in self.model.params().values() if value.dim() == 2]
        covariances = sum(8 * width**2 for width in widths if width <= self.limit) * self.model.dtype.itemsize
        return (NODES + 8) * bytes_per_row(self.model, x, self.buffers) + covariances

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        if self.prediction == "sampling":
            return super()._predict(x, samples, seed, memory)
        check_result_fits(self, x, samples, memory)
        found = self._output_moments(x, memory)
        generator = generator_for(seed, "predict", device=self.model.device)
        noise = torch.randn(
            (samples, found.mean[0].numel()), generator=generator, dtype=found.mean.dtype, device=found.mean.device
        )
        return self.model.likelihood.predict_normal(self._outputs(found, noise), self._likelihood_params())

    def _outputs(self, found: Moments, noise: Tensor) -> NormalOutputs:
        if found.covariance is not None:
            return NormalOutputs.of_moments(found.mean, found.covariance, noise)
        draws = found.mean + found.std * noise.view(-1, 1, *found.mean.shape[1:])
        return NormalOutputs(found.mean, found.spread, None, draws)

    def _likelihood_params(self) -> Params:
        r"""One value for each of the likelihood's parameters; log noise l is such that :math:`e^{2l} = E[\sigma^2]`."""
        values = self.model.likelihood_params({**self.loc, **self.points})
        name = self.model.likelihood.noise_name
        own = self.scale.get(f"{LIKELIHOOD_PREFIX}{name}")
        return values if name not in values or own is None else {**values, name: values[name] + own.square()}

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "prediction": self.prediction, "limit": self.limit}
