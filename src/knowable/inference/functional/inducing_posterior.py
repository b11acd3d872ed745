"""The posterior of layers known at inducing points: normal for one of them, a mixture over draws for several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import with_prefix, without_prefix
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.posterior.monte_carlo import check_result_fits, free_memory
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import Prediction, RegressionPrediction
from knowable.core.support.cholesky import cholesky
from knowable.core.support.randomness import generator_for
from knowable.inference.functional.gaussian_process import contiguous, seen_by
from knowable.inference.functional.inducing import InducingLayer
from knowable.inference.functional.kernel_inputs import Body, Units
from knowable.inference.functional.kernels import Covariance
from knowable.likelihoods import Gaussian

_OWN = ("points", "mean", "root", "slope", "constant")


class InducingPosterior(FunctionPosterior):
    """Functions that are known by normal distributions of their values at inducing points.

    With several layers a prediction is a mixture: each draw of the layers in between has a normal distribution of its
    own over the function.

    Args:
        model: The model.
        layers: From the features to the functions of the likelihood.
        units: In which the first layer sees features, and functions are.
        body: The network that makes features; None: the inputs are the features.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "inducing"

    def __init__(
        self, model: Model, layers: Sequence[InducingLayer], units: Units, body: Body | None = None, **common: Any
    ):
        super().__init__(model, **common)
        self.layers, self.units, self.body = [layer.requires_grad_(False) for layer in layers], units, body
        self.row_numbers = max(len(layer.points) * (3 + layer.outputs) for layer in self.layers)

    def seen(self, x: Any) -> Tensor:
        """What the first layer sees of inputs."""
        return seen_by(self.body, self.units, self.points, self.buffers, x)

    # --- one layer: normal -------------------------------------------------------------------------------------------

    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self._restored(*self.layers[-1].marginal(self.seen(x)))
        return mean, variance.diag_embed()

    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.joint_of(self.seen(x))

    def joint_of(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., rows, outputs)`` and covariances ``(..., outputs, rows, rows)`` at what one layer sees."""
        mean, covariance = self.layers[-1].joint(seen)
        return self.units.functions(mean), covariance * self.units.y_scale.square().view(-1, 1, 1)

    def _restored(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        return self.units.functions(mean), variance * self.units.y_scale.square()

    # --- several layers: a mixture -----------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        if len(self.layers) == 1:
            return super()._predict(x, samples, seed, memory)
        check_result_fits(self, x, samples, memory)
        rows = max(1, (memory or free_memory(self.model.device)) // (2 * 8 * samples * self.row_numbers))
        noise = [self._layer_noise((samples, layer.outputs), seed, n) for n, layer in enumerate(self.layers)]
        parts = [self._mixture(some, noise) for some in x.split(rows)]
        mean, variance = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        draws = mean + variance.sqrt() * noise[-1].unsqueeze(1)
        model, shape = self.model, self.model.probe(x).shape[1:]
        mean, variance, draws = (each.view(*each.shape[:2], *shape).to(model.dtype) for each in (mean, variance, draws))
        _, log_weights = self.draws_for_prediction(samples, seed)
        own = model.likelihood_params(self.points)
        if not isinstance(model.likelihood, Gaussian):
            stack = {name: value.expand(samples, *value.shape) for name, value in own.items()}
            return model.likelihood.predict(draws, stack, log_weights)
        scale = (variance + model.likelihood.noise_scale(own, like=mean).square()).sqrt()
        return RegressionPrediction(
            NormalComponents(mean, scale), log_weights, within=variance, samples=draws, missing=model.likelihood.missing
        )

    def _mixture(self, x: Tensor, noise: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Means and variances ``(samples, rows, outputs)``, one normal for each draw of the layers in between."""
        seen = self.seen(x)
        samples = len(noise[0])
        hidden = seen.unsqueeze(0)
        for layer, own in zip(self.layers[:-1], noise, strict=False):
            mean, variance = _by_draw(layer, hidden)
            hidden = mean + variance.sqrt() * own.unsqueeze(1)
        mean, variance = _by_draw(self.layers[-1], hidden)
        return self._restored(mean.expand(samples, -1, -1), variance.expand(samples, -1, -1))

    def _function_draws(self, x: Tensor, n: int, seed: int) -> Tensor:
        if len(self.layers) == 1:
            return super()._function_draws(x, n, seed)
        self._check_rows(x)
        found = self.draws_of(self.seen(x), n, seed)
        return found.view(n, len(x), *self.model.probe(x).shape[1:]).to(self.model.dtype)

    def draws_of(self, seen: Tensor, n: int, seed: int) -> Tensor:
        """Values ``(n, ..., rows, outputs)`` of n functions at what the first layer sees, ``(..., rows, d)``.

        Sets of rows are drawn one by one, of the same noise.
        """
        lead, rows = seen.shape[:-2], seen.shape[-2]
        ones = (1,) * len(lead)
        noise = [self._layer_noise((n, *ones, layer.outputs, rows, 1), seed, k) for k, layer in enumerate(self.layers)]
        widest = max(layer.outputs for layer in self.layers)
        each = 8 * 6 * lead.numel() * rows * (rows * widest + self.row_numbers)
        at_once, found = max(1, free_memory(self.model.device) // each), []
        for first in range(0, n, at_once):
            hidden = seen
            for layer, own in zip(self.layers, noise, strict=True):
                mean, covariance = layer.joint(hidden)
                hidden = mean + (cholesky(covariance)[0] @ own[first : first + at_once]).squeeze(-1).mT
            found.append(self.units.functions(hidden))
        return torch.cat(found)

    def _layer_noise(self, shape: tuple[int, ...], seed: int, number: int) -> Tensor:
        generator = generator_for(seed, "predict", number, device=self.model.device)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=self.model.device)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        found = self.units.tensors()
        for number, layer in enumerate(self.layers):
            own = {name: getattr(layer, name) for name in _OWN if getattr(layer, name) is not None}
            found |= with_prefix(f"{number}.", own) | with_prefix(f"{number}.kernel.", layer.covariance.tensors())
        return contiguous(found)

    def _settings(self) -> dict[str, Any]:
        return {
            "kernels": [layer.covariance.described() for layer in self.layers],
            "features": None if self.body is None else self.body.described(),
        }

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, kernels: Sequence[Any] = (), features: Any = None,
        **common: Any,
    ) -> InducingPosterior:  # fmt: skip
        layers = []
        for number, kernel in enumerate(kernels):
            own = without_prefix(f"{number}.", tensors)
            covariance = Covariance.built(kernel, without_prefix("kernel.", own))
            layer = InducingLayer(covariance, own["points"], len(own["mean"]), slope=own.get("slope"))
            layer.load_state_dict({name: own[name] for name in _OWN if name in own}, strict=False)
            layers.append(layer)
        units = Units(**{name: tensors[name] for name in ("x_shift", "x_scale", "y_shift", "y_scale")})
        return cls(model, layers, units, Body.built(features, model), **common)


def _by_draw(layer: InducingLayer, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances ``(draws, rows, outputs)`` at ``hidden`` ``(draws, rows, d)``."""
    mean, variance = layer.marginal(hidden.flatten(0, 1))
    return mean.unflatten(0, hidden.shape[:2]), variance.unflatten(0, hidden.shape[:2])
