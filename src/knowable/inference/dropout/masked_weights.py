"""The posterior of dropout: mean weights whose columns are dropped at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.network import Network
from knowable.core.params import index_params, number_of_draws
from knowable.core.particles import Particles
from knowable.core.posterior import Posterior
from knowable.core.prediction import Prediction
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.types import Params
from knowable.inference.dropout.placement import Placement
from knowable.inference.dropout.shared_noise import Axis, SharedNoise, plain_attention, random_axes

PREDICTIONS = ("monte_carlo", "weight_scaling")


class MaskedWeights(Posterior):
    r"""Weights that are their mean times masks: :math:`W = M \operatorname{diag}(z / (1 - p))` with Bernoulli z.

    A discrete distribution, so there is no density. Parameters without a mask (biases) are the same in every draw.

    Args:
        model: The model.
        loc: Means of the random parameters.
        placement: Where masks are and their rates.
        prediction: ``"monte_carlo"``, or ``"weight_scaling"``: a single pass with the mean weights.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "masked_weights"

    def __init__(
        self, model: Model, loc: Params, placement: Placement, *, prediction: str = "monte_carlo", **common: Any
    ):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.placement, self.prediction = placement, prediction
        self._stochastic: tuple[Network, list[Axis | None]] | None = None

    @property
    def rates(self) -> dict[str, float]:
        """The rate of every site, by the name of its (first) weight."""
        return {site.name: site.rate for site in self.placement.sites}

    # --- draws -------------------------------------------------------------------------------------------------------

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        drawn = {name: value.expand(n, *value.shape) for name, value in self.loc.items()}
        for site in self.placement.sites:
            uniform = torch.rand((n, site.units), generator=generator, dtype=self.model.dtype, device=self.model.device)
            mask = (uniform >= site.rate).to(self.model.dtype) / (1 - site.rate)
            for place in site.places:
                value = self.loc[place.name]
                drawn[place.name] = value * site.on_weight(mask, place, value)
        return drawn

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        odds = {place.name: site.rate / (1 - site.rate) for site in self.placement.sites for place in site.places}
        return {name: value.abs() * odds.get(name, 0.0) ** 0.5 for name, value in self.loc.items()}

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        if self.prediction == "monte_carlo":
            return super()._predict(x, samples, seed, memory)
        return self.mean_network()._predict(x, samples, seed, memory)

    def mean_network(self) -> Particles:
        """The network at the mean weights, all dropout off: the weight-scaling rule, as a posterior with one atom."""
        stack = {name: value.unsqueeze(0) for name, value in self.loc.items()}
        return Particles(self.model, stack, points=self.points, buffers=self.buffers, seed=self.seed)

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Draws of the weights; where the network has other random numbers, one stream of these for each draw."""
        if not self.placement.noisy:
            return super().run_draws(stack, x, first=first, seed=seed, vectorise=vectorise)
        if self._stochastic is None:
            network = self.placement.network(self.model, noise=True)
            self._stochastic = network, random_axes(network, index_params(stack, 0), x, self.buffers)
        network, axes = self._stochastic
        outputs = []
        for k in range(number_of_draws(stack)):
            with own_randomness(derive_seed(seed, "noise", first + k)), plain_attention(), SharedNoise(axes):
                outputs.append(network(index_params(stack, k), x, buffers=self.buffers))
        return torch.stack(outputs)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return {f"loc.{name}": value for name, value in self.loc.items()}

    def _settings(self) -> dict[str, Any]:
        return {"placement": self.placement.to_json(), "prediction": self.prediction}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, placement: dict[str, Any], prediction: str, **common: Any
    ) -> MaskedWeights:
        loc = {name.removeprefix("loc."): value for name, value in tensors.items()}
        return cls(model, loc, Placement.from_json(placement), prediction=prediction, **common)
