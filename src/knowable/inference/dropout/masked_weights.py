"""Weights whose layers have their inputs masked, example by example, in an unmodified network.

A mask is any random factor on an input: zeros and ones of dropout, or noise that is learned.

A :class:`MaskedWeight` takes the place of the weight in the module. When it reaches ``F.linear`` or a convolution, the
input of that operation is multiplied by a mask with a row for each example, as dropout layers do in training. Any other
operation gets the weight with one mask for the whole batch on its columns. The weight itself may be a
:class:`~knowable.inference.variational.gaussian_weight.GaussianWeight`, which then takes the masked input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from knowable.core.model.model import Model
from knowable.core.network.layer_operations import CONVOLUTIONS, LINEAR, METADATA, operands
from knowable.core.network.network import Network
from knowable.core.network.params import Params, index_params, number_of_draws, with_prefix, without_prefix
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.inference.dropout.layer_trace import DropoutSite, WeightAxis
from knowable.inference.dropout.placement import Placement
from knowable.inference.dropout.shared_noise import Axis, SharedNoise, plain_attention, random_axes


class SiteMasks:
    """The masks of one site in one forward pass: drawn at the first use, the same at every later use.

    ``draw(rows)`` returns masks ``(rows, units)``; ``scale`` is 1 / (1 - rate) where they are zeros and ones.
    """

    def __init__(self, site: DropoutSite, draw: Callable[[int], Tensor], scale: float | Tensor = 1.0):
        self.site, self._draw, self._scale = site, draw, scale
        self.mask: Tensor | None = None  # before scaling, (rows, units); None before it is drawn
        self._factor: Tensor | None = None

    def factor(self, rows: int) -> Tensor:
        """Factors on the inputs, ``(rows, inputs)``."""
        if self.mask is None or self._factor is None or len(self.mask) != rows:
            self.mask = self._draw(rows)
            self._factor = self.site.on_inputs(self.mask * self._scale)
        return self._factor

    def masked(self, weight: Tensor, place: WeightAxis) -> Tensor:
        """A weight with one mask for all examples on it."""
        if self.mask is None or len(self.mask) != 1:
            self.mask = self._draw(1)
        return weight * self.site.on_weight(self.mask[0] * self._scale, place, weight).to(weight.dtype)


class MaskedWeight(torch.Tensor):
    """A weight with masks for the inputs of its layer; see the module's docstring."""

    loc: Tensor
    place: WeightAxis
    masks: SiteMasks

    @staticmethod
    def __new__(cls, loc: Tensor, place: WeightAxis, masks: SiteMasks) -> MaskedWeight:
        with torch._C.DisableTorchFunctionSubclass():  # a weight that is random itself is not drawn yet
            self = loc.as_subclass(cls)
        self.loc, self.place, self.masks = loc, place, masks
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace operations on the weight."""
        kwargs = kwargs or {}
        if func.__name__ in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is LINEAR or func in CONVOLUTIONS:
            x, weight, bias, rest = operands(func, args, kwargs)
            if isinstance(weight, MaskedWeight) and not isinstance(x, MaskedWeight):
                return func(_masked_input(func, x, weight.masks), weight.loc, bias, **rest)
        if func is Tensor.to and isinstance(args[0], MaskedWeight) and isinstance(args[1], torch.dtype):
            return MaskedWeight(args[0].loc.to(args[1]), args[0].place, args[0].masks)
        return func(*tree_map(_with_one_mask, args), **tree_map(_with_one_mask, kwargs))


def masked_params(params: Params, masks: Sequence[SiteMasks], *, by_example: bool) -> Params:
    """Parameters under masks: one for each example if ``by_example`` and the site allows it, else one for all."""
    given = dict(params)
    for each in masks:
        for place in each.site.places:
            value = params[place.name]
            own = by_example and each.site.by_example
            given[place.name] = MaskedWeight(value, place, each) if own else each.masked(value, place)
    return given


def _masked_input(func: Callable[..., Any], x: Tensor, masks: SiteMasks) -> Tensor:
    factor = masks.factor(len(x))  # (rows, inputs)
    between = (1,) * (x.dim() - 2)
    shape = (len(x), *between, -1) if func is LINEAR else (len(x), -1, *between)
    return x * factor.view(shape).to(x.dtype)


def _with_one_mask(leaf: Any) -> Any:
    return leaf.masks.masked(leaf.loc, leaf.place) if isinstance(leaf, MaskedWeight) else leaf


# --- the posterior of dropout ----------------------------------------------------------------------------------------

PREDICTIONS = ("monte_carlo", "weight_scaling")


class MaskedWeights(Posterior):
    r"""Weights that are their mean times masks: :math:`W = M \operatorname{diag}(z / (1 - p))` with Bernoulli z.

    A discrete distribution without a density. Parameters without a mask (biases) are the same in every draw.

    Args:
        model: The model.
        loc: Means of the random parameters.
        placement: Where masks are and their rates.
        prediction: ``"monte_carlo"``, or ``"weight_scaling"``: a single pass with the mean weights.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
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
        """Outputs of draws of the weights; other random numbers of the network have one stream for each draw."""
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
        return with_prefix("loc.", self.loc)

    def _settings(self) -> dict[str, Any]:
        return {"placement": self.placement.to_json(), "prediction": self.prediction}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, placement: dict[str, Any], prediction: str, **common: Any
    ) -> MaskedWeights:
        loc = without_prefix("loc.", tensors)
        return cls(model, loc, Placement.from_json(placement), prediction=prediction, **common)
