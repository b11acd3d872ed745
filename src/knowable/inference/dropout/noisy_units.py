"""Noise on whole units: one positive random factor for each input of a layer, and the posterior of such weights.

Two sparsity-inducing priors: log-uniform on an interval, with a truncated log-normal posterior (Neklyudov et al.,
2017); and the Horseshoe, a product of half-Cauchy scales of the layer and of each unit, with log-normal posteriors of
their gamma and inverse gamma parts (Louizos, Ullrich and Welling, 2017).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Params, joined_params, with_prefix, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.inference.dropout.layer_trace import DropoutSite
from knowable.inference.dropout.truncated_log_normal import (
    divergence_from_log_uniform,
    draw_log_noise,
    mean_and_relative_variance,
)

_SMALLEST_SCALE, _LARGEST_SCALE = 1e-4, 10.0  # of the truncated log-normal; the second in lengths of the interval
_GAMMA_CONSTANT = 0.5 * (1 + math.log(2))


class NoisyUnits(Posterior):
    r"""Weights :math:`w_{ij} = z_i v_{ij}` with a random factor :math:`z_i` for every input of a layer.

    v is a point estimate or normal. Parameters without a factor (biases) are the same in every draw. There is no
    density.

    Args:
        model: The model.
        loc: v, or its means, and values of the random parameters of the model that have no factor.
        sites: The inputs that have factors.
        noises: Their distributions.
        scale: Standard deviations of v, where it is random.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "noisy_units"
    log_alpha_threshold = 0.0  # units with a signal-to-noise ratio below 1 are pruned

    def __init__(
        self,
        model: Model,
        loc: Params,
        sites: Sequence[DropoutSite],
        noises: Sequence[GroupNoise],
        *,
        scale: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.scale = {name: scale[name].detach().clone() for name in self.loc if scale and name in scale}
        self.sites, self.noises = tuple(sites), tuple(noises)
        for noise in self.noises:
            noise.requires_grad_(False)

    # --- draws -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        drawn = {name: value.expand(n, *value.shape) for name, value in self.loc.items()}
        for name, scale in self.scale.items():
            noise = torch.randn((n, *scale.shape), generator=generator, dtype=scale.dtype, device=scale.device)
            drawn[name] = torch.addcmul(self.loc[name], scale, noise)
        return times_noise(drawn, self.sites, [noise.draw(n, generator) for noise in self.noises])

    @torch.no_grad()
    def _mean_random(self) -> Params:
        means = {name: value.clone() for name, value in self.loc.items()}
        return times_noise(means, self.sites, [noise.moments()[0] for noise in self.noises])

    @torch.no_grad()
    def _std_random(self) -> Params:
        r"""Of every weight: :math:`E[z]\, \sqrt{v\, m^2 + (1 + v)\, s^2}` with v the relative variance of z."""
        found = {name: torch.zeros_like(value) for name, value in self.loc.items()}
        for site, noise in zip(self.sites, self.noises, strict=True):
            mean, spread = noise.moments()
            for place in site.places:
                loc, scale = self.loc[place.name], self.scale.get(place.name, torch.zeros(()).to(mean))
                mean_of, spread_of = (site.on_weight(each, place, loc) for each in (mean, spread))
                variance = spread_of * loc.square() + (1 + spread_of) * scale.square()
                found[place.name] = mean_of * variance.sqrt()
        return found

    # --- signal-to-noise ratios --------------------------------------------------------------------------------------

    def signal_to_noise(self) -> Params:
        r"""The signal-to-noise ratio of every weight's unit, in the shape of the weight; infinite where none is random.

        .. math:: \mathrm{SNR}_i = \max_j \frac{|E[w_{ij}]|}{\mathrm{sd}[w_{ij}]}

        over the weights that take input i: a unit is noise if none of its weights has more signal than noise. (It is
        the maximum and not the mean, because weights into outputs that are noise themselves are uninformative.) Where v
        are point estimates, this is the ratio of mean and standard deviation of the factor.
        """
        found = {name: torch.full_like(value, torch.inf) for name, value in self.loc.items()}
        for site, each in zip(self.sites, self._signal_to_noise_of_units(), strict=True):
            for place in site.places:
                value = self.loc[place.name]
                found[place.name] = site.on_weight(each, place, value).expand_as(value).clone()
        return found

    def unit_signal_to_noise(self) -> dict[str, Tensor]:
        """The same ratio for every input ``(units,)`` of a layer, by the name of the layer's weight."""
        return {site.name: each for site, each in zip(self.sites, self._signal_to_noise_of_units(), strict=True)}

    @torch.no_grad()
    def _signal_to_noise_of_units(self) -> list[Tensor]:
        found = []
        for site, noise in zip(self.sites, self.noises, strict=True):
            spread = noise.moments()[1]
            if site.name not in self.scale:
                found.append(spread.rsqrt())
                continue
            ratios = [site.max_by_unit((self.loc[p.name] / self.scale[p.name]).square(), p) for p in site.places]
            ratio = torch.stack(ratios).amax(0)  # of v: its largest squared mean over its variance
            found.append((ratio / (spread * ratio + 1 + spread)).sqrt())
        return found

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        noises = [with_prefix(f"noise.{i}.", noise.state_dict()) for i, noise in enumerate(self.noises)]
        return joined_params([with_prefix("loc.", self.loc), with_prefix("scale.", self.scale), *noises])

    def _settings(self) -> dict[str, Any]:
        return {
            "sites": [site.to_json() for site in self.sites],
            "noises": [noise.settings() for noise in self.noises],
        }

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, sites: list[Any], noises: list[Any], **common: Any
    ) -> NoisyUnits:
        places = [DropoutSite.from_json(site) for site in sites]
        made = [
            noise_from(settings, site.units, without_prefix(f"noise.{i}.", tensors))
            for i, (site, settings) in enumerate(zip(places, noises, strict=True))
        ]
        loc, scale = without_prefix("loc.", tensors), without_prefix("scale.", tensors)
        return cls(model, loc, places, made, scale=scale, **common)


def times_noise(values: Params, sites: Sequence[DropoutSite], factors: Sequence[Tensor]) -> Params:
    """Weights times the factors ``(..., units)`` of their sites; both may have a leading dimension of draws."""
    found = dict(values)
    for site, factor in zip(sites, factors, strict=True):
        for place in site.places:
            value = values[place.name]
            one = value[0] if factor.dim() > 1 else value
            found[place.name] = value * site.on_weight(factor, place, one)
    return found


def noise_from(settings: dict[str, Any], units: int, state: Params) -> GroupNoise:
    """Restore saved factors."""
    kinds = {"log_uniform": LogUniformNoise, "horseshoe": HorseshoeNoise}
    if state["loc"].shape[-1] != units:
        raise ValueError(f"{state['loc'].shape[-1]} factors were saved for {units} units")
    own = {name: value for name, value in settings.items() if name != "prior"}
    noise = kinds[settings["prior"]](units, like=state["loc"], **own)
    noise.load_state_dict(state)
    return noise


# --- distributions of the factors ------------------------------------------------------------------------------------


class GroupNoise(nn.Module, ABC):
    """The factors on one layer's inputs: their distribution, and its KL divergence from the prior."""

    @abstractmethod
    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)``, differentiable; from the global generator if none is given."""

    @classmethod
    @abstractmethod
    def total_divergence(cls, noises: Sequence[Any]) -> Tensor:
        """KL(q ‖ p), summed over the units of several layers."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean of every factor, and its variance over the squared mean; both ``(units,)``."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain values that, with its tensors, restore it."""

    def log_prior_scale(self) -> Tensor | None:
        """Log standard deviations ``(units,)`` of the weights' prior, or None if the noise does not set them."""
        return None

    def clamp_parameters(self) -> None:
        """Clamp parameters to their valid range; called after every step."""


class LogUniformNoise(GroupNoise):
    r"""Truncated log-normal factors in :math:`[e^{-a}, 1]`, under the log-uniform prior on the same interval.

    Args:
        units: Number of factors.
        span: Length a of the interval: the log factors lie between -a and 0.
        initial_scale: Initial standard deviation of the log factors, whose location starts at 0.
        like: A tensor of the dtype and device to use.
    """

    def __init__(self, units: int, *, span: float, initial_scale: float = 0.02, like: Tensor):
        super().__init__()
        self.span = span
        self.loc = nn.Parameter(like.new_zeros(units))
        self.log_scale = nn.Parameter(like.new_full((units,), math.log(initial_scale)))

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)``, by the inverse CDF."""
        shape = (rows, len(self.loc))
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=self.loc.device)
        return draw_log_noise(self.loc, self.log_scale.exp(), -self.span, 0.0, uniform).exp()

    @classmethod
    def total_divergence(cls, noises: Sequence[LogUniformNoise]) -> Tensor:
        """In closed form; all layers have the same interval."""
        loc, log_scale = (torch.cat([getattr(each, part) for each in noises]) for part in ("loc", "log_scale"))
        return divergence_from_log_uniform(loc, log_scale.exp(), -noises[0].span, 0.0).sum()

    def moments(self) -> tuple[Tensor, Tensor]:
        """In closed form."""
        return mean_and_relative_variance(self.loc, self.log_scale.exp(), -self.span, 0.0)

    def settings(self) -> dict[str, Any]:
        """The interval."""
        return {"prior": "log_uniform", "span": self.span}

    @torch.no_grad()
    def clamp_parameters(self) -> None:
        """Clamp the location to one length of the interval outside it, and the scale to ten lengths.

        Beyond these the distribution is a point mass or the prior, and gradients vanish.
        """
        self.loc.clamp_(-2 * self.span, self.span)
        self.log_scale.clamp_(math.log(_SMALLEST_SCALE), math.log(_LARGEST_SCALE * self.span))


class HorseshoeNoise(GroupNoise):
    r"""Factors that are products of two half-Cauchy scales, one of the layer and one of the unit.

    .. math:: z_i = \tau_0 \sqrt{s_a s_b\, \alpha_i \beta_i}, \qquad s_a, \alpha_i \sim \mathrm{Gamma}(\tfrac12, 1),
        \quad s_b, \beta_i \sim \mathrm{InverseGamma}(\tfrac12, 1)

    with independent log-normal posteriors. All units of a draw share its :math:`s_a` and :math:`s_b`.

    Draws are of :math:`z_i / \bar z_i`, with the median :math:`\bar z_i` of the factor absorbed by the weights:
    :math:`w_{ij} = z_i v_{ij}` with the prior :math:`v_{ij} \sim \mathcal{N}(0, 1)` is
    :math:`(z_i / \bar z_i)\, u_{ij}` with :math:`u_{ij} \sim \mathcal{N}(0, \bar z_i^2)`, the same distribution. Then
    the likelihood does not depend on the medians, whose gradient is that of the closed-form KL alone; otherwise a
    factor and the scale of its weights would be strongly correlated.

    Args:
        units: Number of factors.
        global_scale: Scale :math:`\tau_0` of the layer's half-Cauchy prior.
        initial_scale: Initial standard deviation of the logarithm of every part.
        initial_median: Initial value of the medians.
        like: A tensor of the dtype and device to use.
    """

    def __init__(
        self, units: int, *, global_scale: float, initial_scale: float = 0.02, initial_median: float = 1.0, like: Tensor
    ):
        super().__init__()
        self.global_scale = global_scale
        shift = 2 * math.log(initial_median / global_scale)
        initial = [min(shift, 0.0), max(shift, 0.0)]  # the gamma part has its tail at 0, the inverse gamma at infinity
        self.global_loc = nn.Parameter(like.new_tensor(initial))  # of log s_a and log s_b
        self.global_log_scale = nn.Parameter(like.new_full((2,), math.log(initial_scale)))
        self.loc = nn.Parameter(like.new_zeros(2, units))  # of log α and log β
        self.log_scale = nn.Parameter(like.new_full((2, units), math.log(initial_scale)))

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)`` over their medians: half the sum of all logarithms, which are normal."""
        shape = (rows, 1 + self.loc.shape[1])
        noise = torch.randn(shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        of_layer, of_unit = self._log_variances()
        return torch.exp(of_layer.sqrt() * noise[:, :1] + of_unit.sqrt() * noise[:, 1:])

    @classmethod
    def total_divergence(cls, noises: Sequence[HorseshoeNoise]) -> Tensor:
        """In closed form, of all four parts."""
        locs = [part for each in noises for part in (each.global_loc.unsqueeze(1), each.loc)]
        log_scales = [part for each in noises for part in (each.global_log_scale.unsqueeze(1), each.log_scale)]
        (gamma, inverse), (gamma_scale, inverse_scale) = torch.cat(locs, 1), torch.cat(log_scales, 1)
        found = divergence_from_gamma(gamma, gamma_scale) + divergence_from_inverse_gamma(inverse, inverse_scale)
        return found.sum()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Of the log-normal product over its median."""
        of_layer, of_unit = self._log_variances()
        variance = of_layer + of_unit
        return torch.exp(0.5 * variance), torch.expm1(variance)

    def settings(self) -> dict[str, Any]:
        """The scale of the global half-Cauchy distribution."""
        return {"prior": "horseshoe", "global_scale": self.global_scale}

    def log_prior_scale(self) -> Tensor:
        """Log medians of the factors."""
        return math.log(self.global_scale) + 0.5 * (self.global_loc.sum() + self.loc.sum(0))

    def _log_variances(self) -> tuple[Tensor, Tensor]:
        """Variances of log z: of the part that all units share, and of each unit's own part ``(units,)``."""
        return 0.25 * torch.exp(2 * self.global_log_scale).sum(), 0.25 * torch.exp(2 * self.log_scale).sum(0)


# --- KL of log-normals from the two parts of a squared half-Cauchy variable ------------------------------------------
#
# α ~ Gamma(½, 1) and β ~ InverseGamma(½, 1) make √(αβ) ~ C⁺(0, 1) (Neville, Ormerod and Wand, 2014).


def divergence_from_gamma(loc: Tensor, log_scale: Tensor) -> Tensor:
    r"""KL from Gamma(½, 1) of a log-normal whose log has this mean and log standard deviation, elementwise.

    .. math:: e^{\mu + \sigma^2 / 2} - \tfrac12 \big(\mu + 2 \log\sigma + 1 + \log 2\big)
    """
    return torch.exp(loc + 0.5 * torch.exp(2 * log_scale)) - 0.5 * loc - log_scale - _GAMMA_CONSTANT


def divergence_from_inverse_gamma(loc: Tensor, log_scale: Tensor) -> Tensor:
    r"""KL from InverseGamma(½, 1), elementwise: that of the reciprocal from the gamma distribution.

    .. math:: e^{-\mu + \sigma^2 / 2} - \tfrac12 \big(-\mu + 2 \log\sigma + 1 + \log 2\big)
    """
    return divergence_from_gamma(-loc, log_scale)
