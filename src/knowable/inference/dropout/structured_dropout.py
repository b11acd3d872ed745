"""Sparsity of whole neurons and filters (Neklyudov et al., 2017; Louizos, Ullrich and Welling, 2017)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.training.loop import TrainingResult
from knowable.errors import Unsupported
from knowable.inference.dropout.dropout_divergence import check_priors
from knowable.inference.dropout.masked_weights import SiteMasks, masked_params
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.noisy_units import GroupNoise, HorseshoeNoise, LogUniformNoise, NoisyUnits, times_noise
from knowable.inference.dropout.placement import Placement, place_noise
from knowable.inference.variational.gaussian_weight import GaussianWeight, local_rule, trace_usage
from knowable.inference.variational.method import VariationalMethod, check_normals, final_elbo
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)

PRIORS = ("log_uniform", "horseshoe")


@dataclass(frozen=True, repr=False, kw_only=True)
class StructuredDropout(VariationalMethod):
    r"""Learned noise on whole neurons and channels (the inputs of layers): those that are mostly noise can be pruned.

    .. math:: w_{ij} = z_i\, v_{ij}, \qquad \max_q\; E_q[\log p(D \mid w)] - \mathrm{KL}(q \,\|\, p)

    with one positive factor :math:`z_i` for every feature that a linear layer takes, and for every channel of a
    convolution. Two priors (``prior``):

    ``"log_uniform"``: :math:`p(\log z) = \mathrm{Uniform}(-20, 0)` and a normal q of :math:`\log z`, truncated to the
    same interval; v are point estimates under the model's own prior (structured Bayesian pruning: Neklyudov et al.,
    2017).

    ``"horseshoe"``: :math:`z_i = s\, \tilde z_i` with half-Cauchy scales of the layer, :math:`s \sim C^+(0, \tau_0)`,
    and of the unit, :math:`\tilde z_i \sim C^+(0, 1)`, in log-normal parts, and :math:`v_{ij} \sim \mathcal{N}(0, 1)`
    with a normal q (Bayesian compression with group Horseshoe priors: Louizos, Ullrich and Welling, 2017). The model's
    own prior of these weights is not used, which a note in the diagnostics says.

    All KLs are in closed form. All other parameters (biases, scales of normalisation, noise of the likelihood) are
    point estimates under the model's own prior. The ELBO is conditional on the point estimates and so no bound on the
    evidence of the model: ``log_evidence`` is None, and ``"elbo"`` is among the diagnostics.

    Networks need no change; their own dropout layers are off. In training each example has its own factors, on the
    inputs of its layer; in recurrent and attention layers a step has one draw for all. In prediction all inputs share a
    draw, as with every method. Units with ``posterior.signal_to_noise()`` below 1 are noise.

    Args:
        prior: Prior of the factors: ``"log_uniform"`` or ``"horseshoe"``.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target. None:
            about 2,000 steps, at most a third of the epochs.
        start: ``"network"``, ``"map"`` (a MAP fit under the model's own priors) or a fitted posterior.
        initial_scale: Standard deviation of the log factors, and of v, at the start.
        where: Names or globs of the weights whose inputs have factors. None: all weights of layers, including those
            that take the network's input, so that irrelevant inputs are found; but no factors on the channels of images
            with fewer than four.
        span: Length of the interval of the log-uniform prior: :math:`\log z` lies between -span and 0.
        global_scale: :math:`\tau_0` of the Horseshoe. The smaller, the fewer units stay.
        draws: Draws for each example in each step.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
        >>> model = kn.Model(torch.nn.Linear(5, 1), kn.Gaussian(0.1))
        >>> posterior = kn.StructuredDropout(epochs=1000, learning_rate=0.05).fit(model, (x, x[:, :1] - x[:, 1:2]))
        >>> (posterior.signal_to_noise()["weight"] > 1).tolist()
        [[True, True, False, False, False]]
    """

    family = "dropout"
    summary = "learned noise on whole neurons and channels: those that are mostly noise can be pruned"
    aliases = ("sbp", "group_horseshoe")
    references = ("neklyudov2017", "louizos2017")

    prior: str = field(default="log_uniform", kw_only=False)
    initial_scale: float = 0.02
    where: str | tuple[str, ...] | None = None
    span: float = 20.0
    global_scale: float = 1e-5
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale)
        check_choice("prior", self.prior, PRIORS)
        object.__setattr__(self, "where", check_where(self.where))
        check_number("span", self.span, above=0)
        check_number("global_scale", self.global_scale, above=0)
        check_count("draws", self.draws)

    def objective(
        self, model: Model, x: Tensor, size: int, *, start: Params | None = None
    ) -> StructuredDropoutObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        placement, local = place_noise(model, x, where=self.where), None
        if self.prior == "horseshoe":
            if any(model.prior.prior_of(name) is None for name in model.random_names):
                raise Unsupported(
                    "StructuredDropout(prior='horseshoe') replaces the prior of some weights, which a joint prior over "
                    "all weights does not allow. Give the model a prior by name, such as Normal(1.0), or use "
                    "prior='log_uniform'."
                )
            usage = trace_usage(model, x)
            local = {name for name in model.random_names if usage.suits(name, "local")}
        check_priors(model, placement.sites if local is None else ())
        first = first_values(model, start)
        noises = [self._noise(site.units, first[site.name]) for site in placement.sites]
        common = {"local": local, "draws": self.draws, **self.elbo_settings(start)}
        return StructuredDropoutObjective(model, size, placement, noises, **common)

    def _noise(self, units: int, weight: Tensor) -> GroupNoise:
        common = {"initial_scale": self.initial_scale, "like": weight}
        if self.prior == "log_uniform":
            return LogUniformNoise(units, span=self.span, **common)
        median = weight.square().mean().sqrt().item() or 1.0  # so that the initial weights are likely under their prior
        return HorseshoeNoise(units, global_scale=self.global_scale, initial_median=median, **common)

    def _evidence(self, objective: Any, rows: Data, seed: int, epochs: float) -> tuple[None, dict[str, float]]:
        _, terms = final_elbo(objective, rows, seed, epochs)
        units = objective.posterior().unit_signal_to_noise()
        return None, {**terms, **{f"kept.{name}": (each >= 1).double().mean().item() for name, each in units.items()}}

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        notes = super()._notes(model, size, result)
        if self.prior == "log_uniform":
            return notes
        replaced = "The Horseshoe is the prior of all weights with factors; the model's own prior of them is not used."
        return (replaced, *notes)


# --- the objective ---------------------------------------------------------------------------------------------------


class StructuredDropoutObjective(VariationalObjective):
    r"""-ELBO / N of weights :math:`w_{ij} = z_i v_{ij}`, with random factors z of the inputs, on the full-data scale.

    .. math:: \mathrm{ELBO} = E\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, w)\Big] - \mathrm{KL}(q(z) \,\|\, p(z))
        - \mathrm{KL}(q(v) \,\|\, p(v)) + \log p(\text{point estimates})

    Every example has its own z, on the inputs of its layer; weights of recurrent and attention layers, which have no
    such input, have one z for a step. Where v is random too, linear layers and convolutions whose inputs are multiplied
    by z draw their outputs (local reparameterisation: ``local``, None where v are point estimates); other weights are
    drawn themselves.

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
        initial_scale: float = 0.02,
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
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

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO / N of a batch, and its terms."""
        points, values = self.point_params(), self.means()
        with torch.autocast(x.device.type, enabled=False):  # only the network's own arithmetic is of lower precision
            kl = self.kl_divergence()
            given = [self._under_noise(values) for _ in range(self.draws)]
        log_likelihood = expected_log_likelihood(self, x, y, points, given, weights)
        fixed = {**points, **{name: value for name, value in values.items() if name not in self.random_names}}
        return negative_elbo(self, log_likelihood, kl, fixed)

    def _under_noise(self, values: Params) -> Params:
        """The weights for one forward pass, which draws their noise for each example where possible."""
        given = dict(values)
        for name, scale in self.scales().items():
            if name in (self.local or ()):
                given[name] = GaussianWeight(values[name], scale.square(), local_rule)
            else:
                given[name] = torch.addcmul(values[name], scale, torch.randn_like(scale))
        masks = [SiteMasks(site, noise.draw) for site, noise in zip(self.placement.sites, self.noises, strict=True)]
        return masked_params(given, masks, by_example=True)

    def log_likelihood(self, x: Tensor, y: Tensor, params: Params, weights: Tensor | None = None) -> Tensor:
        """Log likelihood of each row of a batch, in training mode, the network's own dropout layers off."""
        output = self.network(self.model.network_params(params), x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params, weights)

    def means(self) -> Params:
        """v, or its means, and the other random parameters of the model."""
        return dict(zip(self.names, self.values, strict=True))

    def scales(self) -> Params:
        """Standard deviations of v, where it is random."""
        return {name: each.exp() for name, each in zip(self.random_names, self.log_scales, strict=True)}

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of the weights, each with one z for all examples."""
        values, scales, found = self.means(), self.scales(), []
        for _ in range(count):
            drawn = {**values, **{name: values[name] + s * torch.randn_like(s) for name, s in scales.items()}}
            found.append(times_noise(drawn, self.placement.sites, [noise.draw(1)[0] for noise in self.noises]))
        return found

    def posterior(self, **common: Any) -> NoisyUnits:
        """The current distribution."""
        common = {"scale": self.scales(), **self.shared(common)}
        return NoisyUnits(self.model, self.means(), self.placement.sites, list(self.noises), **common)

    def kl_divergence(self) -> Tensor:
        """KL(q ‖ p) of the factors, and of v where it is random, in closed form."""
        noises = list(self.noises)
        total = type(noises[0]).total_divergence(noises)
        values, log_scales = self.means(), dict(zip(self.random_names, self.log_scales, strict=True))
        for site, noise in zip(self.placement.sites, noises, strict=True):
            log_prior_scale = noise.log_prior_scale()
            if log_prior_scale is None:
                continue
            for place in site.places:
                value, log_scale = values[place.name], log_scales[place.name]
                total = total + normal_divergence(value, log_scale, site.on_weight(log_prior_scale, place, value)).sum()
        return total

    def log_prior_of_points(self, points: Params) -> Tensor:
        """Log density of all point estimates under the model's own prior."""
        return self.model.log_prior(points)

    def update(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser's step; then the distributions' parameters are clamped to their range."""
        super().update(optimiser)
        for noise in self.noises:
            noise.clamp_parameters()


def normal_divergence(loc: Tensor, log_scale: Tensor, log_prior_scale: Tensor) -> Tensor:
    """KL of a normal distribution from one of mean 0, elementwise."""
    squares = (loc.square() + torch.exp(2 * log_scale)) * torch.exp(-2 * log_prior_scale)
    return 0.5 * (squares - 1) - log_scale + log_prior_scale
