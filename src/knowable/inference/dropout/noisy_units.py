"""The posterior of structured dropout: weights times noise on whole units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.posterior import Posterior
from knowable.inference.dropout.layer_trace import Site
from knowable.inference.dropout.unit_noise import GroupNoise, HorseshoeNoise, LogUniformNoise


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
    log_alpha_threshold = 0.0  # a unit goes where its signal-to-noise ratio is below 1

    def __init__(
        self,
        model: Model,
        loc: Params,
        sites: Sequence[Site],
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

    # --- what the units are worth ------------------------------------------------------------------------------------

    def signal_to_noise(self) -> Params:
        r"""The signal-to-noise ratio of every weight's unit, in the shape of the weight; infinite where none is random.

        .. math:: \mathrm{SNR}_i = \max_j \frac{|E[w_{ij}]|}{\mathrm{sd}[w_{ij}]}

        over the weights that take input i: a unit is noise if none of its weights has more signal than noise. (Weights
        into outputs that are themselves noise say nothing, which is why it is not a mean.) Where v are point estimates
        this is the ratio of mean and standard deviation of the factor.
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
            ratios = [site.most_by_unit((self.loc[p.name] / self.scale[p.name]).square(), p) for p in site.places]
            ratio = torch.stack(ratios).amax(0)  # of v: its largest squared mean over its variance
            found.append((ratio / (spread * ratio + 1 + spread)).sqrt())
        return found

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        noises = {f"noise.{i}.{k}": v for i, noise in enumerate(self.noises) for k, v in noise.state_dict().items()}
        parts = {"loc": self.loc, "scale": self.scale}
        return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()} | noises

    def _settings(self) -> dict[str, Any]:
        return {
            "sites": [site.to_json() for site in self.sites],
            "noises": [noise.settings() for noise in self.noises],
        }

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, sites: list[dict[str, Any]], noises: list[dict[str, Any]],
        **common: Any,
    ) -> NoisyUnits:  # fmt: skip
        def part(prefix: str) -> Params:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        places = [Site.from_json(site) for site in sites]
        made = [
            noise_from(settings, site.units, part(f"noise.{i}."))
            for i, (site, settings) in enumerate(zip(places, noises, strict=True))
        ]
        return cls(model, part("loc."), places, made, scale=part("scale."), **common)


def times_noise(values: Params, sites: Sequence[Site], factors: Sequence[Tensor]) -> Params:
    """Weights times the factors ``(..., units)`` of their sites; both may have a leading dimension of draws."""
    found = dict(values)
    for site, factor in zip(sites, factors, strict=True):
        for place in site.places:
            value = values[place.name]
            one = value[0] if factor.dim() > 1 else value
            found[place.name] = value * site.on_weight(factor, place, one)
    return found


def noise_from(settings: dict[str, Any], units: int, state: Params) -> GroupNoise:
    """Factors as they were saved."""
    like = state["loc"]
    kinds = {"log_uniform": LogUniformNoise, "horseshoe": HorseshoeNoise}
    own = {name: value for name, value in settings.items() if name != "prior"}
    noise = kinds[settings["prior"]](units, like=like, **own)
    noise.load_state_dict(state)
    return noise
