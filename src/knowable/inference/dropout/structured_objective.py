"""The bound of weights that are multiplied by noise on whole units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.gaussian_weight import GaussianWeight, local_rule
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.core.variational_objective import VariationalObjective, first_values
from knowable.inference.dropout.group_noise import GroupNoise
from knowable.inference.dropout.masked_weight import SiteMasks, masked_params
from knowable.inference.dropout.noisy_units import NoisyUnits, times_noise
from knowable.inference.dropout.placement import Placement


class StructuredDropoutObjective(VariationalObjective):
    r"""-ELBO / N of weights :math:`w_{ij} = z_i v_{ij}`, with random factors z of the inputs, on the full-data scale.

    .. math:: \mathrm{ELBO} = E\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, w)\Big] - \mathrm{KL}(q(z) \,\|\, p(z))
        - \mathrm{KL}(q(v) \,\|\, p(v)) + \log p(\text{point estimates})

    Every example has its own z, on the inputs of its layer; weights of recurrent and attention layers, which have no
    such input, have one z for a step. Where v is random too, its part is drawn at the layer's output (local
    reparameterisation), after the inputs were multiplied by z; in weights that are not used by one linear layer or
    convolution, v itself is drawn.

    Args:
        model: The model.
        size: Number of training examples N.
        placement: Where noise acts.
        noises: The factors of each of its sites.
        local: With random v, the weights whose part is drawn at the output; None where v are point estimates.
        draws: Draws for each example in each step.
        beta: Factor on the KL; 1 is Bayes.
        kl_warmup: Epochs over which it rises to its full value.
        initial_scale: Standard deviation of random v to begin with.
        start: Values to begin at, where they are not the model's own.

    Attributes:
        values: v, or its means, and all other random parameters of the model, which are point estimates here.
        log_scales: Log standard deviations of v, where it is random.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        placement: Placement,
        noises: Sequence[GroupNoise],
        *,
        local: Collection[str] | None = None,
        draws: int = 1,
        beta: float = 1.0,
        kl_warmup: int | None = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
    ):
        super().__init__(model, size, draws=draws, beta=beta, kl_warmup=kl_warmup, start=start)
        self.placement, self.local = placement, local
        self.network = placement.network(model)
        self.noises: Iterable[GroupNoise] = nn.ModuleList(noises)  # type: ignore[assignment]
        first = first_values(model, start)
        self.names = list(model.random_names)
        self.values = nn.ParameterList([nn.Parameter(first[name]) for name in self.names])
        self.random_names = [] if local is None else [place.name for site in placement.sites for place in site.places]
        begin = torch.tensor(initial_scale).log().item()
        self.log_scales = nn.ParameterList(
            [nn.Parameter(torch.full_like(first[name], begin)) for name in self.random_names]
        )

    # --- the variational distribution --------------------------------------------------------------------------------

    def means(self) -> Params:
        """v, or its means, and the other random parameters of the model."""
        return dict(zip(self.names, self.values, strict=True))

    def scales(self) -> Params:
        """Standard deviations of v, where it is random."""
        return {name: each.exp() for name, each in zip(self.random_names, self.log_scales, strict=True)}

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of the weights, each with one z for all examples."""
        return [self._one_draw() for _ in range(count)]

    def _one_draw(self) -> Params:
        values = self.means()
        drawn = {**values, **{k: values[k] + s * torch.randn_like(s) for k, s in self.scales().items()}}
        return times_noise(drawn, self.placement.sites, [noise.draw(1)[0] for noise in self.noises])

    def posterior(self, **common: Any) -> NoisyUnits:
        """The distribution as it is now."""
        return NoisyUnits(
            self.model, self.means(), self.placement.sites, list(self.noises), scale=self.scales(),
            points=self.point_params(), buffers=self.net_buffers, **common,
        )  # fmt: skip

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points, values = self.point_params(), self.means()
        with torch.autocast(x.device.type, enabled=False):  # only the network's own arithmetic is of lower precision
            kl = self.divergence()
            given = [{**points, **self._under_noise(values)} for _ in range(self.draws)]
        each = [self.log_likelihood_of(x, y, params) for params in given]
        fixed = {**points, **{name: value for name, value in values.items() if name not in self.random_names}}
        return self.loss_and_terms(sum(each[1:], each[0]) / len(each), kl, fixed)

    def _under_noise(self, values: Params) -> Params:
        """The weights for one pass: their noise will be drawn by example where that can be."""
        given = dict(values)
        for name, scale in self.scales().items():
            own = name in (self.local or ())
            given[name] = (
                GaussianWeight(values[name], scale.square(), local_rule)
                if own
                else torch.addcmul(values[name], scale, torch.randn_like(scale))
            )
        masks = [SiteMasks(site, noise.draw) for site, noise in zip(self.placement.sites, self.noises, strict=True)]
        return masked_params(given, masks, by_example=True)

    def scores_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode, the network's own dropout layers off."""
        output = self.network(self.model.network_params(params), x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)

    def divergence(self) -> Tensor:
        """KL(q ‖ p) of the factors, and of v where it is random, in closed form."""
        noises = list(self.noises)
        total = type(noises[0]).total_divergence(noises)
        values, log_scales = self.means(), dict(zip(self.random_names, self.log_scales, strict=True))
        for site, noise in zip(self.placement.sites, self.noises, strict=True):
            of_prior = noise.log_prior_scale()
            if of_prior is None:
                continue
            for place in site.places:
                value, log_scale = values[place.name], log_scales[place.name]
                total = total + normal_divergence(value, log_scale, site.on_weight(of_prior, place, value)).sum()
        return total

    def log_prior_of_points(self, points: Params) -> Tensor:
        """Log density of all point estimates under the model's own prior."""
        return self.model.log_prior(points)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step; then distributions are put back into their range."""
        super().update(optimiser)
        for noise in self.noises:
            noise.settle()


def normal_divergence(loc: Tensor, log_scale: Tensor, log_prior_scale: Tensor) -> Tensor:
    """KL of a normal distribution from one of mean 0, elementwise."""
    squares = (loc.square() + torch.exp(2 * log_scale)) * torch.exp(-2 * log_prior_scale)
    return 0.5 * (squares - 1) - log_scale + log_prior_scale
