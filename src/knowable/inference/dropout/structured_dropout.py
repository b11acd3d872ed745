"""Sparsity of whole neurons and filters (Neklyudov et al., 2017; Louizos, Ullrich and Welling, 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.data import Data
from knowable.core.final_bound import final_bound
from knowable.core.gaussian_weight import trace_usage
from knowable.core.model import Model
from knowable.core.target_notes import tempering_notes
from knowable.core.training import TrainingResult
from knowable.core.types import Params
from knowable.core.variational_method import VariationalMethod
from knowable.core.variational_objective import first_values
from knowable.errors import Unsupported
from knowable.inference.dropout.divergence import check_priors
from knowable.inference.dropout.group_noise import GroupNoise, HorseshoeNoise, LogUniformNoise
from knowable.inference.dropout.mc_dropout import check_where
from knowable.inference.dropout.placement import Placement, place_noise
from knowable.inference.dropout.structured_objective import StructuredDropoutObjective

PRIORS = ("log_uniform", "horseshoe")


@dataclass(frozen=True)
class Grouping:
    """What structured dropout is told first.

    Args:
        prior: The prior of the factors.
    """

    prior: str = "log_uniform"


@dataclass(frozen=True, repr=False)
class StructuredDropout(VariationalMethod, Grouping):
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
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of :class:`~knowable.core.variational_method.VariationalMethod` say what is
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

    where: str | tuple[str, ...] | None = None
    span: float = 20.0
    global_scale: float = 1e-5
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
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
            model, size, placement, noises, local=local, draws=self.draws, beta=self.beta, kl_warmup=self.kl_warmup,
            initial_scale=self.initial_scale, start=start,
        )  # fmt: skip

    def _log_uniform(self, units: int, weight: Tensor) -> GroupNoise:
        return LogUniformNoise(units, span=self.span, initial_scale=self.initial_scale, like=weight)

    def _horseshoe(self, units: int, weight: Tensor) -> GroupNoise:
        size = weight.square().mean().sqrt().item()  # what the weights begin with is likely under their prior
        return HorseshoeNoise(
            units, global_scale=self.global_scale, initial_scale=self.initial_scale, initial_median=size or 1.0,
            like=weight,
        )  # fmt: skip

    def _evidence(self, objective: Any, rows: Data, seed: int) -> tuple[None, dict[str, float]]:
        _, terms = final_bound(objective, rows, seed)
        units = objective.posterior().unit_signal_to_noise()
        return None, {**terms, **{f"kept.{name}": (each >= 1).double().mean().item() for name, each in units.items()}}

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        own = ()
        if self.prior == "horseshoe":
            own = (
                "The Horseshoe is the prior of all weights with factors; the model's own prior of them is not used.",
            )
        return (*own, *tempering_notes(self.beta, 1.0), *super()._notes(model, size, result))


def _noises(make: Callable[[int, Tensor], GroupNoise], start: Params, placement: Placement) -> list[GroupNoise]:
    return [make(site.units, start[site.name]) for site in placement.sites]


def _refuse_joint_prior(model: Model) -> None:
    if any(model.prior.prior_of(name) is None for name in model.random_names):
        raise Unsupported(
            "StructuredDropout(prior='horseshoe') replaces the prior of some weights, which a prior over all weights "
            "as a whole does not allow. Give the model a prior by name, such as Normal(1.0), or use "
            "prior='log_uniform'."
        )
