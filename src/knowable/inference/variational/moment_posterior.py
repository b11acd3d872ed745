"""Independent normals that predict by moments: one pass through the network instead of one for every draw."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from knowable.core.checks import check_choice, check_count
from knowable.core.data import as_input
from knowable.core.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model import Model
from knowable.core.normal_outputs import NormalOutputs
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.predicting import bytes_per_row, check_result_fits
from knowable.core.prediction import Prediction
from knowable.core.randomness import generator_for
from knowable.core.types import Params
from knowable.inference.variational.moment_network import propagate
from knowable.inference.variational.moments import NODES, Moments

PREDICTIONS = ("moments", "sampling")
LIMIT = 256  # outputs of a linear layer whose covariances are followed in prediction
_MOST_OUTPUTS = 100  # of a row, whose covariances are given to the likelihood
_BATCH_BYTES = 64 * 2**20  # working memory of one batch of rows


class MomentNormal(DiagonalNormal):
    r"""Independent normals over weights, whose predictions come from the moments of the network's outputs.

    Each row's outputs are taken to be normal with these moments, which the likelihood turns into a prediction in closed
    form where it can (numbers: one normal; labels: the probit approximation). ``samples`` draws of the outputs are made
    for what needs them, such as the split of a label's uncertainty. They show each row by itself, not how rows go
    together: ``with_prediction("sampling")`` does, with weights that are drawn.

    Args:
        model: The model.
        loc: Means of the random parameters.
        scale: Their standard deviations.
        prediction: ``"moments"`` or ``"sampling"``.
        limit: The widest linear layer whose outputs' covariances are followed.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "moment_normal"

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
        super().__init__(model, loc, scale, **common)
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
        with torch.no_grad():
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
