"""Fitting one point: shared by maximum likelihood, MAP, and every method that starts from a MAP fit."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.method import FitJob, Method
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.model.prior import HYPER_PREFIX
from knowable.core.network.network import copy_module
from knowable.core.network.params import Buffers, Params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Trained, TrainingResult, TrainingSettings
from knowable.errors import InvalidArgument, InvalidType, ModelWarning, Unsupported
from knowable.inference.point.collapsed_noise import noise_checked
from knowable.inference.point.normal_priors import NormalLogPrior, NormalPriors, PriorAxes


class PointObjective(Objective):
    r"""-log p(D, θ) / N as a function of one set of parameters (without log p(θ) for maximum likelihood).

    With ``attack`` half of the likelihood is that of adversarial inputs, by the fast gradient sign method
    (Goodfellow et al., 2015):

    .. math:: x' = x - \epsilon\, \mathrm{sign}\, \nabla_x \log p(y \mid x, \theta)

    Args:
        model: The model.
        size: Number of training examples N.
        use_prior: Whether log p(θ) is part of it.
        attack: Size ε of the adversarial perturbation, for each element of a row; None for none.
        held: Names of parameters that are not trained; they stay part of the density.
    """

    recordable = True

    def __init__(
        self, model: Model, size: int, *, use_prior: bool, attack: Tensor | None = None, held: Collection[str] = ()
    ):
        super().__init__(model, size)
        self.use_prior, self.attack = use_prior, attack
        params = model.params()
        self.axes = PriorAxes.of(model) if use_prior else None
        start = params if self.axes is None else self.axes.coordinates(params)
        self.names = list(start)
        self.values = nn.ParameterList([nn.Parameter(start[name], requires_grad=name not in held) for name in start])
        self.normal_priors = NormalPriors.of(model, params)

    def params(self) -> Params:
        """The parameters, by name."""
        values = dict(zip(self.names, self.values, strict=True))
        return values if self.axes is None else self.axes.params(values)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        params = self.params()
        if not self.use_prior:
            log_likelihood = self._log_likelihood(params, x, y, weights)
            return -log_likelihood, {"log_likelihood": log_likelihood.detach() * self.size}
        log_prior, params = self._log_prior(params)
        log_likelihood = self._log_likelihood(params, x, y, weights)
        terms = {"log_likelihood": log_likelihood.detach() * self.size, "log_prior": log_prior.detach()}
        return -log_likelihood - log_prior / self.size, terms

    def _log_prior(self, params: Params) -> tuple[Tensor, Params]:
        """The log prior, and the parameters by which its gradient comes."""
        if self.axes is not None:
            return self.axes.log_prior(dict(zip(self.names, self.values, strict=True))), params
        if self.recording or not self.normal_priors.names:
            return self.model.log_prior(params), params
        normal = [params[name] for name in self.normal_priors.names]
        total, *values = NormalLogPrior.apply(self.normal_priors, *normal)
        for name in params:
            prior = None if name in self.normal_priors.names else self.model.prior.prior_of(name)
            total = total if prior is None else total + prior.log_prob(params[name]).sum()
        return total, {**params, **dict(zip(self.normal_priors.names, values, strict=True))}

    def is_smooth(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> bool:
        """With a prior, without which the minimum may be at infinity, and without dropout and batch statistics."""
        steady = self.use_prior and self.attack is None
        params = {name: value.detach() for name, value in self.params().items()}
        return steady and self.model.network.is_steady(self.model.network_params(params), x, self.net_buffers)

    def _log_likelihood(self, params: Params, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over the rows, and over their adversarial copies."""
        if self.attack is None:
            return self._mean_score(params, x, y, weights)
        x = x.detach().requires_grad_()
        clean = self._mean_score(params, x, y, weights)
        (slope,) = torch.autograd.grad(clean, x, retain_graph=True)
        return 0.5 * (clean + self._mean_score(params, (x - self.attack * slope.sign()).detach(), y, weights))

    def _mean_score(self, params: Params, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        output = self.model.forward(params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params, weights).mean()

    def present_posterior(self) -> Particles:
        """One atom, the parameters as they are."""
        params = {name: value.detach().clone() for name, value in self.params().items()}
        return one_atom(self.model, params, buffers=self.net_buffers)

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows."""
        params = self.params()
        return self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params)


def fit_point(
    job: FitJob, settings: TrainingSettings, *, use_prior: bool = True, objective: PointObjective | None = None
) -> Particles:
    """Train one set of parameters and return it as a posterior with one atom.

    A method that has an objective of its own, for the same model and data, passes it in.
    """
    model, method = job.model, job.method
    if objective is None and use_prior:
        refuse_learned_prior(method, model)
    if job.engine.fully_shard and job.engine.processes.several:
        from knowable.inference.point.fully_sharded import ShardedPointObjective  # takes a moment to import

        found = ShardedPointObjective(model, job.rows.size, job.engine.processes, use_prior=use_prior)
    else:
        found = objective or PointObjective(model, job.rows.size, use_prior=use_prior)
    result = train(found, job.rows, settings, **job.options)
    params = {name: value.detach() for name, value in found.params().items()}
    diagnostics = training_diagnostics(method, model, result, params)
    return one_atom(model, params, buffers=found.net_buffers, seed=job.seed, diagnostics=diagnostics)


def one_atom(model: Model, params: Params, **common: Any) -> Particles:
    """A posterior with one atom."""
    random = {name: params[name].unsqueeze(0).clone() for name in model.random_names}
    return Particles(model, random, points={name: params[name] for name in model.point_names}, **common)


def training_diagnostics(
    method: Method, model: Model, result: TrainingResult, params: Params, terms: dict[str, float] | None = None,
    notes: tuple[str, ...] = (),
) -> Diagnostics:  # fmt: skip
    """Diagnostics of a fit: the terms of its last record, and the likelihood's own parameters."""
    last = {k: v for k, v in result.history[-1].items() if k not in ("step", "epoch")} if result.history else {}
    own = {name: torch.as_tensor(value).mean().item() for name, value in model.likelihood_params(params).items()}
    return Diagnostics(
        method=repr(method), terms={**last, **own, **(terms or {})}, history=result.history, converged=result.converged,
        interrupted=result.interrupted, message=result.message, seconds=result.seconds, notes=notes,
        out_of_time=result.out_of_time,
    )  # fmt: skip


def refuse_learned_prior(method: Method, model: Model) -> None:
    """Refuse to maximise the joint density over the weights and the prior's scale."""
    if model.hyper_names:
        raise Unsupported(
            f"{type(method).__name__} cannot learn the prior's own scale: the joint density grows without bound as "
            f"weights and scale shrink together. Use a method that integrates over the weights, such as MeanFieldVI, "
            f"or give the prior a fixed scale."
        )


# --- Maximum a posteriori: the mode of the posterior -----------------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class MAP(Trained, Method):
    r"""The most probable weights: ordinary training, with the prior as its regulariser.

    .. math:: \hat\theta = \arg\max_\theta \; \log p(D \mid \theta) + \log p(\theta)

    With ``Normal(s)`` as prior this is weight decay of strength 1/s² on the full-data scale. The result is a
    posterior with one atom, without any uncertainty about the weights (see MacKay, 1992, for why that matters).

    Args:
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MAP(epochs=200).fit(model, (x, x.sum(1)))
        >>> len(posterior)
        1
    """

    family = "point"
    summary = "the most probable weights: ordinary training with the prior as regulariser"
    references = ("mackay1992",)
    supports_row_weights = True
    divides_weights = True

    def _fit(self, job: FitJob) -> Particles:
        fit = partial(fit_point, settings=self.training_settings())
        return noise_checked(fit(job), job, fit)


# --- Maximum likelihood: ordinary training, without a prior ----------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class MaximumLikelihood(Trained, Method):
    r"""The weights under which the data is most probable. The prior is ignored.

    .. math:: \hat\theta = \arg\max_\theta \sum_n \log p(y_n \mid x_n, \theta)

    The baseline every Bayesian method is compared with. Networks with many weights overfit by it: pass ``validation``
    to stop early.

    Args:
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> kn.MaximumLikelihood(epochs=200).fit(model, (x, x.sum(1))).diagnostics.message
        'ended after 200 steps'
    """

    family = "point"
    summary = "ordinary training without a prior: the baseline"
    aliases = ("ml", "mle")
    references = ("mackay1992",)
    supports_row_weights = True
    divides_weights = True

    def _fit(self, job: FitJob) -> Particles:
        fit = partial(fit_point, settings=self.training_settings(), use_prior=False)
        return noise_checked(fit(job), job, fit, use_prior=False)


# --- Initial weights: those of another posterior, of a trained network, of a saved state, or new ones ----------------

_OWN = (LIKELIHOOD_PREFIX, HYPER_PREFIX)


@dataclass(frozen=True)
class StartValues:
    """Initial values of every parameter of the model and of the network's buffers."""

    params: Params
    buffers: Buffers
    unset: tuple[str, ...]  # of the likelihood and the prior, not given: they keep the model's values


def start_values(argument: str, model: Model, start: Any) -> StartValues:
    """Read weights for ``model`` from ``start``; ``argument`` is what messages call it.

    ``start`` is ``"network"`` (the network's own weights), a posterior (its means), a network, or a mapping from names
    to values such as ``net.state_dict()``, which may also hold parameters of the likelihood.
    """
    known = _known(argument, model, start)
    params, buffers = model.params(), model.buffers()
    aliases = model.net.state_dict().keys()  # tied weights have several names
    for name, value in known.items():
        if name in params or name in buffers:
            place = params if name in params else buffers
            place[name] = _fitting(argument, name, value, place[name])
        elif name in model.frozen_names:
            _check_frozen(argument, model, name, value)
        elif name not in aliases and not (isinstance(start, Posterior) and name.startswith(_OWN)):
            raise InvalidArgument(
                f"{argument} has a value for {name!r}, which the model does not have. Its parameters are: "
                f"{', '.join(list(params)[:12])}{', ...' if len(params) > 12 else ''}."
            )
    if missing := [name for name in params if name not in known and not name.startswith(_OWN)]:
        raise InvalidArgument(f"{argument} has no value for {', '.join(missing[:5])}.")
    unset = tuple(name for name in params if name not in known and name.startswith(_OWN))
    return StartValues(params, buffers, unset)


def means_for(argument: str, model: Model, posterior: Posterior) -> Params:
    """The posterior's means, for another model with the same parameters; ``argument`` is what messages call it."""
    means = posterior.mean()
    for name, value in model.params().items():
        if name not in means or means[name].shape != value.shape:
            found = f"shape {tuple(means[name].shape)}" if name in means else "nothing"
            raise InvalidArgument(
                f"{argument} is a posterior with {found} for {name!r}; the model wants shape {tuple(value.shape)}."
            )
    return {name: means[name].to(value).clone() for name, value in model.params().items()}  # training changes them


def _known(argument: str, model: Model, start: Any) -> Mapping[str, Tensor]:
    if isinstance(start, Posterior):
        return {**start.mean(), **start.buffers}
    if isinstance(start, nn.Module):
        return start.state_dict()
    if isinstance(start, str) and start == "network":
        return {name: value for name, value in model.params().items() if not name.startswith(_OWN)}
    if not isinstance(start, Mapping) or not all(isinstance(each, Tensor) for each in start.values()):
        raise InvalidType(
            f"{argument} must be 'network', a posterior, a network or a mapping from names to tensors such as "
            f"net.state_dict(); got {start!r:.60}."
        )
    return start


def _fitting(argument: str, name: str, value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        raise InvalidArgument(
            f"{argument}[{name!r}] has shape {tuple(value.shape)}, the model's {tuple(like.shape)}: give the weights "
            f"of the same network."
        )
    if not torch.isfinite(value).all():
        raise InvalidArgument(f"{argument}[{name!r}] has missing or infinite values.")
    return value.detach().to(like).clone()


def _check_frozen(argument: str, model: Model, name: str, value: Tensor) -> None:
    held = model.frozen_params().get(name)
    if held is not None and not torch.equal(value.detach().to(held), held):
        raise InvalidArgument(
            f"{argument}[{name!r}] differs from the network's own value, at which the model holds it frozen. Load the "
            f"weights into the network before building the model: net.load_state_dict(...)."
        )


# --- new initial weights ---------------------------------------------------------------------------------------------

_NEARBY = 0.01  # noise on trained weights, in standard deviations of a parameter's elements
_COMPARED = 2000  # elements of a parameter, at most, that are compared with newly drawn ones
_SURELY = 2.69  # quantile of the Kolmogorov-Smirnov statistic: exceeded by chance once in a million
_BEYOND = 20  # elements larger than all newly drawn ones: by chance with probability 2⁻²⁰


def fresh_start(model: Model, seed: int, member: int) -> tuple[Params, Buffers]:
    """New initial values for member number ``member``: of the parameters that are not frozen, and of the buffers.

    Every module that can reset itself does, unless all its parameters are frozen; parameters that are zero throughout
    stay so (the second factor of a LoRA). What no module resets is drawn from a normal distribution with the mean and
    standard deviation of its elements; a constant stays. Parameters of the likelihood are kept, with some noise, and so
    is a network of which nothing would change.
    """
    with own_randomness(derive_seed(seed, "initial", member)):
        fresh = _reset_values(model)
        values = model.params()
        own = [name for name in values if not name.startswith(_OWN)]
        for name in own:
            values[name] = _new_values(values[name], fresh.get(name))
        same = all(torch.equal(values[name], value) for name, value in model.params().items() if name in own)
        for name in values:
            if name not in model.hyper_names and (same or name not in own):
                values[name] = values[name] + 0.1 * torch.randn_like(values[name])
    return values, {name: fresh.get(name, value) for name, value in model.buffers().items()}


def nearby_start(model: Model, seed: int, member: int) -> tuple[Params, Buffers]:
    """The model's own initial values, with noise of a hundredth of the spread of each parameter's elements."""
    values = model.params()
    with own_randomness(derive_seed(seed, "nearby", member)):
        for name, value in values.items():
            if name not in model.hyper_names:
                values[name] = value + _NEARBY * value.std(correction=0) * torch.randn_like(value)
    return values, model.buffers()


def warn_of_replaced_weights(model: Model, seed: int, advice: str) -> None:
    """Warn where a fresh start replaces weights that its modules do not begin with: trained, or set by other code.

    By two tests of each parameter's elements against those that its module draws: of their distribution
    (Kolmogorov-Smirnov), and of the number that are larger than all of these.
    """
    with own_randomness(derive_seed(seed, "initial", 1)):
        fresh = _reset_values(model)
    kept = [(name, value) for name, value in model.params().items() if name in fresh and value.any()]
    if other := [name for name, value in kept if not _alike(value, fresh[name])]:
        warnings.warn(
            f"The weights of {', '.join(other[:3])}{', ...' * (len(other) > 3)} are not like those with which the "
            f"layers begin by themselves: the network was trained, or initialised in a way of its own. They are "
            f"replaced by weights as the layers draw them. {advice}",
            ModelWarning,
            stacklevel=5,
        )


def _reset_values(model: Model) -> dict[str, Tensor]:
    """Parameters and buffers of the modules that can reset themselves, after they have."""
    net = copy_module(model.net, _out_of_reach(model))
    done: set[str] = set()
    for path, module in net.named_modules():
        own = {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))  # or attention's
        if own - model.frozen_names and _resets(reset):
            done |= own | {f"{path}.{name}" if path else name for name, _ in module.named_buffers(recurse=False)}
    return {name: value.detach() for name, value in (*net.named_parameters(), *net.named_buffers()) if name in done}


def _out_of_reach(model: Model) -> dict[int, Tensor]:
    """The parameters that no module that resets itself can change, by their ids: a copy may share them."""
    free = {id(value) for name, value in model.net.named_parameters() if name not in model.frozen_names}
    resetting = (each for each in model.net.modules() if free & set(map(id, each.parameters(recurse=False))))
    reached = {id(value) for module in resetting for value in module.parameters()}
    return {id(value): value for value in model.net.parameters() if id(value) not in reached}


def _new_values(value: Tensor, reset: Tensor | None) -> Tensor:
    if value.numel() > 1 and not value.any():
        return value
    if reset is not None:
        return reset.to(value)
    spread = value.std(correction=0)
    if spread <= 1e-6 * value.abs().max():
        return value
    return value.mean() + spread * torch.randn_like(value)


def _alike(one: Tensor, drawn: Tensor) -> bool:
    """Whether the elements of two tensors of the same shape may come from the same distribution."""
    if torch.count_nonzero(one.abs() > drawn.abs().max()) > _BEYOND:
        return False
    chosen = torch.linspace(0, one.numel() - 1, min(one.numel(), _COMPARED)).long().to(one.device)
    samples = [each.flatten()[chosen].double().sort().values for each in (one, drawn)]
    first, second = (torch.searchsorted(each, torch.cat(samples), right=True) for each in samples)
    return (first - second).abs().max().item() <= _SURELY * (2 * len(chosen)) ** 0.5


def _resets(reset: Any) -> bool:
    """Call a module's ``reset_parameters``; False if it has none, or one that wants arguments."""
    try:
        reset()
    except TypeError:  # None cannot be called either
        return False
    return True
