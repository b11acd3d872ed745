"""Sparsity of whole neurons and filters (Neklyudov et al., 2017; Louizos, Ullrich and Welling, 2017)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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
from knowable.inference.dropout.divergence import check_priors
from knowable.inference.dropout.masked_weights import SiteMasks, masked_params
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.noisy_units import NoisyUnits, times_noise
from knowable.inference.dropout.placement import Placement, place_noise
from knowable.inference.dropout.unit_noise import GroupNoise, HorseshoeNoise, LogUniformNoise
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
    r"""Noise on whole inputs of layers, learned: neurons and channels that are all noise can be taken out.

    .. math:: w_{ij} = z_i\, v_{ij}, \qquad \max_q\; E_q[\log p(D \mid w)] - \mathrm{KL}(q \,\|\, p)

    with one positive factor :math:`z_i` for every feature that a linear layer takes, and for every channel of a
    convolution. Two priors (``prior``):

    ``"log_uniform"``: :math:`p(\log z) = \mathrm{Uniform}(-20, 0)` and a normal q of :math:`\log z`, truncated to the
    same interval; v are point estimates under the model's own prior (structured Bayesian pruning: Neklyudov et al.,
    2017).

    ``"horseshoe"``: :math:`z_i = s\, \tilde z_i` with half-Cauchy scales of the layer, :math:`s \sim C^+(0, \tau_0)`,
    and of the unit, :math:`\tilde z_i \sim C^+(0, 1)`, in log-normal parts, and :math:`v_{ij} \sim \mathcal{N}(0, 1)`
    with a normal q (Bayesian compression with group Horseshoe priors: Louizos, Ullrich and Welling, 2017). The model's
    own prior of these weights is not used; the diagnostics say so.

    All KLs are in closed form. Everything else (biases, scales of normalisation, noise of the likelihood) is a point
    estimate under the model's own prior. The bound is one for given values of the point estimates, and so says nothing
    of the evidence of the model as stated: ``log_evidence`` is None, and ``"elbo"`` is among the diagnostics.

    Networks need no change; dropout layers that they have are off. Each example has its own factors in training, on the
    inputs of its layer; in recurrent and attention layers a step has one draw for all. In prediction all inputs share a
    draw, as with every method. ``posterior.signal_to_noise()`` says which units are noise: those with a ratio below 1.

    Args:
        prior: ``"log_uniform"`` or ``"horseshoe"``.
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how the bound is
            maximised.
        beta: This and the other fields of :class:`~knowable.inference.variational.method.VariationalMethod` say what is
            maximised, and from where. ``initial_scale`` is the standard deviation of all logarithms of factors, and of
            v, to begin with.
        where: Names or globs of the weights whose inputs have factors. None: all weights of layers, those that take the
            network's input too, so that irrelevant inputs are found; but the channels of images stay if there are fewer
            than four of them.
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
    summary = "noise on whole neurons and channels, learned: those that are all noise can be taken out"
    aliases = ("sbp", "group_horseshoe")
    references = ("neklyudov2017", "louizos2017")

    initial_scale: float = 0.02
    prior: str = field(default="log_uniform", kw_only=False)
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
        placement = place_noise(model, x, where=self.where)
        make, local = self._log_uniform, None
        if self.prior == "horseshoe":
            _refuse_joint_prior(model)
            usage = trace_usage(model, x)
            make, local = self._horseshoe, {name for name in model.random_names if usage.suits(name, "local")}
        check_priors(model, placement.sites if local is None else ())
        noises = _noises(make, first_values(model, start), placement)
        return StructuredDropoutObjective(
            model, size, placement, noises, local=local, draws=self.draws, **self.elbo_settings(start)
        )

    def _log_uniform(self, units: int, weight: Tensor) -> GroupNoise:
        return LogUniformNoise(units, span=self.span, initial_scale=self.initial_scale, like=weight)

    def _horseshoe(self, units: int, weight: Tensor) -> GroupNoise:
        size = weight.square().mean().sqrt().item()  # what the weights begin with is likely under their prior
        return HorseshoeNoise(
            units, global_scale=self.global_scale, initial_scale=self.initial_scale, initial_median=size or 1.0,
            like=weight,
        )  # fmt: skip

    def _evidence(self, objective: Any, rows: Data, seed: int) -> tuple[None, dict[str, float]]:
        _, terms = final_elbo(objective, rows, seed)
        units = objective.posterior().unit_signal_to_noise()
        return None, {**terms, **{f"kept.{name}": (each >= 1).double().mean().item() for name, each in units.items()}}

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        own = ()
        if self.prior == "horseshoe":
            own = (
                "The Horseshoe is the prior of all weights with factors; the model's own prior of them is not used.",
            )
        return (*own, *super()._notes(model, size, result))


def _noises(make: Callable[[int, Tensor], GroupNoise], start: Params, placement: Placement) -> list[GroupNoise]:
    return [make(site.units, start[site.name]) for site in placement.sites]


def _refuse_joint_prior(model: Model) -> None:
    if any(model.prior.prior_of(name) is None for name in model.random_names):
        raise Unsupported(
            "StructuredDropout(prior='horseshoe') replaces the prior of some weights, which a prior over all weights "
            "as a whole does not allow. Give the model a prior by name, such as Normal(1.0), or use "
            "prior='log_uniform'."
        )


# --- The bound of weights that are multiplied by noise on whole units ------------------------------------------------


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
            kl = self.kl_divergence()
            given = [self._under_noise(values) for _ in range(self.draws)]
        log_likelihood = expected_log_likelihood(self, x, y, points, given)
        fixed = {**points, **{name: value for name, value in values.items() if name not in self.random_names}}
        return negative_elbo(self, log_likelihood, kl, fixed)

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

    def log_likelihood(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode, the network's own dropout layers off."""
        output = self.network(self.model.network_params(params), x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)

    def kl_divergence(self) -> Tensor:
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
