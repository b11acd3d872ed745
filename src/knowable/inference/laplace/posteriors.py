r"""Laplace posteriors: normal distributions over weights that predict by linearising the network.

A Laplace approximation replaces the log joint by a parabola, and a generalised Gauss-Newton curvature is that of a
network linearised in its weights. Predictions of the linearised network

.. math:: f(x, \theta) \approx f(x, \hat\theta) + J(x) (\theta - \hat\theta)

are the consistent ones (Immer, Korzepa and Bauer, 2021): they are normal, and better than those of the network itself
at drawn weights, which may lie where the parabola no longer holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FlatNormal, FullCovarianceNormal, IndependentNormal, JointNormal
from knowable.core.model.model import Model
from knowable.core.model.structured_normal import DiagonalPlusLowRank, KroneckerBlock, KroneckerFactored
from knowable.core.network.jacobian import BatchJacobian, jacobian_vector_products
from knowable.core.network.layers import NetworkLayers
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.network.params import Params
from knowable.core.posterior.monte_carlo import bytes_near, bytes_per_row, check_result_fits, predict_outputs
from knowable.core.posterior.normal import NormalPosterior, saved_normal
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_choice
from knowable.core.support.randomness import generator_for
from knowable.inference.laplace.expansion import random_weights
from knowable.inference.laplace.function_covariance import (
    COLUMNS,
    block_covariance,
    block_row_bytes,
    diagonal_blocks,
    full_covariance,
    full_row_bytes,
    head_variance,
    low_rank_covariance,
    low_rank_row_bytes,
    place_covariance,
)

PREDICTIONS = ("linearised", "linearised_sampling", "sampling")
_MOST_OUTPUTS = 100  # of a row, for a covariance in closed form; beyond, linear functions are drawn
_BATCH_BYTES = 64 * 2**20  # working memory of one batch of rows


class LaplacePosterior(NormalPosterior):
    """A normal distribution over weights that predicts by linearising the network.

    Args:
        model: The model.
        normal: The distribution of the random weights, of any structure.
        prediction: ``"linearised"`` (closed form), ``"linearised_sampling"`` (draws of linear functions) or
            ``"sampling"`` (the network itself at drawn weights).
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    def __init__(self, model: Model, normal: JointNormal, *, prediction: str = "linearised", **common: Any):
        super().__init__(model, normal, **common)
        self.family = f"laplace_{normal.kind}"  # type: ignore[misc]
        self.prediction = check_choice("prediction", prediction, PREDICTIONS)
        self._layers: NetworkLayers | None = None

    def with_prediction(self, prediction: str) -> LaplacePosterior:
        """The same posterior, predicting in another way."""
        made = copy.copy(self)
        made.prediction = check_choice("prediction", prediction, PREDICTIONS)
        made._kept = None
        return made

    # --- what depends on the structure of the covariance -------------------------------------------------------------

    def _covariance(self, rows: BatchJacobian) -> Tensor:
        """Covariance of the linearised outputs of some rows, ``(rows, outputs, outputs)``."""
        if isinstance(self.normal, FullCovarianceNormal):
            return full_covariance(rows, self.normal)
        if isinstance(self.normal, DiagonalPlusLowRank):
            return low_rank_covariance(rows, self.normal)
        return block_covariance(rows, self._blocks(rows.layers))

    def _row_bytes(self, layers: NetworkLayers, outputs: int) -> int:
        """Working memory that :meth:`_covariance` takes for one row."""
        itemsize = self.model.dtype.itemsize
        if isinstance(self.normal, FullCovarianceNormal):
            return full_row_bytes(outputs, self.normal.layout.size, itemsize)
        bytes_of = low_rank_row_bytes if isinstance(self.normal, DiagonalPlusLowRank) else block_row_bytes
        return bytes_of(layers, outputs, self.normal.means, itemsize)

    def _place_covariance(self, rows: BatchJacobian) -> Tensor | None:
        """Covariances of each pixel's outputs, where they are cheap; None elsewhere."""
        if isinstance(self.normal, FullCovarianceNormal):
            return place_covariance(rows, self.normal)
        return None if isinstance(self.normal, FlatNormal) else place_covariance(rows, self._blocks(rows.layers))

    def _head_variance(self, rows: BatchJacobian) -> Tensor | None:
        """Variances of very many outputs, where they are cheap; None elsewhere."""
        if isinstance(self.normal, FlatNormal):
            return None
        return head_variance(rows, self._blocks(rows.layers))

    def _blocks(self, layers: NetworkLayers) -> list[KroneckerBlock]:
        if isinstance(self.normal, KroneckerFactored):
            return list(self.normal.blocks)
        if isinstance(self.normal, IndependentNormal):
            return diagonal_blocks(layers, self.normal.precision_diagonal())
        raise NotImplementedError(f"no covariance of linearised outputs for a {type(self.normal).__name__}")

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        if self.prediction != "linearised":
            return super()._predict(x, samples, seed, memory)
        output = self.model.network.probe(x, self.model.network_params(self.mean()), self.buffers)
        if output[0].numel() <= _MOST_OUTPUTS:
            outputs = self._closed_form(x, samples, seed, memory, output[0].numel())
        else:
            outputs = self._with_drawn_functions(x, samples, seed, memory)
            if outputs is None:
                return super()._predict(x, samples, seed, memory)
        return self.model.likelihood.predict_normal(outputs, self.model.likelihood_params(self.points))

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Outputs of the linearised network for a stack of draws, or of the network itself."""
        if self.prediction == "sampling":
            return super().run_draws(stack, x, first=first, seed=seed, vectorise=vectorise)
        network = self.model.network_params(self.mean())
        at = {name: network[name] for name in random_weights(self.model)}
        function = self.model.network.given(network, at, x, self.buffers)
        directions = {name: stack[name] - at[name] for name in at}
        pushed = jacobian_vector_products(function, at, directions, vectorise=vectorise, at_once=DRAWS_AT_ONCE)
        return function(at) + pushed

    def _closed_form(self, x: Tensor, samples: int, seed: int, memory: int | None, outputs: int) -> NormalOutputs:
        check_result_fits(self, x, samples, memory)
        row_bytes = self._row_bytes(self._layers_at(x), outputs)
        mean, covariance = self._moments(x, self._covariance, row_bytes, memory)
        generator = generator_for(seed, "predict", device=self.model.device)
        noise = torch.randn((samples, outputs), generator=generator, dtype=mean.dtype, device=mean.device)
        return NormalOutputs.of_moments(mean, covariance, noise)

    def _with_drawn_functions(self, x: Tensor, samples: int, seed: int, memory: int | None) -> NormalOutputs | None:
        """Draws of functions with exact variances, for a random head with many outputs; None for other networks."""
        first = self._jacobian(x[:1], self._layers_at(x))
        function = self._head_variance if self._place_covariance(first) is None else self._place_covariance
        if function(first) is None:
            return None
        draws, _, _ = predict_outputs(self, x, samples, seed, memory)
        if function == self._head_variance:
            mean, variance = self._moments(x, function, 0, memory)
            return NormalOutputs(mean, variance, None, draws)
        row_bytes = full_row_bytes(
            first.output[0].numel(), min(COLUMNS, self.normal.layout.size), self.model.dtype.itemsize
        )
        mean, found = self._moments(x, function, row_bytes, memory)
        variance = found.diagonal(dim1=-2, dim2=-1).movedim(-1, 1).reshape(mean.shape)
        return NormalOutputs(mean, variance, None, draws, found)

    def _moments(
        self, x: Tensor, function: Callable[[BatchJacobian], Tensor | None], row_bytes: int, memory: int | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs at the mean and a ``function`` of the rows, which takes ``row_bytes`` for each, in batches."""
        layers = self._layers_at(x)
        known = 3 * bytes_per_row(self.model, x, self.buffers) + row_bytes
        batch = max(_BATCH_BYTES, bytes_near(self.model))
        count = max(1, min(batch, memory or batch) // known)

        def of(part: Tensor) -> tuple[Tensor, Tensor]:
            rows = self._jacobian(part, layers)
            found = function(rows)
            assert found is not None
            return rows.output, found

        means, values = zip(*map(of, x.split(count)), strict=True)
        return torch.cat(means), torch.cat(values)

    def _jacobian(self, x: Tensor, layers: NetworkLayers) -> BatchJacobian:
        params = self.model.network_params(self.mean())
        return BatchJacobian(self.model.network, layers, params, x, self.buffers, differentiable=x.requires_grad)

    def _layers_at(self, x: Tensor) -> NetworkLayers:
        if self._layers is None:
            names = random_weights(self.model)
            self._layers = NetworkLayers.of(
                self.model.network, names, self.model.network_params(self.mean()), x, self.buffers
            )
        return self._layers

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "prediction": self.prediction}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> LaplacePosterior:
        return cls(model, saved_normal(model, tensors), **common)


Posterior.families |= {f"laplace_{kind}": LaplacePosterior for kind in ("full", "low_rank", "diagonal", "kronecker")}
